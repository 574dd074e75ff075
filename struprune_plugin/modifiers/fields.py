"""Recipe fields that both structured modifiers share, and the settings that lower-level packages receive from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ByteSize, Field, PrivateAttr, SerializeAsAny, model_validator
from transformers import PreTrainedModel

from struprune_plugin.allocation.rules import RULES, AllocationRule
from struprune_plugin.export.any_class import replace_conv1d
from struprune_plugin.export.outputs import OUTPUTS
from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.linalg.solve import DAMPENING
from struprune_plugin.model.experts import linearize_experts
from struprune_plugin.model.groups import list_groups
from struprune_plugin.model.layers import find_layouts
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.unit_kind import UNIT_KINDS, UnitGroup, UnitKind, list_kinds
from struprune_plugin.modifiers.stage_modifier import StageModifier
from struprune_plugin.pruning.config import PruningConfig
from struprune_plugin.pruning.importance import IMPORTANCES, Importance
from struprune_plugin.pruning.weight_update import WEIGHT_UPDATES, WeightUpdate
from struprune_plugin.runtime.precision import Precision
from struprune_plugin.settings.registry import Config, Patterns

UnitField = Annotated[SerializeAsAny[UnitKind], BeforeValidator(UNIT_KINDS.parse)]
ImportanceField = Annotated[SerializeAsAny[Importance], BeforeValidator(IMPORTANCES.parse)]
WeightUpdateField = Annotated[SerializeAsAny[WeightUpdate], BeforeValidator(WEIGHT_UPDATES.parse)]
AttentionUnit = Annotated[
    Literal["head", "value_channels", "none"],
    BeforeValidator(lambda value: "value_channels" if value == "vo" else value),
]
AllocationField = Annotated[SerializeAsAny[AllocationRule], BeforeValidator(RULES.parse)]

EFFORTS: dict[str, dict[str, Any]] = {  # values of the fields that a recipe leaves out
    "fast": {"sensitivity": {"samples": 8}, "allocation": {"samples": 8, "trial_samples": 0}, "rotate_values": False},
    "default": {},
    "best": {"sensitivity": {"samples": 64}, "allocation": {"samples": 64, "trial_samples": 16}},
}


class BudgetConfig(Config):
    """One limit on the size of the pruned model.

    :param parameters: parameters that stay, embeddings included: their number, or a share below 1 of the whole model's; met to
        within the rounding of widths
    :param bytes: bytes of the saved weights, embeddings included, before a quantiser: a number, or digits before kB, MB
        or GB; met to within the rounding of widths
    """

    parameters: float | None = Field(default=None, gt=0)
    bytes: ByteSize | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_parts(self) -> BudgetConfig:
        names = [name for name, value in self if value is not None]
        if len(names) != 1:
            raise ValueError(f"must give parameters or bytes, got {', '.join(names) or 'none'}. Choose one.")
        if self.parameters is not None and self.parameters >= 1 and not self.parameters.is_integer():
            raise ValueError(
                f"parameters must be a share below 1 or a whole number, got {self.parameters}. Correct it."
            )
        return self

    @property
    def name(self) -> str:
        """What is limited."""
        return "parameters" if self.bytes is None else "bytes"

    def find_limit(self, num_parameters: int) -> int:
        """Return how many parameters, or bytes, may stay.

        :param num_parameters: parameters of the model before pruning
        """
        if self.parameters is None:
            return int(self.bytes or 0)
        return max(int(self.parameters * num_parameters if self.parameters < 1 else self.parameters), 1)


class Fisher(Config):
    """Settings of the Fisher information of each module's output, see
    :func:`~struprune_plugin.allocation.sensitivity.measure_fisher`.

    :param samples: calibration sequences that it is measured on
    """

    method: Literal["fisher"] = "fisher"
    samples: int = Field(default=16, ge=1)


def _read_short_forms(value: Any) -> Any:
    """Return the settings for the short forms ``fisher`` and ``none``."""
    return {"fisher": {}, "none": None}.get(value, value) if isinstance(value, str) else value


def _read_experts(value: Any) -> UnitKind | None:
    """Return the kind of units that ``experts`` asks for: a value of its ``units``, a mapping of its fields, or none."""
    if value is None or value == "none":
        return None
    fields = {"units": value} if isinstance(value, str) else value
    return UNIT_KINDS.parse({"kind": "experts", **fields} if isinstance(fields, dict) else fields)


def list_short_forms(kinds: Sequence[UnitKind]) -> dict[str, Any]:
    """Return the values of ``attention_unit``, ``prune_ffn`` and ``experts`` that ask for kinds of units."""
    asked = dict(kind.short_form for kind in kinds if kind.short_form)
    experts = next((kind for kind in kinds if kind.short_form == ("prune_experts", True)), None)
    attention_unit, prune_ffn = asked.get("attention_unit", "none"), asked.get("prune_ffn", False)
    return {"attention_unit": attention_unit, "prune_ffn": prune_ffn, "experts": experts}


class StructuredModifier(StageModifier):
    """Base of the structured modifiers: fields that choose the units, rank them and spread a budget over layers.

    :param sparsity: share of the parameters to remove, counted over all linears of the modules that hold units, in [0, 1)
    :param budget: limit for the pruned model, in place of ``sparsity``: a mapping of one field of :class:`BudgetConfig`
    :param targets: modules to prune, named by their consuming linears (``fc2``, ``o_proj``): exact names or ``re:<pattern>``
    :param ignore: modules to leave alone, named in the same way
    :param units: kinds of units to prune, each a name or a mapping with ``kind`` and the kind's fields; in place of
        ``attention_unit``, ``prune_ffn`` and ``experts``, which are short forms
    :param attention_unit: ``head``; ``value_channels`` (the same number per head; ``vo`` is a short form); ``none``
    :param prune_ffn: prune FFN channels
    :param experts: ``whole``, ``channels``, ``none``, or a mapping of the fields of ``units: [experts]``
    :param width_multiple: kept FFN widths are multiples of this number and of the sizes that later quantisers and sparsity
        modifiers need. ``auto``: 8 (or 4 or 2) if it divides the width before pruning, from 512 channels on
    :param importance: ranking of units: a name, or a mapping with ``method`` and the method's fields
    :param weight_update: update of the remaining weights, in the same way
    :param allocation: rule for the number of units that each module keeps: a name, or a mapping with ``rule`` and its fields
    :param sensitivity: weight of errors: ``fisher``, a mapping with its ``samples``, or ``none``
    :param dampening_frac: weight of the dense weights in every solve, relative to the mean diagonal of the Gram matrix.
        ``auto`` is 0.01, except in the least-squares solve that gives a module its weights: that uses the best value on
        every fourth sequence, which is held out
    :param rotate_values: rotate the values of each head first, so that few channels carry most of the output; for value
        channels with ``obs`` and a solve
    :param effort: ``fast``, ``default`` or ``best``: fields of :data:`EFFORTS` that the recipe leaves out
    :param precision: dtype in which layers compute: ``model``, the one that it is loaded in and saved in; ``float32``; ``auto``:
        float32 where the device has no products of the model's dtype
    :param offload: keep states, moments, solves and embeddings on the host, and on the device only the layer that runs
    """

    sparsity: float | None = Field(default=None, ge=0, lt=1)
    budget: BudgetConfig | None = None
    targets: Annotated[Patterns, Field(min_length=1)] = Field(default_factory=lambda: ["re:.*"])
    ignore: Patterns = Field(default_factory=list)
    units: Annotated[list[UnitField], Field(min_length=1)] | None = None
    _added: list[UnitKind] = PrivateAttr(default_factory=list)
    attention_unit: AttentionUnit = "value_channels"
    prune_ffn: bool = True
    experts: Annotated[SerializeAsAny[UnitKind] | None, BeforeValidator(_read_experts)] = Field(
        default="whole",
        validate_default=True,  # type: ignore[arg-type]
    )
    width_multiple: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    importance: ImportanceField = Field(default="obs", validate_default=True)  # type: ignore[arg-type]
    weight_update: WeightUpdateField = Field(default="least_squares", validate_default=True)  # type: ignore[arg-type]
    allocation: AllocationField = Field(default="uniform", validate_default=True)  # type: ignore[arg-type]
    sensitivity: Annotated[Fisher | None, BeforeValidator(_read_short_forms)] = Field(default_factory=Fisher)
    dampening_frac: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["auto"] = "auto"
    rotate_values: bool = True
    effort: Literal[tuple(EFFORTS)] = "default"  # type: ignore[valid-type]
    precision: Precision = "auto"
    offload: bool = False

    @model_validator(mode="after")
    def _check_budgets(self) -> StructuredModifier:
        if self.budget is not None and self.sparsity is not None:
            raise ValueError("sparsity and budget are two budgets. Remove one of them.")
        return self

    @model_validator(mode="after")
    def _take_effort(self) -> StructuredModifier:
        """Set the fields that the recipe leaves out to the values of ``effort``, without marking them as set."""
        named = set(self.model_fields_set)
        for name, values in EFFORTS[self.effort].items():
            settings = getattr(self, name)
            if isinstance(settings, Config):
                left_out = type(settings).model_fields.keys() - settings.model_fields_set
                changes = {field: value for field, value in values.items() if field in left_out}
                setattr(self, name, settings.model_copy(update=changes))
            elif isinstance(settings, bool) and name not in named:
                setattr(self, name, values)
        self.model_fields_set.intersection_update(named)
        return self

    def list_units(self) -> list[UnitKind]:
        """Return the kinds of units to prune."""
        if self.units is not None:
            return [*self.units]
        kinds = list_kinds(attention_unit=self.attention_unit, prune_ffn=self.prune_ffn)
        kinds += self._added if self.attention_unit != "none" else []
        return kinds if self.experts is None else [*kinds, self.experts]

    @property
    def prunes_mixtures(self) -> bool:
        """True if units of mixtures may go."""
        return any(kind.of_mixture for kind in self.list_units())

    def take_units(self, kinds: list[UnitKind]) -> Self:
        """Return the recipe with other kinds of units to prune."""
        return self.model_copy(update={"units": self.units and kinds, **list_short_forms(kinds)})

    @model_validator(mode="after")
    def _read_units(self) -> StructuredModifier:
        """Set the short forms to what ``units`` says."""
        for name, value in list_short_forms(self.units).items() if self.units is not None else ():
            if name in self.model_fields_set and getattr(self, name) != value:
                raise ValueError(f"units and {name} are two choices of units. Remove one of them.")
            setattr(self, name, value)
        return self

    def make_config(self, reconstruct: str = "local") -> PruningConfig:
        """Return the configuration that the pruning of a layer depends on."""
        return PruningConfig(
            importance=self.importance,
            weight_update=self.weight_update,
            reconstruct=TARGETS[reconstruct],
            dampening_frac=DAMPENING if isinstance(self.dampening_frac, str) else self.dampening_frac,
            chooses_dampening=self.dampening_frac == "auto",
            rotate_values=self.rotate_values,
            sparsity=self.sparsity or 0.0,
        )

    @property
    def sensitivity_samples(self) -> int | None:
        """Sequences for the Fisher information; None if nothing is weighed by it."""
        weighs = self.importance.eliminates or self.allocation.weighs_errors
        return self.sensitivity.samples if self.sensitivity is not None and weighs else None


class PruningFields(StructuredModifier):
    """Fields of the pruning stage: those of :class:`StructuredModifier`, and:

    :param reconstruct: target of a solve (method.md section 2)
    :param output: ``per_layer``: each layer has its own size, and our modelling file travels with the checkpoint;
        ``uniform``: all layers have the same size, the allocation is uniform, and stock classes load the output
    """

    allocation: AllocationField = Field(default="error_curve", validate_default=True)  # type: ignore[arg-type]
    reconstruct: Literal[tuple(TARGETS)] = "half_residual"  # type: ignore[valid-type]
    output: Literal[tuple(OUTPUTS)] = "per_layer"  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _complete_fields(self) -> PruningFields:
        """Set the allocation that the output needs, unless the recipe does, without marking it as set."""
        rule = OUTPUTS[self.output].default_allocation
        if rule is not None and "allocation" not in self.model_fields_set:
            self.allocation = RULES.parse(rule)
            self.model_fields_set.discard("allocation")
        return self

    def add_units(self, model: PreTrainedModel) -> Self:
        """Return the recipe with the kinds of units that a model and its output allow and recipes without ``units`` prune, too."""
        recipe, present = self.model_copy(), {unit.kind for unit in find_structure(model).list_units()}
        kinds = [kind for kind in list_kinds() if kind.by_default and kind.kind in present]
        recipe._added = [kind for kind in kinds if not OUTPUTS[self.output].find_obstacle(model, kind)]
        return recipe

    def prepare_groups(self, model: PreTrainedModel) -> list[UnitGroup]:
        """Return the groups that the recipe selects and its output can hold; transposed linears (GPT-2) are converted and experts
        split in place first."""
        replace_conv1d(model)
        kinds = self.list_units()
        for kind in kinds:
            kind.check(model.config.model_type, find_layouts(model))
        if self.prunes_mixtures and find_structure(model).has_mixtures:
            linearize_experts(model)
        return OUTPUTS[self.output].select(model, list_groups(model, kinds, self.targets, self.ignore))
