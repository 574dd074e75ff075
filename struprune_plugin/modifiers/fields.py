"""Recipe fields and checks that both modifiers share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from llmcompressor.args import DatasetArguments
from llmcompressor.core import Event, State, create_session
from llmcompressor.modifiers import Modifier
from llmcompressor.pipelines import SequentialPipeline
from llmcompressor.recipe import Recipe
from llmcompressor.utils.dev import get_main_device
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.allocation import MAX_SPARSITY, GroupSize, find_group_sparsity
from struprune_plugin.importance import score_l0, score_magnitude, score_wanda, score_wanda_l2
from struprune_plugin.modifiers.admm import ADMMSettings, score_by_admm
from struprune_plugin.modifiers.budget import WHOLE, Demands, Placement, place_parts, read_sizes
from struprune_plugin.modifiers.capture import LayerObserver
from struprune_plugin.modifiers.checks import (
    check_cache_quantisation,
    check_calibration,
    check_order,
    check_weights,
    list_later_modifiers,
)
from struprune_plugin.modifiers.distributed import check_one_process
from struprune_plugin.modifiers.memory import (
    UNMEASURED,
    DeviceAccount,
    find_free_bytes,
    hold_one_layer,
    open_account,
    to_device,
    to_host,
    work_on_host,
)
from struprune_plugin.modifiers.saliency import check_gradient_memory, measure_snip
from struprune_plugin.modifiers.sensitivity import measure_fisher
from struprune_plugin.modifiers.widths import Rounding, find_roundings
from struprune_plugin.solve import (
    DAMPING,
    Elimination,
    eliminate_units,
    expand_units,
    find_root,
    order_units,
    weigh_outputs,
)
from struprune_plugin.statistics import Moments
from struprune_plugin.surgery import check_sliceable, read_consumer, read_weight, release_weights, sum_rows
from struprune_plugin.topology import (
    Family,
    UnitGroup,
    count_prunable_parameters,
    find_decoder_layers,
    find_family,
    find_groups,
    find_linear,
)

GROUP_FIELDS = ("targets", "ignore", "attention_unit", "prune_ffn", "channel_multiple")


class StructuredModifier(Modifier):
    """Fields that choose the units, score them and spread a budget over layers.

    :param sparsity: fraction of the parameters of all linears in the decoder layers to remove, in [0, 1)
    :param targets: consuming linears (``fc2``, ``out_proj``) of the modules to prune, exact names or ``re:<pattern>``
    :param ignore: the same, for modules to leave alone
    :param attention_unit: ``head``; ``vo`` (value channels, the same number from every head); ``none``
    :param prune_ffn: whether to prune FFN channels
    :param channel_multiple: kept FFN widths are whole multiples of this, and of what later quantisers and sparsity
        modifiers ask
    :param importance: how units are ranked, see method.md section 3
    :param restoration: ``least_squares`` re-solves the consumers, ``admm`` then the producers too, ``none`` deletes only
    :param damping: weight of the dense weights in every solve, relative to the mean diagonal of the Gram matrix; ``auto``
        takes 0.01, and for the least-squares solve that gives a module's weights what does best on every fourth sequence,
        held out
    :param temperature: of the softmax rules, relative to std(I) (R8); a list is searched by error (R9)
    :param search: how a temperature's error is found: ``moments`` reads it off every module's error curve on the dense path,
        ``full`` reruns the whole pruning at every temperature and gives the weights back (R9)
    :param rho: attention's factor in Algorithm 3; cancels under a relative temperature, kept for completeness
    :param gamma: decay of importance with depth in Algorithm 3
    :param sensitivity: ``fisher`` weighs errors of a module's output by the Fisher information there, in ``obs`` and in
        error curves, see :func:`~struprune_plugin.modifiers.sensitivity.measure_fisher`
    :param allocation_samples: calibration sequences for the sensitivity, and, in a pruning stage's own pass, for the
        curves of ``error_curve``; for these at least four tokens an input of the widest module
    :param rotate_values: rotate every head's values first, so that few channels carry what matters; for ``vo`` with
        ``obs`` and a restoration
    :param max_sparsity: clip of a module's sparsity in Algorithms 2 and 3
    :param as_printed: allocate exactly as the paper prints, and miss the budget where it does (R6, R7)
    :param measure_memory: count on a CPU, too, what an accelerator would hold, see
        :mod:`~struprune_plugin.modifiers.memory`; on an accelerator its own counters always tell
    :param memory_budget: bytes that the device may hold; moments and solves go to the host, and are made in pieces, where
        they do not fit. None takes what an accelerator has free
    :param alpha: weight of ADMM's linear terms, above 0 (paper, Algorithm 4; method.md section 7)
    :param beta: weight of its activation terms, above 0
    :param admm_steps: outer steps K
    :param admm_inner_steps: Adam steps of attention's sub-steps
    :param admm_learning_rate: theirs, relative to the size of what is updated
    :param attention_method: 2 (z_Q and z_K apart) or 1 (one z for the logits), R13
    """

    requires_calibration_data: bool = True

    sparsity: float | None = None
    targets: list[str] = Field(default_factory=lambda: ["re:.*"], min_length=1)
    ignore: list[str] = Field(default_factory=list)
    attention_unit: Literal["head", "vo", "none"] = "vo"
    prune_ffn: bool = True
    channel_multiple: int = Field(default=1, ge=1)
    importance: Literal["obs", "wanda", "wanda_l2", "magnitude", "snip", "l0", "closed_form"] = "obs"
    restoration: Literal["least_squares", "admm", "none"] = "least_squares"
    damping: float | Literal["auto"] = "auto"
    temperature: float | list[float] = Field(default_factory=lambda: [0.5, 1.0, 2.0, 4.0, 8.0, 16.0])
    search: Literal["moments", "full"] = "moments"
    rho: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    gamma: float = Field(default=0.9, gt=0, le=1)
    max_sparsity: float = Field(default=MAX_SPARSITY, gt=0, lt=1)
    as_printed: bool = False
    alpha: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    beta: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    admm_steps: int = Field(default=4, ge=1)
    admm_inner_steps: int = Field(default=8, ge=1)
    admm_learning_rate: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    attention_method: Literal[1, 2] = 2
    allocation: str = "uniform"
    sensitivity: Literal["fisher", "none"] = "fisher"
    allocation_samples: int = Field(default=16, ge=1)
    rotate_values: bool = True
    measure_memory: bool = False
    memory_budget: int | None = Field(default=None, ge=1)

    _groups: list[UnitGroup] = PrivateAttr(default_factory=list)
    _roundings: dict[str, Rounding] = PrivateAttr(default_factory=dict)  # by group name
    _query_key: tuple[str, ...] = PrivateAttr(default=())  # W_Q and W_K, where ADMM may move them
    _snip: dict[str, Tensor] = PrivateAttr(default_factory=dict)  # by group name, from the dense model
    _roots: dict[str, Tensor] = PrivateAttr(default_factory=dict)  # of the sensitivity, by group name
    _observer: LayerObserver | None = PrivateAttr(default=None)
    _nested: bool = PrivateAttr(default=False)  # in a session inside another modifier's
    _stages: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)
    _account: DeviceAccount | None = PrivateAttr(default=None)
    _spans: ExitStack = PrivateAttr(default_factory=ExitStack)  # closes the account
    _peaks: list[int] = PrivateAttr(default_factory=list)  # of the whole pass, once it is over
    _placement: Placement = PrivateAttr(default=WHOLE)
    _measure: str = PrivateAttr(default=UNMEASURED)

    @field_validator("sparsity")
    @classmethod
    def _check_sparsity(cls, value: float | None) -> float | None:
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"sparsity must be in [0, 1), got {value}. It is the fraction of parameters removed.")
        return value

    @field_validator("damping")
    @classmethod
    def _check_damping(cls, value: float | str) -> float | str:
        if not isinstance(value, str) and not (value >= 0 and math.isfinite(value)):
            raise ValueError(
                f"damping must be auto, or finite and at least 0, got {value}. Leave it out, or take 0.01."
            )
        return value

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float | list[float]) -> float | list[float]:
        grid = value if isinstance(value, list) else [value]
        if not grid or not all(t > 0 and math.isfinite(t) for t in grid):
            raise ValueError(f"temperature must be above 0, one value or a list of at least one, got {value}.")
        return value

    @model_validator(mode="after")
    def _check_stageless(self) -> StructuredModifier:
        if self.start is not None or self.end is not None:
            raise ValueError(
                "start and end must be left out: structured pruning happens once, in one calibration pass."
            )
        return self

    @property
    def base_damping(self) -> float:
        """The damping of all but the closing least-squares solve."""
        return DAMPING if self.damping == "auto" else self.damping

    @property
    def temperatures(self) -> list[float]:
        return self.temperature if isinstance(self.temperature, list) else [self.temperature]

    def find_groups(self, model: nn.Module) -> list[UnitGroup]:
        return find_groups(model, self.attention_unit, self.prune_ffn, self.targets, self.ignore)

    def measure_groups(self, groups: Iterable[UnitGroup]) -> list[GroupSize]:
        """Return what allocation needs to know of the groups."""
        return [
            GroupSize(
                name=group.name,
                kind=group.module_kind,
                num_units=group.num_units,
                unit_cost=group.unit_cost,
                step=self._roundings[group.name].step,
            )
            for group in groups
        ]

    def check_model(self, model: nn.Module, groups: list[UnitGroup], sparsity: float) -> None:
        """Refuse, before any calibration, what cannot succeed.

        :raises ValueError: the violated contract
        """
        check_order(self)
        if not self._nested:
            check_weights(model)
        if self.restoration == "admm" or self.importance == "closed_form":
            what = "restoration: admm" if self.restoration == "admm" else "importance: closed_form"
            check_one_process(what, "Its variables are per token. Use least_squares and obs.")
        later = list_later_modifiers(self)
        check_cache_quantisation(model.config, later, self.attention_unit == "head")
        self._roundings = self._roundings or find_roundings(model, groups, later, self.channel_multiple)
        family = find_family(model)
        if self.restoration == "admm" or self.importance == "closed_form":
            self._check_admm(model, family)
        if self.allocation == "global_threshold" and self.importance != "closed_form":
            raise ValueError(
                f"importance: must be closed_form for allocation: global_threshold (Algorithm 1), got {self.importance!r}."
            )
        for group in groups:
            check_sliceable(model.get_submodule(group.layer_name), group)
            rounding = self._roundings[group.name]
            if rounding.step > group.num_units:
                raise ValueError(
                    f"{group.name}: the multiple of kept widths must be at most the width {group.num_columns}, got "
                    f"{rounding.width} ({', '.join(rounding.because)}). Choose a smaller multiple or group size."
                )
        share = find_group_sparsity(self.measure_groups(groups), count_prunable_parameters(model), sparsity)
        if self.allocation.startswith("softmax") and share > self.max_sparsity:
            raise ValueError(
                f"max_sparsity: must be at least {share:.4f}, the mean over the modules to prune for sparsity={sparsity}, "
                f"got {self.max_sparsity}. Lower sparsity, raise max_sparsity or prune more kinds of units."
            )

    def _check_admm(self, model: nn.Module, family: Family) -> None:
        """Refuse what Algorithm 4's sub-steps are not derived for.

        :raises ValueError: another FFN than ReLU's or SiLU's gated one; rotary attention without a way round it
        """
        config: Any = model.config
        names = ("activation_function", "hidden_activation", "hidden_act")
        activation = next(getattr(config, name) for name in names if getattr(config, name, None))
        gated = sum(map(len, family.ffn_producers.values())) == 2
        if self.prune_ffn and activation != ("silu" if gated else "relu"):
            raise ValueError(
                "restoration: admm and closed_form must have a ReLU or a SiLU-gated FFN, got "
                f"{'gated ' if gated else ''}{activation!r}. Use least_squares and obs."
            )
        if not family.rotary:
            self._query_key = tuple(list(family.attention_producers)[:2])
        elif self.importance == "closed_form" and self.attention_unit != "none":
            raise ValueError(
                "importance: closed_form must have attention without rotary positions, got "
                f"{getattr(config, 'model_type', '')!r}. Set attention_unit: none, or use obs."
            )
        elif self.attention_unit != "none":
            logger.info("rotary attention is re-solved by least squares, the FFN by ADMM")

    def count_calibration(self, model: nn.Module, loader: Iterable | None, groups: list[UnitGroup]) -> tuple[int, int]:
        """Return (sequences, tokens) of the calibration data, checked against the largest solve.

        :raises ValueError: as :func:`~struprune_plugin.modifiers.checks.check_calibration`
        """
        widest = max(groups, key=lambda group: group.num_columns)
        solves = self.importance == "obs" or self.restoration != "none"
        needed = widest.num_columns + 1 if solves else 1
        return check_calibration(loader, needed, widest.name, getattr(model.config, "max_position_embeddings", None))

    def place_parts(self, model: PreTrainedModel, loader: Any, together: bool = False, hold_out: bool = False) -> None:
        """Choose what goes to the host under the budget; without one, under what the accelerator has free.

        :param together: moments of all modules of a layer are gathered in one pass
        :param hold_out: those of sequences held out, too
        :raises ValueError: the budget is too small, or a method asked for does not keep one
        """
        strict = self.memory_budget is not None
        budget = self.memory_budget or find_free_bytes()
        if budget is None:
            return
        asked = {"restoration": self.restoration, "importance": self.importance}
        for name, value in (*asked.items(), ("tuning_epochs", getattr(self, "tuning_epochs", 0))):
            if value in ("admm", "snip", "l0", "closed_form") or (name == "tuning_epochs" and value):
                if not strict:
                    return
                raise ValueError(
                    f"memory_budget: must be left out for {name}: {value}, which keeps none. Leave one out."
                )
        sizes = read_sizes(model, self._groups, next(iter(loader))["input_ids"].shape)
        needs_fisher = self.importance == "obs" or self.allocation == "error_curve"
        demands = Demands(together, hold_out, self.sensitivity != "none" and needs_fisher)
        self._placement = place_parts(budget, sizes, demands, strict)
        if self._placement.gather_on_host or self._placement.solve_on_host:
            logger.info(f"{budget:,} bytes for the device: {self._placement}")

    def read_dense(self, layer: nn.Module, group: UnitGroup) -> Tensor:
        """Return the consumer's weights as :func:`read_consumer` does, where its system is solved."""
        dense = read_consumer(layer, group, self.fetch)
        self.release(layer)
        return dense

    @property
    def fetch(self) -> Callable[[Tensor], Tensor] | None:
        """What brings a tensor to the host, where systems are solved there; None where they are solved on the device."""
        return to_host if self._placement.solve_on_host else None

    def solve_room(self) -> AbstractContextManager[Any]:
        """Give the block in which systems are solved: the host's, or the device's."""
        return work_on_host() if self._placement.solve_on_host else nullcontext()

    def release(self, layer: nn.Module) -> None:
        """Take a layer's weights off the device where the budget asks for that."""
        if self._placement.release_weights:
            release_weights(layer)

    def measure_saliency(self, model: PreTrainedModel, loader: Iterable) -> None:
        """Score all units by gradients of the dense model, where the importance asks for that.

        :raises ValueError: too little memory for it
        """
        if self.importance == "snip" and not self._snip:
            check_gradient_memory(model, next(iter(loader))["input_ids"].shape)
            with self.stage("gradients"):
                self._snip = measure_snip(model, loader, self._groups)
        needed = self.importance == "obs" or self.allocation == "error_curve"
        if self.sensitivity != "none" and needed and not self._roots:
            with self.stage("sensitivity"), DisableQuantization(model):
                fisher = measure_fisher(model, loader, self._groups, self.allocation_samples, self._placement)
                self._roots = {name: self._find_root(matrix) for name, matrix in fisher.items()}

    def _find_root(self, matrix: Tensor) -> Tensor:
        """Return the root, on the host, found on the device unless solves run on the host."""
        if self._placement.solve_on_host:
            with work_on_host():
                return find_root(matrix)
        return to_host(find_root(to_device(matrix, get_main_device())))

    def update_event(self, state: State, event: Event, **kwargs: Any) -> None:
        """Handle an event of the host; leave no hooks behind if it fails."""
        with self._clean_on_error():
            super().update_event(state, event, **kwargs)

    def clean_up(self) -> None:
        """Forget a run that was aborted: its hooks, its account and what it observed."""
        self._spans.close()
        self.remove_hooks()
        if self._observer is not None:
            self._observer.close()
            self._observer = None

    @contextmanager
    def _clean_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.clean_up()
            raise

    def run_alone(
        self, state: State, pipeline_options: dict[str, Any], propagate_error: bool, calibration: Any = None
    ) -> None:
        """Run this modifier in a session of its own, inside another modifier's: one more pass over its data.

        :param calibration: batches to run on; the other's where None
        :param propagate_error: whether a layer sees the outputs of the changed layers before it, or of the dense ones
        """
        self._nested = True
        calibration = state.data.calib if calibration is None else calibration
        options = DatasetArguments(**pipeline_options, propagate_error=propagate_error)
        with self._clean_on_error(), create_session() as session:
            recipe = Recipe.from_modifiers([self])
            session.initialize(model=state.model, recipe=recipe, calib_data=calibration, copy_data=False)
            SequentialPipeline()(state.model, calibration, options)
            session.finalize()

    def groups_of(self, layer_name: str) -> list[UnitGroup]:
        return [group for group in self._groups if group.layer_name == layer_name]

    def watch_layers(self, model: nn.Module, observer: LayerObserver) -> None:
        """Let an observer see every call of every decoder layer in the calibration pass."""
        for name, layer in find_decoder_layers(model):

            def before(module: nn.Module, args: tuple, call: dict, name: str = name) -> None:
                with self._clean_on_error(), self.stage("statistics"):
                    observer.before_layer(module, self.groups_of(name), args, call)

            def after(module: nn.Module, args: tuple, output: Any) -> None:
                with self._clean_on_error(), self.stage("statistics"):
                    observer.after_layer(output)

            self.register_hook(layer, before, "forward_pre", with_kwargs=True)
            self.register_hook(layer, after, "forward")

    def find_finished_layers(self, model: nn.Module, modules: list[nn.Module]) -> list[tuple[str, nn.Module]]:
        """Return (name, module) of the decoder layer, if any, among the modules of a calibration step.

        :raises ValueError: several layers in one step; their statistics would mix
        """
        here = [(name, layer) for name, layer in find_decoder_layers(model) if any(layer is m for m in modules)]
        if len(here) > 1:
            raise ValueError(
                f"sequential_targets_per_subgraph: must be 1 for {type(self).__name__}, got {len(here)} decoder layers in "
                "one subgraph. Leave it at its default."
            )
        return here

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds and the peak memory of what runs inside to a stage of the manifest."""
        start = time.perf_counter()
        stage = self._stages.setdefault(name, {"seconds": 0.0, "peak_bytes": None})
        span: AbstractContextManager[list[int]] = nullcontext([]) if self._account is None else self._account.watch()
        with span as peaks:
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        stage["seconds"] += time.perf_counter() - start
        stage["peak_bytes"] = max(*peaks, stage["peak_bytes"] or 0) if peaks else None

    @property
    def memory_measure(self) -> str:
        """What ``peak_bytes`` counts."""
        return self._measure

    def list_stages(self) -> list[dict[str, Any]]:
        """Return seconds and peak bytes of every stage, as the manifest has them."""
        return [
            {"name": name, "seconds": round(values["seconds"], 3), "peak_bytes": values["peak_bytes"]}
            for name, values in self._stages.items()
        ]

    def start_account(self, model: PreTrainedModel) -> None:
        """Hold one decoder layer on the device from here on, and count what is there."""
        if not self._nested:
            self._spans.enter_context(
                hold_one_layer(model, self._placement.release_weights, self._placement.embed_on_host)
            )
        self._account = self._spans.enter_context(open_account(self.measure_memory))
        if self._account is not None:
            self._peaks = self._spans.enter_context(self._account.watch())
            self._measure = self._account.measure

    def stop_account(self) -> int | None:
        """Return the most bytes that the device held since the account was started; None where there is none."""
        self._spans.close()
        self._account = None
        return self._peaks[0] if self._peaks else None

    def rotates(self, group: UnitGroup) -> bool:
        """Tell whether the values of a group are rotated before channels go."""
        return self.rotate_values and group.kind == "vo" and self.importance == "obs" and self.restoration != "none"

    def weigh(self, group: UnitGroup, damped: Moments, weight: Tensor) -> Moments:
        """Return the moments that count errors by the sensitivity, or the same ones where none was measured."""
        root = self._roots.get(group.name)
        return damped if root is None else weigh_outputs(damped, self._place(root, damped.gram), weight)

    def _place(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return a tensor of the host's where the system is solved."""
        return tensor if self._placement.solve_on_host else to_device(tensor, like.device)

    def rank_units(
        self, layer: nn.Module, group: UnitGroup, moments: Moments, damped: Moments, num_remove: int
    ) -> tuple[Tensor, Tensor]:
        """Rank a group's units, at least the ``num_remove`` that go first.

        :return: (order, scores): units in the order of removal, shape [at least num_remove], and the score of each unit,
            shape [units]; ``obs`` gives those beyond ``num_remove`` the score infinity
        """
        if self.importance == "obs":
            elimination: Elimination = eliminate_units(
                damped, group.columns_per_unit, group.name, group.num_blocks, num_remove
            )
            scores = elimination.increase.new_full((group.num_units,), torch.inf)
            scores[elimination.order] = elimination.increase
            return elimination.order, scores
        dense = self.read_dense(layer, group)
        weight = dense[:, :-1]
        columns = expand_units(torch.arange(group.num_units, device=weight.device), group.columns_per_unit)
        unit_columns = columns.view(group.num_units, -1)
        if self.importance == "wanda":
            scores = score_wanda(moments, weight, unit_columns)
        elif self.importance == "wanda_l2":
            scores = score_wanda_l2(moments, weight, unit_columns)
        elif self.importance == "snip":
            scores = self._place(self._snip[group.name], weight)
        elif self.importance == "closed_form":
            scores = self._score_closed_form(layer, group, score_wanda(moments, weight, unit_columns))
        elif self.importance == "l0":
            assert self.sparsity is not None
            scores = score_l0(damped, dense, unit_columns, retention=1 - self.sparsity)
        else:
            with work_on_host(False):
                rows = [
                    sum_rows(
                        group, name, read_weight(find_linear(layer, name))[0].abs().sum(1, dtype=torch.float64)
                    ).to(weight.device)
                    for name in group.producers
                ]
            scores = score_magnitude(weight, unit_columns, rows)
        return order_units(scores, group.num_blocks), scores

    @property
    def admm_settings(self) -> ADMMSettings:
        return ADMMSettings(
            self.alpha,
            self.beta,
            self.admm_steps,
            self.admm_inner_steps,
            self.admm_learning_rate,
            self.attention_method,
            self.base_damping,
        )

    def _score_closed_form(self, layer: nn.Module, group: UnitGroup, first: Tensor) -> Tensor:
        """Return Lemma 1's scores after ``admm_steps`` steps of Algorithm 1; as printed, all are 1 (R4)."""
        if self.as_printed:
            logger.warning(
                f"as_printed: {group.name} has no order at Algorithm 1's first step, where every score is 1 (R4); "
                "units go by index. Set as_printed: false to rank them."
            )
            return torch.ones_like(first)
        assert self._observer is not None
        assert self.sparsity is not None
        share = min(self.sparsity, self.max_sparsity)
        num_keep = max(round(group.num_units * (1 - share) / group.num_blocks), 1) * group.num_blocks
        visits = self._observer.visit_batches(layer, group, f"{group.name} inputs")
        return score_by_admm(layer, self._query_key, group, first, num_keep, visits, self.admm_settings)

    def dump_fields(self) -> dict[str, Any]:
        """Return the recipe fields, without the host's bookkeeping."""
        hosts = set(Modifier.model_fields)
        return {name: value for name, value in self.model_dump().items() if name not in hosts}
