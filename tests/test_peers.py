"""Other methods, written anew to compare with."""

import itertools

import pytest
import torch
from conftest import VOCABULARY, make_opt, save_opt
from transformers import AutoTokenizer

from eval.peers.osscar import plan_counts, prune_osscar, search_swaps, subtract_bias
from eval.peers.slicegpt import count_kept_channels, find_principal_basis, prune_slicegpt
from struprune_plugin.data import DEMO_MODEL
from struprune_plugin.evaluation import load_checkpoint, measure_perplexity
from struprune_plugin.maths.elimination import expand_units, keep_last
from struprune_plugin.maths.solve import damp_moments, solve_kept_weights
from struprune_plugin.maths.statistics import accumulate_moments, make_moments, measure_error
from struprune_plugin.model.layers import count_prunable_parameters
from struprune_plugin.model.units import find_groups


def make_windows(num_windows: int = 16, length: int = 32, seed: int = 5) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (num_windows, length), generator=torch.Generator().manual_seed(seed))


def compute_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


# -- SliceGPT ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"enable_bias": False}, {"layer_norm_elementwise_affine": False}])
def test_prune_slicegpt_of_nothing_is_the_identity(tmp_path, changes):
    folder = save_opt(tmp_path, **changes)
    tokens = make_windows(seed=6)
    dense, _ = load_checkpoint(str(folder))
    result = prune_slicegpt(str(folder), make_windows(), 0.0)
    reference = compute_logits(dense, tokens)
    assert (compute_logits(result.model, tokens) - reference).abs().max() < 1e-4 * reference.abs().max()


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


def test_prune_slicegpt_loses_nothing_of_a_rank_deficient_signal(tmp_path):
    model = make_opt()
    basis = torch.linalg.qr(torch.randn(24, 14, generator=torch.Generator().manual_seed(3))).Q
    project = basis @ basis.T
    decoder = model.model.decoder
    with torch.no_grad():
        for embedding in (decoder.embed_tokens, decoder.embed_positions):
            embedding.weight.copy_(embedding.weight @ project)
        for layer in decoder.layers:
            for linear in (layer.self_attn.out_proj, layer.fc2):
                linear.weight.copy_(project @ linear.weight)
                linear.bias.copy_(project @ linear.bias)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(tmp_path)
    result = prune_slicegpt(str(tmp_path), make_windows(), 0.3)  # keeps 16 of 24
    assert result.removed > 0
    tokens = make_windows(seed=6)
    reference = compute_logits(model, tokens)
    assert (compute_logits(result.model, tokens) - reference).abs().max() < 1e-4 * reference.abs().max()
    lossy = prune_slicegpt(str(tmp_path), make_windows(), 0.6)  # keeps 8: now something goes
    assert (compute_logits(lossy.model, tokens) - reference).abs().max() > 1e-2 * reference.abs().max()


def test_find_principal_basis_leaves_out_least_energy():
    signal = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.arange(1, 7)
    basis = find_principal_basis([signal[:20], signal[20:]], 4)
    lost = (signal - signal @ basis @ basis.T).square().sum()
    torch.testing.assert_close(lost, torch.linalg.svdvals(signal)[4:].square().sum())
    torch.testing.assert_close(basis.T @ basis, torch.eye(4, dtype=torch.float64))


def test_count_kept_channels_rounds_down_and_refuses(opt):
    model = make_opt()
    assert count_kept_channels(model, 0.3, 8) == 16
    assert count_kept_channels(model, 0.3, 1) == 16
    assert count_kept_channels(model, 1 / 3, 8) == 16  # no loss to a product that falls short of 16
    for fraction in (-0.1, 0.9, 1.0):
        with pytest.raises(ValueError, match="slice_fraction"):
            count_kept_channels(model, fraction, 8)
    with pytest.raises(ValueError, match="norms before"):
        count_kept_channels(make_opt(do_layer_norm_before=False), 0.3, 8)


# -- OSSCAR -----------------------------------------------------------------------------------------------------------


def make_problem(num_inputs: int = 8, num_outputs: int = 3, seed: int = 0):
    """Damped moments of strongly correlated inputs, on which greedy removal goes wrong, and the dense weights."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(40, num_inputs, generator=generator, dtype=torch.float64)
    inputs = inputs @ torch.randn(num_inputs, num_inputs, generator=generator, dtype=torch.float64)
    weight = torch.randn(num_outputs, num_inputs + 1, generator=generator, dtype=torch.float64)
    moments = make_moments(num_inputs, num_outputs, "cpu", torch.float64)
    accumulate_moments(moments, inputs, inputs @ weight[:, :-1].T + weight[:, -1])
    return damp_moments(moments, weight, 0.01), weight


def _naive_error(damped, units, width: int) -> float:
    columns = expand_units(torch.tensor(sorted(units)), width)
    return measure_error(damped, solve_kept_weights(damped, columns, "here").weight, columns)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_search_swaps_leaves_no_improving_swap(width, seed):
    damped, _ = make_problem(8 * width, seed=seed)
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


def test_search_swaps_improves_some_start():
    swaps = [search_swaps(make_problem(seed=seed)[0], torch.tensor([0, 1, 2, 3]), 1)[1] for seed in range(4)]
    assert sum(swaps) > 0


def test_subtract_bias_is_the_moments_of_the_rest():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    targets = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    bias = torch.randn(3, generator=generator, dtype=torch.float64)
    whole, rest = (make_moments(5, 3, "cpu", torch.float64) for _ in range(2))
    accumulate_moments(whole, inputs, targets)
    accumulate_moments(rest, inputs, targets - bias)
    ours = subtract_bias(whole, bias)
    torch.testing.assert_close(ours.cross, rest.cross)
    torch.testing.assert_close(ours.gram, rest.gram)
    torch.testing.assert_close(ours.target_energy, rest.target_energy)


def test_prune_osscar_of_nothing_is_the_identity(opt):
    dense, _ = load_checkpoint(str(opt))
    result = prune_osscar(str(opt), make_windows(), 0.0)
    assert result.removed == 0
    assert torch.equal(compute_logits(result.model, make_windows()), compute_logits(dense, make_windows()))


def test_prune_osscar_removes_what_is_asked(opt):
    dense, _ = load_checkpoint(str(opt))
    groups, base = find_groups(dense, "head"), count_prunable_parameters(dense)
    for sparsity in (0.1, 0.3, 0.5):
        counts = plan_counts(groups, base, sparsity)
        heads = {counts[group.name] for group in groups if group.kind == "head"}
        assert heads == {round(4 * (1 - sparsity))}
        result = prune_osscar(str(opt), make_windows(), sparsity)
        assert result.removed == pytest.approx(sparsity, abs=max(group.unit_cost for group in groups) / base)
        left = sum(p.numel() for layer in result.model.model.decoder.layers for p in layer.parameters())
        norms = 3 * 4 * 24
        assert result.removed == pytest.approx(1 - (left - norms) / base, abs=1e-12)
        assert measure_perplexity(result.model, make_windows().flatten(), 32) > 0
    with pytest.raises(ValueError, match="sparsity"):
        prune_osscar(str(opt), make_windows(), 1.0)


def test_prune_osscar_keeps_the_biases_and_beats_deletion(opt):
    dense, _ = load_checkpoint(str(opt))
    result = prune_osscar(str(opt), make_windows(), 0.3)
    tokens, reference = make_windows(), compute_logits(dense, make_windows())
    for ours, theirs in zip(result.model.model.decoder.layers, dense.model.decoder.layers, strict=True):
        assert torch.equal(ours.fc2.bias, theirs.fc2.bias)
        assert torch.equal(ours.self_attn.out_proj.bias, theirs.self_attn.out_proj.bias)
    kept = plan_counts(find_groups(dense, "head"), count_prunable_parameters(dense), 0.3)
    ours = (compute_logits(result.model, tokens) - reference).square().mean()
    with torch.no_grad():  # the same numbers of units, the last ones, without a solve
        for group in find_groups(dense, "head"):
            layer = dense.get_submodule(group.layer_name)
            keep = keep_last(torch.arange(group.num_units).flip(0), group.num_units, kept[group.name])
            consumer = layer.get_submodule(group.consumer)
            gone = torch.ones(group.num_columns)
            gone[expand_units(keep, group.columns_per_unit)] = 0
            consumer.weight.mul_(1 - gone)
    assert ours < (compute_logits(dense, tokens) - reference).square().mean()
