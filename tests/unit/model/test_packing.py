"""Experts linearized, packed again, and the channels that are found in them."""

import pytest
import torch
from compressed_tensors.offload import disable_onloading

from eval.coverage import make_config
from eval.groups import find_groups
from struprune_plugin.export.any_class import build_dense
from struprune_plugin.model.experts import linearize_experts, list_experts, list_packed_shapes, pack_experts
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.structure.tiny import build_tiny, draw_tokens
from struprune_plugin.model.surgery import slice_group

LAYOUTS = {
    "mixtral": "gate and up one after the other",
    "gpt_oss": "columns first, gate and up alternate, biases",
    "llama4_text": "columns first, every expert takes every token",
    "nemotron_h": "no gate",
}


def build(model_type):
    model = build_tiny(make_config(model_type, 4 if model_type == "nemotron_h" else 2))
    return model, draw_tokens(model.config, 2, 12)


def run(model, tokens):
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def list_bytes(model):
    with disable_onloading():
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_taken_apart_and_packed_again_they_are_the_same(model_type):
    model, tokens = build(model_type)
    before, wanted = list_bytes(model), run(model, tokens)
    linearize_experts(model)
    assert any(list_experts(model))
    torch.testing.assert_close(run(model, tokens), wanted, rtol=1e-5, atol=1e-5)
    pack_experts(model)
    assert not any(list_experts(model))
    after = list_bytes(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(run(model, tokens), wanted)


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_they_are_taken_apart_without_weights(model_type):
    """As ``struprune plan`` does."""
    model = build(model_type)[0]
    empty = build_dense(type(model), model.config)
    linearize_experts(empty)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    assert any(list_experts(empty))


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_cut_experts_are_packed_at_their_width_and_taken_apart_again(model_type):
    model, tokens = build(model_type)
    linearize_experts(model)
    groups = [group for group in find_groups(model, "none", prune_experts=True) if group.mixture]
    for group in groups:
        layer = model.get_submodule(group.layer_name)
        linear = find_linear(layer, group.consumer)
        keep = torch.arange(0, 16)
        bias = torch.zeros(linear.out_features, 1) if linear.bias is None else linear.bias[:, None]
        slice_group(layer, group, keep, torch.cat([linear.weight[:, keep], bias], 1).double())
    wanted, shapes = run(model, tokens), list_packed_shapes(model)
    pack_experts(model)
    found = {name: tuple(tensor.shape) for name, tensor in list_bytes(model).items()}
    assert shapes.items() <= found.items()
    assert all(16 in shape or 32 in shape for name, shape in shapes.items() if "down_proj_bias" not in name)
    torch.testing.assert_close(run(model, tokens), wanted, rtol=1e-5, atol=1e-5)
    linearize_experts(model)
    torch.testing.assert_close(run(model, tokens), wanted, rtol=1e-5, atol=1e-5)
    again = [group for group in find_groups(model, "none", prune_experts=True) if group.mixture]
    assert {group.num_units for group in again} == {16}
