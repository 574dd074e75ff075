"""Recipe fields that a run would pass over, refused by name.

A field counts as given where the recipe sets it to something else than its default: saved recipes spell every field, and a
default asks for nothing. Values that switch a part off (``sensitivity: none``) are never passed over: that part is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmcompressor.modifiers import Modifier

from struprune_plugin.layer.criteria import CRITERIA
from struprune_plugin.layer.methods import RESTORATIONS
from struprune_plugin.modifiers.fields import PLAN_FIELDS, StructuredModifier
from struprune_plugin.passes.rules import RULES


@dataclass(frozen=True)
class Use:
    """What a field is for.

    :param is_used: whether a modifier reads it, by its other fields
    :param remedy: what would make it count
    :param off: a value that switches something off, beside the default
    """

    is_used: Callable[[Any], bool]
    remedy: str
    off: Any = None


def _searches(modifier: StructuredModifier) -> bool:
    return modifier.allocation in RULES and RULES[modifier.allocation].searches


def _clips(modifier: StructuredModifier) -> bool:
    return (modifier.allocation in RULES and RULES[modifier.allocation].clips) or CRITERIA[
        modifier.importance
    ].per_token


def _runs_admm(modifier: StructuredModifier) -> bool:
    """Tell whether Algorithm 4's sub-steps run; an allocator stage restores nothing, it may rank by them."""
    refines = RESTORATIONS[modifier.restoration].refines and not modifier.only_plans
    return refines or CRITERIA[modifier.importance].per_token


def _runs_admm_on_attention(modifier: StructuredModifier) -> bool:
    return _runs_admm(modifier) and modifier.attention_unit != "none"


def _takes_samples(modifier: StructuredModifier) -> bool:
    own_pass = not modifier.only_plans and modifier.allocation in RULES
    return (own_pass and RULES[modifier.allocation].few_samples) or modifier.sensitivity_samples is not None


def _tries(modifier: StructuredModifier) -> bool:
    return modifier.allocation in RULES and RULES[modifier.allocation].propose is not None


def _swaps(modifier: StructuredModifier) -> bool:
    return CRITERIA[modifier.importance].eliminates and (modifier.prune_ffn or modifier.attention_unit == "vo")


_ADMM = "restoration: admm or importance: closed_form"
_USES: dict[str, Use] = {
    "channel_multiple": Use(lambda m: m.prune_ffn, "prune_ffn: true"),
    "temperature": Use(_searches, "allocation: softmax, softmax_inverse or block_influence"),
    "gamma": Use(lambda m: m.allocation == "softmax_inverse", "allocation: softmax_inverse"),
    "rho": Use(lambda m: m.allocation == "softmax_inverse", "allocation: softmax_inverse"),
    "max_sparsity": Use(_clips, "allocation: error_curve or one of the softmax rules"),
    "as_printed": Use(
        lambda m: _searches(m) or CRITERIA[m.importance].per_token,
        "one of the softmax rules or importance: closed_form",
    ),
    "allocation_samples": Use(_takes_samples, "sensitivity: fisher with importance: obs, or allocation: error_curve"),
    "trial_samples": Use(_tries, "allocation: error_curve", off=0),
    "max_swaps": Use(_swaps, "importance: obs with FFN channels or value channels to prune", off=0),
    "tuning_learning_rate": Use(lambda m: m.tuning_epochs > 0, "tuning_epochs above 0"),
    "alpha": Use(_runs_admm, _ADMM),
    "beta": Use(_runs_admm, _ADMM),
    "admm_steps": Use(_runs_admm, _ADMM),
    "admm_inner_steps": Use(_runs_admm_on_attention, f"{_ADMM}, with attention to prune"),
    "admm_learning_rate": Use(_runs_admm_on_attention, f"{_ADMM}, with attention to prune"),
    "attention_method": Use(_runs_admm_on_attention, f"{_ADMM}, with attention to prune"),
}
_PLANNED = {"trial_samples": Use(lambda _: False, "allocation here, without a SparsityAllocatorModifier stage", off=0)}
_ON_ATTENTION = ("admm_inner_steps", "admm_learning_rate", "attention_method")  # of ADMM's sub-steps


def check_used(modifiers: Sequence[Modifier]) -> None:
    """Refuse fields that are given and that their run would pass over.

    :param modifiers: of a whole recipe, in order
    :raises ValueError: the same
    """
    for place, modifier in enumerate(modifiers):
        planned = any(isinstance(other, StructuredModifier) and other.only_plans for other in modifiers[:place])
        if isinstance(modifier, StructuredModifier) and not getattr(
            modifier, "replay", None
        ):  # which repeats all fields
            for name, use in (_USES | (_PLANNED if planned else {})).items():
                if not (planned and name in PLAN_FIELDS):  # these are compared with the stage before, which rules
                    _refuse(modifier, name, use)


def check_used_without_attention(modifier: StructuredModifier) -> None:
    """Refuse fields of ADMM's attention for a model whose queries and keys positions rotate: least squares does that there.

    :raises ValueError: the same
    """
    for name in _ON_ATTENTION:
        _refuse(modifier, name, Use(lambda _: False, "a model without rotary positions"))


def list_given(modifier: Modifier) -> set[str]:
    """Return the fields that a recipe sets to something else than their defaults."""
    fields = type(modifier).model_fields
    return {
        name
        for name in modifier.model_fields_set & fields.keys()
        if getattr(modifier, name) != fields[name].get_default(call_default_factory=True)
    }


def _refuse(modifier: StructuredModifier, name: str, use: Use) -> None:
    if name not in list_given(modifier) or use.is_used(modifier):
        return
    value = getattr(modifier, name)
    if use.off is not None and value == use.off:
        return
    raise ValueError(
        f"{type(modifier).__name__}: {name} must be left out where the run makes no use of it, got {value!r}. Leave it out, or "
        f"set {use.remedy}."
    )
