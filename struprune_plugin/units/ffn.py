"""FFN channels."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.structure.couplings import Coupling, Measured
from struprune_plugin.model.structure.layout import LayerLayout, UnitLayout
from struprune_plugin.model.unit_kind import ALIGNED, UNIT_KINDS, UnitGroup, UnitKind

_ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu2", "tanh", "sigmoid")
_WIDTH_KEYS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "hidden_dim")  # of one FFN per layer
_FINE = 64  # steps of that size that a width must have for ``auto`` to round it


@dataclass(frozen=True, kw_only=True)
class FFNLayout(UnitLayout):
    """Channels of one FFN; names are relative to the decoder layer.

    :param producers: ``("ffn",)`` per linear, or ``("ffn", "ffn")`` for a fused gate and up projection; the gate comes first
    :param alternates: whether gate and up rows of a fused projection alternate, channel by channel
    :param activation: its name in transformers; empty where the FFN is not ``W2 phi(W1 x)`` with a function of transformers
    """

    alternates: bool = False
    activation: str = ""

    @property
    def formula(self) -> str:
        gated = "gated " if sum(map(len, self.producers.values())) == 2 else ""
        return gated + self.activation if self.activation else ""


@UNIT_KINDS.register
class FFNChannels(UnitKind):
    """A channel: its rows of the linears that produce it, its column of the one that reads it."""

    label: ClassVar[str] = "FFN channels"
    pool: ClassVar[str] = "ffn"
    parts: ClassVar[tuple[str, ...]] = ("ffn",)
    short_form: ClassVar[tuple[str, Any] | None] = ("prune_ffn", True)
    kind: Literal["ffn"] = "ffn"

    def read(self, measured: Measured, thin: Mapping[str, Coupling], consumer: str) -> UnitLayout | None:
        """Return the FFN that ends in a linear: a column depends on one or two rows per producer, of the same token."""
        producers, alternates = dict[str, tuple[str, ...]](), False
        eye = torch.eye(measured.inputs[consumer].shape[-1], dtype=torch.bool)
        for name, coupling in thin.items():
            count, rest = divmod(len(coupling.reached), len(eye))
            if rest or not 1 <= count <= 2 or coupling.later.any():
                return None
            if not torch.equal(coupling.reached, eye.repeat(count, 1)):
                if not torch.equal(coupling.reached, eye.repeat_interleave(count, 0)):
                    return None
                alternates = True
            producers[name] = ("ffn",) * count
        if not producers:
            return None
        return _find_activation(
            measured, FFNLayout(kind="ffn", producers=producers, output=consumer, alternates=alternates)
        )

    def read_sizes(self, unit: UnitLayout, layer: nn.Module) -> dict[str, int]:
        return {"width": find_linear(layer, unit.output).in_features}

    def list_config_keys(self, layout: LayerLayout, layer: nn.Module) -> dict[str, str]:
        return dict.fromkeys(_WIDTH_KEYS, "width") if len(layout.list_units(FFNLayout)) == 1 else {}

    def list_groups(self, layout: LayerLayout, layer: nn.Module) -> Iterator[UnitGroup]:
        for ffn in layout.list_units(FFNLayout):
            yield describe_channels(self, ffn, layer)

    def list_steps(self, group: UnitGroup, width_multiple: int | None) -> Iterator[tuple[int, str]]:
        yield from super().list_steps(group, width_multiple)
        if width_multiple is not None:
            yield width_multiple, f"width_multiple: {width_multiple}"
        elif group.num_units >= _FINE * ALIGNED:
            yield math.gcd(ALIGNED, group.num_units), "width_multiple: auto"


def describe_channels(kind: UnitKind, ffn: FFNLayout, layer: nn.Module) -> UnitGroup:
    """Return the channels of one FFN, or of one expert."""
    runs = dict.fromkeys(ffn.producers, 1) if ffn.alternates else {}
    width = find_linear(layer, ffn.output).in_features
    return UnitGroup(kind, ffn, width, {"ffn": 1}, runs=runs)


def _find_activation(measured: Measured, ffn: FFNLayout) -> FFNLayout:
    """Return an FFN with its gate first and the name of its activation where transformers has the function."""
    parts = list[tuple[str, Tensor]]()
    for name, kinds in ffn.producers.items():
        rows, count = measured.outputs[name], len(kinds)
        split = rows.unflatten(-1, (-1, count)).unbind(-1) if ffn.alternates else rows.chunk(count, -1)
        parts += [(name, part) for part in split]
    wanted = measured.inputs[ffn.output]
    configs = [vars(module).get("config") for module in measured.layer.modules()]
    values = [value for config in configs if config is not None for value in vars(config).values()]
    named = [value for value in values if isinstance(value, str) and value in ACT2FN]
    for name in dict.fromkeys([*named, *_ACTIVATIONS]) if len(parts) <= 2 else ():
        for first, second in ((parts[0], parts[-1]), (parts[-1], parts[0])):
            activated = ACT2FN[name](first[1]) * (second[1] if len(parts) == 2 else 1)
            if torch.allclose(activated.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5):
                order = dict.fromkeys((first[0], second[0]))
                fused_wrong = len(order) == 1 and first is not parts[0]
                producers = {producer: ffn.producers[producer] for producer in order}
                return replace(ffn, producers=producers, activation="" if fused_wrong or ffn.alternates else name)
    return ffn
