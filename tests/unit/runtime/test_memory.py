"""What the device holds while layers are pruned, counted on a CPU; lines that it must not cross."""

import gc

import pytest
import torch
from helpers.models import make_dataset, run_oneshot, save_model, save_opt
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from eval.account import CountedContext, LiveBytes, count_memory
from eval.measure import count_live_bytes
from struprune_plugin import read_manifest
from struprune_plugin.layerwise.samples import find_largest_shape
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.studies.plan import Workload, count_needs, read_shapes

CPU = torch.device("cpu")


def measure_stages(folder, model, **fields):
    with count_memory():
        run_oneshot(str(model), sparsity=0.3, output_dir=str(folder), **fields)
    manifest = read_manifest(folder)
    assert manifest.memory_measure.startswith("account")
    return {stage.name: stage.peak_bytes for stage in manifest.stages}


def test_live_bytes_counts_what_is_alive_together_and_views_once():
    with LiveBytes() as live:
        first = torch.zeros(1000)
        view = first.view(10, 100)[2:]
        second = first + 1
        assert live.live == 8000
        del first, second
        assert live.live == 4000, "the view keeps its storage"
        del view
        assert live.live == 0
    assert live.peak == 8000


def test_count_live_bytes_counts_all_that_is_made():
    outside = torch.ones(500)
    assert count_live_bytes(lambda: outside * 2) == 2000
    assert count_live_bytes(lambda: outside.view(10, 50)) == 0


def test_what_is_read_from_the_host_alone_stays_on_the_host():
    outside = torch.ones(500)
    with LiveBytes() as live:
        double = outside * 2
        assert live.live == 0
        mixed = double + torch.ones(500)
        assert live.live == 2000, "an operation with the device's tensors runs there"
        double.copy_(mixed)
        assert not live.holds(double)


def test_moves_copy_while_the_account_is_open_and_share_otherwise():
    tensor = torch.ones(500)
    assert DeviceContext().to_host(tensor).data_ptr() == tensor.data_ptr()
    with CountedContext.open() as context:
        moved = context.to_device(tensor, CPU)
        assert moved.data_ptr() != tensor.data_ptr()
        assert context.to_device(moved, CPU) is moved
        assert context.live.live == 2000
        kept = context.to_host(moved)
        del moved
        assert context.live.live == 0
        assert torch.equal(kept, tensor)


def test_watch_tells_the_peak_of_every_span_of_nested_ones():
    with CountedContext.open() as context, context.watch() as whole:
        first = torch.zeros(1000)
        with context.watch() as inner:
            del first
            torch.zeros(100)
        torch.zeros(300)
    gc.collect()
    assert inner == [4000]
    assert whole == [4000]


def test_the_account_changes_no_result(opt, prune_once):
    plain = prune_once(opt, "value_channels")[0].state_dict()
    with count_memory():
        counted = run_oneshot(str(opt), sparsity=0.3).state_dict()
    assert plain.keys() == counted.keys()
    assert all(torch.equal(plain[name], counted[name]) for name in plain)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "importance": "snip",
            "allocation": "uniform",
            "weight_update": {"method": "admm", "steps": 1, "inner_steps": 1},
        },
    ],
)
def test_memory_grows_neither_with_layers_nor_with_samples(tmp_path, fields):
    model, deep = save_opt(tmp_path / "model"), save_opt(tmp_path / "deep", num_hidden_layers=5)
    few, many = ({"dataset": make_dataset(n), "num_calibration_samples": n} for n in (16, 32))
    peaks = measure_stages(tmp_path / "a", model, **few, **fields)
    more = measure_stages(tmp_path / "b", model, **many, **fields)
    deeper = measure_stages(tmp_path / "c", deep, **few, **fields)
    for name, peak in peaks.items():
        assert more[name] < 1.02 * peak, f"{name}: more samples"
        if "gradients" not in peaks or name not in ("gradients", "whole pass"):  # gradients are the whole model's
            assert deeper[name] < 1.02 * peak, f"{name}: more layers"


FAST = {"allocation": "uniform", "sensitivity": "none"}


def run_with_budget(folder, model, budget, **fields):
    data = {"dataset": make_dataset(8), "num_calibration_samples": 8, "batch_size": 1}
    with count_memory():
        run_oneshot(str(model), sparsity=0.3, memory_budget=budget, output_dir=str(folder), **data, **fields)
    manifest = read_manifest(folder)
    return max(stage.peak_bytes for stage in manifest.stages), manifest


def make_wide(folder):
    return save_opt(folder, hidden_size=48, word_embed_proj_dim=48, ffn_dim=192, num_hidden_layers=2)


def test_a_budget_is_kept_where_the_head_is_larger_than_a_layer(tmp_path):
    model, budget = save_opt(tmp_path / "model", vocab_size=20_000, tie_word_embeddings=False), 3_000_000
    peak, manifest = run_with_budget(tmp_path / "out", model, budget, allocation="error_curve")
    assert manifest.allocation.tried
    assert 0.5 * budget < peak <= budget


@pytest.mark.parametrize("fields", [FAST, {}])
def test_a_budget_is_kept_and_refused_below_what_it_names(tmp_path, fields):
    model = make_wide(tmp_path / "model")
    with pytest.raises(ValueError, match="memory_budget: must be at least") as refusal:
        run_with_budget(tmp_path / "a", model, 1000, **fields)
    least = int(str(refusal.value).split("at least ")[1].split(" ")[0].replace(",", ""))
    free, reference = run_with_budget(tmp_path / "free", model, None, **fields)
    peaks = []
    for factor in (1, 3):
        peak, manifest = run_with_budget(tmp_path / str(factor), model, int(factor * least), **fields)
        assert peak <= factor * least
        peaks.append(peak)
        found = [[getattr(group, name) for name in ("name", "kept")] for group in manifest.groups]
        assert found == [[getattr(group, name) for name in ("name", "kept")] for group in reference.groups]
        errors = [group.error_after for group in manifest.groups]
        assert errors == pytest.approx([group.error_after for group in reference.groups], rel=1e-3)
    assert peaks[0] < free


def make_mixture(folder):
    """Eight experts, whose moments weigh more than the layer."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 2048}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    return save_model(AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads)), folder)


@pytest.mark.parametrize("fields", [FAST, {}])
def test_a_mixture_keeps_its_budget_and_the_plan_tells_its_peak(tmp_path, fields):
    model = make_mixture(tmp_path / "model")
    recipe = load_recipe("struprune", changes={"sparsity": 0.3, **fields}).modifiers
    needs = count_needs(read_shapes(str(model)), recipe, Workload(8, 32, 1))
    peak, _ = run_with_budget(tmp_path / "free", model, None, **fields)
    assert 0.5 < peak / needs.device < 1.1
    for share in (0.5, 0.8):
        budget = int(share * peak)
        assert run_with_budget(tmp_path / str(share), model, budget, **fields)[0] <= budget


def test_a_budget_is_kept_where_values_take_most(tmp_path):
    sizes = {"hidden_size": 144, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 2048}
    config = LlamaConfig(**sizes, num_attention_heads=9, num_key_value_heads=3)
    model = save_model(AutoModelForCausalLM.from_config(config), tmp_path / "model")
    free, _ = run_with_budget(tmp_path / "free", model, None, **FAST)
    for share in (0.8, 0.9, 0.97):
        assert run_with_budget(tmp_path / str(share), model, int(share * free), **FAST)[0] <= share * free


def test_a_budget_is_refused_with_methods_that_keep_none(opt):
    with pytest.raises(ValueError, match="memory_budget: `weight_update: admm` cannot run under a memory budget"):
        run_oneshot(str(opt), sparsity=0.3, memory_budget=10**9, weight_update="admm")


def test_memory_is_planned_for_the_largest_batch():
    batches = [{"input_ids": torch.zeros(shape)} for shape in ((1, 8), (4, 16), (2, 512))]
    assert find_largest_shape(batches) == (4, 512)
