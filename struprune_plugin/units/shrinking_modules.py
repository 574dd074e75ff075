"""Modules that shrink by their tensors and by what they count, and the proof that they do so exactly."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from struprune_plugin.export.modeling_struprune import adopt_padding, find_owner
from struprune_plugin.model.structure.couplings import Measured
from struprune_plugin.model.structure.layout import LayerLayout, UnitLayout
from struprune_plugin.model.structure.tiny import TinyRun, run_in_pieces
from struprune_plugin.model.surgery import blank_group, pick_two_thirds, slice_group
from struprune_plugin.model.unit_kind import UnitGroup, UnitKind

_PADDING = 5  # tokens to the left of the first sequence


@dataclass(frozen=True, kw_only=True)
class ShrinkingLayout(UnitLayout):
    """Units of a module whose own code runs at any number of them; names are relative to the decoder layer."""

    by_name: ClassVar[bool] = True


class ShrinkingUnits(UnitKind):
    """Base of units whose modules shrink by tensors of their own and by what they count."""

    order: ClassVar[int] = 0
    by_default: ClassVar[bool] = True

    def describe_group(self, unit: Any, layer: nn.Module) -> UnitGroup:
        """Return the units of one module of a layer."""
        raise NotImplementedError

    @torch.no_grad()
    def prove(self, unit: UnitLayout, measured: Measured, run: TinyRun) -> tuple[str, UnitLayout]:
        """Return why a third of a module's units cannot be removed, empty where a model without them equals one with zeros instead,
        and the module.

        Compared are a prompt as a whole; in two pieces and then token by token with a cache; and padded on the left with a cache;
        all as far as the dense class runs so.
        """
        masked, sliced = deepcopy(run.model), deepcopy(run.model)
        names = {id(module): name for name, module in run.model.named_modules()}
        for layer in measured.layers:
            group = self.describe_group(unit, layer)
            if group.num_units < 2 * group.num_blocks:
                return "it has one unit", unit
            keep = pick_two_thirds(group)
            blank_group(masked.get_submodule(names[id(layer)]), group, keep)
            shrunk = sliced.get_submodule(names[id(layer)])
            for name, padding in group.unit.describe_padding(group).items():
                adopt_padding(*find_owner(shrunk, name), padding)
            slice_group(shrunk, group, keep)
        pieces = partial(run_in_pieces, sizes=[run.tokens.shape[1] - 12, 9, 1, 1, 1])
        for form in (run.forward, pieces, _run_padded):
            try:
                wanted = form(masked, run.tokens)
            except Exception:  # stock code that does not run in this form
                continue
            try:
                logits = form(sliced, run.tokens)
            except Exception as error:  # any error of a module that relies on its width
                return f"the module does not run at another width ({type(error).__name__})", unit
            if replace(run, model=masked, forward=form).describe_difference(logits, wanted):
                return "removing its rows changes more than zeros in their place do", unit
        return "", unit

    def list_groups(self, layout: LayerLayout, layer: nn.Module) -> Iterator[UnitGroup]:
        for unit in layout.units:
            if unit.kind == self.kind:
                yield self.describe_group(unit, layer)

    def check(self, model_type: str, layers: Sequence[tuple[nn.Module, LayerLayout]]) -> None:
        kinds = {unit.kind: unit for _, layout in layers for unit in layout.units}
        if self.kind not in kinds:
            reasons = dict.fromkeys(reason for _, layout in layers for reason in layout.unprunable.values())
            raise ValueError(
                f"units: must name kinds that {model_type!r} has, got {self.kind!r}; it has {', '.join(kinds)}"
                f"{''.join(f'; {reason}' for reason in reasons)}. Remove {self.kind!r}."
            )


def _run_padded(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits of two sequences, the first one padded on the left, without those of the padding."""
    length, both = tokens.shape[1], tokens.repeat(2, 1)
    both[1] = tokens[0].roll(7)
    mask = torch.ones_like(both)
    mask[0, :_PADDING] = 0
    return run_in_pieces(model, both, [length - 2, 1, 1], mask)[mask.bool()]
