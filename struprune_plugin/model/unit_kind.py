"""What the other rooms ask of a kind of units (:class:`UnitKind`), and a group of coupled units that it describes.

Kinds are guests in ``struprune_plugin.units``, one per file, registered as a third party's are. No other file names one.
Moments and weights outside ``struprune_plugin.model`` have the consumer's columns in *unit order*: those of one unit are adjacent.
Activations have them in the module's order (:meth:`UnitGroup.to_unit_order`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.model.structure.couplings import Coupling, Measured
from struprune_plugin.model.structure.layout import Join, LayerLayout, Producers, UnitLayout
from struprune_plugin.model.structure.locate import find_linear, read_padding
from struprune_plugin.model.structure.tiny import TinyRun
from struprune_plugin.model.structure.trial_removal import find_flaw
from struprune_plugin.settings.registry import Config, Registry

ALIGNED = 8  # numbers of bfloat16 in 16 bytes: kernels of matrix units need rows that are multiples of it


class UnitKind(Config):
    """Kind of units: from the proof on a tiny layer to the word in a report. Its fields are its options in a recipe.

    ``unit`` is a module of one layer, as :meth:`read` or :meth:`extend` returned it.

    :cvar label: units in tables and reports, such as ``FFN channels``
    :cvar pool: groups of one pool are allocated together
    :cvar order: place in a layer: 0 mixers of tokens, 1 FFNs, 2 experts; modules beside experts come last
    :cvar parts: parts of producers whose rows belong to units; rows of other parts are never removed
    :cvar splits_blocks: whether a unit is a channel of a block, such as a head, else a whole block or a channel alone
    :cvar aligned: why numbers of units are multiples of 8, or of 4 or 2 where 8 does not divide the dense one; empty for no reason
    :cvar of_mixture: whether its modules are those of a mixture, which is split into linears first
    :cvar short_form: recipe's field, and its value, that also ask for the kind; None where there is none
    :cvar by_default: whether recipes without ``units`` prune it wherever a model has it, unless attention stays whole
    :cvar solve_copies: number of float64 Gram matrices alive at the same time in the worst solve, float32 ones counted half
    """

    label: ClassVar[str]
    pool: ClassVar[str]
    order: ClassVar[int] = 1
    parts: ClassVar[tuple[str, ...]]
    splits_blocks: ClassVar[bool] = False
    aligned: ClassVar[str] = ""
    of_mixture: ClassVar[bool] = False
    short_form: ClassVar[tuple[str, Any] | None] = None
    by_default: ClassVar[bool] = False
    solve_copies: ClassVar[int] = 7
    kind: str

    @property
    def is_mixer(self) -> bool:
        """True if the units' modules mix tokens."""
        return self.order == 0

    # -- on a tiny instance ----------------------------------------------------------------------------------------

    def read(self, measured: Measured, thin: Mapping[str, Coupling], consumer: str) -> UnitLayout | None:
        """Return the module that ends in a linear if its units are of this kind.

        :param thin: linears with a row that reaches only a part of the consumer's columns, and how
        """
        return None

    def list_surplus(self, units: Sequence[UnitLayout]) -> dict[str, str]:
        """Return the reasons, by their last linear, why modules that were read in one layer stay whole beside the others."""
        return {}

    def prove(self, unit: Any, measured: Measured, run: TinyRun) -> tuple[str, UnitLayout]:
        """Return why units cannot be removed, empty where they can, and the module with its proved properties.

        By default every third column goes, with the rows that reach no other.
        """
        return find_flaw(unit, measured, torch.arange(measured.inputs[unit.output].shape[-1]) % 3 == 0, run), unit

    def extend(
        self, model: nn.Module, measured: Sequence[Measured], layouts: Sequence[LayerLayout], run: TinyRun
    ) -> list[LayerLayout]:
        """Return the layouts of the types of layers with units that need more than one measurement of a layer.

        :param model: tiny instance, which may be changed as long as its function does not
        """
        return [*layouts]

    # -- entries of lists of modules that go in place of units ----------------------------------------------------------

    @property
    def drops_entries(self) -> bool:
        """True if entries of lists of modules go, before anything is ranked, and those that stay keep all units."""
        return False

    def find_entries(
        self, model: PreTrainedModel, groups: Sequence[UnitGroup], others: Sequence[Any]
    ) -> ListEntries | None:
        """Return the entries that may go where :attr:`drops_entries` is set; None where the model has none.

        :param groups: of this kind, of all layers
        :param others: the recipe's other modifiers
        :raises ValueError: entries cannot go; the message says why, and that units go instead
        """
        raise NotImplementedError

    def take_units(self) -> Self:
        """Return the settings by which units go in place of entries."""
        raise NotImplementedError

    def update_config(self, model: PreTrainedModel, groups: Sequence[UnitGroup]) -> None:
        """Update what the configuration of a pruned model states, before the model's class is built with it.

        :param groups: of this kind, of all layers, before anything went
        """

    # -- on a model ------------------------------------------------------------------------------------------------

    def list_groups(self, layout: LayerLayout, layer: nn.Module) -> Iterator[UnitGroup]:
        """Yield the groups of a layer whose units are of this kind, without the layer's position in the model."""
        raise NotImplementedError

    def check(self, model_type: str, layers: Sequence[tuple[nn.Module, LayerLayout]]) -> None:
        """Raise a ValueError where units of this kind cannot be removed from a model's layers as they are now."""

    def tie(self, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
        """Return the chosen groups of this kind, of all layers, with those tied that must keep the same number of units."""
        return [*groups]

    def describe_unit(self, unit: Any, layer: nn.Module) -> str:
        """Return what can be removed from a module, as ``plan`` says it."""
        return f"{unit.output}: {find_linear(layer, unit.output).in_features:,} {self.label}"

    def read_sizes(self, unit: Any, layer: nn.Module) -> dict[str, int]:
        """Return a module's present sizes by the fields of :class:`~struprune_plugin.model.layers.LayerSizes`."""
        return {}

    def list_config_keys(self, layout: LayerLayout, layer: nn.Module) -> dict[str, str]:
        """Return those fields by the keys of configurations that may state them."""
        return {}

    def release(self, unit: Any, layer: nn.Module) -> str:
        """Let stock code that sees zeros in place of whole units count the present ones; return the name of its module, if any."""
        return ""

    def count_activations(self, unit: Any, layer: nn.Module, config: Any) -> int:
        """Return the numbers per token that a module's forward pass holds.

        :param config: of the text decoder, as this layer reads it
        """
        rows = sum(find_linear(layer, name).out_features for name in unit.producers)
        return rows + find_linear(layer, unit.output).in_features

    def describe(self, group: UnitGroup) -> str:
        """Return the words for a group's units, as tables show them; the label alone, or followed by `` × …``."""
        return self.label

    def visit_mixture(
        self, layer: nn.Module, groups: Sequence[UnitGroup], tensors: Any, call: Any, missing: Any
    ) -> Iterator[tuple[UnitGroup, Any]]:
        """Yield every group of a mixture with its ``ConsumerBatch`` (``layerwise/capture.py``) in a forward pass.

        :param tensors: ``ModuleTensors`` of the pass
        :param missing: what the mixture has to add, and factors on the tokens' errors, or None
        """
        raise NotImplementedError

    def list_weights(self, layer: nn.Module, group: UnitGroup) -> list[Tensor]:
        """Return the weights of a group's dense module part by part, for methods that weigh a module by them: its linears."""
        return [find_linear(layer, name).weight.detach() for name in (*group.producers, group.consumer)]

    def describe_padding(self, group: UnitGroup) -> dict[str, Any]:
        """Return the padding, by linear, with which stock code sees a group's dense units, none of which is removed yet; empty
        where it runs at any width."""
        return {}

    def list_steps(self, group: UnitGroup, width_multiple: int | None) -> Iterator[tuple[int, str]]:
        """Yield (multiple, reason) of the numbers of units that a group may keep.

        :param width_multiple: the recipe's; None for ``auto``
        """
        if self.aligned:
            yield math.gcd(ALIGNED, group.num_units), self.aligned
        yield group.num_blocks, ""

    def resize_module(self, layer: nn.Module, group: UnitGroup, num_keep: int) -> None:
        """Update a module's padding, and what it counts by itself, to the units that its linears hold."""
        for name, parts in {**group.producers, group.consumer: self.parts}.items():
            for form in read_padding(layer, name).values():
                for part, segment in zip(parts, form["segments"], strict=False):
                    if part in self.parts:
                        segment[1] = segment[1] * num_keep // group.num_units


UNIT_KINDS: Registry[UnitKind] = Registry(UnitKind, "kind")  # in the order in which they read a layer


def list_kinds(**short_forms: Any) -> list[UnitKind]:
    """Return all registered kinds with their default options, or those that short forms of a recipe ask for."""
    kinds = [UNIT_KINDS.parse(name) for name in UNIT_KINDS]
    return [kind for kind in kinds if not short_forms or kind.short_form in [*short_forms.items()]]


@dataclass(frozen=True)
class UnitGroup:
    """Coupled units of one module of one decoder layer, its linears, and how its output joins the residual stream.

    Names of linears and submodules are relative to the layer.
    For example, the FFN of LLaMA's first layer: consumer ``mlp.down_proj`` [4096, 11008] loses columns, the producers
    ``mlp.gate_proj`` and ``mlp.up_proj`` [11008, 4096] lose the rows of the same channels; num_units is 11008, unit_cost
    3 * 4096, and the consumer's output is added to the input of ``post_attention_layernorm`` (``join.residual``).

    :param layout: the module as its kind has read it, a :class:`UnitLayout`
    :param num_units: number of present units
    :param part_rows: number of rows per part of a block
    :param unit_cost: parameters that removing one unit frees
    :param num_blocks: number of equal runs of units that each keep the same number
    :param runs: number of runs of rows per block, for producers whose rows are not part by part
    :param rotates: whether the units of a block may be rotated into each other first
    :param module: module whose output these units alone change; empty where none is known
    :param mixture: list of modules that holds the group's, each with tokens and weights of its own; empty where it stands alone
    :param tie: groups with the same tie keep the same number of units; empty where a group's number is independent
    :param extra_linears: other linears of the module that a method may change; empty where none knows how
    :param is_coupled: whether a norm over all units lies before the consumer, so that its inputs change as units go
    """

    unit: UnitKind
    layout: Any
    num_units: int
    part_rows: Mapping[str, int]
    layer_index: int = 0
    layer_name: str = ""
    unit_cost: int = 0
    num_blocks: int = 1
    columns_per_unit: int = 1
    runs: Mapping[str, int] = field(default_factory=dict)
    rotates: bool = False
    module: str = ""
    mixture: str = ""
    tie: str = ""
    extra_linears: tuple[str, ...] = ()
    is_coupled: bool = False

    @property
    def producers(self) -> Producers:
        """Linears whose rows belong to units, each with the parts of its rows in order."""
        return {name: parts for name, parts in self.layout.producers.items() if {*self.unit.parts} & {*parts}}

    @property
    def tensors(self) -> Producers:
        """Parameters and buffers beside the linears with rows that belong to units, as :attr:`producers`."""
        return self.layout.tensors

    @property
    def consumer(self) -> str:
        """The linear that reads the units."""
        return self.layout.output

    @property
    def join(self) -> Join:
        return self.layout.join

    @property
    def name(self) -> str:
        """Full name of the consuming linear."""
        return f"{self.layer_name}.{self.consumer}"

    @property
    def kind(self) -> str:
        return self.unit.kind

    @property
    def output_name(self) -> str:
        """Full name of the module whose output error is measured: the consumer, or the mixture's list."""
        return f"{self.layer_name}.{self.mixture}" if self.mixture else self.name

    @property
    def num_columns(self) -> int:
        return self.num_units * self.columns_per_unit

    @property
    def repeats(self) -> int:
        """For channels of blocks, number of columns of one unit, which lie apart; else 1."""
        return self.columns_per_unit if self.unit.splits_blocks else 1

    @property
    def entry(self) -> int:
        """Index of the group's module in its mixture."""
        return int(self.consumer.removeprefix(f"{self.mixture}.").partition(".")[0])

    def find_row_owners(self, producer: str) -> Tensor:
        """Return the unit that every row of a producer or tensor belongs to, -1 for rows that are never removed, shape [rows]."""
        blocks = self.num_blocks if self.unit.splits_blocks else self.num_units
        units = torch.arange(self.num_units).view(blocks, self.num_units // blocks if blocks else 1)
        owners = [
            units.repeat(1, self.part_rows[part] // units.shape[1])
            if part in self.unit.parts
            else units.new_full((blocks if self.unit.splits_blocks else 1, self.part_rows[part]), -1)
            for part in (self.producers.get(producer) or self.tensors[producer])
        ]
        runs = blocks * self.runs.get(producer, 0)
        if not runs:
            return torch.cat([owner.flatten() for owner in owners])
        return torch.cat([owner.reshape(runs, -1) for owner in owners], 1).flatten()

    def count_rows(self, producer: str) -> int:
        """Return the number of a producing linear's rows per unit."""
        return int((self.find_row_owners(producer) == 0).sum())

    def find_kept_rows(self, producer: str, keep: Tensor) -> Tensor:
        """Return the row indices of a producing linear that stay with the kept units, sorted, shape [kept rows]."""
        owners = self.find_row_owners(producer)
        stays = torch.zeros(self.num_units + 1, dtype=torch.bool)  # the last entry stands for owner -1
        stays[keep.cpu()] = stays[-1] = True
        return stays[owners].nonzero().flatten()

    def resize(self, num_units: int) -> UnitGroup:
        """Return the description of the same module with another number of units, the same in every block."""
        rows = dict(self.part_rows)
        for part in self.unit.parts if self.unit.splits_blocks else ():
            rows[part] = rows[part] * num_units // self.num_units
        return replace(self, num_units=num_units, part_rows=rows)

    def to_unit_order(self, columns: Tensor) -> Tensor:
        """Return consumer columns (the last dimension) reordered from the module's order to unit order."""
        if self.repeats == 1:
            return columns
        return columns.unflatten(-1, (self.num_blocks, self.repeats, -1)).transpose(-1, -2).flatten(-3)

    def to_module_order(self, columns: Tensor) -> Tensor:
        """Return consumer columns (the last dimension), of all or of the kept units, reordered to the module's order."""
        if self.repeats == 1:
            return columns
        return columns.unflatten(-1, (self.num_blocks, -1, self.repeats)).transpose(-1, -2).flatten(-3)


@dataclass(frozen=True)
class ListEntries:
    """Entries of a model's lists of modules that may go with all their units; equally many stay in every list.

    They go from a layer before its units are ranked, and what stays is then re-solved. See :meth:`UnitKind.find_entries`.

    :cvar label: entries in plans, tables and reports, such as ``experts``
    :cvar remedy: what to set where too few may go, for a message
    :param lists: groups of the entries of every list, in order, by the list's full name
    :param counts: numbers of entries that a list may keep, descending
    :param costs: prunable parameters that go with one entry of each list
    :param extra_cost: other parameters that go with one entry of every list, such as rows of a router
    """

    label: ClassVar[str]
    remedy: ClassVar[str]
    lists: Mapping[str, Sequence[UnitGroup]]
    counts: Sequence[int]
    costs: Sequence[int]
    extra_cost: int

    @property
    def cost(self) -> int:
        """Prunable parameters that go with one entry of every list."""
        return sum(self.costs)

    @property
    def max_removable(self) -> int:
        """Prunable parameters that go if as few entries stay as may."""
        return (self.counts[0] - self.counts[-1]) * self.cost

    def count_removed(self, num_keep: int) -> int:
        """Return the parameters that go if ``num_keep`` entries of every list stay."""
        return (self.counts[0] - num_keep) * (self.cost + self.extra_cost)

    def choose(
        self, model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], num_keep: int, context: Any
    ) -> Mapping[str, Sequence[int]]:
        """Return the entries that stay, ``num_keep`` of every list, sorted, by the list's full name.

        :param model: the dense model, which is not changed
        :param context: :class:`~struprune_plugin.runtime.device_context.DeviceContext` of the run
        """
        raise NotImplementedError

    def drop(self, layer: nn.Module, name: str, keep: Sequence[int]) -> None:
        """Remove all entries but ``keep`` (sorted) from the list ``name`` of a decoder layer, in place, and what belongs to them.

        Those that stay are renumbered.
        """
        raise NotImplementedError


def select_groups(groups: Sequence[UnitGroup], layer_name: str) -> list[UnitGroup]:
    """Return the groups of one decoder layer, in order."""
    return [group for group in groups if group.layer_name == layer_name]


def sort_groups(groups: Sequence[UnitGroup]) -> list[UnitGroup]:
    """Return groups in pruning order: layer by layer; in a layer by their kinds' order, modules beside a mixture last."""
    return sorted(groups, key=lambda g: (g.layer_index, bool(g.join.block) and not g.mixture, g.unit.order))
