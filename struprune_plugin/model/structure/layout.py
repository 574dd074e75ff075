"""The description of a model's structure: which linears of each decoder layer form units, and how they meet the residual stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Part = Literal["query", "key", "value", "gate", "ffn"]
Producers = Mapping[str, tuple[Part, ...]]  # linears, each with the parts of its rows in order
Rows = Literal["", "head", "block", "channel"]


@dataclass(frozen=True)
class Join:
    """Join of a consumer's output and the residual stream.

    :param residual: submodule whose input is the residual stream that the output is added to; the layer itself where empty
    :param parallel: linear computed earlier whose output is added to the same residual stream; empty where there is none
    :param scale: factor on the output, and on the parallel one's, when it is added
    :param is_direct: whether the output is added as it is; else something nonlinear stands between, a norm for instance
    :param block: of experts, and of an expert beside them that every token passes: the module whose output, which holds their sum,
        is what is added
    """

    residual: str = ""
    parallel: str = ""
    scale: float = 1.0
    is_direct: bool = False
    block: str = ""


@dataclass(frozen=True)
class AttentionLayout:
    """The value channels, and the heads, of one attention module; names are relative to the decoder layer.

    :param module: the attention module
    :param producers: linears that make queries, keys, values and what gates them, each with the parts of its rows in order
    :param output: the output projection
    :param join: how that meets the residual stream
    :param repeated: producers whose rows come head by head or, under grouped queries, block by block; part by part elsewhere
    :param linears: all linears of the module, those that lose nothing too
    :param width_name: attribute of the module that holds the width of a head's values
    :param is_grouped: whether several query heads share one value head
    :param is_plain: whether attention is the softmax of scaled products of queries and keys, without positions between
    :param has_heads: whether whole heads meet nothing but themselves
    :param takes_fewer_heads: whether the module, as its class has it, runs on linears of fewer heads
    :param rotates: whether a head's values may be rotated into each other
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
    """The channels of one FFN; names are relative to the decoder layer.

    :param producers: ``("ffn",)`` a linear, or ``("ffn", "ffn")`` for a fused gate and up projection; the gate comes first
    :param output: the linear that reads the channels
    :param join: how that meets the residual stream
    :param alternates: whether a fused projection's rows come channel by channel, a gate beside what it gates
    :param activation: as transformers calls it; empty where the FFN is not ``W2 phi(W1 x)`` with one of its functions
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
    """The channels of the experts of one mixture, once :func:`~struprune_plugin.model.experts.take_apart` has made them linears.

    :param module: the list of experts; names are relative to the decoder layer
    :param expert: one of them; names are relative to the expert
    :param join: how the sum of the experts meets the residual stream: where directly, the layer's output is that with the sum,
        times a factor, added
    """

    module: str
    expert: FFNLayout
    join: Join = Join()

    def place(self, index: int) -> FFNLayout:
        """Return one expert with names relative to the decoder layer."""
        prefix, expert = f"{self.module}.{index}.", self.expert
        producers = {f"{prefix}{name}": parts for name, parts in expert.producers.items()}
        return FFNLayout(producers, f"{prefix}{expert.output}", self.join, expert.alternates, expert.activation)


@dataclass(frozen=True)
class Sublayer:
    """A module with all that goes from its decoder layer when its last unit goes, as its norms.

    :param absent: modules that go, by their names in the layer: what stands for them, as
        :func:`~struprune_plugin.export.modeling_struprune.remove_module` takes it
    :param shared: modules that go where all other sublayers of the layer are gone, too
    :param flaw: why it has to keep units; empty where it need not
    """

    absent: Mapping[str, int] = field(default_factory=dict)
    shared: Sequence[str] = ()
    flaw: str = ""


@dataclass(frozen=True)
class LayerLayout:
    """The units of one kind of decoder layer.

    :param attention: None where no value channel can go
    :param ffns: those whose channels can go, in the order in which they compute
    :param left: linears of the layer that stay whole, each with the reason
    :param experts: None where no channel of an expert can go
    """

    attention: AttentionLayout | None = None
    ffns: Sequence[FFNLayout] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertsLayout | None = None

    def list_linears(self) -> list[str]:
        """Return the names of all linears of the modules that hold units, in an order that digests of weights hang on."""
        attention = self.attention
        names = [*attention.producers, attention.output, *attention.linears] if attention else []
        return list(dict.fromkeys([*names, *(name for ffn in self.ffns for name in (*ffn.producers, ffn.output))]))


@dataclass(frozen=True)
class Structure:
    """Removable structure of a model.

    :param layers: name of the list of decoder layers
    :param kinds: of layers
    :param kind_of: the kind of each layer, an index into ``kinds``
    """

    layers: str
    kinds: Sequence[LayerLayout]
    kind_of: Sequence[int]

    @property
    def has_experts(self) -> bool:
        """True if channels of experts can go."""
        return any(kind.experts for kind in self.kinds)

    def __getitem__(self, index: int) -> LayerLayout:
        """Return the layout of the layer at a position."""
        return self.kinds[self.kind_of[index]]

    def __len__(self) -> int:
        return len(self.kind_of)
