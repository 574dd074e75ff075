"""Channels of a mixture's experts, which llm-compressor has split into linears."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.model.structure.couplings import Coupling, Measured
from struprune_plugin.model.structure.layout import LayerLayout, UnitLayout
from struprune_plugin.model.structure.tiny import TinyRun
from struprune_plugin.model.unit_kind import UNIT_KINDS, ListEntries, UnitGroup
from struprune_plugin.units.entire_experts import count_experts, find_entire_experts
from struprune_plugin.units.expert_reading import ExpertsLayout, find_experts
from struprune_plugin.units.expert_streams import visit_experts
from struprune_plugin.units.ffn import FFNChannels, describe_channels


@UNIT_KINDS.register
class ExpertChannels(FFNChannels):
    """A channel of one expert.

    :param units: ``whole``: entire experts go, those of the least mean of router weight times output norm (REAP), with their
        router entries, equally many in every layer, and the others are re-solved; ``channels``: every expert loses channels of its
        own, also where a mixture's experts cannot go whole. ``widths`` alone means ``channels``
    :param widths: ``same``: all experts of the model keep the same number of channels, so that stock classes and engines load
        the output; ``per_layer``: all experts of a layer do
    """

    label: ClassVar[str] = "expert channels"
    pool: ClassVar[str] = "experts"
    order: ClassVar[int] = 2
    aligned: ClassVar[str] = "grouped kernels: 16 bytes of bfloat16"
    of_mixture: ClassVar[bool] = True
    short_form: ClassVar[tuple[str, Any] | None] = ("prune_experts", True)
    kind: Literal["experts"] = "experts"  # type: ignore[assignment]
    units: Literal["whole", "channels"] = "whole"
    widths: Literal["same", "per_layer"] = "same"

    @property
    def drops_entries(self) -> bool:
        return self.units == "whole"

    @model_validator(mode="before")
    @classmethod
    def _read_widths(cls, value: Any) -> Any:
        return {"units": "channels", **value} if isinstance(value, dict) and "widths" in value else value

    @model_validator(mode="after")
    def _check_widths(self) -> Self:
        if self.drops_entries and self.widths == "per_layer":
            raise ValueError("`widths: per_layer` is of channels, got `units: whole`. Set `units: channels`.")
        return self

    def read(self, measured: Measured, thin: Mapping[str, Coupling], consumer: str) -> UnitLayout | None:
        return None  # experts are read once they are split

    def extend(
        self, model: nn.Module, measured: Sequence[Measured], layouts: Sequence[LayerLayout], run: TinyRun
    ) -> list[LayerLayout]:
        return find_experts(model, measured, layouts, run)

    def list_groups(self, layout: LayerLayout, layer: nn.Module) -> Iterator[UnitGroup]:
        for experts in layout.list_units(ExpertsLayout):
            members: Any = layer.get_submodule(experts.output)
            for index in range(members.num_experts):
                group = describe_channels(self, experts.place(index), layer)
                yield replace(group, mixture=experts.output, tie=self.kind)

    def tie(self, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
        widths = {group.num_units for group in groups}  # several in the output of an earlier `per_layer`
        if self.widths == "same" and len(widths) < 2:
            return [*groups]
        return [replace(group, tie=group.output_name) for group in groups]

    def find_entries(
        self, model: PreTrainedModel, groups: Sequence[UnitGroup], others: Sequence[Any]
    ) -> ListEntries | None:
        try:
            return find_entire_experts(model, groups, others)
        except ValueError as reason:
            raise ValueError(f"experts: their channels go, not entire experts: {reason}") from None

    def take_units(self) -> Self:
        return self.model_copy(update={"units": "channels"})

    def update_config(self, model: PreTrainedModel, groups: Sequence[UnitGroup]) -> None:
        count_experts(model, groups)

    def visit_mixture(
        self, layer: nn.Module, groups: Sequence[UnitGroup], tensors: Any, call: Any, missing: Any
    ) -> Iterator[tuple[UnitGroup, Any]]:
        yield from visit_experts(layer, groups, tensors, call, missing)

    def describe_unit(self, unit: UnitLayout, layer: nn.Module) -> str:
        members: Any = layer.get_submodule(unit.output)
        return f"{unit.output}: {members.num_experts} experts, whole or their channels"

    def read_sizes(self, unit: UnitLayout, layer: nn.Module) -> dict[str, int]:
        return {}  # the width that a configuration states is another module's

    def list_config_keys(self, layout: LayerLayout, layer: nn.Module) -> dict[str, str]:
        return {}

    def count_activations(self, unit: UnitLayout, layer: nn.Module, config: Any) -> int:
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        return (getattr(config, "num_experts_per_tok", None) or 1) * (3 * width + 2 * config.hidden_size)
