"""Finished decoder layers of a pruning pass, and what an allocation measured, kept in a journal and taken out of it again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.layer.methods import Plan
from struprune_plugin.layer.prune import LayerOutcome
from struprune_plugin.layer.records import AllocationRecord
from struprune_plugin.layer.signals import Signals
from struprune_plugin.maths.allocation import Candidate
from struprune_plugin.model.families import find_family
from struprune_plugin.model.layers import describe_weights, list_linears
from struprune_plugin.model.surgery import LayerCopy, copy_layer
from struprune_plugin.passes.journal import Journal, digest_package
from struprune_plugin.passes.tokens import TokenDigest


@dataclass(frozen=True)
class DoneLayer:
    """A layer that an earlier process has pruned.

    :param outcome: its records
    :param copy: what it is now; None where nothing has gone yet
    """

    outcome: LayerOutcome
    copy: LayerCopy | None


class LayerLog:
    """The layers that are done, first to last without a gap.

    :param journal: where they are kept
    """

    def __init__(self, journal: Journal):
        self._journal = journal
        self._is_whole = True  # so far every layer asked for was there

    def take(self, model: PreTrainedModel, layer: nn.Module, index: int) -> DoneLayer | None:
        """Return a layer that is done; None from the first on that is not."""
        held = self._journal.read(_name(index)) if self._is_whole else None
        if held is None:
            self._is_whole = False
            return None
        record, tensors = held
        if not record["outcome"]["changed"]:
            return DoneLayer(LayerOutcome.from_dict(record["outcome"]), None)
        linears = list_linears(find_family(model), layer)
        copy = LayerCopy.from_tensors(tensors, linears, record["counts"])
        return DoneLayer(LayerOutcome.from_dict(record["outcome"]), copy)

    def keep(self, model: PreTrainedModel, layer: nn.Module, index: int, outcome: LayerOutcome) -> None:
        """Make a layer that is done durable.

        :raises OSError: the disk refuses
        """
        record: dict[str, Any] = {"outcome": outcome.to_dict(), "counts": {}}
        tensors: dict[str, Tensor] = {}
        if outcome.changed:
            copy = copy_layer(model, layer)
            record["counts"], tensors = copy.counts, copy.list_tensors()
        self._journal.write(_name(index), record, tensors)


def _name(index: int) -> str:
    return f"layer-{index:05d}"


def keep_allocation(journal: Journal, stage: str, plan: Plan | None, signals: Signals) -> None:
    """Make what was measured of the dense model, and the plan that followed, durable."""
    tensors = {f"roots/{name}": root for name, root in signals.roots.items()}
    tensors |= {f"saliency/{name}": scores for name, scores in signals.saliency.items()}
    record = None
    if plan is not None:
        candidates = [asdict(candidate) for candidate in plan.candidates]
        record = {"kept": dict(plan.kept), "record": plan.record.to_dict(), "candidates": candidates}
    journal.write(stage, {"plan": record}, tensors)


def take_allocation(journal: Journal | None, stage: str) -> tuple[Plan | None, Signals] | None:
    """Return what :func:`keep_allocation` kept; None where there is nothing."""
    held = None if journal is None else journal.read(stage)
    if held is None:
        return None
    record, tensors = held
    parts: dict[str, dict[str, Tensor]] = {"roots": {}, "saliency": {}}
    for name, tensor in tensors.items():
        kind, _, group = name.partition("/")
        parts[kind][group] = tensor
    told = record["plan"]
    plan = None
    if told is not None:
        candidates = [Candidate(c["temperature"], tuple(c["kept"]), c["loss"]) for c in told["candidates"]]
        plan = Plan(told["kept"], AllocationRecord.from_dict(told["record"]), candidates)
    return plan, Signals(**parts)


def describe_run(
    recipe: list[dict[str, Any]], versions: dict[str, str], model: PreTrainedModel, loader: Iterable[dict[str, Tensor]]
) -> dict[str, Any]:
    """Return what must be the same for a run to go on, by topic.

    :param recipe: fields of every modifier, in order
    :param versions: of the packages
    """
    found: list[str] = []
    digest = TokenDigest(found.append)
    for batch in loader:
        digest.add(batch["input_ids"])
        if "attention_mask" in batch:
            digest.add(batch["attention_mask"])
    digest.finish()
    return {
        "recipe": recipe,
        "model": {"weights": describe_weights(model), "dtype": str(model.dtype)},
        "data": found[0],
        "versions": versions,
        "threads": torch.get_num_threads(),
        "code": digest_package(),
    }
