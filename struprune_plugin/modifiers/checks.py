"""Refusals before any work: of the recipe, the model and the calibration data."""

import hashlib
import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from compressed_tensors.utils import match_modules_set, patch_attr
from llmcompressor.datasets.utils import DataCollatorWithTruncation, LengthAwareSampler
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.pruning import ConstantPruningModifier, MagnitudePruningModifier, REAPPruningModifier
from llmcompressor.modifiers.pruning.sparsegpt.sgpt_base import SparsityModifierBase
from llmcompressor.modifiers.quantization import QuantizationMixin
from llmcompressor.modifiers.transform import AWQModifier, QuIPModifier, SmoothQuantModifier, SpinQuantModifier
from llmcompressor.modifiers.transform.awq.dynamic_mappings import get_layer_mappings_from_model
from loguru import logger
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from struprune_plugin.export.outputs import OUTPUTS
from struprune_plugin.layerwise.calls import mark_tokens
from struprune_plugin.model.layers import QUANTISER_PARAMETERS
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.locate import is_pruned
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.modifiers.fields import PruningFields, StructuredModifier
from struprune_plugin.runtime.distributed import gather
from struprune_plugin.settings.registry import shorten_value
from struprune_plugin.storage.files import shorten_error
from struprune_plugin.storage.manifest import CalibrationRecord
from struprune_plugin.storage.resume_store import digest_tokens

Stages = tuple[Sequence[Modifier], Sequence[Modifier]]
# modifiers that need the final weights
_QUANTISERS = QuantizationMixin, AWQModifier, SmoothQuantModifier, SpinQuantModifier, QuIPModifier
_LAST = *_QUANTISERS, SparsityModifierBase, ConstantPruningModifier, MagnitudePruningModifier


def refuse(recipe: PruningFields, model: PreTrainedModel, groups: Sequence[UnitGroup], stages: Stages) -> None:
    """Raise if a recipe's fields, the model and the stages around pruning do not go together.

    ``struprune plan`` calls this, too: nothing here needs weights or data, which a run checks afterwards.

    :param recipe: the pruning stage, completed by an allocator's
    :param stages: modifiers before pruning, and those behind it
    """
    check_order(recipe, stages[0])
    kinds = recipe.list_units()
    mixers = [kind for kind in kinds if kind.is_mixer and not kind.by_default]
    check_heads(stages[1], *(any(kind.splits_blocks == narrow for kind in mixers) for narrow in (False, True)))
    recipe.importance.check(model, kinds)
    recipe.weight_update.check(model, kinds)
    recipe.allocation.check(recipe.importance.method)
    for condition, sentence in _list_refusals(recipe, model, groups, stages[1]):
        if condition:
            raise ValueError(sentence)
    check_later(stages[1], model)


def _list_refusals(
    recipe: PruningFields, model: PreTrainedModel, groups: Sequence[UnitGroup], later: Sequence[Modifier]
) -> Iterator[tuple[bool, str]]:
    """Yield (condition, sentence): the first sentence whose condition holds is the error."""
    importance, update = recipe.importance, recipe.weight_update
    ranked, updated = f"importance: {importance.method}", f"weight_update: {update.method}"
    yield (
        recipe.sparsity is None and recipe.budget is None,
        "StruPruneModifier: the recipe gives neither sparsity nor budget, and no SparsityAllocatorModifier stage comes before. "
        "Add sparsity to the recipe.",
    )
    dropping = [kind.kind for kind in recipe.list_units() if kind.drops_entries]
    yield (
        len(dropping) > 1,
        f"units: entries of lists of modules may go for one kind, got {', '.join(dropping)}. Remove the others.",
    )
    is_quantised = any(isinstance(other, QuantizationMixin) for other in later)
    yield from OUTPUTS[recipe.output].check(recipe, model, groups, is_quantised)
    yield (
        not importance.takes_experts and recipe.prunes_mixtures and find_structure(model).has_mixtures,
        f"`{ranked}` is not defined for the experts of a mixture. Set `experts: none`, or another importance.",
    )
    for on_device, asked in ((not importance.takes_offload, ranked), (update.refines, updated)):
        sentence = f"offload: must be false with `{asked}`, which runs on the device. Remove one of the two."
        yield recipe.offload and on_device, sentence
    yield (
        update.refines and not any(map(update.can_refine, groups)),
        f"`{updated}` has no effect on the chosen modules. Remove it, or prune other modules.",
    )
    yield (
        recipe.budget is not None and importance.aims,
        f"budget: `{ranked}` needs sparsity, on which its scores depend. Give sparsity instead, or choose another importance.",
    )


def check_order(modifier: Modifier, before: Sequence[Modifier]) -> None:
    """Raise if a quantiser, its smoothing or rotation, or a sparsity modifier (its zeros would be lost) comes before a stage."""
    if first := next((type(other).__name__ for other in before if isinstance(other, _LAST)), None):
        name = type(modifier).__name__
        raise ValueError(
            f"recipe: {name} must come before quantisers, their smoothing and rotation, and sparsity modifiers, got {first} first. "
            f"Move the stage of {name} up."
        )


def check_pruned(modifiers: Sequence[Modifier], config: PretrainedConfig) -> None:
    """Raise if llm-compressor's modifiers alone would break a model that was pruned before."""
    if not is_pruned(type(config)):
        return
    narrow = any("narrow" in linear for layer in config.layout["linears"] for linear in layer.values())
    check_heads(modifiers, "num_attention_heads" in (config.per_layer_attributes or ()), narrow)
    alone = not any(isinstance(modifier, StructuredModifier) for modifier in modifiers)  # none writes the layout anew
    if alone and config.layout.get("parameters") and any(isinstance(one, REAPPruningModifier) for one in modifiers):
        raise ValueError(
            "REAPPruningModifier: its output would not load, since the channels of these experts were pruned. Run it before that, "
            "or in one recipe with a StruPruneModifier."
        )


def check_heads(modifiers: Sequence[Modifier], heads_differ: bool, values_narrow: bool) -> None:
    """Raise if a modifier reads heads in the configuration that the layers do not have, now or after pruning.

    :param heads_differ: head counts differ between layers; a quantiser of the key-value cache reads one
    :param values_narrow: values are narrower than queries; SpinQuant's R2 turns blocks as wide as these
    """
    for modifier in modifiers:
        if isinstance(modifier, SpinQuantModifier) and "R2" in modifier.rotations and values_narrow:
            raise ValueError(
                "SpinQuantModifier: rotations: R2 turns blocks as wide as a head, and pruned values are narrower, so that the "
                "output would be wrong. Remove R2, or set attention_unit to head or none."
            )
        if isinstance(modifier, QuantizationMixin) and modifier.resolved_config.kv_cache_scheme and heads_differ:
            raise ValueError(
                f"{type(modifier).__name__}: kv_cache_scheme: llm-compressor reads one number of heads for all layers, and pruning "
                "heads gives each layer its own, so that the output would not load. Remove the field, or set attention_unit to "
                "value_channels or none."
            )


def check_later(modifiers: Sequence[Modifier], model: PreTrainedModel) -> None:
    """Raise as :func:`check_mappings`, which llm-compressor would do behind pruning; warn of what may not load.

    :param modifiers: those behind pruning
    """
    is_mixture = find_structure(model).has_mixtures
    check_mappings([] if is_mixture else modifiers, model)  # llm-compressor linearizes experts first
    is_mixture |= any("down_proj" in module._parameters for module in model.modules())  # packed experts that stay whole
    for modifier in modifiers:
        if isinstance(modifier, QuIPModifier) or (isinstance(modifier, QuantizationMixin) and is_mixture):
            what = "a quantised mixture" if is_mixture else "the transforms of QuIP"
            logger.warning(f"transformers may load {what} wrongly (docs/recipes.md says which). Compare the logits.")


def check_mappings(modifiers: Sequence[Modifier], model: PreTrainedModel) -> None:
    """Raise ValueError if the mappings of AWQ or SmoothQuant, given or llm-compressor's for the class, do not fit the model."""
    for modifier in modifiers:
        try:
            if isinstance(modifier, AWQModifier):
                for mapping in modifier.mappings or get_layer_mappings_from_model(model):
                    deque(match_modules_set(model, (mapping.smooth_layer, *mapping.balance_layers)))
            elif isinstance(modifier, SmoothQuantModifier):
                copied = modifier.model_copy(update={"ignore": modifier.ignore or []})
                copied.mappings = copied._infer_mappings_from_model(model)
                copied._resolve_mappings(model)
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"{type(modifier).__name__}: mappings must name modules of the model, got: "
                f"{shorten_error(error.__cause__ or error)}. Give the model's own mappings, or none where llm-compressor knows its "
                "class."
            ) from None


def check_weights(model: nn.Module) -> None:
    """Raise if the model is quantised, or if weights are not finite."""
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise ValueError(
            "model: must not be quantised yet, got a config with quantization_config. "
            "Prune the full-precision checkpoint and quantise afterwards."
        )
    extremes = {  # NaN where a weight is; found much faster than by isfinite. A quantiser's parameters have no values yet
        f"{module_name}.{name}": torch.stack(parameter.detach().aminmax())
        for module_name, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name not in QUANTISER_PARAMETERS and parameter.numel()
    }
    for name, values in extremes.items():  # read once all are computed, because the host waits for a device
        if not values.isfinite().all():
            raise ValueError(f"{name}: must be finite, got NaN or Inf. Repair or reload the checkpoint.")


def read_batches(loader: Any) -> list[dict[str, Tensor]]:
    """Return a loader's batches, read once: in every pass a shuffling one gives them in another order.

    :raises ValueError: there are no data, or the loader gives nothing to the stages behind
    """
    if loader is None:
        raise ValueError("dataset: calibration text must be given, got none. Pass dataset=… to oneshot.")
    collate: Any = getattr(loader, "collate_fn", None)
    lost = 0

    def count_lost(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        nonlocal lost
        lost += sum(min(len(row["input_ids"]), collate.max_seq_length or sys.maxsize) for row in rows)
        batch = collate(rows)  # in which the rows are cut
        lost -= batch["input_ids"].numel()
        return batch

    is_cut = isinstance(collate, DataCollatorWithTruncation) and not loader.num_workers
    with patch_attr(loader, "collate_fn", count_lost) if is_cut else nullcontext():
        batches = list(loader)
    if lost:
        logger.warning(
            f"dataset: {lost:,} tokens are cut off: a batch is as long as its shortest row. Set batch_size=1."
        )
    if batches and next(iter(loader), None) is None:
        raise ValueError(
            "dataset: a loader must give its batches in every pass, got none in the second. Pass a list of them, or a Dataset."
        )
    shapes = {getattr(batch.get("input_ids"), "shape", ())[1:] for batch in batches if isinstance(batch, Mapping)}
    if isinstance(getattr(loader, "sampler", None), LengthAwareSampler) and len(shapes) > 1:
        # the longest come first: the last ones, which are held out, would have few tokens
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(0))
        batches = [batches[place] for place in order]
    return batches


def read_rows(model: PreTrainedModel, batches: Iterable) -> list[tuple[Tensor, Tensor]]:
    """Return the token ids of every calibration sequence, padding included, and the mask of those that count, shape [S] each.

    :raises ValueError: a batch has no such ids, or arguments of the model besides, which the passes over layers do not use
    """
    rows: list[tuple[Tensor, Tensor]] = []
    unused = inspect.signature(model.forward).parameters.keys() - {"input_ids", "attention_mask", "labels"}
    for batch in batches:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        is_whole = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dim() == 2 and ids.numel()
        if not isinstance(ids, Tensor) or not is_whole or int(ids.min()) < 0:
            raise ValueError(
                "dataset: every batch must hold input_ids, a tensor of whole numbers from 0 on with sequences as rows, none "
                f"of them empty, got {shorten_value(ids.tolist() if isinstance(ids, Tensor) else batch)}. Correct the data."
            )
        mask = mark_tokens(batch).cpu()
        for name in sorted(unused & batch.keys()):
            usual = mask.cumsum(1) - 1 if name == "position_ids" else torch.zeros_like(ids.cpu())
            value = batch[name]
            if not (isinstance(value, Tensor) and value.shape == ids.shape and (value.cpu() == usual)[mask].all()):
                raise ValueError(
                    f"dataset: batches must hold no arguments of the model but input_ids, attention_mask and labels, got {name}, "
                    "which would have no effect. Remove it; of packed sequences, make each a row."
                )
        rows += zip(ids.cpu().to(torch.int64), mask, strict=True)
    return rows


def check_calibration(
    model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], where: str, needed: int
) -> CalibrationRecord:
    """Return the record of the calibration data over all processes, without padding.

    :param where: module of the largest solve, for messages
    :param needed: tokens in distinct sequences that this solve needs
    :raises ValueError: too few tokens, or as :func:`check_sequences`
    """
    rows = read_rows(model, batches)
    longest = max((len(ids) for ids, _ in rows), default=0)
    largest = max((int(ids.max()) for ids, _ in rows), default=0)
    check_sequences(model, max(gather(longest)), max(gather(largest)))  # all processes refuse together
    parts = gather([(hashlib.sha256(ids[kept].numpy().tobytes()).hexdigest(), int(kept.sum())) for ids, kept in rows])
    if without := parts.count([]):
        raise ValueError(
            f"dataset: every process must have a calibration sequence, got none in {without} of {len(parts)}. Use more samples, or "
            "fewer processes."
        )
    sequences = [(digest, length) for part in parts for digest, length in part]
    num_sequences, num_tokens = len(sequences), sum(length for _, length in sequences)
    num_distinct, distinct_tokens = len(set(sequences)), sum(length for _, length in set(sequences))
    if distinct_tokens < needed:
        raise ValueError(
            f"{where}: the solve must have at least {needed} calibration tokens (one per input and one for the bias), got "
            f"{num_tokens} in {num_sequences} sequences ({num_distinct} distinct sequences with {distinct_tokens} tokens). Use "
            "more, longer or different calibration samples."
        )
    return CalibrationRecord(num_sequences, num_tokens, digest_tokens(batch["input_ids"] for batch in batches))


def check_sequences(model: PreTrainedModel, longest: int, largest_token: int) -> None:
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
