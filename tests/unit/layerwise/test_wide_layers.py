"""Layers in float32 while they run, where the device has no products of the model's dtype: both answers are played."""

import copy

import pytest
import torch
from compressed_tensors.offload import offload_module
from helpers.families import make_model
from helpers.models import make_opt
from torch import nn

from struprune_plugin.evaluation.scoring import compute_fast
from struprune_plugin.layerwise.ends import BatchFlow, compute_logits, enter_layers
from struprune_plugin.layerwise.passes import enter_device_context
from struprune_plugin.layerwise.wide_layers import compute_wide, widen_weights
from struprune_plugin.model.layers import find_decoder_layers, freeze_weights
from struprune_plugin.runtime import precision

NARROW = [torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def make_batch(model, length=12):
    ids = torch.randint(4, model.config.get_text_config().vocab_size, (2, length), generator=torch.manual_seed(3))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def run_naively(model, batch):
    """The model's forward pass, each decoder layer and the head replaced by a float32 copy, rounded between the layers."""
    dtype, whole = model.dtype, copy.deepcopy(model)

    def widen(value):
        if isinstance(value, torch.Tensor):
            return value.float() if value.is_floating_point() else value
        if isinstance(value, dict):
            return {key: widen(part) for key, part in value.items()}
        return type(value)(map(widen, value)) if isinstance(value, tuple | list) else value

    def wrap(forward):
        def run(*args, **kwargs):
            output = forward(*widen(args), **widen(kwargs))
            return output.to(dtype) if isinstance(output, torch.Tensor) else (output[0].to(dtype), *output[1:])

        return run

    for _, layer in find_decoder_layers(whole):
        layer.float()
        layer.forward = wrap(layer.forward)
    head = whole.get_output_embeddings()
    own = copy.deepcopy(head).float()  # the embeddings may be tied to it
    head.forward = lambda inputs: own.forward(inputs.float())
    with torch.no_grad():
        return whole(**batch, use_cache=False).logits


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("kind", ["opt", "llama", "gemma2", "qwen3_moe", "gpt_neox"])
def test_layers_and_head_compute_as_float32_copies_do(kind, dtype):
    model = (make_opt() if kind == "opt" else make_model(kind)).to(dtype).eval()
    before, batch = {name: (t, t.clone()) for name, t in model.state_dict(keep_vars=True).items()}, make_batch(model)
    with torch.no_grad(), compute_wide(model, NARROW):
        logits = model(**batch, use_cache=False).logits
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, run_naively(model, batch), rtol=1e-5, atol=1e-5)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])
    with torch.no_grad():
        assert model(**batch, use_cache=False).logits.dtype is dtype


def test_a_float32_model_and_no_dtypes_change_nothing():
    model, batch = make_opt(), make_batch(make_opt())
    with torch.no_grad():
        wanted = model(**batch).logits
        with compute_wide(model, NARROW):
            assert torch.equal(model(**batch).logits, wanted)
        narrow = model.bfloat16()
        wanted = narrow(**batch).logits
        with compute_wide(narrow, ()):
            assert torch.equal(narrow(**batch).logits, wanted)


class FillsMapping(nn.Module):
    """Layer that leaves keys for later layers in a mapping, as those with shared keys and values do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, hidden, shared):
        shared["key"] = self.linear(hidden)
        return hidden + shared["given"]


def test_mappings_that_a_layer_fills_are_filled(monkeypatch):
    layer, model = FillsMapping().bfloat16(), nn.Module()
    model.get_output_embeddings = lambda: None
    monkeypatch.setattr("struprune_plugin.layerwise.wide_layers.find_decoder_layers", lambda _: [("0", layer)])
    hidden, given = torch.randn(3, 4).bfloat16(), torch.randn(3, 4).bfloat16()
    shared = {"given": given}
    with torch.no_grad(), compute_wide(model, NARROW):
        output = layer(hidden, shared)
    assert torch.equal(shared["key"], (hidden.float() @ layer.linear.weight.float().T).bfloat16())
    assert torch.equal(output, (hidden.float() + given.float()).bfloat16())
    assert shared["given"] is given


def test_weights_come_back_after_an_error_and_where_they_are_offloaded():
    linear = nn.Linear(4, 4).bfloat16()
    own = linear.weight
    with widen_weights(linear, NARROW):
        assert linear.weight.dtype is torch.float32
        assert torch.equal(linear.weight, own.float())
    with pytest.raises(RuntimeError), widen_weights(linear, NARROW):
        linear(torch.ones(3))
    assert linear.weight is own
    offload_module(linear, "cpu", "cpu")
    cache = linear._parameters
    with widen_weights(linear, NARROW):
        assert torch.equal(linear.weight, own.float())
    assert linear._parameters is cache
    assert linear.weight.dtype is torch.bfloat16


def test_gradients_flow_back_through_layers_and_head_in_float32():
    model, batch = make_opt().bfloat16(), make_batch(make_opt())
    wide = copy.deepcopy(model).float()
    found = []
    for own, widened in ((model, "float32"), (wide, "model")):
        with enter_device_context(own, precision=widened) as context, freeze_weights(own):
            flow: BatchFlow = enter_layers(own, batch, context)
            layers = [layer for _, layer in find_decoder_layers(own)]
            for index, layer in enumerate(layers):
                with torch.no_grad():
                    flow.advance(index, layer, context)
            hidden = flow.states.hidden.detach().requires_grad_()
            sum(compute_logits(own, batch, row, hidden, context).float().square().sum() for row in (0, 1)).backward()
            flow.above = [hidden.grad]
            assert hidden.grad.dtype is own.dtype
            for index, layer in reversed(list(enumerate(layers))):
                flow.run_backward(index, layer, context)
            found.append(flow.above[0].float())
    assert (found[0] - found[1]).norm() < 0.02 * found[1].norm()  # states and gradients are rounded between layers


@pytest.mark.parametrize(
    ("flags", "dtype", "wanted"),
    [
        ({"avx2": True, "avx512_bf16": False}, torch.bfloat16, False),
        ({"avx512_bf16": True}, torch.bfloat16, True),
        ({"amx_bf16": True}, torch.bfloat16, True),
        ({"neon": True, "bf16": True}, torch.bfloat16, True),
        ({"avx512_bf16": True}, torch.float16, False),
        ({"avx512_fp16": True}, torch.float16, True),
        ({}, torch.float32, True),
    ],
)
def test_torch_is_asked_what_the_processor_can(flags, dtype, wanted, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    assert precision.has_products(dtype, CPU) == wanted
    assert (dtype in precision.find_widened("auto", CPU)) == (not wanted)
    assert dtype not in precision.find_widened("model", CPU)
    assert (dtype in precision.find_widened("float32", CPU)) == (dtype is not torch.float32)


def test_a_card_is_asked_without_emulation(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **how: asked.append(how))
    assert not precision.has_products(torch.bfloat16, torch.device("cuda"))
    assert precision.has_products(torch.float16, torch.device("cuda"))
    assert asked == [{"including_emulation": False}]


def test_what_is_told_names_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    told = [precision.describe_precision(torch.bfloat16, each, CPU) for each in ("auto", "model", "float32")]
    assert told == [
        "float32 (this device has no bfloat16 products); saved in bfloat16",
        "bfloat16",
        "float32 (precision: float32); saved in bfloat16",
    ]
    assert precision.describe_precision(torch.float32, "auto", CPU) == "float32"


def test_scores_are_computed_fast_but_those_of_quantised_models_and_of_others_without_layers(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    model, batch = make_opt().bfloat16(), make_batch(make_opt())
    with torch.no_grad(), compute_fast(model):
        assert model(**batch).logits.dtype is torch.float32
    model.config.quantization_config = {}
    with torch.no_grad(), compute_fast(model):
        assert model(**batch).logits.dtype is torch.bfloat16
    del model.config.quantization_config

    def refuse(_model):
        raise ValueError("no list of decoder layers")

    monkeypatch.setattr("struprune_plugin.evaluation.scoring.find_decoder_layers", refuse)
    with torch.no_grad(), compute_fast(model):
        assert model(**batch).logits.dtype is torch.bfloat16
