import copy

import pytest
import torch
from conftest import make_dataset, make_opt, run_oneshot
from transformers import OPTForCausalLM

from eval.equivalence import mask_dense
from struprune_plugin import read_manifest
from struprune_plugin.device.room import Room
from struprune_plugin.layer.calls import LayerCall
from struprune_plugin.layer.tuning import TuningSettings, tune_layer

SETTINGS = TuningSettings(epochs=4, learning_rate=0.02)


def _make_calls(num_batches=4, tokens=None):
    generator = torch.Generator().manual_seed(0)
    hidden = [torch.randn(2, 8, 24, generator=generator) for _ in range(num_batches)]
    return [LayerCall(x, (), {"attention_mask": None}, tokens, x.device) for x in hidden]


@torch.no_grad()
def _run(layer, calls):
    return [call.repeat(layer, Room()) for call in calls]


def _error(layer, calls, wanted):
    return sum((a - b).square().sum().item() for a, b in zip(_run(layer, calls), wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tune_layer_moves_a_changed_layer_back_to_the_dense_output(dtype):
    layer, calls = make_opt().model.decoder.layers[0], _make_calls()
    wanted = _run(layer, calls)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    before = _error(layer, calls, wanted)
    layer.to(dtype)
    names = [name for name, _ in layer.named_parameters()]
    record = tune_layer(layer, calls, wanted, SETTINGS, "x", Room())
    assert [name for name, _ in layer.named_parameters()] == names
    assert all(parameter.dtype == dtype for parameter in layer.parameters())
    assert _error(layer.float(), calls, wanted) < 0.8 * before
    assert len(record.holdout) == SETTINGS.epochs + 1
    assert record.holdout[record.best_epoch] == min(record.holdout) < record.holdout[0]
    held = _error(layer, calls[-1:], wanted[-1:]) / wanted[-1].square().sum().item()
    assert held == pytest.approx(record.holdout[record.best_epoch], rel=0.2 if dtype == torch.bfloat16 else 1e-4)


def test_tune_layer_that_cannot_improve_stays_as_it_is():
    layer, calls = make_opt().model.decoder.layers[0], _make_calls()
    wanted = _run(layer, calls)
    before = copy.deepcopy(layer.state_dict())
    assert tune_layer(layer, calls, wanted, SETTINGS, "x", Room()).best_epoch == 0
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_tune_layer_does_not_count_padding():
    tokens = torch.arange(3, 16)
    results = []
    for rubbish in (0.0, 9.0):
        layer, calls = make_opt().model.decoder.layers[0], _make_calls(tokens=tokens)
        wanted = [0.9 * output for output in _run(layer, calls)]
        for target in wanted:
            target.view(-1, 24)[:3] += rubbish
        tune_layer(layer, calls, wanted, SETTINGS, "x", Room())
        results.append(layer.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_a_tuned_model_equals_its_masks_and_replays(opt, tmp_path):
    fields = {
        "sparsity": 0.3,
        "tuning_epochs": 2,
        "tuning_learning_rate": 0.002,
        "rotate_values": True,
        "batch_size": 4,
    }
    fields |= {"dataset": make_dataset(48), "num_calibration_samples": 48}
    first = run_oneshot(str(opt), **fields, output_dir=str(tmp_path / "a"))
    manifest = read_manifest(tmp_path / "a")
    assert list(manifest["tuning"]) == [f"model.decoder.layers.{i}" for i in range(3)]
    tuned = [name for name, record in manifest["tuning"].items() if record["best_epoch"]]
    assert tuned
    masked = OPTForCausalLM.from_pretrained(opt).eval()
    mask_dense(masked, first, manifest)
    ids = torch.randint(4, 2048, (3, 20), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(first(ids).logits, masked(ids).logits, rtol=0, atol=1e-4)
    data = {name: fields[name] for name in ("dataset", "num_calibration_samples", "batch_size")}
    again = run_oneshot(str(opt), replay=str(tmp_path / "a" / "struprune.json"), **data)
    for (name, one), (_, two) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    plain = run_oneshot(str(opt), **{name: value for name, value in fields.items() if not name.startswith("tuning")})
    norms = [model.get_submodule(tuned[0]).final_layer_norm.weight for model in (first, plain)]
    assert not torch.equal(*norms), "only tuning changes a norm"


def test_tuning_without_a_dense_path_is_refused(opt):
    with pytest.raises(ValueError, match="tuning_epochs must be 0 where target is local, got 2"):
        run_oneshot(str(opt), sparsity=0.3, target="local", tuning_epochs=2)
