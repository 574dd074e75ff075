import pytest
import torch
from helpers.families import make_model
from helpers.models import make_dataset, run_oneshot, save_opt
from transformers import AutoModelForCausalLM, OPTForCausalLM

from eval.coverage import mask_dense
from struprune_plugin import read_manifest
from struprune_plugin.layerwise.calls import LayerCall
from struprune_plugin.layerwise.capture import Visit
from struprune_plugin.model.ffn_weights import read_ffn
from struprune_plugin.model.layers import find_decoder_layers, find_linear
from struprune_plugin.model.surgery import read_consumer, slice_group
from struprune_plugin.model.units import find_groups
from struprune_plugin.pruning.ffn_tuning import FFNData, FFNTuning, Teacher, gather_inputs, tune_ffn
from struprune_plugin.runtime.device_context import DeviceContext

ACTIVATIONS = {"opt": "relu", "llama": "silu", "phi3": "silu", "gemma2": "gelu_pytorch_tanh", "phi": "gelu_new"}


def _make_ffn(model_type="opt", dtype=torch.float32):
    """Return a layer, its FFN's group, and what stands before and behind that FFN's channels."""
    model = make_model(model_type).to(dtype)
    group = next(g for g in find_groups(model, "none") if g.layer_index == 0)
    return find_decoder_layers(model)[0][1], group


def _make_data(layer, group, tokens=400, dtype=torch.float32):
    inputs = torch.randn(tokens, find_linear(layer, next(iter(group.producers))).in_features, dtype=dtype)
    return FFNData(inputs, torch.ones(tokens), torch.arange(tokens) % 8 == 7)


SETTINGS = FFNTuning(epochs=60)


def _halve(layer, group):
    keep = torch.arange(0, group.num_units, 2)
    slice_group(layer, group, keep, read_consumer(layer, group)[:, [*keep.tolist(), -1]])
    return group.resize(len(keep))


def _measure(layer, group, dense, data, root=None, activation="relu"):
    off = read_ffn(layer, group)(data.inputs).float() - dense(data.inputs).float()
    return float(((off if root is None else off @ root.mT).square().sum(-1) * data.weights)[data.held].sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ACTIVATIONS)
@torch.no_grad()
def test_tuning_brings_a_sliced_ffn_nearer_to_the_dense_one(model_type, dtype):
    torch.manual_seed(0)
    layer, group = _make_ffn(model_type, dtype)
    data, activation = _make_data(layer, group, dtype=dtype), ACTIVATIONS[model_type]
    dense = read_ffn(layer, group)
    now = _halve(layer, group)
    before = _measure(layer, now, dense, data, activation=activation)
    names = [name for name, _ in layer.named_parameters()]
    record = tune_ffn(layer, now, Teacher(dense, data, None, DeviceContext()), SETTINGS)
    after = _measure(layer, now, dense, data, activation=activation)
    assert [name for name, _ in layer.named_parameters()] == names
    assert all(parameter.dtype == dtype for parameter in layer.parameters())
    assert after < 0.96 * before
    assert len(record.holdout) == 61
    assert record.holdout[record.best_epoch] == min(record.holdout)
    assert after / before == pytest.approx(record.holdout[record.best_epoch] / record.holdout[0], rel=0.05)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ACTIVATIONS)
def test_the_ffn_apart_computes_what_the_layer_does(model_type):
    layer, group = _make_ffn(model_type)
    inputs = _make_data(layer, group).inputs
    parts = [find_linear(layer, name)(inputs) for name in group.producers]
    parts = parts[0].chunk(2, -1) if len(group.producers[next(iter(group.producers))]) > 1 else parts
    act = (
        torch.nn.functional.gelu
        if "gelu" in ACTIVATIONS[model_type]
        else getattr(torch.nn.functional, ACTIVATIONS[model_type])
    )
    options = {"approximate": "tanh"} if "gelu" in ACTIVATIONS[model_type] else {}
    hidden = act(parts[0], **options) * (parts[1] if len(parts) > 1 else 1)
    wanted = find_linear(layer, group.consumer)(hidden)
    torch.testing.assert_close(read_ffn(layer, group)(inputs), wanted)


@torch.no_grad()
def test_tuning_that_cannot_help_leaves_the_ffn_as_it_is():
    layer, group = _make_ffn()
    data, dense = _make_data(layer, group), read_ffn(layer, group)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert tune_ffn(layer, group, Teacher(dense, data, None, DeviceContext()), SETTINGS).best_epoch == 0
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@torch.no_grad()
def test_tuning_follows_the_sensitivity():
    """Of two outputs whose errors compete, the one that counts a hundred times as much comes out better."""
    errors = []
    for first in (0.01, 1.0):
        torch.manual_seed(0)
        layer, group = _make_ffn()
        data, dense = _make_data(layer, group), read_ffn(layer, group)
        root = torch.ones(find_linear(layer, group.consumer).out_features)
        root[:16], root[16:] = first, 1.01 - first
        now = _halve(layer, group)
        tune_ffn(layer, now, Teacher(dense, data, root.diag(), DeviceContext()), SETTINGS)
        half = torch.zeros_like(root)
        half[:16] = 1
        errors.append(_measure(layer, now, dense, data, half.diag()))
    assert errors[1] < 0.8 * errors[0]


@torch.no_grad()
def test_what_an_error_counts_may_be_of_any_size():
    """Fisher information falls with the size of a model; Adam's epsilon must not notice."""
    found = []
    for scale in (1.0, 1e-8):
        torch.manual_seed(0)
        layer, group = _make_ffn()
        data, dense = _make_data(layer, group), read_ffn(layer, group)
        root = scale * torch.eye(find_linear(layer, group.consumer).out_features)
        tune_ffn(layer, _halve(layer, group), Teacher(dense, data, root, DeviceContext()), SETTINGS)
        found.append(layer.fc1.weight.clone())
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


def _make_visits(layer, group, tokens=None):
    generator = torch.Generator().manual_seed(0)
    hidden = [torch.randn(3, 8, 32, generator=generator) for _ in range(4)]
    calls = [LayerCall(x, {}, tokens, x.device) for x in hidden]
    return [Visit(2 * call.hidden.flatten(0, 1), None, None, call) for call in calls]


@torch.no_grad()
def test_what_an_ffn_sees_is_counted_once_without_padding():
    layer, group = _make_ffn()
    dense = read_ffn(layer, group)
    tokens = torch.arange(3, 24)
    visits = _make_visits(layer, group, tokens)
    data = gather_inputs(group, dense, visits, DeviceContext())
    assert torch.equal(data.inputs, torch.cat([visit.source[3:] for visit in visits]))
    streams = torch.cat([visit.call.hidden.flatten(0, 1)[3:] + dense(visit.source[3:]) for visit in visits])
    counts = 1 / streams.square().mean(-1)
    torch.testing.assert_close(data.weights, counts / counts.mean())
    held = torch.zeros(4, 3, 8, dtype=torch.bool)
    held[2, 1] = True  # the eighth of twelve sequences
    assert torch.equal(data.held, held.flatten(1)[:, 3:].flatten())


@torch.no_grad()
def test_batches_do_not_change_what_an_ffn_learns():
    found = []
    for parts in (1, 4):
        torch.manual_seed(0)
        layer, group = _make_ffn()
        dense = read_ffn(layer, group)
        visits = _make_visits(layer, group)
        if parts == 1:
            hidden = torch.cat([visit.call.hidden for visit in visits])
            call = LayerCall(hidden, {}, None, hidden.device)
            visits = [Visit(2 * hidden.flatten(0, 1), None, None, call)]
        data = gather_inputs(group, dense, visits, DeviceContext())
        tune_ffn(layer, _halve(layer, group), Teacher(dense, data, None, DeviceContext()), SETTINGS)
        found.append(layer.fc1.weight.clone())
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_a_tuned_model_equals_its_masks_and_replays(opt, tmp_path):
    fields = {
        "sparsity": 0.3,
        "rotate_values": True,
        "batch_size": 4,
        "ffn_tuning": {"epochs": 2, "learning_rate": 0.01},
    }
    fields |= {"dataset": make_dataset(48), "num_calibration_samples": 48}
    first = run_oneshot(str(opt), **fields, output_dir=str(tmp_path / "a"))
    manifest = read_manifest(tmp_path / "a")
    assert list(manifest.tuning) == [f"model.decoder.layers.{i}" for i in range(3)]
    tuned = [name for name, record in manifest.tuning.items() if record.best_epoch]
    assert tuned
    masked = OPTForCausalLM.from_pretrained(opt).eval()
    mask_dense(masked, first, manifest)
    ids = torch.randint(4, 2048, (3, 20), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(first(ids).logits, masked(ids).logits, rtol=0, atol=1e-4)
    data = {name: fields[name] for name in ("dataset", "num_calibration_samples", "batch_size")}
    again = run_oneshot(str(opt), replay=str(tmp_path / "a" / "struprune.json"), **data)
    for (name, one), (_, two) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    plain = run_oneshot(str(opt), **{name: value for name, value in fields.items() if name != "ffn_tuning"})
    rows = [model.get_submodule(tuned[0]).fc1.weight for model in (first, plain)]
    assert not torch.equal(*rows), "only tuning changes what stands before the channels"


@pytest.mark.parametrize("target", ["residual", "half_residual"])
def test_a_second_solve_has_the_target_of_the_first(target, tmp_path):
    """One layer inherits no error, so that the errors in the manifest are those of the module's own output."""
    dense, data = save_opt(tmp_path / "dense", num_hidden_layers=1), make_dataset(48)
    fields = {"sparsity": 0.3, "attention_unit": "none", "reconstruct": target, "ffn_tuning": {"epochs": 8}}
    fields |= {"allocation": "uniform", "sensitivity": None, "dataset": data, "num_calibration_samples": 48}
    run_oneshot(str(dense), **fields, output_dir=str(tmp_path / "out"))
    ids, outputs = torch.tensor(data["input_ids"][:]), []
    for folder in (dense, tmp_path / "out"):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        model.model.decoder.layers[0].fc2.register_forward_hook(lambda _m, _a, output: outputs.append(output))
        with torch.no_grad():
            model(ids)
    error = float((outputs[1] - outputs[0]).square().sum() / outputs[0].square().sum())
    manifest = read_manifest(tmp_path / "out")
    assert next(iter(manifest.tuning.values())).best_epoch
    assert manifest.groups[-1].error_after == pytest.approx(error, rel=0.01)
