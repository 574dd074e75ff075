"""Tiny random mixtures of eight experts, and dense ones whose router passes some experts by."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.nn import functional

from eval import coverage
from eval.coverage import make_config
from struprune_plugin.model.structure.shrinking import shrink_config
from struprune_plugin.model.structure.tiny import build_instance, find_class
from struprune_plugin.units.expert_routing import find_routing

NUM_EXPERTS = 8
LAYERS = {"jamba": 8, "deepseek_v3": 4, "deepseek_v32": 5, "glm4_moe": 3, "qwen3_5_moe_text": 4}
OPEN = {"gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}}


def make_mixture(model_type: str, **changes):
    """A tiny random decoder with eight experts a layer, in float32."""
    with patch.dict(coverage.OPEN, OPEN):
        kind, small = find_class(shrink_config(make_config(model_type, LAYERS.get(model_type, 2))))
    probe = build_instance(kind, small)
    setattr(small.get_text_config(decoder=True), find_routing(probe).key, NUM_EXPERTS)
    for name, value in changes.items():
        setattr(small, name, value)
    return build_instance(kind, small)


@contextmanager
def mask_routing(model, kept):
    """Let routers give no token to experts that are not kept, by logits and biases of the choice that no other falls below.

    :param kept: experts that stay, by the full name of their list
    """
    routing = find_routing(model)
    gone, before = {}, []
    for name, keep in kept.items():
        layer = next(p for p, m in model.named_modules() if name.startswith(f"{p}.") and p.rpartition(".")[2].isdigit())
        away = torch.tensor([expert for expert in range(NUM_EXPERTS) if expert not in keep])
        for tensor, axis in routing.tensors.items():
            owner, _, own = tensor.rpartition(".")
            found = getattr(model.get_submodule(f"{layer}.{owner}"), own)
            if own == "weight":
                gone[found.data_ptr()] = away
            elif "correction" in own:  # a bias of the choice alone
                before.append((found, found.detach().clone()))
                with torch.no_grad():
                    found.index_fill_(axis, away, -1e9)
    plain = functional.linear

    def linear(inputs, weight, bias=None):
        output = plain(inputs, weight, bias)
        away = gone.get(weight.data_ptr())
        return output if away is None else output.index_fill(-1, away, -1e9)

    try:
        with patch.object(functional, "linear", linear):
            yield
    finally:
        with torch.no_grad():
            for tensor, values in before:
                tensor.copy_(values)
