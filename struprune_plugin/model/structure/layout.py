"""Description of a model's structure: which linears of each decoder layer form units, and how they join the residual stream."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

Part = str  # of rows that units are made of, by the kind of units
Producers = Mapping[str, tuple[Part, ...]]  # linears, each with the parts of its rows in order
L = TypeVar("L", bound="UnitLayout")


@dataclass(frozen=True)
class Join:
    """Join of a consumer's output with the residual stream.

    :param residual: submodule whose input is the residual stream that the output is added to; the layer itself where empty
    :param parallel: earlier linear whose output is added to the same residual stream; empty where there is none
    :param scale: factor on the added output, and on the parallel linear's
    :param is_direct: whether the output is added up to that factor; else something nonlinear lies between, a norm for instance
    :param norm: module, the consumer or one around it, whose output a norm rescales before it is added; empty where none does
    :param normalizer: that norm, whose output is added to ``residual`` times ``scale``; empty where another module lies between
    :param block: for a mixture, and for a module beside it: the module whose output, which contains their sum, is added
    """

    residual: str = ""
    parallel: str = ""
    scale: float = 1.0
    is_direct: bool = False
    norm: str = ""
    normalizer: str = ""
    block: str = ""


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """Removable units of one module; names are relative to the decoder layer. Kinds of units extend it by facts of their own.

    :param kind: name of the kind of units that read it
    :param producers: linears whose rows belong to units
    :param output: the linear that reads the units; of a mixture, the list of its modules
    :param tensors: other parameters with entries that belong to units along their first dimension, as ``producers``
    :cvar of_mixture: whether these are units of a mixture's modules, which are linears once llm-compressor has split them
    :cvar by_name: whether the module's linears count as prunable only where a recipe names the kind
    """

    of_mixture: ClassVar[bool] = False
    by_name: ClassVar[bool] = False
    kind: str
    producers: Producers
    output: str
    join: Join = Join()
    tensors: Producers = field(default_factory=dict)

    @property
    def formula(self) -> str:
        """The textbook formula of the module, for methods that are written for one; empty where it is not known to have one."""
        return ""

    def list_linears(self) -> list[str]:
        """Return the names of the module's linears, including those that lose nothing."""
        return [*self.producers, self.output]


@dataclass(frozen=True)
class LayerLayout:
    """Units of one type of decoder layer.

    :param units: of every module that can lose units, by the order of their kinds
    :param unprunable: linears of the layer that are not pruned, each with the reason
    """

    units: Sequence[UnitLayout] = ()
    unprunable: Mapping[str, str] = field(default_factory=dict)

    def list_units(self, form: type[L]) -> list[L]:
        """Return the modules of one form."""
        return [unit for unit in self.units if isinstance(unit, form)]

    def list_linears(self, named: Collection[str] = ()) -> list[str]:
        """Return the names of all linears of modules that hold units, but mixtures; digests of weights depend on the order.

        :param named: kinds of units that a recipe names
        """
        units = [unit for unit in self.units if not unit.of_mixture and (unit.kind in named or not unit.by_name)]
        return list(dict.fromkeys(name for unit in units for name in unit.list_linears()))


@dataclass(frozen=True)
class Structure:
    """Removable structure of a model.

    :param layers: name of the list of decoder layers
    :param layouts: layouts of the types of layers
    :param type_of: the type of each layer, an index into ``layouts``
    :param num_parts: number of parts of a layer's output; 0 where it is a tensor
    """

    layers: str
    layouts: Sequence[LayerLayout]
    type_of: Sequence[int]
    num_parts: int

    @property
    def has_mixtures(self) -> bool:
        """True if units of a mixture can be removed, for which it is split first."""
        return any(unit.of_mixture for unit in self.list_units())

    def list_units(self) -> list[UnitLayout]:
        """Return the modules that can lose units, of all types of layers."""
        return [unit for layout in self.layouts for unit in layout.units]

    def __getitem__(self, index: int) -> LayerLayout:
        """Return the layout of the layer at a position."""
        return self.layouts[self.type_of[index]]
