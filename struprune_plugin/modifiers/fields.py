"""Recipe fields and checks that both modifiers share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from llmcompressor.core import active_session
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from struprune_plugin.allocation import MAX_SPARSITY, GroupSize, find_group_sparsity
from struprune_plugin.importance import score_magnitude, score_wanda, score_wanda_l2
from struprune_plugin.solve import Elimination, eliminate_units, expand_units, order_units
from struprune_plugin.statistics import Moments
from struprune_plugin.surgery import check_sliceable, read_weight
from struprune_plugin.topology import UnitGroup, count_prunable_parameters, find_groups, find_linear

GROUP_FIELDS = ("targets", "ignore", "attention_unit", "prune_ffn", "channel_multiple")


class StructuredModifier(Modifier):
    """Fields that choose the units, score them and spread a budget over layers.

    :param sparsity: fraction of the parameters of all linears in the decoder layers to remove, in [0, 1)
    :param targets: consuming linears (``fc2``, ``out_proj``) of the modules to prune, exact names or ``re:<pattern>``
    :param ignore: the same, for modules to leave alone
    :param attention_unit: ``head``; ``vo`` (value channels, the same number from every head); ``none``
    :param prune_ffn: whether to prune FFN channels
    :param channel_multiple: kept FFN widths are whole multiples of this
    :param importance: how units are ranked, see method.md section 3
    :param restoration: ``least_squares`` re-solves what remains, ``none`` deletes only
    :param damping: weight of the dense weights in every solve, relative to the mean diagonal of the Gram matrix
    :param temperature: of the softmax rules, relative to std(I) (R8); a list is searched by error (R9)
    :param rho: attention's factor in Algorithm 3; cancels under a relative temperature, kept for completeness
    :param gamma: decay of importance with depth in Algorithm 3
    :param max_sparsity: clip of a module's sparsity in Algorithms 2 and 3
    :param as_printed: allocate exactly as the paper prints, and miss the budget where it does (R6, R7)
    """

    requires_calibration_data: bool = True

    sparsity: float | None = None
    targets: list[str] = Field(default_factory=lambda: ["re:.*"], min_length=1)
    ignore: list[str] = Field(default_factory=list)
    attention_unit: Literal["head", "vo", "none"] = "vo"
    prune_ffn: bool = True
    channel_multiple: int = Field(default=1, ge=1)
    importance: Literal["obs", "wanda", "wanda_l2", "magnitude"] = "obs"
    restoration: Literal["least_squares", "none"] = "least_squares"
    damping: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    temperature: float | list[float] = Field(default_factory=lambda: [0.5, 1.0, 2.0, 4.0, 8.0, 16.0])
    rho: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    gamma: float = Field(default=0.9, gt=0, le=1)
    max_sparsity: float = Field(default=MAX_SPARSITY, gt=0, lt=1)
    as_printed: bool = False

    @field_validator("sparsity")
    @classmethod
    def _check_sparsity(cls, value: float | None) -> float | None:
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"sparsity must be in [0, 1), got {value}. It is the fraction of parameters removed.")
        return value

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float | list[float]) -> float | list[float]:
        grid = value if isinstance(value, list) else [value]
        if not grid or not all(t > 0 and math.isfinite(t) for t in grid):
            raise ValueError(f"temperature must be above 0, one value or a list of at least one, got {value}.")
        return value

    @model_validator(mode="after")
    def _check_stageless(self) -> StructuredModifier:
        if self.start is not None or self.end is not None:
            raise ValueError(
                "start and end must be left out: structured pruning happens once, in one calibration pass."
            )
        return self

    @property
    def temperatures(self) -> list[float]:
        return self.temperature if isinstance(self.temperature, list) else [self.temperature]

    def find_groups(self, model: nn.Module) -> list[UnitGroup]:
        return find_groups(model, self.attention_unit, self.prune_ffn, self.targets, self.ignore)

    def measure_groups(self, groups: Iterable[UnitGroup]) -> list[GroupSize]:
        """Return what allocation needs to know of the groups."""
        return [
            GroupSize(
                name=group.name,
                kind=group.module_kind,
                num_units=group.num_units,
                unit_cost=group.unit_cost,
                step=group.num_blocks if group.kind != "ffn" else self.channel_multiple,
            )
            for group in groups
        ]

    def check_model(self, model: nn.Module, groups: list[UnitGroup], sparsity: float) -> None:
        """Refuse, before any calibration, what cannot succeed.

        :raises ValueError: the violated contract
        """
        config = getattr(model, "config", None)
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                "model: must not be quantised yet, got a config with quantization_config. "
                "Prune the full-precision checkpoint and quantise afterwards."
            )
        self._check_order()
        for group in groups:
            check_sliceable(model.get_submodule(group.layer_name), group)
            if group.kind == "ffn" and self.channel_multiple > group.num_units:
                raise ValueError(
                    f"{group.name}: channel_multiple must be at most the width {group.num_units}, "
                    f"got {self.channel_multiple}. Lower it."
                )
        find_group_sparsity(self.measure_groups(groups), count_prunable_parameters(model), sparsity)

    def check_calibration(self, loader: Iterable | None, groups: list[UnitGroup]) -> tuple[int, int]:
        """Return (sequences, tokens) of the calibration data; refuse too few.

        :raises ValueError: no data, or fewer tokens than the widest solve has unknowns a row
        """
        if loader is None:
            raise ValueError("dataset: calibration text must be given, got none. Pass dataset=… to oneshot.")
        num_sequences = num_tokens = 0
        for batch in loader:
            mask = batch.get("attention_mask")
            num_sequences += len(batch["input_ids"])
            num_tokens += int(batch["input_ids"].numel() if mask is None else mask.sum())
        widest = max(groups, key=lambda group: group.num_columns)
        if num_tokens < widest.num_columns + 1:
            raise ValueError(
                f"{widest.name}: calibration must have at least {widest.num_columns + 1} tokens (its inputs and the bias), "
                f"got {num_tokens} in {num_sequences} sequences. Raise the number or the length of the samples."
            )
        return num_sequences, num_tokens

    def check_alone(self) -> None:
        """Refuse a calibration pass that other modifiers share.

        :raises ValueError: a ``sequential`` pipeline runs several modifiers at once
        """
        modifiers = active_session().lifecycle.recipe.modifiers
        if len(modifiers) > 1:
            raise ValueError(
                f"pipeline: {type(self).__name__} must have a calibration pass of its own, got one shared by "
                f"{[type(m).__name__ for m in modifiers]}. Use pipeline='independent', the default."
            )

    def _check_order(self) -> None:
        for modifier in active_session().lifecycle.recipe.modifiers:
            if modifier is self:
                return
            if isinstance(modifier, QuantizationMixin):
                raise ValueError(
                    f"recipe: {type(self).__name__} must come before every quantiser, got {type(modifier).__name__} first. "
                    "Move the pruning stage up."
                )

    def rank_units(
        self, layer: nn.Module, group: UnitGroup, moments: Moments, damped: Moments
    ) -> tuple[Tensor, Tensor]:
        """Rank a group's units.

        :return: (order, scores): units in the order of removal, and the score of each unit, both of shape [units]
        """
        if self.importance == "obs":
            elimination: Elimination = eliminate_units(damped, group.columns_per_unit, group.num_blocks)
            scores = torch.empty_like(elimination.increase)
            scores[elimination.order] = elimination.increase
            return elimination.order, scores
        weight, _ = read_weight(find_linear(layer, group.consumer))
        columns = expand_units(torch.arange(group.num_units, device=weight.device), group.columns_per_unit)
        unit_columns = columns.view(group.num_units, -1)
        if self.importance == "wanda":
            scores = score_wanda(moments, weight, unit_columns)
        elif self.importance == "wanda_l2":
            scores = score_wanda_l2(moments, weight, unit_columns)
        else:
            rows = [
                read_weight(find_linear(layer, name))[0].abs().view(group.num_units, -1).sum(1, dtype=torch.float64)
                for name in group.producers
            ]
            scores = score_magnitude(weight, unit_columns, rows)
        return order_units(scores, group.num_blocks), scores

    def dump_fields(self) -> dict[str, Any]:
        """Return the recipe fields, without the host's bookkeeping."""
        hosts = set(Modifier.model_fields)
        return {name: value for name, value in self.model_dump().items() if name not in hosts}
