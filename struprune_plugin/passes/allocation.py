"""The allocation pass: what every module's importance and error curve are on the dense model, and the plan that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.device.ranks import Parcel, count_ranks, decide_once, sum_over_ranks
from struprune_plugin.device.room import Room
from struprune_plugin.layer.calls import LayerCall, split_tokens, take_hidden
from struprune_plugin.layer.criteria import Ranking, read_dense
from struprune_plugin.layer.decide import weigh_moments
from struprune_plugin.layer.gather import LayerObserver
from struprune_plugin.layer.methods import Methods, Plan
from struprune_plugin.layer.records import AllocationRecord
from struprune_plugin.layer.signals import Signals
from struprune_plugin.layer.targets import TARGETS
from struprune_plugin.maths.curves import measure_deletion_curve, measure_restored_curve
from struprune_plugin.maths.importance import measure_block_influence
from struprune_plugin.maths.rotation import eliminate_directions, order_directions, rotate_moments
from struprune_plugin.maths.rounding import (
    GroupSize,
    check_budget,
    find_group_sparsity,
    measure_uniform_slack,
    round_kept_counts,
    round_uniform_counts,
)
from struprune_plugin.maths.solve import damp_moments
from struprune_plugin.maths.statistics import Moments, count_sums, move_moments
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.units.group import UnitGroup, select_groups
from struprune_plugin.passes.rules import RULES, AllocationSettings, Evidence, Subject

_KEPT = 0.25  # of the host's free memory, for moments


class AllocationPass:
    """A pass over the dense model that changes nothing and ends in a :class:`~struprune_plugin.layer.methods.Plan`.

    One decoder layer is on the device at a time; of each module only its importance, its scores and its error curve stay.

    :param groups: of all layers
    :param sizes: theirs, for the budget
    :param keeps_moments: keep every group's moments, too, for a pass on the same batches
    :ivar plan: once the pass is over
    :ivar evidence: of every group, by name
    :ivar moments: of every group, by name, on the host; none where they are not kept
    """

    def __init__(
        self,
        groups: Sequence[UnitGroup],
        sizes: Sequence[GroupSize],
        settings: AllocationSettings,
        methods: Methods,
        signals: Signals,
        room: Room,
        keeps_moments: bool = False,
    ):
        self.plan: Plan | None = None
        self._groups, self._sizes = groups, sizes
        self._settings, self._rule = settings, RULES[settings.name]
        self._methods, self._signals, self._room = methods, signals, room
        self._observer = LayerObserver(TARGETS["local"], room, all_groups=True)
        self.evidence: dict[str, Evidence] = {}
        self.moments: dict[str, Moments] = {}
        self._keeps_moments = keeps_moments
        self._influence = torch.zeros(2, dtype=torch.float64)  # of the layer at hand: sum and tokens
        self._model: PreTrainedModel | None = None

    def begin(self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]]) -> None:
        self._model = model

    def see_tokens(self, tokens: Tensor) -> None:
        """Nothing depends on them."""

    def before_layer(self, name: str, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        with self._room.stage("statistics"):
            self._observer.before_layer(layer, select_groups(self._groups, name), args, kwargs)

    def after_layer(self, output: Any) -> None:
        with self._room.stage("statistics"):
            self._observer.after_layer(output)
            if self._rule.compares_layers:
                self._compare(self._observer.calls[-1], take_hidden(output))

    def end_layer(self, name: str, layer: nn.Module) -> None:
        total, tokens = sum_over_ranks(self._influence).tolist()
        for group in select_groups(self._groups, name):
            self.evidence[group.name] = self._measure_group(layer, group, total / max(tokens, 1))
        self._influence.zero_()
        self._observer.finish_layer()

    def finish(self) -> None:
        self._observer.close()
        missing = [group.name for group in self._groups if group.name not in self.evidence]
        assert not missing, f"no calibration data reached {missing}"
        share = find_group_sparsity(self._sizes, self._settings.num_prunable, self._settings.sparsity)
        self.plan = self._rule.decide(self._sizes, self.evidence, share, self._settings)

    def abort(self) -> None:
        self._observer.close()

    def adopt(self, evidence: Mapping[str, Evidence]) -> None:
        """Take what an earlier pass measured in place of measuring it, and make the plan."""
        self.evidence = dict(evidence)
        self.finish()

    def _compare(self, call: LayerCall, output: Tensor) -> None:
        """Add one batch to the influence of a layer."""
        inputs, outputs = self._room.to_device(call.hidden, output.device).flatten(0, -2), output.flatten(0, -2)
        tokens = None if call.tokens is None else self._room.to_device(call.tokens, output.device)
        for part in split_tokens(tokens, len(inputs), call.length):
            moved = float(measure_block_influence(inputs[part], outputs[part]))
            self._influence += torch.tensor([moved, len(inputs[part])], dtype=torch.float64)

    def _measure_group(self, layer: nn.Module, group: UnitGroup, influence: float) -> Evidence:
        """Return a group's importance, its error curve and its scores; the first of several processes measures."""
        with self._room.stage("statistics"):
            moments = self._observer.collect_moments(layer, group, "statistics").all
            if self._keeps_moments:
                self.moments[group.name] = move_moments(moments, self._room.to_host)

        def measure() -> Evidence:
            has_bias = find_linear(layer, group.consumer).bias is not None
            dense = read_dense(layer, group, self._room)
            damped = damp_moments(moments, dense, self._methods.damping, has_bias)
            weighed = weigh_moments(group, damped, dense, self._signals, self._room)
            ranked = weighed if self._methods.criterion.eliminates else damped
            args = (layer, group, moments, ranked, self._observer, self._methods, self._signals, self._room)
            curve, scores, order, basis = self._measure_curve(Ranking(*args), weighed, dense)
            assert self._model is not None
            importance = self._rule.weigh(Subject(self._model, layer, group, scores, influence), self._settings)
            host = self._room.to_host
            return Evidence(importance, host(curve), host(scores), host(order), None if basis is None else host(basis))

        with self._room.stage("curves"), self._room.solving():
            return decide_once(measure, _pack, _unpack, torch.device("cpu"))

    def _measure_curve(
        self, ranking: Ranking, weighed: Any, dense: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return a group's error for every number of kept units, the score of every unit, their order, and their basis."""
        group, methods, basis = ranking.group, self._methods, None
        if methods.rotates(group):
            rotation = eliminate_directions(weighed, group.num_blocks, group.columns_per_unit, group.name)
            basis = rotation.basis
            weighed = rotate_moments(weighed, basis, group.columns_per_unit)
            order, scores = order_directions(rotation)
        else:
            order, scores = methods.criterion.rank(ranking, group.num_units)
        if methods.restoration.solves:  # ADMM too starts from and closes with the least-squares solve
            return measure_restored_curve(weighed, order, group.columns_per_unit, group.name), scores, order, basis
        root = self._signals.roots.get(group.name)
        moved = dense if root is None else self._room.place(root, dense) @ dense
        return measure_deletion_curve(weighed, moved, order, group.columns_per_unit), scores, order, basis


def _pack(evidence: Evidence) -> Parcel:
    basis = [] if evidence.basis is None else [evidence.basis]
    return {"importance": evidence.importance}, [evidence.curve, evidence.scores, evidence.order, *basis]


def _unpack(parcel: Parcel) -> Evidence:
    record, tensors = parcel
    return Evidence(record["importance"], *tensors)


def take_batches(
    loader: Iterable[dict[str, Tensor]], groups: Sequence[UnitGroup], samples: int
) -> list[dict[str, Tensor]]:
    """Return the first sequences, in the loader's batches, that make so many samples and four tokens an input of the widest
    module, or this process' share of these. How many they are does not depend on the batches."""
    ranks = count_ranks()
    needed = 4 * max(group.num_columns for group in groups) / ranks
    batches: list[dict[str, Tensor]] = []
    sequences = tokens = 0
    for batch in loader:
        mask = batch.get("attention_mask")
        held = (torch.ones_like(batch["input_ids"]) if mask is None else mask).sum(1).tolist()
        taken = 0
        while taken < len(held) and (sequences < samples / ranks or tokens < needed):
            sequences, tokens, taken = sequences + 1, tokens + held[taken], taken + 1
        batches.append({name: part[:taken] for name, part in batch.items()} if taken < len(held) else batch)
        if taken < len(held) or (sequences >= samples / ranks and tokens >= needed):
            break
    return [batch for batch in batches if len(batch["input_ids"])]


def can_keep_moments(groups: Sequence[UnitGroup], hidden_size: int) -> bool:
    """Tell whether all groups' moments take no more than a share of the host's free memory."""
    numbers = sum(
        2 * count_sums(group.num_columns, hidden_size) for group in groups
    )  # sums are triangles, moments whole
    return 4 * numbers <= _KEPT * psutil.virtual_memory().available


def hold_batches(
    loader: Iterable[dict[str, Tensor]], samples: int
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return (the batches without their last sequences, those), at most a quarter of all."""
    batches = list(loader)
    total = sum(len(batch["input_ids"]) for batch in batches)
    left = total - min(samples, total // 4)
    rest: list[dict[str, Tensor]] = []
    held: list[dict[str, Tensor]] = []
    for batch in batches:
        here = min(max(left, 0), len(batch["input_ids"]))
        left -= len(batch["input_ids"])
        for part, store in ((slice(here), rest), (slice(here, None), held)):
            store.append({name: tensor[part] for name, tensor in batch.items()})
    return [batch for batch in rest if len(batch["input_ids"])], [batch for batch in held if len(batch["input_ids"])]


def make_uniform_plan(
    sizes: Sequence[GroupSize], share: float, allowed: Callable[[str, int], bool] | None = None
) -> Plan:
    """Give every group the same sparsity, rounded so that the budget is met.

    :param share: sparsity over the groups' own parameters
    :param allowed: where all layers must be of one size: whether a kind of modules may keep so many units
    :raises ValueError: rounding misses the budget
    """
    if allowed is None:
        counts = round_kept_counts(sizes, [share] * len(sizes))
        check_budget(sizes, counts, share)
    else:
        counts = round_uniform_counts(sizes, share, allowed)
        check_budget(sizes, counts, share, measure_uniform_slack(sizes))
    kept = {size.name: count for size, count in zip(sizes, counts, strict=True)}
    return Plan(kept, AllocationRecord("uniform"))
