"""``SparsityAllocatorModifier``: the softmax allocator as a stage of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from llmcompressor.core import Event, State
from loguru import logger
from pydantic import PrivateAttr, model_validator
from torch import Tensor, nn

from struprune_plugin.allocation import (
    RULES,
    Candidate,
    GroupSize,
    allocate_error_curves,
    allocate_global_threshold,
    check_budget,
    find_group_sparsity,
    round_kept_counts,
    search_temperature,
)
from struprune_plugin.importance import measure_attention_importance, measure_mlp_importance
from struprune_plugin.modifiers.capture import LayerObserver
from struprune_plugin.modifiers.checks import check_alone, list_modifiers
from struprune_plugin.modifiers.distributed import Decision, count_ranks, decide_once
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.memory import to_host
from struprune_plugin.modifiers.widths import Rounding
from struprune_plugin.rotation import eliminate_directions, order_directions, rotate_moments
from struprune_plugin.solve import damp_moments, measure_deletion_curve, measure_restored_curve
from struprune_plugin.statistics import Moments
from struprune_plugin.surgery import read_weight
from struprune_plugin.topology import UnitGroup, count_prunable_parameters, find_linear, list_head_weights


@dataclass(frozen=True)
class Plan:
    """How many units every group keeps.

    :param kept: units by group name
    :param record: for the manifest
    :param candidates: the temperatures searched, kept counts in the order of the groups; none without a search
    """

    kept: dict[str, int]
    record: dict[str, Any]
    candidates: tuple[Candidate, ...] = ()


class SparsityAllocatorModifier(StructuredModifier):
    """
    Allocates sparsity to the modules of all layers in one calibration pass over the dense model, and leaves the plan
    for a :class:`StruPruneModifier` in a later stage. Source: paper, Algorithms 2 and 3, steps 1, 2 and 5.

    One decoder layer is on the device at a time; of each module only its importance and its error curve are kept.
    Fields as in :class:`StructuredModifier`; ``sparsity`` must be given.

    :param allocation: ``softmax`` (Algorithm 2), ``softmax_inverse`` (Algorithm 3), ``global_threshold`` (Algorithm 1, with
        ``importance: closed_form``) or ``error_curve`` (the least sum of all modules' errors, see
        :func:`~struprune_plugin.allocation.allocate_error_curves`)

    Example recipe::

        allocation_stage:
          allocation_modifiers:
            SparsityAllocatorModifier:
              sparsity: 0.3
              allocation: softmax
        pruning_stage:
          pruning_modifiers:
            StruPruneModifier: {importance: obs}
    """

    allocation: Literal["error_curve", "softmax", "softmax_inverse", "global_threshold"] = "softmax"

    _scores: dict[str, Tensor] = PrivateAttr(default_factory=dict)
    _importance: dict[str, float] = PrivateAttr(default_factory=dict)
    _curves: dict[str, Tensor] = PrivateAttr(default_factory=dict)
    _started: float = PrivateAttr(default=0.0)
    _seconds: float = PrivateAttr(default=0.0)
    _peak_bytes: int | None = PrivateAttr(default=None)
    _plan: Plan | None = PrivateAttr(default=None)

    @property
    def plan(self) -> Plan | None:
        """The plan, once the calibration pass of this stage is over."""
        return self._plan

    @property
    def measured(self) -> dict[str, Any]:
        """Seconds and peak bytes of the calibration pass, once it is over."""
        return {"seconds": self._seconds, "peak_bytes": self._peak_bytes}

    @model_validator(mode="after")
    def _check_required(self) -> SparsityAllocatorModifier:
        if self.sparsity is None:
            raise ValueError("sparsity must be given: the allocator spreads it over the layers.")
        if self.search == "full":
            raise ValueError(
                "search must be moments in an allocator stage, got full, which prunes and so needs the pruning stage's fields. "
                "Give StruPruneModifier the allocation and search: full, without an allocator stage."
            )
        return self

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        assert self.sparsity is not None
        self._groups = self.find_groups(state.model)
        self.check_model(state.model, self._groups, self.sparsity)
        self.count_calibration(state.model, state.data.calib, self._groups)
        self.place_parts(state.model, state.data.calib, together=True)
        if not self._nested:
            self._check_stages()
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        check_alone(self)
        self.start_account(state.model)
        self._started = time.perf_counter()
        self.measure_saliency(state.model, state.data.calib)
        self._observer = LayerObserver("local", all_groups=True, placement=self._placement)
        self.watch_layers(state.model, self._observer)

    def on_sequential_epoch_end(self, state: State, event: Event, modules: list[nn.Module], **kwargs: Any) -> None:
        assert self._observer is not None
        for name, layer in self.find_finished_layers(state.model, modules):
            for group in self.groups_of(name):
                with self.stage("statistics"):
                    moments = self._observer.collect_moments(layer, group, "statistics")

                def measure(layer: nn.Module = layer, group: UnitGroup = group, moments: Moments = moments) -> Decision:
                    return self._measure_group(state.model, layer, group, moments)

                with self.stage("curves"), self.solve_room():
                    record, (self._curves[group.name], self._scores[group.name]) = decide_once(
                        measure, torch.device("cpu")
                    )
                self._importance[group.name] = record["importance"]
            self._observer.finish_layer()

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        self.remove_hooks()
        self._observer = None
        self._plan = self._make_plan(state.model)
        self._seconds, self._peak_bytes = time.perf_counter() - self._started, self.stop_account()

    def run_nested(
        self,
        state: State,
        pipeline_options: dict[str, Any],
        snip: dict[str, Tensor],
        roots: dict[str, Tensor],
        roundings: dict[str, Rounding],
    ) -> Plan:
        """Make the plan in a session of its own, inside another modifier's: one more pass over the data.

        :param snip: gradient scores by group name, where measured already
        :param roots: the same of the sensitivity
        :param roundings: by group name; the session of its own does not see the recipe's later modifiers
        """
        self._snip, self._roots, self._roundings = snip, roots, roundings
        batches = self._take_batches(state) if self.allocation == "error_curve" else None
        self.run_alone(state, pipeline_options, propagate_error=False, calibration=batches)
        assert self._plan is not None
        return self._plan

    def _take_batches(self, state: State) -> list[dict[str, Tensor]]:
        """Return the first batches that hold ``allocation_samples`` and four tokens an input of the widest module, or this
        process' share of these."""
        ranks = count_ranks()
        needed = 4 * max(group.num_columns for group in self.find_groups(state.model)) / ranks
        batches: list[dict[str, Tensor]] = []
        sequences = tokens = 0
        for batch in state.data.calib:
            batches.append(batch)
            sequences += len(batch["input_ids"])
            tokens += int(batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel())
            if sequences >= self.allocation_samples / ranks and tokens >= needed:
                break
        return batches

    def _check_stages(self) -> None:
        """Refuse a plan that nobody follows, or two plans.

        :raises ValueError: the same
        """
        names = [type(modifier).__name__ for modifier in list_modifiers()]
        ours, theirs = "SparsityAllocatorModifier", "StruPruneModifier"
        if names.count(ours) != 1 or theirs not in names[names.index(ours) :]:
            raise ValueError(
                f"recipe: one {ours} stage must come before the {theirs} stage that follows its plan, got {names}. "
                "Add or reorder the stages."
            )

    def _measure_group(self, model: nn.Module, layer: nn.Module, group: UnitGroup, moments: Moments) -> Decision:
        """Return a group's importance, and its error curve and scores."""
        consumer = find_linear(layer, group.consumer)
        weight = self.read_dense(layer, group)
        damped = damp_moments(moments, weight, self.base_damping, consumer.bias is not None)
        weighed = self.weigh(group, damped, weight)
        if self.rotates(group):
            rotation = eliminate_directions(weighed, group.num_blocks, group.columns_per_unit, group.name)
            weighed = rotate_moments(weighed, rotation.basis, group.columns_per_unit)
            order, scores = order_directions(rotation)
        else:
            ranked = weighed if self.importance == "obs" else damped
            order, scores = self.rank_units(layer, group, moments, ranked, group.num_units)
        if self.restoration == "none":
            root = self._roots.get(group.name)
            moved = weight if root is None else self._place(root, weight) @ weight
            curve = measure_deletion_curve(weighed, moved, order, group.columns_per_unit)
        else:  # ADMM too starts from and closes with the least-squares solve
            curve = measure_restored_curve(weighed, order, group.columns_per_unit, group.name)
        importance = float(scores.sum())
        if self.allocation == "softmax_inverse":
            decay = self.gamma**group.layer_index
            if group.module_kind == "ffn":
                linears = [read_weight(find_linear(layer, name))[0] for name in (*group.producers, group.consumer)]
                importance = decay * measure_mlp_importance(linears)
            else:
                importance = decay * self.rho * measure_attention_importance(list_head_weights(model, layer))
        return {"importance": importance}, [to_host(curve), to_host(scores)]

    def _make_plan(self, model: nn.Module) -> Plan:
        assert self.sparsity is not None
        sizes: list[GroupSize] = self.measure_groups(self._groups)
        missing = [group.name for group in self._groups if group.name not in self._curves]
        assert not missing, f"no calibration data reached {missing}"
        num_prunable = count_prunable_parameters(model)
        share = find_group_sparsity(sizes, num_prunable, self.sparsity)
        if self.allocation == "global_threshold":
            return self._make_threshold_plan(sizes, share)
        if self.allocation == "error_curve":
            return self._make_curve_plan(sizes, share)
        best, candidates = search_temperature(
            sizes,
            [self._importance[group.name] for group in self._groups],
            [self._curves[group.name] for group in self._groups],
            share,
            self.temperatures,
            RULES[self.allocation],
            self.max_sparsity,
            self.as_printed,
        )
        if not self.as_printed:
            check_budget(sizes, best.kept, share)
        else:
            removed = sum((s.num_units - kept) * s.unit_cost for s, kept in zip(sizes, best.kept, strict=True))
            logger.warning(
                f"as_printed: the paper's formula removes {removed / num_prunable:.4f} of the parameters, "
                f"asked were {self.sparsity} (R6). Set as_printed: false to meet the budget."
            )
        logger.info(f"allocated by {self.allocation} at temperature {best.temperature:g}, error {best.loss:.6g}")
        record = {
            "method": self.allocation,
            "as_printed": self.as_printed,
            "search": "moments",
            "temperature": best.temperature,
            "searched": [{"temperature": c.temperature, "error": c.loss} for c in candidates],
            "importance": {group.name: self._importance[group.name] for group in self._groups},
        }
        kept = {size.name: count for size, count in zip(sizes, best.kept, strict=True)}
        return Plan(kept, record, tuple(candidates))

    def _make_threshold_plan(self, sizes: list[GroupSize], share: float) -> Plan:
        scores = [self._scores[size.name] for size in sizes]
        kept = round_kept_counts(sizes, allocate_global_threshold(sizes, scores, share))
        check_budget(sizes, kept, share)
        retention = {s.name: min(max(float(part.mean()), 0.0), 1.0) for s, part in zip(sizes, scores, strict=True)}
        record = {"method": self.allocation, "as_printed": self.as_printed, "retention": retention}
        return Plan({size.name: count for size, count in zip(sizes, kept, strict=True)}, record)

    def _make_curve_plan(self, sizes: list[GroupSize], share: float) -> Plan:
        curves = [self._curves[size.name] for size in sizes]
        kept = allocate_error_curves(sizes, curves, (1 - share) * sum(size.num_parameters for size in sizes))
        check_budget(sizes, kept, share)
        loss = sum(float(curve[count]) for curve, count in zip(curves, kept, strict=True))
        record = {"method": self.allocation, "error": loss, "sensitivity": self.sensitivity}
        return Plan({size.name: count for size, count in zip(sizes, kept, strict=True)}, record)
