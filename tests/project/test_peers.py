"""Other methods, written anew to compare with."""

import itertools
from typing import Any

import pytest
import torch
from helpers.families import make_model
from helpers.models import VOCABULARY, save_model, save_opt
from helpers.problems import make_problem
from helpers.tokenizers import make_tokenizer
from helpers.tokenizers import save_model as save_with_tokenizer

from eval.groups import find_groups
from eval.peers import flap, modegpt, slicegpt
from eval.peers.compact import prune_compact
from eval.peers.fasp import prune_fasp
from eval.peers.flap import prune_flap
from eval.peers.llm_pruner import prune_llm_pruner
from eval.peers.modegpt import prune_modegpt, prune_without_query_key
from eval.peers.osscar import prune_osscar, search_swaps
from eval.peers.slicegpt import find_principal_basis, prune_slicegpt
from eval.vocabulary import list_weights
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, make_calibration_dataset
from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.second_moments import measure_error
from struprune_plugin.linalg.solve import solve_kept_weights
from struprune_plugin.model.layers import count_parameters, count_prunable_parameters, find_decoder_layers
from struprune_plugin.model.surgery import mask_group, read_consumer


def make_windows(num_windows: int = 16, length: int = 32, seed: int = 5) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (num_windows, length), generator=torch.Generator().manual_seed(seed))


def compute_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


# -- all peers, on OPT and on LLaMA with grouped queries ---------------------------------------------------------------

UNIT_PEERS = {"FASP": prune_fasp, "OSSCAR": prune_osscar, "FLAP": prune_flap, "LLM-Pruner": prune_llm_pruner}
MODELS: dict[str, Any] = {  # eight query heads on four KV heads, without biases; OPT has them
    "llama": lambda folder: save_model(make_model("llama", num_hidden_layers=3), folder),
    "opt": save_opt,
}


@pytest.fixture(scope="module", params=MODELS)
def dense_folder(request, tmp_path_factory):
    return str(MODELS[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(MODELS["llama"](tmp_path_factory.mktemp("llama")))


def find_kept(dense_layer, layer, group) -> torch.Tensor:
    """The units whose rows of values (of the FFN: of the last linear that makes its channels) are still there."""
    name = list(group.producers)[-1]
    rows = [m.get_submodule(name).weight.detach() for m in (dense_layer, layer)]
    kept = (rows[0][:, None] == rows[1][None]).all(2).any(1)
    return group.find_row_owners(name)[kept].unique()


def mask_like(dense, pruned, restored: bool = True) -> None:
    """Give a dense model zeros where a sliced one has nothing; with the sliced one's weights beside, or its own."""
    layers = dict(find_decoder_layers(pruned))
    for group in find_groups(dense, "head"):
        before, after = dense.get_submodule(group.layer_name), layers[group.layer_name]
        keep = find_kept(before, after, group)
        weight = read_consumer(after, group.resize(len(keep)))
        assert weight.shape[1] == len(keep) * group.columns_per_unit + 1
        consumer = before.get_submodule(group.consumer)
        if not restored:
            columns = torch.cat([unit_columns(keep, group.columns_per_unit), torch.tensor([group.num_columns])])
            weight = read_consumer(before, group)[:, columns]
        elif consumer.bias is None and after.get_submodule(group.consumer).bias is not None:
            consumer.bias = torch.nn.Parameter(torch.zeros(consumer.out_features))
        mask_group(before, group, keep, weight)


OTHERS = {"SliceGPT": prune_slicegpt, "MoDeGPT": prune_modegpt, "MoDeGPT without Q and K": prune_without_query_key}


@pytest.mark.parametrize("peer", [*UNIT_PEERS, *OTHERS])
def test_a_peer_of_nothing_is_the_identity(peer, dense_folder):
    dense, _ = load_checkpoint(dense_folder)
    result = {**UNIT_PEERS, **OTHERS}[peer](dense_folder, make_windows(), 0.0)
    reference = compute_logits(dense, make_windows())
    difference = (compute_logits(result.model, make_windows()) - reference).abs().max()
    assert difference < (1e-4 if peer != "FASP" else 1e-3) * reference.abs().max()
    assert peer == "SliceGPT" or result.removed == 0


@pytest.mark.parametrize("peer", UNIT_PEERS)
def test_a_peer_removes_what_is_asked_and_gives_what_its_mask_gives(peer, dense_folder):
    dense, _ = load_checkpoint(dense_folder)
    base, largest = count_prunable_parameters(dense), max(g.unit_cost for g in find_groups(dense, "head"))
    result = UNIT_PEERS[peer](dense_folder, make_windows(), 0.25)
    assert result.removed == pytest.approx(0.25, abs=largest / base)
    tokens = make_windows(seed=7)
    reference, found = (compute_logits(model, tokens) for model in (dense, result.model))
    if peer != "FASP":  # which leaves zeros
        assert result.removed == pytest.approx(1 - count_prunable_parameters(result.model) / base, abs=1e-12)
        mask_like(dense, result.model)
        torch.testing.assert_close(found, compute_logits(dense, tokens), rtol=0, atol=1e-4)
    if peer in ("OSSCAR", "FLAP"):  # closer than plain deletion of the same units
        deleted, _ = load_checkpoint(dense_folder)
        mask_like(deleted, result.model, restored=False)
        assert (found - reference).square().mean() < (compute_logits(deleted, tokens) - reference).square().mean()


# -- FASP under grouped queries ------------------------------------------------------------------------------------------


def test_fasp_takes_a_value_channel_from_every_query_head_that_reads_it(llama):
    """Its zeros are what a deployment slices: values and outputs of the heads' own widths give the same function."""
    dense, _ = load_checkpoint(llama)
    result = prune_fasp(llama, make_windows(), 0.3)
    reference = compute_logits(result.model, make_windows())
    ragged = set()
    for layer in result.model.model.layers:
        attention = layer.self_attn
        gone = (attention.v_proj.weight == 0).all(1).view(4, 4)
        columns = gone[:, None].expand(4, 2, 4).flatten()  # eight query heads, two on a KV head
        assert torch.equal((attention.o_proj.weight == 0).all(0), columns)
        ragged |= set(gone.sum(1).tolist())
        values, keep = attention.v_proj, (~gone).flatten().nonzero().flatten()
        values.weight, values.out_features = torch.nn.Parameter(values.weight[keep]), len(keep)
        values.register_forward_hook(
            lambda _m, _a, out, i=keep: out.new_zeros(*out.shape[:-1], 16).index_copy(2, i, out)
        )
        output, left = attention.o_proj, (~columns).nonzero().flatten()
        output.weight, output.in_features = torch.nn.Parameter(output.weight[:, left]), len(left)
        output.register_forward_pre_hook(lambda _m, args, i=left: (args[0][..., i],))
    assert len(ragged) > 1
    assert result.removed == pytest.approx(
        1 - count_prunable_parameters(result.model) / count_prunable_parameters(dense)
    )
    torch.testing.assert_close(compute_logits(result.model, make_windows()), reference, rtol=0, atol=1e-4)


def test_fasp_scores_a_value_channel_by_all_its_columns_and_restores_by_ridge(llama):
    """The first module it visits, against FASP's formulas on whole-model activations."""
    dense, _ = load_checkpoint(llama)
    module, seen = dense.model.layers[0].self_attn.o_proj, {}
    module.register_forward_hook(lambda _, args, out: seen.update(x=args[0], y=out))
    compute_logits(dense, make_windows())
    x, y = (seen[name].flatten(0, -2).double() for name in "xy")
    weight = module.weight.detach().double()
    columns = (weight.abs().sum(0) * x.norm(dim=0)).view(4, 2, 4)  # KV head, query head on it, channel
    scores = columns.sum(1).flatten()
    found = prune_fasp(llama, make_windows(), 0.3, dampening=0.05).model.model.layers[0].self_attn.o_proj
    left = (found.weight != 0).any(0)
    units = left.view(4, 2, 4).any(1).flatten().nonzero().flatten()
    assert 0 < len(units) < 16
    assert units.tolist() == sorted(scores.topk(len(units)).indices.tolist())
    keep = left.nonzero().flatten()
    strength = 0.05 * x.square().sum(0).mean()
    gram = x[:, keep].T @ x[:, keep] + strength * torch.eye(len(keep))
    naive = (y.T @ x[:, keep] + strength * weight[:, keep]) @ torch.linalg.inv(gram)
    torch.testing.assert_close(found.weight[:, keep].double(), naive, rtol=1e-3, atol=1e-4)
    deleted = weight * left
    error, plain = ((y - x @ w.T).square().sum() for w in (found.weight.double(), deleted))
    assert error < plain


# -- FLAP ----------------------------------------------------------------------------------------------------------------


def test_flap_ranks_by_the_fluctuation_of_dense_inputs(dense_folder):
    dense, _ = load_checkpoint(dense_folder)
    groups, seen = find_groups(dense, "head"), {}
    found = flap.measure_inputs(dense, groups, make_windows(), 8)
    for group in groups:
        module = dense.get_submodule(group.name)
        module.register_forward_pre_hook(
            lambda _, args, n=group.name: seen.update({n: args[0].flatten(0, -2).double()})
        )
    compute_logits(dense, make_windows())
    for group in groups:
        x, weight = seen[group.name], dense.get_submodule(group.name).weight.detach().double()
        torch.testing.assert_close(found[group.name].mean, x.mean(0), rtol=1e-4, atol=1e-5)
        metric = x.var(0) * weight.norm(dim=0) ** 2
        naive = ((metric - metric.mean()) / metric.std()).view(group.num_units, -1).mean(1)
        ours = flap.score_units(found[group.name], weight, group.columns_per_unit)
        torch.testing.assert_close(ours, naive, rtol=1e-3, atol=1e-4)


def test_flap_makes_up_for_the_mean_of_what_goes(dense_folder):
    """In the first module, whose inputs are the dense model's: no error in the mean, and less than by deletion in all."""
    dense, _ = load_checkpoint(dense_folder)
    result = prune_flap(dense_folder, make_windows(), 0.25)
    seen = {}
    group = next(
        g
        for g in find_groups(dense, "head")
        if len(find_kept(dense.get_submodule(g.layer_name), result.model.get_submodule(g.layer_name), g)) < g.num_units
    )
    module, after = dense.get_submodule(group.name), result.model.get_submodule(group.name)
    module.register_forward_hook(lambda _, args, out: seen.update(x=args[0].flatten(0, -2), y=out.flatten(0, -2)))
    compute_logits(dense, make_windows())
    keep = find_kept(dense.get_submodule(group.layer_name), result.model.get_submodule(group.layer_name), group)
    columns = unit_columns(keep, group.columns_per_unit)
    with torch.no_grad():
        ours = seen["x"][:, columns] @ after.weight.T + after.bias
        plain = seen["x"][:, columns] @ module.weight[:, columns].T + (0 if module.bias is None else module.bias)
    assert torch.equal(after.weight, module.weight[:, columns])
    torch.testing.assert_close(ours.mean(0), seen["y"].mean(0), rtol=0, atol=1e-4)
    assert (ours - seen["y"]).square().sum() < (plain - seen["y"]).square().sum()


# -- LLM-Pruner ----------------------------------------------------------------------------------------------------------


def test_llm_pruner_keeps_the_units_of_highest_importance(dense_folder):
    """Against the formula on gradients of one batch: the parameters that are gone with a unit, one by one."""
    dense, _ = load_checkpoint(dense_folder)
    windows = make_windows()
    dense(input_ids=windows[:10], labels=windows[:10]).loss.backward()
    result = prune_llm_pruner(dense_folder, windows, 0.2)
    for group in find_groups(dense, "head"):
        before, after = (model.get_submodule(group.layer_name) for model in (dense, result.model))
        keep = find_kept(before, after, group)
        if group.layer_index != 1:
            assert len(keep) == group.num_units
            continue
        scores = torch.zeros(group.num_units, dtype=torch.float64)
        for unit in range(group.num_units):
            rest = torch.tensor([other for other in range(group.num_units) if other != unit])
            for name in (*group.producers, group.consumer):
                linear = before.get_submodule(name)
                rows = name in group.producers
                stays = group.find_kept_rows(name, rest) if rows else unit_columns(rest, group.columns_per_unit)
                for parameter in linear.parameters() if rows else [linear.weight]:
                    taylor = (parameter * parameter.grad).detach().abs().double()
                    gone = torch.ones(taylor.shape[0 if rows else 1]).index_fill(0, stays, 0).bool()
                    scores[unit] += (taylor[gone] if rows else taylor[:, gone]).sum()
        assert 0 < len(keep) < group.num_units
        assert keep.tolist() == sorted(scores.topk(len(keep)).indices.tolist())


# -- SliceGPT ---------------------------------------------------------------------------------------------------------


def test_prune_slicegpt_counts_the_parameters_that_are_there(opt):
    result = prune_slicegpt(str(opt), make_windows(), 0.3)  # 24 channels -> 16
    dense, _ = load_checkpoint(str(opt))
    d, k, ffn, layers = 24, 16, 40, 3
    inner = 3 * (k * d + d) + (d * k + k) + (k * ffn + ffn) + (ffn * k + k) + 2 * k * k
    last = inner + (ffn + 1 + k) * (d - k)  # fc2, its bias and its shortcut lead to the head in full width
    base = count_prunable_parameters(dense)
    assert base == layers * (4 * (d * d + d) + 2 * d * ffn + ffn + d)
    assert result.removed == pytest.approx(1 - (2 * inner + last) / base, abs=1e-12)
    shapes = [tuple(p.shape) for p in result.model.model.decoder.layers[0].parameters()]
    assert (d, k) in shapes
    assert shapes.count((k, k)) == 2
    assert result.model.model.decoder.embed_tokens.weight.shape[1] == k
    assert result.model.lm_head.weight.shape[1] == d


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_slicegpt_is_the_dense_model_projected_at_every_cut(model_type, tmp_path, monkeypatch):
    folder, bases = str(save_model(make_model(model_type, num_hidden_layers=3), tmp_path)), []
    dense, _ = load_checkpoint(folder)

    def record(signals, width):
        bases.append(find_principal_basis(signals, width))
        return bases[-1]

    monkeypatch.setattr(slicegpt, "find_principal_basis", record)
    result = prune_slicegpt(folder, make_windows(), 0.25)
    assert result.model.model.layers[1].attention.shortcut.shape == (24, 24)
    first, *others = [(basis @ basis.T).float() for basis in bases]
    dense.model.embed_tokens.register_forward_hook(lambda _m, _a, out: out @ first)
    for layer, middle, last in zip(dense.model.layers, others[::2], others[1::2], strict=True):

        def forward(hidden, layer=layer, middle=middle, last=last, **kwargs):
            hidden = (hidden + layer.self_attn(layer.input_layernorm(hidden), **kwargs)[0]) @ middle
            return (hidden + layer.mlp(layer.post_attention_layernorm(hidden))) @ last

        layer.forward = forward
    tokens = make_windows(seed=6)
    reference = compute_logits(dense, tokens)
    assert (compute_logits(result.model, tokens) - reference).abs().max() < 1e-4 * reference.abs().max()


# -- OSSCAR -----------------------------------------------------------------------------------------------------------


def _naive_error(damped, units, width: int) -> float:
    columns = unit_columns(torch.tensor(sorted(units)), width)
    return float(measure_error(damped, solve_kept_weights(damped, columns, "here")[0], columns))


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_search_swaps_leaves_no_improving_swap(width, seed):
    _, _, damped = make_problem(8 * width, seed=seed)  # correlated inputs, on which greedy removal goes wrong
    start = torch.tensor([0, 1, 2, 3])  # any set will do to start from
    keep, num_swaps = search_swaps(damped, start, width)
    assert len(keep) == len(start)
    error = _naive_error(damped, keep.tolist(), width)
    assert error <= _naive_error(damped, start.tolist(), width) * (1 + 1e-9)
    assert (num_swaps == 0) == (keep.tolist() == start.tolist())
    outside = set(range(8)) - set(keep.tolist())
    for dropped, added in itertools.product(keep.tolist(), outside):
        other = (set(keep.tolist()) - {dropped}) | {added}
        assert _naive_error(damped, other, width) >= error * (1 - 1e-8)


def test_find_principal_basis_leaves_out_least_energy():
    signal = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.arange(1, 7)
    basis = find_principal_basis([signal[:20], signal[20:]], 4)
    lost = (signal - signal @ basis @ basis.T).square().sum()
    torch.testing.assert_close(lost, torch.linalg.svdvals(signal)[4:].square().sum())
    torch.testing.assert_close(basis.T @ basis, torch.eye(4, dtype=torch.float64))


# -- MoDeGPT ----------------------------------------------------------------------------------------------------------


def record_inputs(model, *names: str) -> dict[str, torch.Tensor]:
    """Inputs of modules on the calibration windows, tokens flattened, float64."""
    seen: dict[str, torch.Tensor] = {}
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, args, n=name: seen.update({n: args[0].flatten(0, -2).double()}))
    compute_logits(model, make_windows())
    return seen


def sqrt_of(gram: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(gram)
    return vectors @ values.clamp(min=0).sqrt().diag() @ vectors.T


@pytest.mark.parametrize("query_key", [True, False])
def test_modegpt_removes_what_is_asked(query_key, dense_folder, monkeypatch):
    """Its zeros count as gone: rows of queries, keys and values, columns of the output; the FFN is sliced."""
    monkeypatch.setattr(modegpt, "TEMPERATURE", 10.0)  # layers of two pairs can do no more than half
    dense, _ = load_checkpoint(dense_folder)
    result = (prune_modegpt if query_key else prune_without_query_key)(dense_folder, make_windows(), 0.5)
    left, cut = 0, set()
    for (_, before), (_, after) in zip(find_decoder_layers(dense), find_decoder_layers(result.model), strict=True):
        for name in (name for name, module in before.named_modules() if isinstance(module, torch.nn.Linear)):
            linear = after.get_submodule(name)
            rows, columns = (linear.weight != 0).any(1), (linear.weight != 0).any(0)
            left += int(rows.sum()) * (int(columns.sum()) + (linear.bias is not None))
            if not rows.all():
                cut.add(name[-6:])
    assert cut == ({"q_proj", "k_proj", "v_proj"} if query_key else {"v_proj"})
    assert result.removed == pytest.approx(0.5, abs=0.01)
    assert result.removed == pytest.approx(1 - left / count_prunable_parameters(dense), abs=1e-12)


def test_modegpt_spreads_sparsity_by_block_influence_and_entropy(llama):
    """The shares that minimise ``sum s_i p_i + T sum p_i log p_i`` under the budget, on the dense model's activations."""
    model, _ = load_checkpoint(llama)
    with torch.no_grad():
        hidden = model(input_ids=make_windows(), use_cache=False, output_hidden_states=True).hidden_states
    layers = [layer for _, layer in find_decoder_layers(model)]
    found = modegpt.measure_influence(layers, modegpt.record_calls(model, make_windows()))
    for index in range(2):  # the last entry is behind the norm
        cosine = torch.cosine_similarity(hidden[index].double(), hidden[index + 1].double(), dim=-1)
        torch.testing.assert_close(found[index], 1 - cosine.mean(), rtol=1e-4, atol=1e-5)
    influence = torch.tensor([0.1, 0.2, 0.15, 0.4], dtype=torch.float64)
    shapes = [modegpt.LayerShape(4, 2, 8, 100, (10, 20, 30))] * 4
    size = shapes[0].size
    shares = torch.tensor(modegpt.allocate(influence, 0.1 * 4 * size, shapes), dtype=torch.float64) / (0.1 * 4 * size)
    assert float(shares.sum()) == pytest.approx(1)
    slope = influence + modegpt.TEMPERATURE * (shares.log() + 1)  # of the Lagrangian: the same for all layers
    torch.testing.assert_close(slope, slope.mean().expand(4))
    most = modegpt.allocate(influence, 0.7 * 4 * size, shapes)
    assert max(most) == pytest.approx(modegpt.MOST * size)
    assert sum(most) == pytest.approx(0.7 * 4 * size)
    assert most[3] < most[1] <= most[0]


@pytest.mark.parametrize("dampening", [0.0, 0.1])
def test_modegpt_keeps_ffn_channels_of_highest_leverage_and_solves_by_nystrom(llama, dampening):
    dense, _ = load_checkpoint(llama)
    x = record_inputs(dense, "model.layers.0.mlp.down_proj")["model.layers.0.mlp.down_proj"]
    weight = dense.model.layers[0].mlp.down_proj.weight.detach().double()
    gram, n = x.T @ x, x.shape[1]
    ridge = modegpt.RIDGE * gram.diagonal().mean()
    leverage = (gram @ torch.linalg.inv(gram + ridge * torch.eye(n))).diagonal()
    keep, new = modegpt.decompose_ffn(gram, torch.cat([weight, torch.zeros(len(weight), 1)], 1), n // 2, dampening)
    assert keep.tolist() == sorted(leverage.topk(n // 2).indices.tolist())
    strength = dampening * gram.diagonal().mean()
    naive = (weight @ gram[:, keep] + strength * weight[:, keep]) @ torch.linalg.inv(
        gram[keep][:, keep] + strength * torch.eye(n // 2)
    )
    torch.testing.assert_close(new[:, :-1], naive, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("step", [1, 2])
def test_modegpt_keeps_the_channels_of_queries_and_keys_of_largest_norms(step):
    """Against columns of ``C^(1/2) W^T``; with two, after a rotation of the pairs by any angle."""
    generator = torch.Generator().manual_seed(3)
    x, queries, keys = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((50, 9), (2, 8, 9), (8, 9)))
    gram, scores = x.T @ x, torch.zeros(8 // step, dtype=torch.float64)
    angles = torch.rand(50, 1, generator=generator, dtype=torch.float64) * 6 if step == 2 else torch.zeros(50, 1)

    def norms(rows):
        first, second = (x @ rows.T).chunk(2, 1)
        turned = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
        squares = torch.cat(turned, 1).square().sum(0)
        return squares if step == 1 else squares[:4] + squares[4:]

    scores = sum(norms(head) for head in queries).sqrt() * norms(keys).sqrt()
    best = scores.topk(4 // step).indices
    wanted = best if step == 1 else torch.cat([best, best + 4])
    found = modegpt.select_query_key(gram, queries, keys, 4 // step, step)
    assert found.tolist() == sorted(wanted.tolist())


def test_modegpts_values_are_the_papers_two_decompositions():
    """One head: ``U S V^T = C^(1/2) W_V``, then ``U' S' V'^T = S V^T W_O``; ``C^(-1/2) U U'`` and ``S' V'^T``, cut to a rank."""
    generator = torch.Generator().manual_seed(4)
    x, values, outputs = (
        torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((60, 9), (6, 9), (1, 8, 6))
    )
    root = sqrt_of(x.T @ x)
    first = torch.linalg.svd(root @ values.T, full_matrices=False)
    second = torch.linalg.svd(first.S.diag() @ first.Vh @ outputs[0].T, full_matrices=False)
    papers_values = (torch.linalg.inv(root) @ first.U @ second.U)[:, :3]
    papers = papers_values @ second.S[:3].diag() @ second.Vh[:3]
    new, columns = modegpt.decompose_values(x.T @ x, values, outputs, 3)
    assert new.shape == (3, 9)
    torch.testing.assert_close(new.T @ columns[0].T, papers)


def test_modegpts_values_of_a_group_are_the_best_of_their_rank():
    """No other factors of the rank, shared by the heads, come closer: the error is the tail of the singular values."""
    generator = torch.Generator().manual_seed(5)
    x, values, outputs = (
        torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((60, 9), (6, 9), (2, 8, 6))
    )
    new, columns = modegpt.decompose_values(x.T @ x, values, outputs, 4)
    whole = torch.cat([x @ values.T @ head.T for head in outputs], 1)
    error = (whole - torch.cat([x @ new.T @ head.T for head in columns], 1)).square().sum()
    torch.testing.assert_close(error, torch.linalg.svdvals(whole)[4:].square().sum())


def test_modegpt_refuses_other_families(tmp_path):
    folder = save_model(make_model("qwen3", num_hidden_layers=2), tmp_path)
    with pytest.raises(ValueError, match=r"^modegpt: model must be one of .* got qwen3\. "):
        prune_modegpt(str(folder), make_windows(), 0.2)


# -- COMPACT -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_compact_keeps_frequent_tokens_and_the_channels_that_these_use(tied, tmp_path):
    """Against squared activations of the dense model's second FFN, summed over the tokens that stay; nothing is repaired."""
    folder = save_with_tokenizer(
        tmp_path / "whole", make_tokenizer("byte_level"), intermediate_size=1200, tie_word_embeddings=tied
    )
    dense, tokenizer = load_checkpoint(str(folder))
    windows = torch.tensor(make_calibration_dataset(DEMO_CALIBRATION, tokenizer, 16, 32)["input_ids"][:])
    result = prune_compact(str(folder), windows, 0.3)
    base, whole = count_prunable_parameters(dense), count_parameters(dense)
    gone = whole - count_parameters(result.model)
    assert result.removed == pytest.approx(1 - count_prunable_parameters(result.model) / base, abs=1e-12)
    assert result.removed * base + result.removed_rows * whole == pytest.approx(gone, abs=1e-6)
    old, new = (find_decoder_layers(model)[1][1].mlp for model in (dense, result.model))
    assert gone == pytest.approx(0.3 * base, abs=3 * old.up_proj.in_features), "to the channel"
    shares = [
        after.shape[0] / before.shape[0]
        for before, after in (
            (old.up_proj.weight, new.up_proj.weight),
            *zip(list_weights(dense), list_weights(result.model), strict=True),
        )
    ]
    assert shares == pytest.approx([shares[0]] * 3, abs=64 / dense.config.vocab_size)

    new_ids = result.tokenizer.get_vocab()
    kept = sorted(number for token, number in tokenizer.get_vocab().items() if token in new_ids)
    for before, after in zip(list_weights(dense), list_weights(result.model), strict=True):
        torch.testing.assert_close(after, before[kept], rtol=0, atol=0)
    counts = torch.isin(windows, torch.tensor(kept))
    assert 0.9 < counts.double().mean() < 1
    seen = []
    hook = old.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    compute_logits(dense, windows)
    hook.remove()
    scores = (seen[0].double().square() * counts[..., None]).sum((0, 1))
    keep = scores.topk(new.down_proj.in_features).indices.sort().values
    torch.testing.assert_close(new.down_proj.weight, old.down_proj.weight[:, keep], rtol=0, atol=0)
    torch.testing.assert_close(new.up_proj.weight, old.up_proj.weight[keep], rtol=0, atol=0)
