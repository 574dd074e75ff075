"""Description of a model's structure: which linears of each decoder layer form units, and how they join the residual stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Part = str  # of rows that units are made of, by the kind of units
Producers = Mapping[str, tuple[Part, ...]]  # linears, each with the parts of its rows in order
Rows = Literal["", "head", "block"]  # order of rows: part by part, head by head, or by value heads or FFN channels


@dataclass(frozen=True)
class Join:
    """Join of a consumer's output with the residual stream.

    :param residual: submodule whose input is the residual stream that the output is added to; the layer itself where empty
    :param parallel: earlier linear whose output is added to the same residual stream; empty where there is none
    :param scale: factor on the added output, and on the parallel linear's
    :param is_direct: whether the output is added up to that factor; else something nonlinear lies between, a norm for instance
    :param norm: module, the consumer or one around it, whose output a norm rescales before it is added; empty where none does
    :param block: for experts, and for a shared expert beside them: the module whose output, which contains their sum, is added
    """

    residual: str = ""
    parallel: str = ""
    scale: float = 1.0
    is_direct: bool = False
    norm: str = ""
    block: str = ""


@dataclass(frozen=True)
class AttentionLayout:
    """Value channels and heads of one attention module; names are relative to the decoder layer.

    :param output: the output projection
    :param repeated: the order of producers' rows, where it is not part by part
    :param linears: all linears of the module, including those that lose nothing
    :param width_name: attribute of the module that stores the width of a head's values
    :param is_grouped: whether several query heads share one value head
    :param is_plain: whether attention is the softmax of scaled products of queries and keys, without position encodings
    :param has_heads: whether heads are coupled to no other heads, so that whole heads are units
    :param takes_fewer_heads: whether the module's own code runs on linears of fewer heads
    :param rotates: whether the values of a head may be rotated
    """

    module: str
    producers: Producers
    output: str
    join: Join = Join()
    repeated: Mapping[str, Rows] = field(default_factory=dict)
    linears: Sequence[str] = ()
    width_name: str = "head_dim"
    is_grouped: bool = False
    is_plain: bool = False
    has_heads: bool = True
    takes_fewer_heads: bool = True
    rotates: bool = True


@dataclass(frozen=True)
class FFNLayout:
    """Channels of one FFN; names are relative to the decoder layer.

    :param producers: ``("ffn",)`` per linear, or ``("ffn", "ffn")`` for a fused gate and up projection; the gate comes first
    :param output: the linear that reads the channels
    :param alternates: whether gate and up rows of a fused projection alternate, channel by channel
    :param activation: its name in transformers; empty where the FFN is not ``W2 phi(W1 x)`` with a function of transformers
    """

    producers: Producers
    output: str
    join: Join = Join()
    alternates: bool = False
    activation: str = ""

    @property
    def gated(self) -> bool:
        return sum(map(len, self.producers.values())) == 2


@dataclass(frozen=True)
class ExpertsLayout:
    """Channels of a mixture's experts after :func:`~struprune_plugin.model.experts.take_apart` has split them into linears.

    :param module: the list of experts
    :param expert: layout of one expert; names are relative to the expert
    :param join: how the sum of the experts joins the residual stream
    """

    module: str
    expert: FFNLayout
    join: Join = Join()

    def place(self, index: int) -> FFNLayout:
        """Return the layout of one expert with names relative to the decoder layer."""
        prefix, expert = f"{self.module}.{index}.", self.expert
        producers = {f"{prefix}{name}": parts for name, parts in expert.producers.items()}
        return FFNLayout(producers, f"{prefix}{expert.output}", self.join, expert.alternates, expert.activation)


@dataclass(frozen=True)
class LayerLayout:
    """Units of one kind of decoder layer.

    :param attention: None where no value channel can be removed
    :param ffns: FFNs whose channels can be removed, in the order of computation
    :param unprunable: linears of the layer that are not pruned, each with the reason
    :param experts: None where no channel of an expert can be removed
    """

    attention: AttentionLayout | None = None
    ffns: Sequence[FFNLayout] = ()
    unprunable: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertsLayout | None = None

    def list_linears(self) -> list[str]:
        """Return the names of all linears of the modules that hold units; digests of weights depend on the order."""
        attention = self.attention
        names = [*attention.producers, attention.output, *attention.linears] if attention else []
        return list(dict.fromkeys([*names, *(name for ffn in self.ffns for name in (*ffn.producers, ffn.output))]))


@dataclass(frozen=True)
class Structure:
    """Removable structure of a model.

    :param layers: name of the list of decoder layers
    :param kinds: layouts of the kinds of layers
    :param kind_of: the kind of each layer, an index into ``kinds``
    :param num_parts: number of parts of a layer's output; 0 where it is a tensor
    """

    layers: str
    kinds: Sequence[LayerLayout]
    kind_of: Sequence[int]
    num_parts: int

    @property
    def has_experts(self) -> bool:
        """True if channels of experts can be removed."""
        return any(kind.experts for kind in self.kinds)

    def __getitem__(self, index: int) -> LayerLayout:
        """Return the layout of the layer at a position."""
        return self.kinds[self.kind_of[index]]
