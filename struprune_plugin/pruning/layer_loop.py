"""Loop that prunes every decoder layer in order, each on inputs from the pruned layers before it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.layerwise.passes import stream_layers
from struprune_plugin.layerwise.statistics import LayerStatistics
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.surgery import copy_layer, restore_layer
from struprune_plugin.model.units.group import UnitGroup, select_groups
from struprune_plugin.pruning.prune_layer import LayerPruner
from struprune_plugin.pruning.resume import LayerLog
from struprune_plugin.runtime.distributed import count_before
from struprune_plugin.storage.records import GroupRecord


def prune_layers(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    groups: Sequence[UnitGroup],
    pruner: LayerPruner,
    log: LayerLog | None = None,
) -> list[GroupRecord]:
    """Prune a model, layer by layer; return the records of its groups, in order.

    :param groups: groups of all layers
    :param log: log of the finished layers; layers that an earlier process finished are restored from it
    """
    config, context, structure = pruner.config, pruner.context, find_structure(model)
    before = count_before(sum(len(batch["input_ids"]) for batch in batches))
    statistics = LayerStatistics(
        config.reconstruct, context, hold_out=config.chooses_dampening, num_before=before, propagates=True
    )
    records, changed = list[GroupRecord](), False
    for step in stream_layers(model, batches, context, "pruning", propagates=True):
        own, done = select_groups(groups, step.name), None if log is None else log.take(step.index)
        for _ in step.observe(statistics, [] if done else own):  # a finished layer needs only the dense path
            pass
        if done is None:
            outcome = pruner.prune(step.layer, own, statistics, changed, step.progress)
            if log is not None:
                with context.stage("checkpoint"):
                    copy = copy_layer(step.layer, structure[step.index]) if outcome.changed else None
                    log.keep(step.index, outcome, copy)
        else:
            outcome = done.outcome
            if done.copy is not None:
                pruner.drop_experts(step.layer, own)
                restore_layer(step.layer, structure[step.index], done.copy)
                context.release(step.layer)
        changed = outcome.changed
        records += outcome.groups
        statistics.finish_layer()
    return records
