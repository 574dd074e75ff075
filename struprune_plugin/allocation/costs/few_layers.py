"""Models of a few decoder layers in which the modules of one kind are cut in every layer alike."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from struprune_plugin.allocation.costs.measure_costs import Change
from struprune_plugin.export.convert import adopt_attention, can_narrow
from struprune_plugin.model.structure.tiny import find_class
from struprune_plugin.model.surgery import cut_units
from struprune_plugin.model.units import find_groups
from struprune_plugin.model.units.kinds import VALUE


def shorten_class(model: PreTrainedModel, num_layers: int) -> tuple[Any, PreTrainedConfig]:
    """Return a model's class, and a configuration for the class to build it with fewer layers."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = num_layers
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:num_layers]
    return find_class(config, type(model))


def adopt_all(model: PreTrainedModel) -> None:
    """Convert a dense model's attention to the class that pruned models have, where it accepts values of any width."""
    if can_narrow(model):
        adopt_attention(model, ())


def cut_alike(model: PreTrainedModel, change: Change) -> None:
    """Cut the counterparts of a change's group in every layer to the same number of units, with values that mean nothing."""
    unit: Any = "none" if change.group.unit.is_ffn else change.group.kind
    groups = [group for group in find_groups(model, unit) if group.consumer == change.group.consumer]
    if change.group.unit is VALUE and not can_narrow(model):
        adopt_attention(model, groups)
    cut_units(model, groups, {group.name: change.units for group in groups})
