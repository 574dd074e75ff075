"""``StruPruneModifier``: prune every decoder layer physically, one layer on the device at a time."""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from llmcompressor.args import DatasetArguments
from llmcompressor.core import Event, State, active_session, create_session
from llmcompressor.pipelines import SequentialPipeline
from llmcompressor.recipe import Recipe
from loguru import logger
from pydantic import PrivateAttr, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.allocation import find_group_sparsity, round_kept_counts
from struprune_plugin.export import adopt_attention, adopt_config, read_manifest, wrap_save, write_manifest
from struprune_plugin.modifiers.allocator import Plan, SparsityAllocatorModifier
from struprune_plugin.modifiers.capture import LayerObserver
from struprune_plugin.modifiers.fields import GROUP_FIELDS, StructuredModifier
from struprune_plugin.solve import damp_moments, expand_units, keep_last, solve_kept_weights
from struprune_plugin.statistics import Moments, append_bias, measure_error, with_bias_index
from struprune_plugin.surgery import read_weight, slice_group
from struprune_plugin.topology import UnitGroup, count_prunable_parameters, find_decoder_layers, find_linear


class StruPruneModifier(StructuredModifier):
    """
    Removes coupled units (FFN channels; attention heads or value channels) from every decoder layer and re-solves the
    linears that consumed them, so that the model is physically smaller.

    For a linear with inputs P (kept ones P_S), target Y and dense weights W, the new weights minimise
    ``||Y - W_S P_S||^2 + lambda ||W_S - W||^2``. Layers are pruned in order; each sees inputs from the layers pruned
    before it. The dense hidden states travel beside the pruned ones, on the host.

    Fields as in :class:`StructuredModifier`, and:

    :param sparsity: required, unless a :class:`SparsityAllocatorModifier` stage comes before; its plan rules then
    :param allocation: ``uniform``, or ``softmax`` / ``softmax_inverse`` in an allocation pass of this modifier's own
    :param target: what a solve should reproduce (method.md section 2): ``residual`` (the dense residual stream minus
        the pruned one before the module, which repairs inherited error), ``block`` (the dense module's output) or
        ``local`` (the module's own output on the pruned path's inputs)
    :param replay: a ``struprune.json`` whose kept units and settings to repeat on the same calibration data

    Example recipe::

        pruning_stage:
          pruning_modifiers:
            StruPruneModifier:
              sparsity: 0.2
    """

    allocation: Literal["uniform", "softmax", "softmax_inverse"] = "uniform"
    target: Literal["residual", "block", "local"] = "residual"
    replay: str | None = None

    _groups: list[UnitGroup] = PrivateAttr(default_factory=list)
    _num_prunable: int = PrivateAttr(default=0)
    _pipeline_options: dict[str, Any] = PrivateAttr(default_factory=dict)
    _calibration: dict[str, Any] = PrivateAttr(default_factory=dict)
    _fingerprint: Any = PrivateAttr(default=None)
    _replayed: dict[str, Any] = PrivateAttr(default_factory=dict)
    _stage_before: SparsityAllocatorModifier | None = PrivateAttr(default=None)
    _plan: Plan | None = PrivateAttr(default=None)
    _observer: LayerObserver | None = PrivateAttr(default=None)
    _changed: bool = PrivateAttr(default=False)
    _records: list[dict[str, Any]] = PrivateAttr(default_factory=list)
    _stages: dict[str, dict[str, float]] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_replay(cls, values: Any) -> Any:
        """Take all settings from the manifest that is to be replayed; what the recipe says besides must agree."""
        if not isinstance(values, dict) or not values.get("replay"):
            return values
        settings = {name: v for name, v in read_manifest(values["replay"])["settings"].items() if name != "replay"}
        for name in settings.keys() & values.keys():
            if values[name] != settings[name]:
                raise ValueError(
                    f"replay: {name} must be {settings[name]!r} as in {values['replay']}, got {values[name]!r}. Leave it out."
                )
        return {**settings, **values}

    # -- lifecycle ------------------------------------------------------------------------------------------------

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        model = state.model
        self._stage_before = stage = self._find_allocator()
        sparsity = self.sparsity if stage is None else self._agree_with(stage)
        if sparsity is None:
            raise ValueError(
                "StruPruneModifier: sparsity must be given where no SparsityAllocatorModifier stage comes before, "
                "got none. Add sparsity to the recipe."
            )
        self.sparsity = sparsity
        self._groups = self.find_groups(model)
        self.check_model(model, self._groups, sparsity)
        num_sequences, num_tokens = self.check_calibration(state.data.calib, self._groups)
        self._calibration = {"num_sequences": num_sequences, "num_tokens": num_tokens}
        self._num_prunable = count_prunable_parameters(model)
        self._pipeline_options = {"sequential_targets": kwargs.get("sequential_targets")}
        if self.replay:
            self._replayed = self._read_replay(self.replay)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        self.check_alone()
        with self._stage("allocate"):
            self._plan = self._make_plan(state)
        adopt_attention(state.model)
        self._observer = observer = LayerObserver(self.target)
        self._fingerprint = hashlib.sha256()
        self.register_hook(state.model.get_input_embeddings(), self._see_tokens, "forward_pre", with_kwargs=True)
        for name, layer in find_decoder_layers(state.model):

            def before(module: nn.Module, args: tuple, call: dict, name: str = name) -> None:
                with self._stage("statistics"):
                    observer.before_layer(module, self._groups_of(name), args, call)

            def after(module: nn.Module, args: tuple, output: Any) -> None:
                with self._stage("statistics"):
                    observer.after_layer()

            self.register_hook(layer, before, "forward_pre", with_kwargs=True)
            self.register_hook(layer, after, "forward")

    def on_sequential_epoch_end(self, state: State, event: Event, modules: list[nn.Module], **kwargs: Any) -> None:
        layers = find_decoder_layers(state.model)
        here = [(name, layer) for name, layer in layers if any(layer is module for module in modules)]
        if len(here) > 1:
            raise ValueError(
                f"sequential_targets_per_subgraph: must be 1 for StruPruneModifier, got {len(here)} decoder layers in one "
                "subgraph. Leave it at its default."
            )
        assert self._observer is not None
        for name, layer in here:
            self._check_replayed_calibration()
            for group in self._groups_of(name):
                progress = f"({group.layer_index + 1}/{len(layers)}): {group.consumer.split('.')[-1]} statistics"
                with self._stage("statistics"):
                    moments = self._observer.collect_moments(layer, group, progress)
                self._prune_group(layer, group, moments)
            self._observer.finish_layer()

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        self.remove_hooks()
        seen = {record["name"] for record in self._records}
        missing = [group.name for group in self._groups if group.name not in seen]
        if missing:
            raise ValueError(
                f"sequential_targets: every decoder layer must be a target of its own, got no data for {missing}. "
                "Leave it at its default."
            )

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        if self._observer is None or len(self._records) < len(self._groups):
            return True  # an aborted run that the host winds down: nothing to export
        self._observer = None
        adopt_config(state.model)
        manifest = self._make_manifest(state.model)
        wrap_save(state.model, lambda folder: write_manifest(manifest, folder))
        budget = manifest["budget"]
        logger.info(
            f"removed {budget['removed_parameters']:,} of {budget['prunable_parameters']:,} parameters of the decoder "
            f"layers ({budget['met_sparsity']:.4%}, asked {budget['asked_sparsity']:.4%})"
        )
        return True

    # -- plan -----------------------------------------------------------------------------------------------------

    def _groups_of(self, layer_name: str) -> list[UnitGroup]:
        return [group for group in self._groups if group.layer_name == layer_name]

    def _find_allocator(self) -> SparsityAllocatorModifier | None:
        """Return the allocator stage that comes before this modifier in the recipe."""
        found = None
        for modifier in active_session().lifecycle.recipe.modifiers:
            if modifier is self:
                return found
            if isinstance(modifier, SparsityAllocatorModifier):
                found = modifier
        return found

    def _agree_with(self, stage: SparsityAllocatorModifier) -> float | None:
        for name in ("sparsity", *GROUP_FIELDS):
            ours, theirs = getattr(self, name), getattr(stage, name)
            if ours != theirs and not (name == "sparsity" and ours is None):
                raise ValueError(
                    f"StruPruneModifier: {name} must be {theirs!r} as in the SparsityAllocatorModifier stage, "
                    f"got {ours!r}. Give both stages the same value."
                )
        return stage.sparsity

    def _make_plan(self, state: State) -> Plan:
        """Return the kept counts: replayed, left by an allocator stage, allocated in a pass of its own, or uniform."""
        assert self.sparsity is not None
        if self._replayed:
            kept = {name: len(keep) for name, keep in self._replayed["keep"].items()}
            return Plan(kept, self._replayed["allocation"])
        if self._stage_before is not None:
            assert self._stage_before.plan is not None
            return self._stage_before.plan
        if self.allocation != "uniform":
            return self._run_allocation_pass(state)
        sizes = self.measure_groups(self._groups)
        share = find_group_sparsity(sizes, self._num_prunable, self.sparsity)
        counts = round_kept_counts(sizes, [share] * len(sizes))
        return Plan({size.name: n for size, n in zip(sizes, counts, strict=True)}, {"method": "uniform"})

    def _run_allocation_pass(self, state: State) -> Plan:
        """Run a :class:`SparsityAllocatorModifier` over the dense model in a nested session: one more pass of data."""
        logger.info(f"allocation pass ({self.allocation}) over the dense model")
        shared = {name: value for name, value in self.dump_fields().items() if name in StructuredModifier.model_fields}
        allocator = SparsityAllocatorModifier(**shared, allocation=self.allocation)
        calibration = state.data.calib
        with create_session() as session:
            session.initialize(
                model=state.model, recipe=Recipe.from_modifiers([allocator]), calib_data=calibration, copy_data=False
            )
            SequentialPipeline()(
                state.model, calibration, DatasetArguments(**self._pipeline_options, propagate_error=False)
            )
            session.finalize()
        assert allocator.plan is not None
        return allocator.plan

    def _read_replay(self, path: str) -> dict[str, Any]:
        manifest = read_manifest(path)
        sizes = {entry["name"]: entry["num_units"] for entry in manifest["groups"]}
        if sizes != {group.name: group.num_units for group in self._groups}:
            raise ValueError(
                f"replay: {path} must describe this model's modules and their sizes, got others. "
                "Replay it on the dense model it was made from."
            )
        keep = {entry["name"]: entry["keep"] for entry in manifest["groups"]}
        return {
            "keep": keep,
            "allocation": manifest["allocation"],
            "calibration": manifest["calibration"],
            "path": path,
        }

    def _see_tokens(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs["input"]
        self._fingerprint.update(tokens.detach().cpu().to(torch.int64).numpy().tobytes())

    def _check_replayed_calibration(self) -> None:
        """Refuse, at the first layer, to replay on other calibration data than the manifest's."""
        self._calibration["sha256"] = self._fingerprint.hexdigest()
        expected = self._replayed.get("calibration", self._calibration)["sha256"]
        if self._calibration["sha256"] != expected:
            raise ValueError(
                f"replay: the calibration tokens must be those of {self._replayed['path']} (sha256 {expected[:12]}…), got "
                f"{self._calibration['sha256'][:12]}…. Pass the same text, number, length and order of samples."
            )

    # -- pruning --------------------------------------------------------------------------------------------------

    def _prune_group(self, layer: nn.Module, group: UnitGroup, moments: Moments) -> None:
        """Select, re-solve and slice one group, and record it."""
        assert self._plan is not None
        num_keep = self._plan.kept[group.name]
        consumer = find_linear(layer, group.consumer)
        dense = append_bias(*read_weight(consumer))
        self._changed = self._changed or num_keep < group.num_units
        with self._stage("select and solve"):
            damped = damp_moments(moments, dense, self.damping, consumer.bias is not None)
            keep, scores = self._select_units(layer, group, moments, damped, num_keep)
            columns = expand_units(keep, group.columns_per_unit)
            deleted = dense[:, with_bias_index(columns, group.num_columns)]
            weight, condition = deleted, None
            if self.restoration == "least_squares" and self._changed:
                solved = solve_kept_weights(damped, columns, group.name)
                weight, condition = solved.weight, solved.condition_number
            energy = max(float(moments.target_energy), 1e-300)
            errors = [measure_error(moments, w, columns) / energy for w in (deleted, weight)]
        if self._changed:
            with self._stage("surgery"):
                slice_group(layer, group, keep, weight)
        self._records.append(
            {
                "name": group.name,
                "layer": group.layer_index,
                "kind": group.kind,
                "num_units": group.num_units,
                "num_blocks": group.num_blocks,
                "unit_cost": group.unit_cost,
                "kept": num_keep,
                "sparsity": 1 - num_keep / group.num_units,
                "scores": _summarize_scores(scores, keep),
                "error_before": errors[0],
                "error_after": errors[1],
                "condition_number": condition,
                "keep": keep.tolist(),
            }
        )

    def _select_units(
        self, layer: nn.Module, group: UnitGroup, moments: Moments, damped: Moments, num_keep: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return (kept units, scores); no scores where nothing had to be ranked."""
        device = damped.gram.device
        if self._replayed:
            return torch.tensor(self._replayed["keep"][group.name], device=device), None
        if num_keep == group.num_units:
            return torch.arange(num_keep, device=device), None
        order, scores = self.rank_units(layer, group, moments, damped)
        return keep_last(order, num_keep), scores

    # -- manifest -------------------------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Add the seconds and the peak memory of what runs inside to a stage of the manifest."""
        start = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        yield
        stage = self._stages.setdefault(name, {"seconds": 0.0, "peak_bytes": 0})
        stage["seconds"] += time.perf_counter() - start
        stage["peak_bytes"] = max(stage["peak_bytes"], measure_peak_bytes())

    def _make_manifest(self, model: PreTrainedModel) -> dict[str, Any]:
        assert self._plan is not None
        after = model.num_parameters()
        removed = sum((r["num_units"] - r["kept"]) * r["unit_cost"] for r in self._records)
        stages = [
            {"name": name, "seconds": round(values["seconds"], 3), "peak_bytes": int(values["peak_bytes"])}
            for name, values in self._stages.items()
        ]
        return {
            "model": {
                "base": model.config._name_or_path,
                "type": model.config.model_type,
                "parameters_before": after + removed,
                "parameters_after": after,
            },
            "settings": self.dump_fields(),
            "seed": torch.initial_seed(),
            "calibration": self._calibration,
            "budget": {
                "prunable_parameters": self._num_prunable,
                "asked_sparsity": self.sparsity,
                "removed_parameters": removed,
                "met_sparsity": removed / self._num_prunable,
            },
            "allocation": self._plan.record,
            "memory_measure": "accelerator bytes allocated" if torch.cuda.is_available() else "process resident bytes",
            "stages": stages,
            "groups": self._records,
        }


def _summarize_scores(scores: Tensor | None, keep: Tensor) -> dict[str, float] | None:
    """Return the extremes of a group's scores and where the cut lies."""
    if scores is None:
        return None
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept[keep] = True
    return {
        "min": float(scores.min()),
        "mean": float(scores.mean()),
        "max": float(scores.max()),
        "largest_removed": float(scores[~kept].max()),
        "smallest_kept": float(scores[kept].min()),
    }


def measure_peak_bytes() -> int:
    """Return the peak memory so far: allocated on the accelerator, or resident in this process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
