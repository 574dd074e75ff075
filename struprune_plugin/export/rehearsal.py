"""Rehearsal of a whole pruning on a tiny random instance, which proves before a run that a model's class can be pruned."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import torch
from compressed_tensors.utils import patch_attr
from loguru import logger
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from struprune_plugin.export.any_class import replace_conv1d
from struprune_plugin.export.convert import adopt_config, adopt_paddings
from struprune_plugin.layerwise.calls import mark_tokens
from struprune_plugin.layerwise.ends import compute_logits
from struprune_plugin.layerwise.passes import stream_layers
from struprune_plugin.model.experts import linearize_experts
from struprune_plugin.model.groups import list_groups
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.locate import find_stock, make_dense_config
from struprune_plugin.model.structure.tiny import TinyRun, build_tiny, draw_tokens, prove_once, run_in_pieces
from struprune_plugin.model.surgery import blank_group, mask_group, pick_two_thirds, slice_group
from struprune_plugin.model.unit_kind import UnitGroup, UnitKind
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import compute_on_rank0

_PIECES = (8, 1, 1, 1, 1)  # tokens that are read with a cache


def rehearse(model: PreTrainedModel, kinds: Sequence[UnitKind]) -> None:
    """Prune, save and load a tiny instance of a model's class, once per class, configuration and kinds of units.

    The logits must agree between a layer-by-layer and a whole run, between removal of a third of the units and zeros in their
    place, before saving and after loading, and with a cache: up to rounding (:class:`TinyRun`).

    :raises ValueError: the logits do not agree, or the class has no such units
    """
    config, model_class = make_dense_config(model.config), find_stock(type(model))
    text = config.get_text_config(decoder=True)
    if getattr(text, "output_router_logits", False):
        text.output_router_logits = False  # for a loss in training; layers that run alone give none

    def run() -> None:
        tiny = build_tiny(config, model_class=model_class)
        replace_conv1d(tiny)
        tokens = draw_tokens(tiny.config, 2, sum(_PIECES), seed=3)
        with _name_class(model_class.__name__):
            check_passes(tiny, [{"input_ids": tokens}])
            if any(unit.of_mixture for unit in kinds) and find_structure(tiny).has_mixtures:
                linearize_experts(tiny)
        groups = list_groups(tiny, kinds)
        with _name_class(model_class.__name__):
            _check_pruning(tiny, tokens, groups)

    # only the first process can save
    prove_once(sorted(unit.kind for unit in kinds), model_class, config, lambda: compute_on_rank0(run))


@contextmanager
def _name_class(name: str) -> Iterator[None]:
    """Raise any error of the block, which a class that relies on its sizes may give, as one of the class."""
    try:
        yield
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).rstrip('.')}"
        raise ValueError(
            f"model: a tiny instance of {name} must work as before after pruning, saving and loading, got {problem}. Choose "
            "another attention_unit, or another model."
        ) from error


@torch.no_grad()
def _check_pruning(tiny: PreTrainedModel, tokens: Tensor, groups: Sequence[UnitGroup]) -> None:
    masked = deepcopy(tiny)
    adopt_paddings(tiny, groups)
    for group in groups:
        keep, mask = pick_two_thirds(group), blank_group if group.is_coupled else mask_group
        mask(masked.get_submodule(group.layer_name), group, keep)
        slice_group(tiny.get_submodule(group.layer_name), group, keep)
    run = TinyRun(masked, tokens)
    wanted = TinyRun(tiny, tokens)()
    _check_equal(run, wanted, run(), "with units removed as with zeros in their place")
    adopt_config(tiny)
    bars = patch_attr(transformers_logging, "_tqdm_active", False)  # they would speak of it as of the user's model
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, bars:
        tiny.save_pretrained(folder)
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        loaded = type(tiny).from_pretrained(folder, dtype=torch.float32, **plain)
    _check_equal(run, TinyRun(loaded.eval(), tokens)(), wanted, "loaded as before it was saved")
    try:
        cached = (run := TinyRun(masked, tokens, partial(run_in_pieces, sizes=_PIECES)))()
    except Exception as error:  # stock code that keeps no cache of such a call
        logger.debug(f"{type(masked).__name__} does not run with a cache: {error}")
        return
    _check_equal(run, run_in_pieces(loaded, tokens, _PIECES), cached, "with a cache as the dense model with zeros")


@torch.no_grad()
def check_passes(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> None:
    """Raise ValueError where layer-by-layer runs of a small model on recorded calls do not give the model's own logits."""
    context = DeviceContext()
    *_, last = stream_layers(model, batches, context, "", propagates=True)
    for flow, batch in zip(last.flows, batches, strict=True):
        rows = range(len(batch["input_ids"]))
        logits = torch.stack([compute_logits(model, batch, row, flow.states.hidden, context) for row in rows])
        wanted = model(**batch, use_cache=False).logits
        tokens = mark_tokens(batch)
        _check_equal(TinyRun(model, batch["input_ids"]), logits[tokens], wanted[tokens], "layer by layer as whole")


def _check_equal(run: TinyRun, logits: Tensor, wanted: Tensor, when: str) -> None:
    if difference := run.describe_difference(logits, wanted):
        raise ValueError(f"it must give the same logits {when}, got a difference of {difference}.")
