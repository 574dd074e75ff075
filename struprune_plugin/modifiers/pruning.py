"""``StruPruneModifier``: prune every decoder layer physically, one layer on the device at a time."""

from __future__ import annotations

import hashlib
import time
from typing import Any, Literal

import torch
from llmcompressor.core import Event, State
from loguru import logger
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.allocation import (
    check_budget,
    find_group_sparsity,
    measure_uniform_slack,
    round_kept_counts,
    round_uniform_counts,
)
from struprune_plugin.export import (
    adopt_attention,
    adopt_config,
    adopt_stock,
    can_hold_heads,
    make_uniform_config,
    read_manifest,
    wrap_save,
    write_manifest,
)
from struprune_plugin.modifiers.admm import run_admm
from struprune_plugin.modifiers.allocator import Plan, SparsityAllocatorModifier
from struprune_plugin.modifiers.capture import LayerObserver, accumulate_tokens, make_group_sums
from struprune_plugin.modifiers.checks import check_alone, count_parameters, describe_weights, list_modifiers
from struprune_plugin.modifiers.distributed import (
    Decision,
    check_one_process,
    count_before,
    count_ranks,
    decide_once,
    gather_digests,
)
from struprune_plugin.modifiers.fields import GROUP_FIELDS, StructuredModifier
from struprune_plugin.modifiers.tuning import TuningSettings, tune_layer
from struprune_plugin.modifiers.widths import check_widths, describe_roundings
from struprune_plugin.rotation import Rotation, eliminate_directions, order_directions, rotate_columns, rotate_moments
from struprune_plugin.solve import choose_damping, damp_moments, expand_units, keep_last, solve_kept_weights, swap_units
from struprune_plugin.statistics import Moments, measure_error, with_bias_index
from struprune_plugin.surgery import (
    LayerCopy,
    copy_layer,
    restore_layer,
    rotate_group,
    rotate_producer,
    set_weight,
    slice_group,
)
from struprune_plugin.topology import (
    UnitGroup,
    count_prunable_parameters,
    find_decoder_layers,
    find_family,
    find_groups,
    find_linear,
    has_uniform_layers,
    measure_layer,
)


class StruPruneModifier(StructuredModifier):
    """
    Removes coupled units (FFN channels; attention heads or value channels) from every decoder layer and re-solves the
    linears that consumed them, so that the model is physically smaller.

    For a linear with inputs P (kept ones P_S), target Y and dense weights W, the new weights minimise
    ``||Y - W_S P_S||^2 + lambda ||W_S - W||^2``. Layers are pruned in order; each sees inputs from the layers pruned
    before it. The dense hidden states travel beside the pruned ones, on the host.

    Fields as in :class:`StructuredModifier`, and:

    :param sparsity: required, unless a :class:`SparsityAllocatorModifier` stage comes before; its plan rules then
    :param allocation: ``uniform``, or a rule of :class:`SparsityAllocatorModifier`, in an allocation pass of our own;
        ``error_curve`` takes ``allocation_samples`` for it
    :param target: what a solve should reproduce (method.md section 2): ``residual`` (the dense residual stream minus
        the pruned one before the module, which repairs inherited error), ``block`` (the dense module's output) or
        ``local`` (the module's own output on the pruned path's inputs)
    :param output: ``per_layer`` (every layer its own size; our modelling file travels with the checkpoint) or ``uniform``
        (all layers the same size, so that allocation is uniform; stock classes load it)
    :param max_swaps: after the elimination, exchange at most so many kept units of a module for removed ones, while the
        re-solved error falls; with ``obs``, for units of one column that were not rotated
    :param tuning_epochs: passes over the calibration data in which every layer, once pruned, is tuned towards the dense
        one's output, see :func:`~struprune_plugin.modifiers.tuning.tune_layer`; 0 leaves it as solved
    :param tuning_learning_rate: of Adam, relative to the root mean square of every parameter
    :param replay: a ``struprune.json`` whose kept units and settings to repeat on the same calibration data

    Example recipe::

        pruning_stage:
          pruning_modifiers:
            StruPruneModifier:
              sparsity: 0.2
    """

    allocation: Literal["uniform", "error_curve", "softmax", "softmax_inverse", "global_threshold"] = "error_curve"
    target: Literal["residual", "block", "local"] = "residual"
    output: Literal["per_layer", "uniform"] = "per_layer"
    replay: str | None = None
    max_swaps: int = Field(default=100, ge=0)
    tuning_epochs: int = Field(default=0, ge=0)
    tuning_learning_rate: float = Field(default=0.02, gt=0, allow_inf_nan=False)

    _num_prunable: int = PrivateAttr(default=0)
    _pipeline_options: dict[str, Any] = PrivateAttr(default_factory=dict)
    _calibration: dict[str, Any] = PrivateAttr(default_factory=dict)
    _weights_digest: str = PrivateAttr(default="")
    _started: float = PrivateAttr(default=0.0)
    _fingerprint: Any = PrivateAttr(default=None)
    _replayed: dict[str, Any] = PrivateAttr(default_factory=dict)
    _stage_before: SparsityAllocatorModifier | None = PrivateAttr(default=None)
    _plan: Plan | None = PrivateAttr(default=None)
    _changed: bool = PrivateAttr(default=False)
    _tuning: dict[str, Any] = PrivateAttr(default_factory=dict)  # by layer
    _rehearsed: Plan | None = PrivateAttr(default=None)  # of a rehearsal, which gives every layer its weights back
    _pruned: tuple[nn.Module, LayerCopy] | None = PrivateAttr(default=None)  # a rehearsal's last layer, as it was
    _records: list[dict[str, Any]] = PrivateAttr(default_factory=list)

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

    @model_validator(mode="after")
    def _check_tuning(self) -> StruPruneModifier:
        if self.tuning_epochs and self.target == "local":
            raise ValueError(
                f"tuning_epochs must be 0 where target is local, got {self.tuning_epochs}: no dense path is run to learn "
                "from. Set target: residual."
            )
        return self

    @model_validator(mode="after")
    def _default_to_uniform(self) -> StruPruneModifier:
        if self.output == "uniform" and "allocation" not in self.model_fields_set:
            self.allocation = "uniform"
        return self

    @model_validator(mode="after")
    def _check_search(self) -> StruPruneModifier:
        if self.search == "full" and not self.allocation.startswith("softmax"):
            raise ValueError(
                f"search must be moments for allocation: {self.allocation}, which has no temperature, got full. "
                "Set allocation: softmax or softmax_inverse, or leave search out."
            )
        return self

    # -- lifecycle ------------------------------------------------------------------------------------------------

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        model = state.model
        if self.tuning_epochs:
            check_one_process("tuning_epochs above 0", "Leave it at 0, or tune in a run of one process.")
        self._stage_before = stage = self._find_allocator()
        sparsity = self.sparsity if stage is None else self._agree_with(stage)
        if sparsity is None:
            raise ValueError(
                "StruPruneModifier: sparsity must be given where no SparsityAllocatorModifier stage comes before, "
                "got none. Add sparsity to the recipe."
            )
        self.sparsity = sparsity
        self._groups = self.find_groups(model)
        self._check_stages()
        if self.output == "uniform":
            self._check_uniform(model)
        self.check_model(model, self._groups, sparsity)
        num_sequences, num_tokens = self.count_calibration(model, state.data.calib, self._groups)
        self._calibration = {"num_sequences": num_sequences, "num_tokens": num_tokens}
        self.place_parts(model, state.data.calib, hold_out=self.damping == "auto")
        self._weights_digest = describe_weights(model)
        self._num_prunable = count_prunable_parameters(model)
        self._pipeline_options = {"sequential_targets": kwargs.get("sequential_targets")}
        self._plan = self._make_early_plan(model)
        if self._plan is not None:
            check_widths(self._groups, self._plan.kept, self._roundings)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        check_alone(self)
        self.start_account(state.model)
        self._started = time.perf_counter()
        self.measure_saliency(state.model, state.data.calib)
        if self._plan is None:
            self._plan = self._make_late_plan(state)
            check_widths(self._groups, self._plan.kept, self._roundings)
        adopt_attention(state.model)
        num_before = (
            count_before(sum(len(batch["input_ids"]) for batch in state.data.calib)) if count_ranks() > 1 else 0
        )
        self._observer = LayerObserver(
            self.target, hold_out=self.damping == "auto", placement=self._placement, num_before=num_before
        )
        self._fingerprint = hashlib.sha256()
        self.register_hook(state.model.get_input_embeddings(), self._see_tokens, "forward_pre", with_kwargs=True)
        self.watch_layers(state.model, self._observer)

    def on_sequential_epoch_end(self, state: State, event: Event, modules: list[nn.Module], **kwargs: Any) -> None:
        assert self._observer is not None
        num_layers = len(find_decoder_layers(state.model))
        self._restore_pruned()
        for name, layer in self.find_finished_layers(state.model, modules):
            self._check_calibration_is_replayed()
            if self._rehearsed is not None:
                self._pruned = (layer, copy_layer(state.model, layer))
            for group in self.groups_of(name):
                progress = f"({group.layer_index + 1}/{num_layers}): {group.consumer.split('.')[-1]} statistics"
                with self.stage("statistics"):
                    moments = self._observer.collect_moments(layer, group, progress)
                self._prune_group(layer, group, moments)
            if self.tuning_epochs and self._changed:
                self._tune_layer(name, layer)
            self._observer.finish_layer()
            self._observer.watch_propagation(layer)

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        self.remove_hooks()
        assert self._observer is not None
        self._observer.close()
        self._restore_pruned()
        self._stages["whole pass"] = {
            "seconds": time.perf_counter() - self._started,
            "peak_bytes": self.stop_account(),
        }
        seen = {record["name"] for record in self._records}
        missing = [group.name for group in self._groups if group.name not in seen]
        if missing:
            raise ValueError(
                f"sequential_targets: every decoder layer must be a target of its own, got no data for {missing}. "
                "Leave it at its default."
            )

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        if self._observer is None or len(self._records) < len(self._groups):
            self.clean_up()
            return True  # an aborted run that the host winds down: nothing to export
        self._observer = None
        if self._rehearsed is not None:
            return True
        if self.output == "uniform":
            kept = {record["kind"]: record["kept"] for record in self._records}
            sizes = measure_layer(find_family(state.model), find_decoder_layers(state.model)[0][1])
            adopt_stock(state.model, make_uniform_config(state.model, sizes.num_key_value_heads, kept.get("ffn", 0)))
        else:
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

    def _find_allocator(self) -> SparsityAllocatorModifier | None:
        """Return the allocator stage that comes before this modifier in the recipe."""
        found = None
        for modifier in list_modifiers():
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
        if self.search == "full":
            raise ValueError(
                "StruPruneModifier: search must be moments where a SparsityAllocatorModifier stage makes the plan, got full. "
                "Leave that stage out."
            )
        return stage.sparsity

    def _check_stages(self) -> None:
        """Refuse a second pruning stage: groups are measured before any stage has run.

        :raises ValueError: the same
        """
        names = [type(modifier).__name__ for modifier in list_modifiers()]
        if names.count("StruPruneModifier") > 1:
            raise ValueError(
                f"recipe: must hold one StruPruneModifier, got {names}. Prune the saved output again in a run of its own."
            )

    def _check_uniform(self, model: PreTrainedModel) -> None:
        """Refuse what no stock class could load.

        :raises ValueError: the same
        """
        family = find_family(model)
        problem = ""
        if self.allocation != "uniform" or self._stage_before is not None:
            problem = "uniform allocation, got one that gives layers different sizes. Set allocation: uniform"
        elif self.attention_unit == "vo":
            problem = (
                "values as wide as queries and keys, which stock classes demand, got attention_unit: vo. "
                "Set attention_unit: head or none"
            )
        elif self.attention_unit == "head" and not family.free_heads:
            problem = (
                f"all heads for {model.config.model_type}, whose stock class takes the head size for hidden_size / heads, got "
                "attention_unit: head. Set attention_unit: none"
            )
        elif not has_uniform_layers(model):
            problem = (
                "a dense model, or one whose layers are all the same, got layers of different sizes or values narrower than "
                "queries. Convert it first (struprune convert --to uniform-padded)"
            )
        elif len(self._groups) != len(find_groups(model, self.attention_unit, self.prune_ffn)):
            problem = "all layers, got targets or ignore that leave some out. Leave them at their defaults"
        if problem:
            raise ValueError(f"output: uniform must have {problem}.")

    def _make_early_plan(self, model: PreTrainedModel) -> Plan | None:
        """Return the kept counts where they need no calibration data: replayed, or uniform."""
        assert self.sparsity is not None
        if self._rehearsed is not None:
            return self._rehearsed
        if self.replay:
            return self._read_replay(self.replay)
        if self._stage_before is not None or self.allocation not in ("uniform", "error_curve"):
            return None
        sizes = self.measure_groups(self._groups)
        share = find_group_sparsity(sizes, self._num_prunable, self.sparsity)
        if self.output == "uniform":

            def allowed(kind: str, count: int) -> bool:
                return kind == "ffn" or can_hold_heads(model, count)

            counts = round_uniform_counts(sizes, share, allowed)
            check_budget(sizes, counts, share, measure_uniform_slack(sizes))
        else:
            counts = round_kept_counts(sizes, [share] * len(sizes))
            check_budget(sizes, counts, share)
        kept = {size.name: n for size, n in zip(sizes, counts, strict=True)}
        if self.allocation == "error_curve":
            check_widths(self._groups, kept, self._roundings)  # what uniform counts cannot meet, no curves mend
            return None
        return Plan(kept, {"method": "uniform"})

    def _make_late_plan(self, state: State) -> Plan:
        """Return the kept counts that an allocator stage left, or those of an allocation pass of our own."""
        if self._stage_before is not None:
            assert self._stage_before.plan is not None
            self._stages["allocate"] = self._stage_before.measured
            return self._stage_before.plan
        logger.info(f"allocation pass ({self.allocation}) over the dense model")
        shared = {name: value for name, value in self.dump_fields().items() if name in StructuredModifier.model_fields}
        with self.stage("allocate"):
            allocator = SparsityAllocatorModifier(**shared | {"search": "moments"})
            plan = allocator.run_nested(state, self._pipeline_options, self._snip, self._roots, self._roundings)
        if self.search == "moments":
            return plan
        with self.stage("search"):
            return self._search_fully(state, plan)

    def _search_fully(self, state: State, plan: Plan) -> Plan:
        """Rehearse the whole pruning at every temperature of a plan, and return the plan of least error.

        ``L(T) = sum_groups ||Y - W' P||^2`` after restoration, not normalised: the very errors that the solves minimise, so
        measured against this run's ``target`` on the pruned path's inputs. ``block`` and ``residual`` compare with the dense
        model, ``residual`` with what a group inherits counted again; ``local`` compares with targets that the allocation
        itself moves. Source: paper, Algorithms 2 and 3, step 5 (R9).
        """
        errors: dict[tuple[int, ...], float] = {}
        for candidate in plan.candidates:
            if candidate.kept not in errors:  # temperatures far apart may round to the same counts
                kept = dict(zip(plan.kept, candidate.kept, strict=True))
                errors[candidate.kept] = self._rehearse(state, Plan(kept, plan.record))
            logger.info(f"temperature {candidate.temperature:g}: error {errors[candidate.kept]:.6g}")
        best = min(plan.candidates, key=lambda candidate: errors[candidate.kept])
        searched = [
            {"temperature": c.temperature, "error": errors[c.kept], "error_by_moments": c.loss} for c in plan.candidates
        ]
        record = {**plan.record, "search": "full", "temperature": best.temperature, "searched": searched}
        return Plan(dict(zip(plan.kept, best.kept, strict=True)), record, plan.candidates)

    def _rehearse(self, state: State, plan: Plan) -> float:
        """Prune after a plan in a session of its own, a layer at a time, giving each layer its weights back once the next
        has seen its outputs; return the squared error summed over groups."""
        rehearsal = StruPruneModifier(**self.dump_fields() | {"tuning_epochs": 0})  # a search by the solves' errors
        rehearsal._rehearsed, rehearsal._roundings = plan, self._roundings
        rehearsal._placement = self._placement
        rehearsal._snip, rehearsal._roots = self._snip, self._roots
        rehearsal.run_alone(state, self._pipeline_options, propagate_error=True)
        return sum(record["error_after"] * record["target_energy"] for record in rehearsal._records)

    def _restore_pruned(self) -> None:
        """In a rehearsal, undo the last layer's pruning: the host has propagated its outputs."""
        if self._pruned is not None:
            layer, dense = self._pruned
            restore_layer(layer, dense)
            self._pruned = None

    def clean_up(self) -> None:
        """Forget a run that was aborted; a rehearsal gives back what it holds."""
        super().clean_up()
        self._restore_pruned()

    def _read_replay(self, path: str) -> Plan:
        """Take the kept units of a manifest, and make the saved recipe independent of that file."""
        manifest = read_manifest(path)
        sizes = {entry["name"]: entry["num_units"] for entry in manifest["groups"]}
        if sizes != {group.name: group.num_units for group in self._groups} or (
            manifest["model"]["weights_sha256"] != self._weights_digest
        ):
            raise ValueError(
                f"replay: the model must be the one that {path} was made from, got other modules, sizes, weights or dtype. "
                "Replay it on that dense model."
            )
        self._replayed = {
            "path": path,
            "keep": {entry["name"]: entry["keep"] for entry in manifest["groups"]},
            "calibration": manifest["calibration"],
        }
        self.replay = None
        return Plan({name: len(keep) for name, keep in self._replayed["keep"].items()}, manifest["allocation"])

    def _see_tokens(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tokens = (args[0] if args else kwargs["input"]).detach().cpu().to(torch.int64)
        self._fingerprint.update(repr(tuple(tokens.shape)).encode() + tokens.numpy().tobytes())

    def _check_calibration_is_replayed(self) -> None:
        """Refuse, at the first layer, to replay on other calibration data than the manifest's."""
        digests = gather_digests(self._fingerprint.digest())
        self._calibration["sha256"] = (
            digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()
        ).hex()
        if self._replayed and self._calibration != self._replayed["calibration"]:
            raise ValueError(
                f"replay: the calibration batches must be those of {self._replayed['path']}, "
                f"{self._replayed['calibration']}, got {self._calibration}. Pass the same text, number, length, order "
                "(shuffle_calibration_samples=False) and batch size of samples, and as many processes."
            )

    # -- pruning --------------------------------------------------------------------------------------------------

    def _prune_group(self, layer: nn.Module, group: UnitGroup, moments: Moments) -> None:
        """Select, re-solve and slice one group, and record it."""
        assert self._plan is not None
        assert self._observer is not None
        held = self._observer.take_held(group)
        self._changed = self._changed or self._plan.kept[group.name] < group.num_units
        with self.stage("select and solve"), self.solve_room():
            record, (keep, weight, *rotated) = decide_once(
                lambda: self._decide(layer, group, moments, held), moments.gram.device
            )
        if self._changed and self.restoration == "admm" and (group.kind == "ffn" or self._query_key):
            if rotated:
                rotate_group(layer, group, rotated[0])
            _, record["admm"] = self._run_admm(layer, group, keep, weight)
            record["error_after"] = record["admm"]["error_after"]
        elif self._changed:
            with self.stage("surgery"):
                slice_group(layer, group, keep, weight, dict(zip(group.producers, rotated[1:], strict=False)))
                self.release(layer)
        self._records.append(record)

    def _decide(self, layer: nn.Module, group: UnitGroup, moments: Moments, held: Moments | None) -> Decision:
        """Select and re-solve one group; the layer stays as it is.

        :return: its record, and (kept units, the consumer's weight on them); where values are rotated the basis and the
            producer's kept rows too
        """
        assert self._plan is not None
        num_keep = self._plan.kept[group.name]
        has_bias = find_linear(layer, group.consumer).bias is not None
        dense = self.read_dense(layer, group)
        damped = damp_moments(moments, dense, self.base_damping, has_bias)
        weighed = self.weigh(group, damped, dense) if self.importance == "obs" else damped
        rotation: Rotation | None = None
        rotated: list[Tensor] = []
        if self.rotates(group) and num_keep < group.num_units:
            rotation = eliminate_directions(weighed, group.num_blocks, group.columns_per_unit, group.name)
            dense = rotate_columns(dense, rotation.basis, group.columns_per_unit)
            moments, damped = (rotate_moments(m, rotation.basis, group.columns_per_unit) for m in (moments, damped))
            held = None if held is None else rotate_moments(held, rotation.basis, group.columns_per_unit)
        keep, scores = self._select_units(layer, group, moments, weighed, num_keep, rotation)
        keep, swaps = self._swap_units(group, weighed, keep)
        if rotation is not None:
            rows = group.find_kept_rows(next(iter(group.producers)), keep.cpu())
            producer = rotate_producer(layer, group, rotation.basis, self.fetch)
            rotated = [rotation.basis, producer[rows.to(producer.device)]]
        columns = expand_units(keep, group.columns_per_unit)
        deleted = dense[:, with_bias_index(columns, group.num_columns)]
        weight, condition, damping = deleted, None, self.base_damping
        if self.restoration != "none" and self._changed:
            if held is not None:
                damping = choose_damping(moments, held, dense, columns, has_bias, group.name)
                damped = damp_moments(moments, dense, damping, has_bias)
            solved = solve_kept_weights(damped, columns, group.name)
            weight, condition = solved.weight, solved.condition_number
        energy = max(float(moments.target_energy), 1e-300)
        errors = [measure_error(moments, w, columns) / energy for w in (deleted, weight)]
        record = {
            "name": group.name,
            "layer": group.layer_index,
            "kind": group.kind,
            "num_units": group.num_units,
            "num_blocks": group.num_blocks,
            "unit_cost": group.unit_cost,
            "kept": num_keep,
            "sparsity": 1 - num_keep / group.num_units,
            "scores": _summarize_scores(scores, keep),
            "target_energy": energy,
            "error_before": errors[0],  # by deletion alone
            "error_after": errors[1],
            "swaps": swaps,
            "damping": damping,
            "admm": None,
            "condition_number": condition,
            "keep": keep.tolist(),
        }
        return record, [keep, weight, *rotated]

    def _tune_layer(self, name: str, layer: nn.Module) -> None:
        """Tune a pruned layer towards the dense one's output, and add to the records of its groups."""
        assert self._observer is not None
        calls, wanted = self._observer.list_block_pairs()
        settings = TuningSettings(self.tuning_epochs, self.tuning_learning_rate)
        with self.stage("tuning"):
            self._tuning[name] = tune_layer(layer, calls, wanted, settings, name)

    def _run_admm(
        self, layer: nn.Module, group: UnitGroup, keep: Tensor, weight: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Run ADMM from the least-squares solution, slice, and re-solve the consumer on the true activations.

        The closing solve makes p = phi(z) hold exactly in the saved model. Source: method.md sections 6 and 7.

        :return: (the consumer's weight, a record for the manifest)
        """
        assert self._observer is not None
        with self.stage("admm"):
            visits = self._observer.visit_batches(layer, group, f"{group.name} inputs")
            result = run_admm(layer, self._query_key, group, keep, weight, visits, self.admm_settings)
            slice_group(layer, group, keep, result.consumer, result.producers)
            consumer = find_linear(layer, group.consumer)
            sums = make_group_sums(layer, group, keep.device)
            for visit in self._observer.visit_batches(layer, group, f"{group.name} closing"):
                accumulate_tokens(sums, visit.inputs, visit.target, visit.call.tokens, group)
            moments = sums.gather()
            damped = damp_moments(moments, result.consumer.double(), self.base_damping, consumer.bias is not None)
            columns = torch.arange(len(keep) * group.columns_per_unit, device=moments.gram.device)
            solved = solve_kept_weights(damped, columns, group.name)
            set_weight(consumer, solved.weight)
        error = measure_error(moments, solved.weight) / max(float(moments.target_energy), 1e-300)
        return solved.weight, {"objective": result.objective, "error_after": error}

    def _select_units(
        self,
        layer: nn.Module,
        group: UnitGroup,
        moments: Moments,
        weighed: Moments,
        num_keep: int,
        rotation: Rotation | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (kept units, scores); no scores where nothing had to be ranked.

        :param rotation: what the values were rotated by, which gives the order
        """
        device = weighed.gram.device
        if self._replayed:
            return torch.tensor(self._replayed["keep"][group.name], device=device), None
        if num_keep == group.num_units:
            return torch.arange(num_keep, device=device), None
        if rotation is not None:
            order, scores = order_directions(rotation)
        else:
            order, scores = self.rank_units(layer, group, moments, weighed, group.num_units - num_keep)
        return keep_last(order, group.num_units, num_keep), scores

    def _swap_units(self, group: UnitGroup, weighed: Moments, keep: Tensor) -> tuple[Tensor, int]:
        """Search for better units by swaps, where one was asked for and units are single columns; also count the swaps."""
        chosen = self._replayed or self.rotates(group) or self.importance != "obs"
        if chosen or group.columns_per_unit > 1:
            return keep, 0
        return swap_units(weighed, keep, group.name, group.num_blocks, self.max_swaps)

    # -- manifest -------------------------------------------------------------------------------------------------

    def _make_manifest(self, model: PreTrainedModel) -> dict[str, Any]:
        assert self._plan is not None
        after = count_parameters(model)
        removed = sum((r["num_units"] - r["kept"]) * r["unit_cost"] for r in self._records)
        return {
            "model": {
                "base": model.config._name_or_path,
                "type": model.config.model_type,
                "weights_sha256": self._weights_digest,
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
                "rounding": describe_roundings(self._groups, self._roundings),
            },
            "allocation": self._plan.record,
            "memory_measure": self.memory_measure,
            "stages": self.list_stages(),
            "tuning": self._tuning,
            "groups": self._records,
        }


def _summarize_scores(scores: Tensor | None, keep: Tensor) -> dict[str, float | None] | None:
    """Return the extremes of a group's scores and where the cut lies; ``obs`` scores only what it removed."""
    if scores is None:
        return None
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept[keep] = True
    known = scores.isfinite()
    parts = {"kept": scores[known & kept], "removed": scores[known & ~kept]}
    return {
        f"{extreme}_{name}": float(getattr(part, extreme)()) if len(part) else None
        for name, part in parts.items()
        for extreme in ("min", "mean", "max")
    }
