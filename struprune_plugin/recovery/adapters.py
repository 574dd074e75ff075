"""Low-rank adapters on a model's linears: peft's own layers, put on, merged and taken off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from compressed_tensors.offload import update_offload_parameter
from compressed_tensors.utils import match_name
from peft import LoraConfig
from peft.tuners.lora import Linear, LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from struprune_plugin.model.layers import find_decoder_layers, find_layouts, freeze_weights
from struprune_plugin.recovery.recovery_config import Adapters


def match_linears(model: nn.Module, adapters: Adapters) -> list[str]:
    """Return the full names of the decoder layers' linears that get adapters.

    :raises ValueError: a target that matches nothing; a rank above the sides of all linears
    """
    layers = zip(find_decoder_layers(model), find_layouts(model), strict=True)
    names = [f"{name}.{linear}" for (name, _), (_, layout) in layers for linear in layout.list_linears()]
    chosen = set(names) if adapters.targets is None else set()
    for target in adapters.targets or ():
        found = {name for name in names if match_name(name, target) or f".{name}".endswith(f".{target}")}
        if not found:
            leaves = ", ".join(dict.fromkeys(name.split(".")[-1] for name in names))
            raise ValueError(
                f"adapters.targets: must match linears of the decoder layers, got {target!r} that matches none "
                f"({len(names)} candidates, the first is {names[0]!r}). Use {leaves}, or re:<pattern> on full names."
            )
        chosen |= found
    modules: list[Any] = [model.get_submodule(name) for name in chosen]
    widest = max(min(module.weight.shape) for module in modules)
    if adapters.rank > widest:
        raise ValueError(
            f"adapters.rank: must be at most {widest}, the smaller side of the largest linear with an adapter, got "
            f"{adapters.rank}. Start with 8."
        )
    return [name for name in names if name in chosen]


@contextmanager
def seed_random(seed: int) -> Iterator[None]:
    """Seed torch, and restore the earlier random state on exit."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def attach_adapters(model: nn.Module, names: Sequence[str], adapters: Adapters) -> Iterator[list[nn.Parameter]]:
    """Put peft's LoRA layers in the place of linears, as the model's only weights that learn; take them off on exit.

    They are merged if the block succeeds. Adapters are in float32 or wider; the sum is rounded once to a weight's own dtype.

    :param names: full names of the linears
    :return: the parameters of the adapters
    """
    attached: dict[str, Any] = {}
    with freeze_weights(model):
        try:
            for name in names:
                linear: Any = model.get_submodule(name)
                config = LoraConfig(lora_dropout=adapters.dropout, fan_in_fan_out=isinstance(linear, Conv1D))
                attached[name] = Linear(linear, "default", config, r=adapters.rank, lora_alpha=adapters.alpha)  # type: ignore[arg-type]
                model.set_submodule(name, attached[name])
            parameters = [part for layer in attached.values() for part in layer.parameters() if part.requires_grad]
            for parameter in parameters:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            model.eval()
            yield parameters
            for layer in attached.values():
                _merge(layer)
        finally:
            for name, layer in attached.items():
                model.set_submodule(name, layer.get_base_layer())


@torch.no_grad()
def _merge(layer: Any) -> None:
    """Add an adapter's product to the weights of its linear, wherever these are held."""
    linear, change = layer.get_base_layer(), layer.get_delta_weight("default")
    update_offload_parameter(linear, "weight", (linear.weight.to(change) + change).to(linear.weight.dtype))


def switch_dropout(model: nn.Module, active: bool) -> None:
    """Switch the adapters' dropout on or off; nothing else changes."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout.train(active)
