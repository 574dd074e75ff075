"""Requirements of ``output: uniform`` on a recipe and a model."""

from __future__ import annotations

from collections.abc import Sequence

from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from transformers import PreTrainedModel

from struprune_plugin.export.stock_config import are_layers_alike, can_hold_heads, select_configurable
from struprune_plugin.model.units import find_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.fields import StructuredModifier


def select_uniform(recipe: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
    """Return the groups that a stock class can shrink in all layers alike, and those of whole experts, whose width stays.

    :param groups: groups that the recipe selects
    """
    if not are_layers_alike(model):
        return list(groups)  # refused by :func:`check_uniform`
    keeps_width = recipe.experts is not None and recipe.experts.drops
    cut = [group for group in groups if not (group.experts and keeps_width)]
    chosen = {group.name: group for group in (select_configurable(model, cut) if cut else cut)}
    return [chosen.get(group.name, group) for group in groups if group.name in chosen or group not in cut]


def check_uniform(
    recipe: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup], later: Sequence[Modifier]
) -> None:
    """Raise if a recipe with ``output: uniform`` would give a model that no stock class can load.

    :param groups: groups that the recipe selects
    :param later: modifiers behind it in the recipe
    :raises ValueError: in that case
    """
    problem = ""
    if recipe.allocation.measures:
        problem = "needs a uniform allocation, got one that gives layers different sizes. Set `allocation: uniform`"
    elif recipe.attention_unit == "value_channels":
        problem = (
            "needs values as wide as queries and keys, as stock classes do, got `attention_unit: value_channels`. Set "
            "`attention_unit: head` or `attention_unit: none`"
        )
    elif _is_transposed(model) and any(isinstance(other, QuantizationMixin) for other in later):
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


def _is_transposed(model: PreTrainedModel) -> bool:
    """Return whether linears of a model were Conv1D modules, as in GPT-2."""
    return any(hasattr(module, "nf") for module in model.modules())
