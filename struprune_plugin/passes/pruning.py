"""The pruning pass: every decoder layer in order, each on inputs from the pruned layers before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.device.ranks import count_before, count_ranks
from struprune_plugin.device.room import Room
from struprune_plugin.layer.gather import LayerObserver
from struprune_plugin.layer.methods import Methods, Plan
from struprune_plugin.layer.prune import LayerOutcome, prune_layer
from struprune_plugin.layer.records import GroupRecord
from struprune_plugin.layer.signals import Signals
from struprune_plugin.layer.tuning import TuningRecord
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.model.surgery import LayerCopy, copy_layer, restore_layer
from struprune_plugin.model.units.group import UnitGroup, select_groups
from struprune_plugin.passes.resume import DoneLayer, LayerLog
from struprune_plugin.passes.tokens import TokenDigest


class PruningPass:
    """Prune every layer after a plan.

    :param groups: of all layers
    :param keeps: whether the weights stay; else each layer gets its own back once the next has seen its outputs: a rehearsal
    :param tokens: takes the calibration tokens in, and may refuse them before anything is pruned
    :param log: of the layers that are done, by an earlier process too; these are taken as they are
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
        log: LayerLog | None = None,
    ):
        self.records: list[GroupRecord] = []
        self.tuning: dict[str, TuningRecord] = {}
        self._groups, self._methods, self._room = groups, methods, room
        self._prune = partial(prune_layer, plan=plan, methods=methods, signals=signals, room=room)
        self._tokens = tokens or TokenDigest()
        self._log = log
        self._done: dict[str, DoneLayer | None] = {}  # the layer at hand, by name; None where it is to be pruned
        self._observer: LayerObserver | None = None
        self._model: PreTrainedModel | None = None
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
        if name not in self._done:
            self._done = {name: self._find_done(name, layer)}
        groups = (
            [] if self._done[name] else select_groups(self._groups, name)
        )  # of a layer that is done only the dense path is wanted
        with self._room.stage("statistics"):
            self._observer.before_layer(layer, groups, args, kwargs)

    def after_layer(self, output: Any) -> None:
        assert self._observer is not None
        with self._room.stage("statistics"):
            self._observer.after_layer(output)

    def end_layer(self, name: str, layer: nn.Module) -> None:
        assert self._observer is not None
        assert self._model is not None
        if self._lent is not None:
            self._lent()
            self._lent = _lend(self._model, layer)
        if not self.records:
            self._tokens.finish()
        outcome = self._restore_done(name, layer) or self._prune_layer(name, layer)
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

    def _prune_layer(self, name: str, layer: nn.Module) -> LayerOutcome:
        """Prune a layer, and keep what became of it."""
        assert self._observer is not None
        assert self._model is not None
        index, total = self._find_index(name)
        changed = any(record.removed_parameters for record in self.records)
        progress = f"({index + 1}/{total}): "
        outcome = self._prune(
            layer, select_groups(self._groups, name), self._observer, changed=changed, progress=progress
        )
        if self._log is not None:
            with self._room.stage("checkpoint"):
                self._log.keep(self._model, layer, index, outcome)
        return outcome

    def _find_done(self, name: str, layer: nn.Module) -> DoneLayer | None:
        assert self._model is not None
        return None if self._log is None else self._log.take(self._model, layer, self._find_index(name)[0])

    def _restore_done(self, name: str, layer: nn.Module) -> LayerOutcome | None:
        """Make a layer what an earlier process made of it; None where none did."""
        done = self._done.get(name)
        if done is None:
            return None
        assert self._model is not None
        if done.copy is not None:
            restore_layer(self._model, layer, done.copy)
            self._room.release(layer)
        return done.outcome

    def _find_index(self, name: str) -> tuple[int, int]:
        """Return a layer's position, and how many there are."""
        assert self._model is not None
        names = [other for other, _ in find_decoder_layers(self._model)]
        return names.index(name), len(names)


def _lend(model: PreTrainedModel, layer: nn.Module) -> Callable[[], None]:
    """Take a layer down, and return what gives it back as it was."""
    copy: LayerCopy = copy_layer(model, layer)
    return lambda: restore_layer(model, layer, copy)
