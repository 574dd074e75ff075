"""What the device holds while layers are pruned, counted on a CPU; lines that it must not cross."""

import pytest
import torch
from helpers.models import CHEAP, DEFAULT, make_dataset, run_oneshot, save_model, save_opt
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from eval.account import CountedContext, LiveBytes, count_memory
from struprune_plugin import read_manifest
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.modifiers.plan import Workload, plan_run
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.runtime.device_context import DeviceContext

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


def test_the_account_changes_no_result(opt, prune_once):
    plain = prune_once(opt, "value_channels")[0].state_dict()
    with count_memory():
        counted = run_oneshot(str(opt), sparsity=0.3, **DEFAULT).state_dict()
    assert plain.keys() == counted.keys()
    assert all(torch.equal(plain[name], counted[name]) for name in plain)


@pytest.mark.parametrize(
    "fields", [DEFAULT, {"importance": "snip", "weight_update": {"method": "admm", "steps": 1, "inner_steps": 1}}]
)
def test_memory_grows_neither_with_layers_nor_with_samples(tmp_path, fields):
    model, deep = (save_opt(tmp_path / f"{n}", num_hidden_layers=n) for n in (3, 5))
    few, many = ({"dataset": make_dataset(n), "num_calibration_samples": n} for n in (16, 32))
    peaks = measure_stages(tmp_path / "a", model, **few, **fields)
    more = measure_stages(tmp_path / "b", model, **many, **fields)
    deeper = measure_stages(tmp_path / "c", deep, **few, **fields)
    for name, peak in peaks.items():
        assert more[name] < 1.02 * peak, f"{name}: more samples"
        if "gradients" not in peaks or name not in ("gradients", "whole pass"):  # gradients are the whole model's
            assert deeper[name] < 1.02 * peak, f"{name}: more layers"


TRIED = {"allocation": "error_curve", "sensitivity": "fisher"}


def measure(folder, model, **fields):
    """Return (peak bytes of the run, its manifest)."""
    data = {"dataset": make_dataset(8), "num_calibration_samples": 8, "batch_size": 1}
    with count_memory():
        run_oneshot(str(model), sparsity=0.3, output_dir=str(folder), **data | fields)
    manifest = read_manifest(folder)
    return max(stage.peak_bytes for stage in manifest.stages), manifest


def make_wide(folder, **changes):
    sizes = {"hidden_size": 48, "word_embed_proj_dim": 48, "ffn_dim": 192, "num_hidden_layers": 2}
    return save_opt(folder, **sizes | changes)


@pytest.mark.parametrize("fields", [CHEAP, TRIED])
def test_offload_holds_less_and_changes_no_choice(tmp_path, fields):
    model = make_wide(tmp_path / "model")
    whole, reference = measure(tmp_path / "whole", model, **fields)
    peak, manifest = measure(tmp_path / "offload", model, offload=True, **fields)
    assert peak < 0.6 * whole
    kept = [[(group.name, group.kept) for group in told.groups] for told in (manifest, reference)]
    assert kept[0] == kept[1]
    errors = [group.error_after for group in manifest.groups]
    assert errors == pytest.approx([group.error_after for group in reference.groups], rel=1e-3)


def test_offload_keeps_embeddings_and_logits_on_the_host(tmp_path):
    sizes = ({"vocab_size": size, "tie_word_embeddings": False} for size in (2048, 20_000))
    small, large = (make_wide(tmp_path / str(number), **fields) for number, fields in enumerate(sizes))
    peak, manifest = measure(tmp_path / "a", small, offload=True, **TRIED)
    assert manifest.allocation.tried
    assert measure(tmp_path / "b", large, offload=True, **TRIED)[0] < 1.02 * peak


def test_offload_holds_what_a_layer_takes(tmp_path):
    """A layer's weights are 12 d^2, moments 16 d^2 and more: with offload the peak grows as the weights do, or less."""
    peaks, layers, data = [], [], {"dataset": make_dataset(16), "num_calibration_samples": 16}
    for number, width in enumerate((48, 96)):
        sizes = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 4 * width}
        model = make_wide(tmp_path / f"model{number}", **sizes)
        layer = find_decoder_layers(AutoModelForCausalLM.from_pretrained(model))[0][1]
        layers.append(sum(parameter.nbytes for parameter in layer.parameters()))
        peaks.append(measure(tmp_path / f"out{number}", model, offload=True, **data, **DEFAULT)[0])
    assert peaks[1] / peaks[0] < 1.05 * layers[1] / layers[0]


def make_mixture(folder):
    """Eight experts, whose moments weigh more than the layer."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 2048}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    return save_model(AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads)), folder)


@pytest.mark.parametrize(("fields", "offload"), [(CHEAP, True), (DEFAULT, False)])
def test_the_plan_tells_the_peak_of_a_mixture(tmp_path, fields, offload):
    model = make_mixture(tmp_path / "model")
    recipe = load_recipe("struprune", changes={"sparsity": 0.3, "offload": offload, **fields}).modifiers
    needs = plan_run(str(model), recipe, Workload(8, 32, 1)).needs
    peak, _ = measure(tmp_path / "out", model, offload=offload, **fields)
    assert 0.4 < peak / needs.device < 1.1


def test_offload_is_refused_with_methods_that_run_on_the_device(opt):
    with pytest.raises(ValueError, match="offload: must be false with `weight_update: admm`, which runs on the device"):
        run_oneshot(str(opt), sparsity=0.3, offload=True, weight_update="admm")


def test_a_device_without_room_says_what_to_set(opt, monkeypatch):
    def fail(*_args):
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(DeviceContext, "to_device", fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"too little memory. Use `offload: true`.*tried to allocate"):
        run_oneshot(str(opt), sparsity=0.3)
