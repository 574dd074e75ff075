import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from helpers.models import DEFAULT, make_dataset, make_opt, run_oneshot, save_opt
from helpers.recovery_loop import changed, weights_of
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM, OPTForCausalLM

from eval.coverage import mask_dense
from eval.groups import find_groups
from struprune_plugin import SparsityAllocatorModifier, StruPruneModifier, read_manifest
from struprune_plugin.paper.snip import SNIP
from struprune_plugin.pruning import reconstruction

CLOSED_FORM = {"method": "closed_form", "steps": 2, "inner_steps": 2}  # fewer than the default's


@pytest.mark.parametrize(
    ("shape", "unit"), [("pre_norm", "value_channels"), ("post_norm", "head"), ("no_bias", "value_channels")]
)
def test_pruned_model_equals_the_dense_one_masked_with_the_same_indices(save_shape, shape, unit, tmp_path):
    out = tmp_path / "out"
    fields = {"sparsity": 0.3, "attention_unit": unit, "rotate_values": True, "sensitivity": "fisher"}
    pruned = run_oneshot(str(save_shape(shape)), **fields, allocation="error_curve", output_dir=str(out))
    masked = OPTForCausalLM.from_pretrained(save_shape(shape)).eval()
    mask_dense(masked, pruned, read_manifest(out))
    ids = torch.randint(4, 2048, (3, 20), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(pruned(ids).logits, masked(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fields", [{"allocation": "softmax_inverse"}, {"weight_update": "admm"}])
def test_zero_sparsity_is_the_identity(opt, fields, tmp_path):
    dense = OPTForCausalLM.from_pretrained(opt)
    pruned = run_oneshot(str(opt), sparsity=0.0, output_dir=str(tmp_path / "out"), **fields)
    for model in (pruned, AutoModelForCausalLM.from_pretrained(tmp_path / "out")):
        assert not changed(weights_of(dense), weights_of(model))


WATCHED = {  # consumer -> submodule whose input is the residual stream before it: pre-norm, post-norm
    "fc2": ("final_layer_norm", "fc1"),
    "self_attn.out_proj": ("self_attn_layer_norm", "self_attn.q_proj"),
}


def _watch(model, consumer, post_norm, ids):
    """(stream, inputs, output) of one consumer in the last layer, from a whole-model forward pass."""
    seen = {}
    block = model.model.decoder.layers[2]
    module, stream = block.get_submodule(consumer), block.get_submodule(WATCHED[consumer][post_norm])
    handles = [
        stream.register_forward_pre_hook(
            lambda _, args, kwargs: seen.update(stream=args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        ),
        module.register_forward_hook(lambda _, args, out: seen.update(inputs=args[0], output=out)),
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return tuple(seen[name].flatten(0, -2).double() for name in ("stream", "inputs", "output"))


@pytest.fixture(scope="module")
def prune_for(save_shape, tmp_path_factory):
    """A function that prunes a shape for a target, once, and returns (dense folder, model in memory, its folder)."""

    @functools.cache
    def prune(shape, target, unit):
        out = tmp_path_factory.mktemp("out") / "out"
        options = {"sparsity": 0.3, "attention_unit": unit, "reconstruct": target}
        options |= {"dampening_frac": 0.05, "rotate_values": False}
        return save_shape(shape), run_oneshot(str(save_shape(shape)), **options, output_dir=str(out)).float(), out

    return prune


@pytest.mark.parametrize(
    ("shape", "target", "consumer", "unit"),
    [
        ("pre_norm", "half_residual", "fc2", "value_channels"),
        ("pre_norm", "half_residual", "self_attn.out_proj", "value_channels"),
        ("pre_norm", "residual", "self_attn.out_proj", "head"),
        ("post_norm", "residual", "fc2", "value_channels"),
        ("post_norm", "residual", "self_attn.out_proj", "value_channels"),
        ("no_bias", "block", "fc2", "head"),
        ("no_bias", "block", "self_attn.out_proj", "head"),
        ("no_bias", "local", "fc2", "value_channels"),
        ("no_bias", "local", "self_attn.out_proj", "value_channels"),
    ],
)
def test_last_layer_is_the_ridge_solution_for_its_target(prune_for, shape, target, consumer, unit):
    """The whole chain (dense path, streams, dampening, solve) against one naive solve on whole-model activations."""
    folder, pruned, out = prune_for(shape, target, unit)
    dense = OPTForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor(make_dataset()["input_ids"])
    (keep,) = [g.keep for g in read_manifest(out).groups if g.name.endswith(f"layers.2.{consumer}")]
    width = 6 if unit == "head" and consumer != "fc2" else 1
    columns = [u * width + i for u in keep for i in range(width)]

    # what the consumer saw when it was pruned: everything before it pruned already, its own module dense
    mixed = AutoModelForCausalLM.from_pretrained(out).eval()
    mixed.model.decoder.layers[2] = copy.deepcopy(dense.model.decoder.layers[2])
    if consumer == "fc2":
        mixed.model.decoder.layers[2].self_attn = pruned.model.decoder.layers[2].self_attn
    stream, inputs, output = _watch(mixed, consumer, shape == "post_norm", ids)
    dense_stream, _, dense_output = _watch(dense, consumer, shape == "post_norm", ids)
    residual = dense_stream + dense_output - stream
    wanted = {"half_residual": (output + residual) / 2, "residual": residual, "block": dense_output, "local": output}[
        target
    ]

    module = dense.model.decoder.layers[2].get_submodule(consumer)
    p, strength = inputs[:, columns], 0.05 * inputs.square().sum(0).mean()
    ridge = torch.eye(len(columns), dtype=torch.float64) * strength
    right = wanted.T @ p + strength * module.weight.detach().double()[:, columns]
    if module.bias is not None:
        ones = torch.ones(len(p), 1, dtype=torch.float64)
        ridge = torch.block_diag(ridge, torch.zeros(1, 1, dtype=torch.float64))
        right, p = torch.cat([right, wanted.T @ ones], 1), torch.cat([p, ones], 1)
    naive = right @ torch.linalg.inv(p.T @ p + ridge)
    solved = pruned.model.decoder.layers[2].get_submodule(consumer)
    torch.testing.assert_close(solved.weight.double(), naive[:, : len(columns)], rtol=1e-3, atol=5e-4)
    if module.bias is not None:
        torch.testing.assert_close(solved.bias.double(), naive[:, -1], rtol=1e-3, atol=5e-4)


@pytest.mark.parametrize("importance", ["wanda", "magnitude"])
def test_score_based_importance_keeps_the_units_of_highest_score(opt, importance, tmp_path):
    out = tmp_path / "out"
    fields = {"sparsity": 0.3, "importance": importance, "attention_unit": "none"}
    run_oneshot(str(opt), **fields, output_dir=str(out))
    dense = OPTForCausalLM.from_pretrained(opt).eval()
    seen = {}
    block = dense.model.decoder.layers[0]
    block.fc2.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    with torch.no_grad():  # the first layer sees the dense inputs, as attention is left alone
        dense(torch.tensor(make_dataset()["input_ids"]))
    x = seen["x"].flatten(0, -2).double()
    second = block.fc2.weight.double()
    scores = {
        "wanda": x.abs().mean(0) * second.abs().sum(0),
        "magnitude": second.abs().sum(0) + block.fc1.weight.double().abs().sum(1),
    }[importance]
    entry = read_manifest(out).groups[0]
    assert set(entry.keep) == set(scores.topk(entry.kept).indices.tolist())


@pytest.mark.parametrize(
    ("dtype", "fields"),
    [("float32", DEFAULT), ("bfloat16", DEFAULT), ("float32", {"importance": "snip", "allocation": "softmax"})],
)
def test_batch_size_and_threads_do_not_change_the_kept_units(opt, dtype, fields, tmp_path):
    """In bfloat16 the activations themselves are rounded as a kernel adds: choices that tie to within that may fall otherwise."""
    data = {"dataset": make_dataset(6), "num_calibration_samples": 6}  # 6: the last batch is a smaller one
    groups, threads = [], torch.get_num_threads()
    for size, num_threads in ((1, 1), (4, 2)):
        torch.set_num_threads(num_threads)
        try:
            out = tmp_path / f"{size}"
            run_oneshot(str(opt), sparsity=0.3, precision=dtype, batch_size=size, output_dir=str(out), **data, **fields)
        finally:
            torch.set_num_threads(threads)
        groups.append(read_manifest(out).groups)
    for group, other in zip(*groups, strict=True):
        for name in ("name", "kept", *({"float32": ("damping",), "bfloat16": ()}[dtype])):
            assert getattr(group, name) == getattr(other, name), group.name
        exchanged = set(group.keep) - set(other.keep)
        assert len(exchanged) <= {"float32": 0, "bfloat16": 1}[dtype], group.name
        rel = {"float32": 1e-4, "bfloat16": 0.05}[dtype]
        close = pytest.approx(other.error_after, rel=rel, abs=1e-7)  # of the target's energy, in float32 sums
        assert group.error_after == close, group.name


@pytest.mark.parametrize(
    ("importance", "update"),
    [
        *((name, "least_squares") for name in ("magnitude", "snip", "l0", "closed_form")),
        *((name, "none") for name in ("obs", "wanda")),  # of each kind: eliminates, scores
    ],
)
def test_every_importance_runs_with_and_without_correction(opt, importance, update, tmp_path):
    fields = {"sparsity": 0.3, "importance": importance, "weight_update": update}
    fields |= {"importance": CLOSED_FORM} if importance == "closed_form" else {}
    pruned = run_oneshot(str(opt), **fields, output_dir=str(tmp_path / "out"))
    dense, manifest = OPTForCausalLM.from_pretrained(opt), read_manifest(tmp_path / "out")
    assert abs(manifest.budget.met_sparsity - 0.3) < 0.005
    for group in manifest.groups:
        if update == "none":  # which only deletes
            assert group.error_after == group.error_before
            kept = dense.get_submodule(group.name).weight[:, group.keep]
            assert torch.equal(pruned.get_submodule(group.name).weight, kept)
        else:
            assert group.error_after < group.error_before


@pytest.mark.parametrize("unit", ["head", "value_channels"])
def test_snip_scores_are_weights_times_gradients_of_the_loss(unit):
    model = make_opt()
    loader = [{"input_ids": torch.tensor(make_dataset(4, 16)["input_ids"])}]
    groups = find_groups(model, unit)
    ours = SNIP().measure(model, loader, groups)
    model(input_ids=loader[0]["input_ids"], labels=loader[0]["input_ids"]).loss.backward()
    for group in groups:
        layer = model.get_submodule(group.layer_name)
        products = {
            name: (w := layer.get_submodule(name).weight) * w.grad for name in (group.consumer, *group.producers)
        }
        naive = products[group.consumer].sum(0).view(group.num_units, -1).sum(1)
        naive = naive + sum(products[name].sum(1).view(group.num_units, -1).sum(1) for name in group.producers)
        torch.testing.assert_close(ours[group.name].float(), naive.abs(), rtol=1e-3, atol=1e-5)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_snip_scores_do_not_depend_on_padding():
    model, text = make_opt(), torch.tensor(make_dataset(1, 16)["input_ids"])
    groups = find_groups(model, "head")
    wanted = SNIP().measure(model, [{"input_ids": text}], groups)
    for side in (4, 0), (0, 4):
        batch = {"input_ids": F.pad(text, side, value=7), "attention_mask": F.pad(torch.ones_like(text), side)}
        for name, scores in SNIP().measure(model, [batch], groups).items():
            torch.testing.assert_close(scores, wanted[name], rtol=1e-3, atol=1e-7)


def test_allocator_stage_and_own_allocation_pass_agree(opt, tmp_path):
    allocation = "softmax_inverse"
    fields = {"sparsity": 0.3, "allocation": {"rule": allocation, "temperature": [0.5, 4.0]}, "sensitivity": "fisher"}
    run_oneshot(str(opt), **fields, output_dir=str(tmp_path / "own"))
    stages = [SparsityAllocatorModifier(**fields), StruPruneModifier()]
    run_oneshot(str(opt), recipe=stages, output_dir=str(tmp_path / "stage"))
    own, stage = read_manifest(tmp_path / "own"), read_manifest(tmp_path / "stage")
    assert own.groups == stage.groups
    assert own.allocation == stage.allocation
    assert own.allocation.method == allocation
    assert [row["temperature"] for row in own.allocation.searched] == [0.5, 4.0]
    assert len({group.kept for group in own.groups if group.kind == "ffn"}) > 1, "not uniform"
    assert abs(own.budget.met_sparsity - 0.3) < 0.005
    assert [entry.seconds > 0 for entry in stage.stages if entry.name == "allocate"] == [True]


@pytest.mark.parametrize("update", ["none", "least_squares"])
def test_allocator_error_is_that_of_pruning_the_dense_layers_so(opt, update, tmp_path):
    """R9: the loss of a temperature, read off the moments, against what pruning one module alone then measures."""
    fields = {"sparsity": 0.1, "reconstruct": "local", "importance": "wanda", "dampening_frac": 1e-9}
    fields |= {"attention_unit": "none", "targets": ["model.decoder.layers.0.fc2"], "weight_update": update}
    fields["allocation"] = {"rule": "softmax", "temperature": 1.0}
    run_oneshot(str(opt), **fields, output_dir=str(tmp_path / "out"))
    manifest = read_manifest(tmp_path / "out")
    (entry,) = manifest.groups
    dense = OPTForCausalLM.from_pretrained(opt).eval()
    seen = {}
    dense.model.decoder.layers[0].fc2.register_forward_hook(lambda _, args, out: seen.update(y=out))
    with torch.no_grad():
        dense(torch.tensor(make_dataset()["input_ids"]))
    error = entry.error_after * seen["y"].double().square().sum().item()
    assert manifest.allocation.searched[0]["error"] == pytest.approx(error, rel=1e-2)


def test_allocator_plans_admm_by_the_re_solved_error(opt, tmp_path):
    """ADMM starts from the least-squares solve and closes with one: its curve is not that of bare deletion."""
    for name, few in (("least_squares", {}), ("admm", {"steps": 1, "inner_steps": 1}), ("none", {})):
        fields = {"sparsity": 0.3, "allocation": "softmax", "attention_unit": "none"}
        run_oneshot(str(opt), **fields, weight_update={"method": name, **few}, output_dir=str(tmp_path / name))
    solved, admm, deleted = (read_manifest(tmp_path / n).allocation for n in ("least_squares", "admm", "none"))
    assert admm.searched == solved.searched != deleted.searched


def test_padding_does_not_count(opt, tmp_path):
    """A padded batch gives the importance and the moments of its real tokens alone."""
    ids = [row[:20] for row in make_dataset(4, 32)["input_ids"]]
    short = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 20] * 4})
    padded = Dataset.from_dict({"input_ids": [r + [1] * 7 for r in ids], "attention_mask": [[1] * 20 + [0] * 7] * 4})
    options = {"sparsity": 0.3, "allocation": "softmax", "num_calibration_samples": 4}
    plain, other = (
        weights_of(run_oneshot(str(opt), dataset=data, output_dir=str(tmp_path / name), **options))
        for name, data in (("short", short), ("padded", padded))
    )
    for name, weight in plain.items():  # 80 tokens: badly conditioned
        torch.testing.assert_close(weight, other[name], rtol=1e-3, atol=5e-4, msg=name)
    first, second = (read_manifest(tmp_path / name).allocation.importance for name in ("short", "padded"))
    for name, value in first.items():
        assert second[name] == pytest.approx(value, rel=1e-3)


def test_padding_before_the_tokens_shifts_no_positions(save_family, tmp_path):
    folder, text = save_family("gpt2"), torch.tensor(make_dataset(8, 24)["input_ids"])
    data = [F.pad(text, side, value=9).tolist() for side in ((8, 0), (0, 8))]
    masks = [F.pad(torch.ones_like(text), side).tolist() for side in ((8, 0), (0, 8))]
    before, behind = (
        weights_of(
            run_oneshot(
                str(folder), dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": mask}), sparsity=0.3
            )
        )
        for ids, mask in zip(data, masks, strict=True)
    )
    assert all(torch.equal(weight, behind[name]) for name, weight in before.items())


@pytest.fixture
def _empty_is_nan():
    """Memory that is not set yet holds NaN, as it may at any time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_empty_is_nan")
def test_an_allocation_pass_is_not_put_off_by_a_later_quantiser(opt, tmp_path):
    stages = [
        StruPruneModifier(sparsity=0.3, importance="wanda", allocation="softmax"),
        QuantizationModifier(targets=["Linear"], scheme="W8A8", ignore=["lm_head"]),
    ]
    run_oneshot(str(opt), recipe=stages, output_dir=str(tmp_path / "quantised"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised")
    assert model(torch.arange(4, 30)[None]).logits.isfinite().all()


def test_softmax_spares_what_matters_and_gamma_decays_with_depth(opt, tmp_path):
    run_oneshot(
        str(opt), sparsity=0.4, allocation={"rule": "softmax", "temperature": 0.5}, output_dir=str(tmp_path / "softmax")
    )
    manifest = read_manifest(tmp_path / "softmax")
    ffn = [group for group in manifest.groups if group.kind == "ffn"]
    importance = [manifest.allocation.importance[group.name] for group in ffn]
    kept = [ffn[i].kept for i in sorted(range(3), key=importance.__getitem__)]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]
    values = {}
    for gamma in (1.0, 0.5):
        out = tmp_path / f"gamma{gamma}"
        run_oneshot(str(opt), sparsity=0.4, allocation={"rule": "softmax_inverse", "gamma": gamma}, output_dir=str(out))
        values[gamma] = read_manifest(out).allocation.importance
    for name, value in values[1.0].items():
        layer = int(name.split("layers.")[1].split(".")[0])
        assert values[0.5][name] == pytest.approx(value * 0.5**layer)


def test_algorithm_1_meets_the_budget_by_one_threshold(opt, tmp_path):
    fields = {"sparsity": 0.3, "allocation": "global_threshold", "importance": CLOSED_FORM}
    run_oneshot(str(opt), **fields, output_dir=str(tmp_path / "out"))
    manifest = read_manifest(tmp_path / "out")
    assert abs(manifest.budget.met_sparsity - 0.3) < 0.01
    assert manifest.allocation.method == "global_threshold"
    assert all(0 <= value <= 1 for value in manifest.allocation.retention.values())
    assert len({group.kept for group in manifest.groups if group.kind == "ffn"}) > 1, "not uniform"


def test_algorithm_1_as_printed_removes_by_index(opt, tmp_path):
    """R4: all scores are 1 at the first step."""
    fields = {"sparsity": 0.3, "importance": {"method": "closed_form", "as_printed": True}, "attention_unit": "none"}
    run_oneshot(str(opt), **fields, output_dir=str(tmp_path / "out"))
    for group in read_manifest(tmp_path / "out").groups:
        assert group.keep == list(range(40 - group.kept, 40))


def test_allocation_as_printed_misses_the_budget_and_the_manifest_says_so(opt, tmp_path):
    fields = {"allocation": {"rule": "softmax", "temperature": 0.1, "as_printed": True}, "attention_unit": "head"}
    run_oneshot(str(opt), sparsity=0.5, **fields, output_dir=str(tmp_path / "out"))
    budget = read_manifest(tmp_path / "out").budget
    assert budget.asked_sparsity == 0.5
    assert budget.met_sparsity < 0.45


@pytest.mark.parametrize(
    ("shape", "method", "unit"),
    [
        ("pre_norm", 1, "head"),
        ("pre_norm", 2, "value_channels"),
        ("post_norm", 2, "head"),
        ("no_bias", 1, "value_channels"),
    ],
)
def test_admm_lowers_its_objective_and_the_output_is_exact(save_shape, shape, method, unit, tmp_path, monkeypatch):
    out, closing, solve = tmp_path / "out", [], reconstruction.solve_weights
    monkeypatch.setattr(reconstruction, "solve_weights", lambda *args: closing.append(solve(*args)) or closing[-1])
    options = {"sparsity": 0.4, "attention_unit": unit}
    options |= {"dataset": make_dataset(4), "num_calibration_samples": 4}
    options["weight_update"] = {"method": "admm", "steps": 2, "attention_method": method}
    pruned = run_oneshot(str(save_shape(shape)), output_dir=str(out), **options)
    ids = torch.arange(4, 30)[None]
    assert torch.equal(pruned(ids).logits, AutoModelForCausalLM.from_pretrained(out)(ids).logits)
    for entry in read_manifest(out).groups:
        objective = entry.admm
        assert len(objective) == 3
        assert objective[-1] < objective[0]
        if entry.kind == "ffn":
            assert all(b <= a * (1 + 1e-4) for a, b in itertools.pairwise(objective)), objective
        assert entry.error_after < entry.error_before
    told = [(entry.error_after, entry.condition_number) for entry in read_manifest(out).groups]
    assert told == [(record.error_after, record.condition_number) for _, (record,) in closing], "of the closing solves"


def test_admm_refuses_other_activations(tmp_path):
    folder = save_opt(tmp_path / "m", activation_function="gelu")
    with pytest.raises(ValueError, match=r"weight_update: admm must have a ReLU or a SiLU-gated FFN, got 'gelu'"):
        run_oneshot(str(folder), sparsity=0.3, weight_update="admm")


def test_the_saved_recipe_gives_the_same_bytes(opt, prune_once, tmp_path):
    first = prune_once(opt, "value_channels")[1]
    run_oneshot(str(opt), recipe=str(first / "recipe.yaml"), output_dir=str(tmp_path / "again"))
    assert (first / "model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()


def test_width_multiple_is_kept(opt, tmp_path):
    run_oneshot(str(opt), sparsity=0.3, width_multiple=8, output_dir=str(tmp_path / "out"))
    ffn = [group.kept for group in read_manifest(tmp_path / "out").groups if group.kind == "ffn"]
    assert all(width % 8 == 0 for width in ffn)


def test_targets_limit_what_is_pruned(opt):
    pruned = run_oneshot(str(opt), sparsity=0.1, targets=["re:.*fc2"], ignore=["re:.*layers\\.0\\..*"])
    sizes = [(layer.fc2.in_features, layer.self_attn.out_proj.in_features) for layer in pruned.model.decoder.layers]
    assert sizes[0] == (40, 24)
    assert all(width < 40 and attention == 24 for width, attention in sizes[1:])


def test_aborted_run_leaves_the_host_usable(opt, tmp_path):
    with pytest.raises(ValueError, match="at least"):
        run_oneshot(str(opt), sparsity=0.3, dataset=make_dataset(1, 8))
    assert run_oneshot(str(opt), sparsity=0.3).num_parameters() < make_opt().num_parameters()


@pytest.mark.parametrize("unit", ["head", "value_channels"])
def test_a_model_of_one_layer_with_one_head_is_pruned(unit, tmp_path):
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1}
    pruned = run_oneshot(str(save_opt(tmp_path / "m", **shape)), sparsity=0.2, attention_unit=unit, **DEFAULT)
    assert pruned.num_parameters() < make_opt(**shape).num_parameters()


def test_automatic_dampening_needs_sequences_to_hold_out_and_is_recorded(opt, tmp_path):
    data = {"dataset": make_dataset(16), "num_calibration_samples": 16, "sparsity": 0.3}
    chosen = {}
    for name, fields in {"many": {}, "few": {"num_calibration_samples": 3}, "fixed": {"dampening_frac": 0.02}}.items():
        run_oneshot(str(opt), **data | fields, output_dir=str(tmp_path / name))
        chosen[name] = [group.damping for group in read_manifest(tmp_path / name).groups]
    assert set(chosen["few"]) == {0.01}
    assert set(chosen["fixed"]) == {0.02}
    assert set(chosen["many"]) != {0.01}


def test_calibration_passes_end_where_all_is_seen(opt):
    """Attention's statistics need no FFN: their pass ends once the output projection has run. The last one needs no attention."""
    model = OPTForCausalLM.from_pretrained(opt)
    calls, kinds = {"ffn": 0, "attention": 0}, {}
    for layer in model.model.decoder.layers:
        kinds |= {layer.activation_fn: "ffn", layer.self_attn.out_proj: "attention"}

    def watch(module, _args):
        if module in kinds:
            calls[kinds[module]] += 1

    handle = register_module_forward_pre_hook(watch)
    try:  # a module's own hooks are no part of a run
        assert run_oneshot(model, sparsity=0.3, tokenizer=str(opt)) is model
    finally:
        handle.remove()
    assert 0 < calls["ffn"] == calls["attention"]
