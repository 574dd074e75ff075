"""Refusals before any work: of the recipe, the model and the calibration data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.utils import is_match
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.pruning.sparsegpt.sgpt_base import SparsityModifierBase
from llmcompressor.modifiers.quantization import QuantizationMixin
from llmcompressor.modifiers.transform import AWQModifier, SmoothQuantModifier
from loguru import logger
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from struprune_plugin.export.any_class import build_dense
from struprune_plugin.export.stock_config import are_layers_alike, can_hold_heads, select_configurable
from struprune_plugin.model.layers import QUANTISER_PARAMETERS, find_decoder_layers
from struprune_plugin.model.structure.locate import find_stock, make_dense_config
from struprune_plugin.model.units import find_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.pruning.resume import digest_tokens
from struprune_plugin.runtime.distributed import gather
from struprune_plugin.storage.files import shorten_value
from struprune_plugin.storage.manifest import CalibrationRecord

_FEW = 0.5  # share of distinct sequences below which a warning is logged
_FINAL = {  # modifiers that need the final weights -> their name in messages
    QuantizationMixin: "quantiser",
    AWQModifier: "quantiser and its smoothing",
    SmoothQuantModifier: "quantiser and its smoothing",
    SparsityModifierBase: "sparsity modifier",
}


def check_stage(
    modifier: Modifier, model: PreTrainedModel, before: Sequence[Modifier], later: Sequence[Modifier]
) -> None:
    """Raise if a stage, which changes the weights, cannot stand where it does in the recipe, or cannot run on the model.

    :raises ValueError: a quantiser, its smoothing, or a sparsity modifier (whose zeros would be lost) comes first; targets of one
        behind match nothing, so that llm-compressor would leave the model unchanged; as :func:`check_weights`
    """
    for other in before:
        for kind, name in _FINAL.items():
            if isinstance(other, kind):
                raise ValueError(
                    f"recipe: {type(modifier).__name__} must come before every {name}, got {type(other).__name__} first. "
                    f"Move the stage of {type(modifier).__name__} up."
                )
    modules = list(model.named_modules())
    for other in later:
        groups: list[tuple[Any, list[str]]] = []
        if isinstance(other, QuantizationMixin):
            groups = [(scheme.targets, other.ignore) for scheme in other.resolved_config.config_groups.values()]
        elif isinstance(other, SparsityModifierBase):  # its ignore list applies inside the targets
            groups = [([other.targets] if isinstance(other.targets, str) else other.targets, [])]
        who = type(other).__name__
        for targets, ignore in groups:
            for target in targets:
                if not any(is_match(name, module, [target]) for name, module in modules):
                    raise ValueError(
                        f"{who}: {target!r} in targets matches no module of the model. Give a full name, a class such as "
                        "Linear, or re:<pattern>."
                    )
            if targets and not any(is_match(name, module, targets, ignore) for name, module in modules):
                raise ValueError(
                    f"{who}: ignore must leave at least one module of targets, got {list(ignore)}, which matches all of "
                    f"{list(targets)}. Remove entries of ignore."
                )
    check_weights(model)


def check_cache_quantisation(config: PretrainedConfig, modifiers: Sequence[Modifier], heads_differ: bool) -> None:
    """Raise if a key-value cache is to be quantised for which llm-compressor cannot size the scales.

    llm-compressor reads one head count for all layers from the model's configuration, and again when the checkpoint is loaded.

    :param modifiers: modifiers that run on the pruned model
    :param heads_differ: whether head counts differ between layers, now or after pruning
    """
    for modifier in modifiers:
        if not isinstance(modifier, QuantizationMixin) or modifier.resolved_config.kv_cache_scheme is None:
            continue
        where = f"{type(modifier).__name__}: kv_cache_scheme"
        if not hasattr(type(config), "num_key_value_heads") and "num_key_value_heads" not in vars(config):
            raise ValueError(
                f"{where}: llm-compressor cannot quantise the key-value cache of {config.model_type!r}, whose configuration "
                "has no num_key_value_heads. Remove the field, and quantise weights and activations only."
            )
        if heads_differ:
            raise ValueError(
                f"{where}: llm-compressor reads one number of heads for all layers, and pruning heads gives each layer its own, "
                "so that the output would not load. Remove the field, or set attention_unit to value_channels or none."
            )


def check_weights(model: nn.Module) -> None:
    """Raise if the model is quantised, or if weights are not finite."""
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise ValueError(
            "model: must not be quantised yet, got a config with quantization_config. "
            "Prune the full-precision checkpoint and quantise afterwards."
        )
    # Extremes are NaN where a weight is, and are found much faster than isfinite tells. Parameters of a quantiser later in the
    # recipe have no values yet.
    extremes = {
        f"{module_name}.{name}": torch.stack(parameter.detach().aminmax())
        for module_name, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name not in QUANTISER_PARAMETERS and parameter.numel()
    }
    for name, values in extremes.items():  # read once all are computed, because the host waits for a device
        if not values.isfinite().all():
            raise ValueError(f"{name}: must be finite, got NaN or Inf. Repair or reload the checkpoint.")


def check_layers(model: PreTrainedModel) -> None:
    """Raise if a model does not have as many decoder layers as its configuration says."""
    text = model.config.get_text_config(decoder=True)
    told, found = getattr(text, "num_hidden_layers", None), len(find_decoder_layers(model))
    if told is None or told == found:
        return
    dense = build_dense(find_stock(type(model)), make_dense_config(model.config))
    if len(find_decoder_layers(dense)) != found:  # some classes count other layers, too
        raise ValueError(
            f"model: it must have the {told} decoder layers that its configuration says, got {found}. Set "
            f"config.num_hidden_layers = {found}, and shorten lists with one entry per layer such as config.layer_types."
        )


def read_batches(loader: Iterable[dict[str, Tensor]] | None) -> list[dict[str, Tensor]]:
    """Return a loader's batches, read once: in every pass a shuffling one gives them in another order.

    :raises ValueError: there are no data, or the loader gives nothing to the stages behind
    """
    if loader is None:
        raise ValueError("dataset: calibration text must be given, got none. Pass dataset=… to oneshot.")
    batches = list(loader)
    if batches and next(iter(loader), None) is None:
        raise ValueError(
            "dataset: a loader must give its batches in every pass, got none in the second. Pass a list of them, or a Dataset."
        )
    return batches


def read_rows(batches: Iterable) -> list[tuple[Tensor, Tensor]]:
    """Return the token ids of every calibration sequence, padding included, and the mask of those that count, shape [S] each.

    :raises ValueError: a batch has no such ids
    """
    rows: list[tuple[Tensor, Tensor]] = []
    for batch in batches:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        is_integer = isinstance(ids, Tensor) and not ids.is_floating_point()
        if not (isinstance(ids, Tensor) and is_integer and ids.dim() == 2 and ids.numel() and int(ids.min()) >= 0):
            found = batch if ids is None else ids.tolist() if isinstance(ids, Tensor) else ids
            raise ValueError(
                "dataset: every batch must hold input_ids, a tensor of whole numbers from 0 on with sequences as rows, none "
                f"of them empty, got {shorten_value(found)}. Correct the data."
            )
        ids, mask = ids.cpu().to(torch.int64), batch.get("attention_mask")
        rows += zip(ids, torch.ones_like(ids).bool() if mask is None else mask.cpu().bool(), strict=True)
    return rows


def check_calibration(
    model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], where: str, needed: int
) -> CalibrationRecord:
    """Return the record of the calibration data over all processes, without padding; warn if the data vary little.

    The number of distinct tokens of natural text grows with at least the square root of its length (Heaps' law).

    :param where: module of the largest solve, for messages
    :param needed: tokens in distinct sequences that this solve needs
    :raises ValueError: too few tokens, the same data in several processes, or as :func:`check_sequences`
    """
    rows = read_rows(batches)
    texts = [ids[kept] for ids, kept in rows]
    words = {word for text in texts for word in text.tolist()}
    longest, largest = (max((int(measure(ids)) for ids, _ in rows), default=0) for measure in (len, torch.max))
    num_words, longest, largest = map(max, zip(*gather((len(words), longest, largest)), strict=True))
    parts = gather([(hashlib.sha256(text.numpy().tobytes()).digest(), len(text)) for text in texts])
    if any(part in parts[:rank] for rank, part in enumerate(parts)):
        raise ValueError(
            f"dataset: each of the {len(parts)} processes must have different samples, got the same in several. Use "
            "struprune_plugin.oneshot, which distributes them, or pass each process a loader of its part."
        )
    check_sequences(model, longest, largest)
    sequences = [row for part in parts for row in part]
    num_sequences, num_tokens = len(sequences), sum(length for _, length in sequences)
    num_distinct, distinct_tokens = len(set(sequences)), sum(length for _, length in set(sequences))
    if distinct_tokens < needed:
        told = f"{num_tokens} in {num_sequences} sequences"
        if num_distinct < num_sequences:
            told += f" ({num_distinct} distinct sequences with {distinct_tokens} tokens)"
        raise ValueError(tell_few_tokens(where, needed, told))
    if num_words < min(math.sqrt(num_tokens), 256) or num_distinct < _FEW * num_sequences:
        logger.warning(
            f"dataset: calibration text should vary, got {num_words:,} distinct tokens among {num_tokens:,} "
            f"({num_words / num_tokens:.2%}) and {num_distinct:,} distinct sequences among {num_sequences:,} "
            f"({num_distinct / num_sequences:.0%}). The weights are fitted to this text. Use more varied text."
        )
    return CalibrationRecord(num_sequences, num_tokens, digest_tokens(batch["input_ids"] for batch in batches))


def tell_few_tokens(where: str, needed: int, found: str) -> str:
    """Return the message for calibration data that are too few for the solve of a module."""
    return (
        f"{where}: the solve must have at least {needed} calibration tokens (one per input and one for the bias), got {found}. "
        f"Use more or longer calibration samples{', and different ones' if 'distinct' in found else ''}."
    )


def check_sequences(model: PreTrainedModel, longest: int, largest_token: int = 0) -> None:
    """Raise if sequences exceed the model's positions, or if token indices exceed its embeddings.

    :param longest: tokens of the longest sequence
    :param largest_token: largest token index, padding included
    """
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ValueError(
            f"dataset: sequences must be at most {positions} tokens long, the model's number of positions, got {longest}. "
            "Lower max_seq_length (--seq-length)."
        )
    size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if size is not None and largest_token >= size:
        raise ValueError(
            f"dataset: token ids must be below {size}, the model's number of embeddings, got {largest_token}. Use the model's "
            "own tokenizer."
        )


def select_uniform(recipe: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
    """Return the groups that a stock class can shrink in all layers alike, and those of whole experts, whose width stays."""
    if not are_layers_alike(model):
        return list(groups)  # refused by :func:`check_uniform`
    keeps_width = recipe.experts is not None and recipe.experts.drops
    cut = [group for group in groups if not (group.experts and keeps_width)]
    chosen = {group.name: group for group in (select_configurable(model, cut) if cut else cut)}
    return [chosen.get(group.name, group) for group in groups if group.name in chosen or group not in cut]


def check_uniform(
    recipe: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup], later: Sequence[Modifier]
) -> None:
    """Raise if a recipe with ``output: uniform`` would give a model that no stock class can load."""
    problem = ""
    if recipe.allocation.measures:
        problem = "needs a uniform allocation, got one that gives layers different sizes. Set `allocation: uniform`"
    elif recipe.attention_unit == "value_channels":
        problem = (
            "needs values as wide as queries and keys, as stock classes do, got `attention_unit: value_channels`. Set "
            "`attention_unit: head` or `attention_unit: none`"
        )
    elif any(hasattr(module, "nf") for module in model.modules()) and any(
        isinstance(other, QuantizationMixin) for other in later
    ):
        problem = (
            f"gives {model.config.model_type} its stock class, whose transposed weights llm-compressor does not quantise, got a "
            "quantiser behind it. Set `output: per_layer`"
        )
    elif not are_layers_alike(model):
        problem = (
            "needs a dense model, or one whose layers are all the same, got layers of different sizes or values narrower than "
            "queries. Convert the model first (struprune convert --to uniform-padded)"
        )
    elif recipe.attention_unit == "head" and not any(
        can_hold_heads(model, count) for count in range(1, groups[0].num_units)
    ):
        problem = (
            f"needs all heads of {model.config.model_type}, whose stock class computes the head size as hidden_size / heads, got "
            "`attention_unit: head`. Set `attention_unit: none`"
        )
    elif len(StructuredModifier.find_groups(recipe, model)) != len(
        find_groups(model, recipe.attention_unit, recipe.prune_ffn, prune_experts=recipe.experts is not None)
    ):
        problem = "must cover all decoder layers, and targets or ignore leave some out. Remove targets and ignore"
    if problem:
        raise ValueError(f"`output: uniform` {problem}.")
