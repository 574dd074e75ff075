"""The pruning pass: every decoder layer in order, each on inputs from the pruned layers before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.device.ranks import count_before, count_ranks
from struprune_plugin.device.room import Room
from struprune_plugin.layer.gather import LayerObserver
from struprune_plugin.layer.methods import Methods, Plan
from struprune_plugin.layer.prune import prune_layer
from struprune_plugin.layer.records import GroupRecord
from struprune_plugin.layer.signals import Signals
from struprune_plugin.layer.tuning import TuningRecord
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.model.surgery import LayerCopy, copy_layer, restore_layer
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.passes.tokens import TokenDigest


class PruningPass:
    """Prune every layer after a plan.

    :param groups: of all layers
    :param keeps: whether the weights stay; else each layer gets its own back once the next has seen its outputs: a rehearsal
    :param tokens: takes the calibration tokens in, and may refuse them before anything is pruned
    :ivar records: one a group, in order
    :ivar tuning: by layer
    """

    def __init__(
        self,
        groups: Sequence[UnitGroup],
        plan: Plan,
        methods: Methods,
        signals: Signals,
        room: Room,
        keeps: bool = True,
        tokens: TokenDigest | None = None,
    ):
        self.records: list[GroupRecord] = []
        self.tuning: dict[str, TuningRecord] = {}
        self._groups, self._plan = groups, plan
        self._methods, self._signals, self._room = methods, signals, room
        self._tokens = tokens or TokenDigest()
        self._observer: LayerObserver | None = None
        self._model: PreTrainedModel | None = None
        self._changed = False
        self._lent: Callable[[], None] | None = None if keeps else lambda: None  # gives a rehearsed layer back

    def begin(self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]]) -> None:
        before = count_before(sum(len(batch["input_ids"]) for batch in loader)) if count_ranks() > 1 else 0
        holds = self._methods.chooses_damping
        self._observer = LayerObserver(self._methods.target, self._room, hold_out=holds, num_before=before)
        self._model = model

    def see_tokens(self, tokens: Tensor) -> None:
        self._tokens.add(tokens)

    def before_layer(self, name: str, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        assert self._observer is not None
        with self._room.stage("statistics"):
            self._observer.before_layer(layer, self._groups_of(name), args, kwargs)

    def after_layer(self, output: Any) -> None:
        assert self._observer is not None
        with self._room.stage("statistics"):
            self._observer.after_layer(output)

    def end_layer(self, name: str, layer: nn.Module) -> None:
        assert self._observer is not None
        assert self._model is not None
        layers = find_decoder_layers(self._model)
        if self._lent is not None:
            self._lent()
            self._lent = _lend(self._model, layer)
        if not self.records:
            self._tokens.finish()
        index = next(i for i, (other, _) in enumerate(layers) if other == name)
        outcome = prune_layer(
            layer,
            self._groups_of(name),
            self._observer,
            self._plan,
            self._methods,
            self._signals,
            self._room,
            self._changed,
            f"({index + 1}/{len(layers)}): ",
        )
        self._changed = outcome.changed
        self.records += outcome.groups
        if outcome.tuning is not None:
            self.tuning[name] = outcome.tuning
        self._observer.finish_layer()
        self._observer.watch_propagation(layer)

    def finish(self) -> None:
        """Conclude.

        :raises ValueError: a layer that the calibration pass did not treat as a step of its own
        """
        self.abort()
        seen = {record.name for record in self.records}
        missing = [group.name for group in self._groups if group.name not in seen]
        if missing:
            raise ValueError(
                f"sequential_targets: every decoder layer must be a target of its own, got no data for {missing}. "
                "Leave it at its default."
            )

    def abort(self) -> None:
        if self._observer is not None:
            self._observer.close()
        if self._lent is not None:
            self._lent()
            self._lent = lambda: None

    def _groups_of(self, layer_name: str) -> list[UnitGroup]:
        return [group for group in self._groups if group.layer_name == layer_name]


def _lend(model: PreTrainedModel, layer: nn.Module) -> Callable[[], None]:
    """Take a layer down, and return what gives it back as it was."""
    copy: LayerCopy = copy_layer(model, layer)
    return lambda: restore_layer(layer, copy)
