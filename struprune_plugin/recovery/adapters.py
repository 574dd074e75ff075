"""Low-rank adapters on a model, and the model's state around the training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from compressed_tensors.offload import remove_dispatch, set_onload_device
from compressed_tensors.offload.cache import OffloadCache
from compressed_tensors.utils import match_name
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from struprune_plugin.export.modeling_struprune import adopt_padded, release_padded
from struprune_plugin.model.layers import find_decoder_layers, find_layouts
from struprune_plugin.recovery.recovery_config import Adapters


def match_linears(model: nn.Module, adapters: Adapters) -> list[str]:
    """Return the full names of the decoder layers' linears that get adapters.

    :raises ValueError: a target that matches nothing; a rank above the sides of all linears
    """
    layers = zip(find_decoder_layers(model), find_layouts(model), strict=True)
    names = [f"{name}.{linear}" for (name, _), (_, layout) in layers for linear in layout.list_linears()]
    chosen = names if adapters.targets is None else _choose(names, adapters.targets)
    modules: list[Any] = [model.get_submodule(name) for name in chosen]
    widest = max(min(module.weight.shape) for module in modules)
    if adapters.rank > widest:
        raise ValueError(
            f"adapters.rank: must be at most {widest}, the smaller side of the largest linear with an adapter, got "
            f"{adapters.rank}. Start with 8."
        )
    return chosen


def _choose(names: list[str], targets: Sequence[str]) -> list[str]:
    matches = {
        target: {name for name in names if match_name(name, target) or f".{name}".endswith(f".{target}")}
        for target in targets
    }
    for target, found in matches.items():
        if not found:
            leaves = ", ".join(dict.fromkeys(name.split(".")[-1] for name in names))
            raise ValueError(
                f"adapters.targets: must match linears of the decoder layers, got {target!r} that matches none "
                f"({len(names)} candidates, the first is {names[0]!r}). Use {leaves}, or re:<pattern> on full names."
            )
    return [name for name in names if any(name in found for found in matches.values())]


@contextmanager
def lift_dispatch(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Move a model out of llm-compressor's offloading into plain host memory, and restore the offloading on exit."""
    dispatched = any(isinstance(module._parameters, OffloadCache) for module in model.modules())
    remove_dispatch(model)
    home = next(model.parameters()).device
    model.to("cpu")
    try:
        yield
    finally:
        model.to(home)
        if dispatched:
            set_onload_device(model, device)
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


@contextmanager
def seed_random(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch, and restore the earlier random state on exit."""
    with torch.random.fork_rng([] if device.type in ("cpu", "mps") else [device.index or 0]):
        torch.manual_seed(seed)
        yield


@contextmanager
def attach_adapters(model: nn.Module, names: list[str], adapters: Adapters) -> Iterator[list[nn.Parameter]]:
    """Attach float32 adapters to linears; merge them if the block succeeds, remove them if it raises.

    The model's own dropout stays off. Weights are merged in float32 and rounded once to their own dtype.

    :return: the parameters of the adapters
    """
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    sizes: dict[str, Any] = {"r": adapters.rank, "lora_alpha": adapters.alpha, "lora_dropout": adapters.dropout}
    config = LoraConfig(**sizes, target_modules=names, bias="none")
    adapted: Any = get_peft_model(model, config)  # type: ignore[arg-type]  # what it wraps is the model itself, in place
    padded = [_move_padding(module) for module in model.modules() if isinstance(module, LoraLayer)]
    try:
        model.eval()
        yield [parameter for parameter in model.parameters() if parameter.requires_grad]
    except BaseException:
        adapted.unload()
        raise
    else:
        adapted.merge_and_unload()
    finally:
        model.eval()
        for linear, form in filter(None, padded):
            adopt_padded(linear, *form)
        for parameter, value in required:
            parameter.requires_grad_(value)


def _move_padding(adapted: Any) -> tuple[nn.Module, tuple[Any, Any]] | None:
    """Move the padding of a linear to the module that adds its adapter, whose weights have the same sides; return both.

    None where the linear is not padded.
    """
    linear = adapted.get_base_layer()
    if not hasattr(linear, "spread"):
        return None
    form = linear.spread, linear.gather
    release_padded(linear)
    adopt_padded(adapted, *form)
    return linear, form


def switch_dropout(model: nn.Module, active: bool) -> None:
    """Switch the adapters' dropout on or off; nothing else changes."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout.train(active)
