"""What can be refused before calibration starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from llmcompressor.core import active_session
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from torch import nn

from struprune_plugin.topology import UnitGroup, find_decoder_layers, find_family, find_linear, list_linears


def list_modifiers() -> list[Modifier]:
    """Return all modifiers of the recipe that is being initialised, in order."""
    return active_session().lifecycle.recipe.modifiers


def check_order(modifier: Modifier) -> None:
    """Refuse a quantiser that comes before a modifier of ours in the recipe.

    :raises ValueError: the same
    """
    for other in list_modifiers():
        if other is modifier:
            return
        if isinstance(other, QuantizationMixin):
            raise ValueError(
                f"recipe: {type(modifier).__name__} must come before every quantiser, got {type(other).__name__} first. "
                "Move it up."
            )


def check_alone(modifier: Modifier) -> None:
    """Refuse a calibration pass that other modifiers share.

    :raises ValueError: a ``sequential`` pipeline runs several modifiers at once
    """
    modifiers = list_modifiers()
    if len(modifiers) > 1:
        raise ValueError(
            f"pipeline: {type(modifier).__name__} must have a calibration pass of its own, got one shared by "
            f"{[type(m).__name__ for m in modifiers]}. Use pipeline='independent', the default."
        )


def check_weights(model: nn.Module) -> None:
    """Refuse a quantised model, and weights that are not finite.

    :raises ValueError: the same; the message names the parameter
    """
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise ValueError(
            "model: must not be quantised yet, got a config with quantization_config. "
            "Prune the full-precision checkpoint and quantise afterwards."
        )
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not torch.isfinite(parameter.detach()).all():
                raise ValueError(
                    f"{module_name}.{name}: must be finite, got NaN or Inf. Repair or reload the checkpoint."
                )


def check_calibration(loader: Iterable | None, num_needed: int, where: str, max_length: int | None) -> tuple[int, int]:
    """Return (sequences, tokens) of the calibration data.

    :param num_needed: tokens that the largest solve, of ``where``, needs
    :param max_length: positions that the model has
    :raises ValueError: no data, too few tokens, or sequences that are too long
    """
    if loader is None:
        raise ValueError("dataset: calibration text must be given, got none. Pass dataset=… to oneshot.")
    num_sequences = num_tokens = 0
    for batch in loader:
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if max_length is not None and ids.shape[-1] > max_length:
            raise ValueError(
                f"dataset: sequences must have at most the model's {max_length} positions, got {ids.shape[-1]} tokens. "
                "Lower the sequence length."
            )
        num_sequences += len(ids)
        num_tokens += int(ids.numel() if mask is None else mask.sum())
    if num_tokens < num_needed:
        raise ValueError(
            f"{where}: calibration must have at least {num_needed} tokens (its inputs and the bias), "
            f"got {num_tokens} in {num_sequences} sequences. Raise the number or the length of the samples."
        )
    return num_sequences, num_tokens


def check_group_sizes(groups: Sequence[UnitGroup], kept: Mapping[str, int]) -> None:
    """Refuse widths that a quantiser later in the recipe cannot cut into its groups.

    :param kept: units to keep, by group name
    :raises ValueError: a width that is no multiple of the group size
    """
    sizes = [
        scheme.weights.group_size
        for modifier in list_modifiers()
        if isinstance(modifier, QuantizationMixin)
        for scheme in modifier.resolved_config.config_groups.values()
        if scheme.weights is not None and (scheme.weights.group_size or 0) > 1
    ]
    for size in sorted(set(sizes)):
        for group in groups:
            width = kept[group.name] * group.columns_per_unit
            if width % size:
                remedy = f"channel_multiple: {size}" if group.kind == "ffn" else "attention_unit: none"
                raise ValueError(
                    f"{group.name}: the kept width must be a multiple of the quantiser's group size {size}, got {width}. "
                    f"Set {remedy} in the pruning stage."
                )


def describe_weights(model: nn.Module) -> str:
    """Return a digest of the decoder layers' linears that tells one dense model from another: sums, dtypes, shapes."""
    digest = hashlib.sha256()
    family = find_family(model)
    for _, layer in find_decoder_layers(model):
        for name in list_linears(family, layer):
            weight = find_linear(layer, name).weight.detach()
            values = [weight.sum(dtype=torch.float64).item(), weight.abs().sum(dtype=torch.float64).item()]
            digest.update(repr((name, str(weight.dtype), tuple(weight.shape), values)).encode())
    return digest.hexdigest()
