"""Any class layer by layer: what its layers are called with, return and leave to each other, whatever that is."""

import pytest
import torch
from helpers.families import make_model
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from struprune_plugin.export.rehearsal import check_passes
from struprune_plugin.layerwise.calls import LayerCall, States
from struprune_plugin.layerwise.ends import compute_logits, enter_layers
from struprune_plugin.layerwise.passes import calibrating, enter_device_context, stream_layers
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.model.structure.locate import locate_layers
from struprune_plugin.model.structure.tiny import build_tiny, draw_tokens
from struprune_plugin.runtime.device_context import DeviceContext

ALTERNATING = ["sliding_attention", "full_attention"]
SHARING = {"layer_types": ALTERNATING * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
MODELS = {  # type -> (its list of layers, fields of its configuration)
    "gpt2": ("transformer.h", {"n_layer": 3}),  # Conv1D
    "bloom": ("transformer.h", {"n_layer": 3}),  # alibi; tuples
    "opt": ("model.decoder.layers", {"num_hidden_layers": 3}),
    "gemma3n_text": (  # four streams, inputs by layer, shared keys and values
        "model.layers",
        {**SHARING, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "intermediate_size": [64] * 4},
    ),
    "gemma4_text": ("model.layers", SHARING),
    "gemma3": (
        "model.language_model.layers",
        {"text_config": {"num_hidden_layers": 3, "layer_types": ALTERNATING + ALTERNATING[:1]}},
    ),
    "zaya": ("model.layers", {"num_hidden_layers": 4}),  # a router's state goes from layer to layer
    "glm_moe_dsa": ("model.layers", {"num_hidden_layers": 3, "index_topk": 4}),  # so do indices
    "deepseek_v4": ("model.layers", {"num_hidden_layers": 4}),  # hyper-connections
    "recurrent_gemma": ("model.layers", {"num_hidden_layers": 3}),  # all positional; capped logits
    "granite": ("model.layers", {"num_hidden_layers": 3, "logits_scaling": 6.0}),
}


def make_batches(model):
    """Return a batch without padding, one with padding on the right and one with padding on the left."""
    ids = [draw_tokens(model.config, 2, 10, seed) for seed in range(3)]
    masks = [torch.ones_like(part) for part in ids]
    masks[1][1, 7:] = 0
    masks[2][0, :4] = 0
    return [{"input_ids": part, "attention_mask": mask} for part, mask in zip(ids, masks, strict=True)]


@pytest.mark.parametrize("model_type", ["llama", "opt", "qwen3_moe", "mistral"])
def test_text_without_padding_has_no_mask(model_type):
    """Fused attention is causal by itself; windows shorter than the text and padding still need a mask."""
    model = make_model(model_type)
    with enter_device_context(model) as context, calibrating(model):
        flows = [enter_layers(model, batch, context) for batch in make_batches(model)]
    masks = [[call.arguments["attention_mask"] for call in flow.calls] for flow in flows]
    for batch, row in zip((False, True, True), masks, strict=True):
        assert all((mask is not None) == (batch or model_type == "mistral") for mask in row)


@torch.no_grad()
def test_a_soft_cap_is_kept_where_transformers_would_fuse_attention_without_it():
    model = make_model("gemma2", attn_logit_softcapping=2.0)
    batch = make_batches(model)[0]
    wanted = model(**batch).logits
    model.set_attn_implementation("sdpa")
    with enter_device_context(model):
        torch.testing.assert_close(model(**batch).logits, wanted)


def build(model_type):
    where, fields = MODELS[model_type]
    return build_tiny(CONFIG_MAPPING[model_type](**fields)).requires_grad_(False), where


def list_logits(model, batch, hidden):
    rows = range(len(batch["input_ids"]))
    return torch.stack([compute_logits(model, batch, row, hidden, DeviceContext()) for row in rows])


def assert_logits(found, wanted, mask):
    counted = mask.bool()
    torch.testing.assert_close(found[counted], wanted[counted], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model_type", MODELS)
@torch.no_grad()
def test_layers_in_turn_give_the_models_own_logits(model_type):
    model, where = build(model_type)
    assert locate_layers(model) == where
    batches, context = make_batches(model), DeviceContext()
    for step in stream_layers(model, batches, context, "test"):
        flows = list(step.flows)
        for flow in flows:
            call = flow.enter(step.index)
            # another path's run leaves nothing behind
            call.run(step.layer, context, call.states.map(lambda part: part + 1 if part.is_floating_point() else part))
            flow.states = call.run(step.layer, context).map(context.offload)
    for flow, batch in zip(flows, batches, strict=True):
        found = list_logits(model, batch, flow.states.hidden)
        assert_logits(found, model(**batch, use_cache=False).logits, batch["attention_mask"])
    check_passes(model, batches)


@pytest.mark.parametrize("model_type", MODELS)
def test_gradients_pass_through_what_layers_leave_to_each_other(model_type):
    model, _ = build(model_type)
    layers, context, batch = [layer for _, layer in find_decoder_layers(model)], DeviceContext(), make_batches(model)[1]
    flow = enter_layers(model, batch, context)
    with torch.no_grad():
        for index, layer in enumerate(layers):
            flow.states = flow.enter(index).run(layer, context).map(context.offload)
    hidden = flow.states.hidden.detach().requires_grad_()
    logits = list_logits(model, batch, hidden)
    above = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)) * batch["attention_mask"][..., None]
    flow.above = list(torch.autograd.grad(logits, hidden, above))
    for index in range(len(layers) - 1, 0, -1):
        flow.run_backward(index, layers[index], context)
    torch.testing.assert_close(flow.above[0], find_gradient(model, layers[0], batch, above), rtol=1e-5, atol=1e-5)


def find_gradient(model, first, batch, above):
    """Return the gradient at the first layer's hidden states, by autograd over the whole model."""
    seen = {}

    def watch(_module, _args, output):
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        seen["hidden"] = hidden.requires_grad_()

    with first.register_forward_hook(watch):
        logits = model(**batch, use_cache=False).logits
    return torch.autograd.grad(logits, seen["hidden"], above)[0]


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("rwkv", {"num_hidden_layers": 8}, "rwkv.blocks.6: .* on the hidden states that the layer before it returned"),
        ("mllama", {}, "layers must run on text one after the other, each once, got a pass that runs 0, 1, 2, 4"),
    ],
)
def test_models_that_do_more_between_their_layers_are_refused(model_type, fields, message):
    model = build_tiny(CONFIG_MAPPING[model_type](**fields))
    with pytest.raises(ValueError, match=message):
        enter_layers(model, {"input_ids": torch.tensor([[4, 5, 6]])}, DeviceContext())


def test_a_class_that_mixes_its_layers_is_refused():
    """What is derived from outputs of layers and given to later ones is not seen, but found out."""
    model, _ = build("opt")
    layers = [layer for _, layer in find_decoder_layers(model)]
    kept = [torch.zeros(())]
    layers[0].register_forward_hook(lambda _module, _args, output: kept.append(output))
    layers[2].register_forward_hook(lambda _module, _args, output: output + kept[-1].mean())
    handles = model.lm_head.register_forward_pre_hook(lambda _module, args: (args[0] + kept[-1].sum(),))
    with pytest.raises(ValueError, match=r"same logits layer by layer as whole, got a difference of"):
        check_passes(model, make_batches(model))
    handles.remove()


def test_layers_are_found_without_weights():
    config = CONFIG_MAPPING["gemma3"]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert locate_layers(model) == "model.language_model.layers"
    with pytest.raises(ValueError, match="must have a list of decoder layers that hold linears, got none in Linear"):
        locate_layers(torch.nn.Linear(2, 2))


def test_entries_of_shared_mappings_stay_on_their_path():
    def layer(hidden, store):
        store["sum"] = store.get("sum", 0) + hidden
        return hidden + store["sum"]

    context, store = DeviceContext(), {}
    call = LayerCall(torch.ones(1, 2, 3), {0: store}, torch.ones(1, 2).bool(), torch.device("cpu"))
    one, two = call.run(layer, context), call.run(layer, context, States(torch.zeros(1, 2, 3)))
    assert not store
    assert one.others[(0, "sum")].unique().tolist() == [1]
    assert two.others[(0, "sum")].unique().tolist() == [0]
    assert call.run(layer, context, one).hidden.unique().tolist() == [5]
