"""``LoRARecoveryModifier``: train low-rank adapters on a pruned model, and merge them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any, Literal

import torch
from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from llmcompressor.utils.dev import get_main_device
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger
from pydantic import Field, PrivateAttr, model_validator
from transformers import AutoModelForCausalLM, PreTrainedModel

from struprune_plugin.device.ranks import check_one_process
from struprune_plugin.modifiers.checks import (
    check_alone,
    check_order,
    check_targets,
    list_later_modifiers,
)
from struprune_plugin.modifiers.patterns import check_patterns
from struprune_plugin.modifiers.recovery_stage import RecoveryStage, warn_of_small_teacher
from struprune_plugin.recovery.adapters import (
    attach_adapters,
    checkpoint_layers,
    free_cache,
    lift_dispatch,
    match_linears,
    seed_random,
)
from struprune_plugin.recovery.distillation import cache_teacher
from struprune_plugin.recovery.samples import Sample, read_samples, split_samples
from struprune_plugin.recovery.training import AdapterTraining, Schedule, TrainingSettings


class LoRARecoveryModifier(RecoveryStage):
    """
    Trains low-rank adapters (LoRA) on the linears of a pruned model's decoder layers, and merges them: ``W + alpha / rank
    * B A``. Names, shapes, classes and dtype stay as they were. Source: Hu et al., 2021.

    A stage between pruning and quantising. The whole model is on the device while it trains; the calibration samples are
    the training data. Each step takes ``batch_size`` samples, of which at most as many as a calibration batch holds, all
    of one length, are on the device at a time; its loss is the mean over their predicted tokens.

    :param rank: of the adapters
    :param alpha: scale of the adapters, divided by the rank
    :param targets: linears of the decoder layers: full names, last parts (``q_proj``, ``fc1``) or ``re:<pattern>``; all
        that the model family names where left out
    :param dropout: on the inputs of the adapters, in [0, 1); the model's own dropout stays off
    :param epochs: passes over the training part
    :param max_steps: stop after so many steps, in the midst of an epoch too
    :param learning_rate: of AdamW, after the warm-up
    :param schedule: how it falls after the warm-up: ``cosine``, ``linear`` (both to zero) or ``constant``
    :param warmup_fraction: share of the steps in which it rises from zero
    :param weight_decay: of AdamW, on the adapters
    :param batch_size: samples a step
    :param gradient_checkpointing: recompute every decoder layer in the backward pass: less memory, a third slower
    :param max_grad_norm: clip of the gradient's norm a step
    :param seed: of the adapters' start, the order of samples and the dropout
    :param holdout_fraction: the last samples, of which none is trained on (at least one where above 0). The loss on them
        is measured at every epoch, and the adapters of the best epoch are kept: of epoch 0, that is the model as it
        was, where no epoch was better. At 0 the last step's are kept
    :param distill: ``none``, or ``kl``: mix in the divergence from a dense teacher, see :func:`measure_divergence`
    :param distill_weight: w in ``(1 - w) * cross entropy + w * divergence``, in [0, 1]; at 1
        text of other kinds than the samples gains most
    :param distill_temperature: T of the divergence
    :param distill_top_k: tokens kept of each of the teacher's distributions, beside one bucket for the rest; the cache
        takes ``6 k + 2`` bytes a token of the data, or ``2 V`` where k is the vocabulary V
    :param teacher: folder or hub name of the teacher; the checkpoint that is being pruned where left out. It and the
        model are never on the device at the same time

    Example recipe::

        pruning_stage:
          pruning_modifiers:
            StruPruneModifier: {sparsity: 0.3}
        recovery_stage:
          recovery_modifiers:
            LoRARecoveryModifier: {rank: 8, epochs: 2}
    """

    requires_calibration_data: bool = False  # no pass over the layers: it trains between two of them

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    targets: list[str] | None = Field(default=None, min_length=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    epochs: int = Field(default=2, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=5e-4, gt=0, allow_inf_nan=False)
    schedule: Schedule = "cosine"
    warmup_fraction: float = Field(default=0.1, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    batch_size: int = Field(default=8, ge=1)
    gradient_checkpointing: bool = False
    max_grad_norm: float = Field(default=1.0, gt=0)
    seed: int = 0
    holdout_fraction: float = Field(default=0.1, ge=0, lt=1)
    distill: Literal["none", "kl"] = "none"
    distill_weight: float = Field(default=1.0, ge=0, le=1)
    distill_temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    distill_top_k: int = Field(default=64, ge=1)

    _names: list[str] = PrivateAttr(default_factory=list)
    _train: list[Sample] = PrivateAttr(default_factory=list)
    _holdout: list[Sample] = PrivateAttr(default_factory=list)
    _micro_size: int = PrivateAttr(default=1)
    _teacher: dict[str, Any] | None = PrivateAttr(default=None)
    _began: float = PrivateAttr(default=0.0)

    @model_validator(mode="after")
    def _check_fields(self) -> LoRARecoveryModifier:
        if self.start is not None or self.end is not None:
            raise ValueError("start and end must be left out: adapters are trained once, in a stage of their own.")
        if self.teacher is not None and self.distill == "none":
            raise ValueError(
                f"teacher must be left out where distill is none, got {self.teacher!r}. Set distill: kl to learn from it."
            )
        check_patterns("targets", self.targets or [])
        for name in ("distill_weight", "distill_temperature", "distill_top_k") if self.distill == "none" else ():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:  # saved recipes spell defaults too; they ask for nothing
                raise ValueError(
                    f"{name} must be left out where distill is none, got {value}. Set distill: kl, or leave it out."
                )
        return self

    # -- lifecycle ------------------------------------------------------------------------------------------------

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        check_one_process("LoRARecoveryModifier", "Prune in several, then recover in a run of its own.")
        check_order(self)
        check_targets(state.model, list_later_modifiers(self))
        self._check_model(state.model)
        self._names = match_linears(state.model, self.targets)
        self._check_rank(state.model, self._names, self.rank)
        samples, self._micro_size = read_samples(state.data.calib)
        self._check_lengths(samples, state.model)
        self._train, self._holdout = split_samples(samples, self.holdout_fraction)
        if self.distill == "kl":
            self._teacher = {"name": self._find_teacher(state.model)}
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        check_alone(self)
        model, device = state.model, get_main_device()
        self._began = time.perf_counter()
        with seed_random(self.seed, device), lift_dispatch(model, device), DisableQuantization(model):
            if self._teacher is not None:
                self._ask_teacher(self._teacher, model, device)
            model.to(device)
            self._recover(model)
        self._train, self._holdout = [], []

    # -- training -------------------------------------------------------------------------------------------------

    def _ask_teacher(self, record: dict[str, Any], model: PreTrainedModel, device: torch.device) -> None:
        """Put the teacher on the device, keep what it says of every sample on the host, and let it go."""
        teacher = AutoModelForCausalLM.from_pretrained(record["name"], dtype=model.dtype).eval().to(device)
        args = (self._micro_size, self.distill_top_k, self.distill_temperature)
        self._train, self._holdout = (cache_teacher(teacher, part, *args) for part in (self._train, self._holdout))
        record["parameters"] = teacher.num_parameters()
        warn_of_small_teacher(record["name"], record["parameters"], model)
        del teacher
        free_cache()
        held = [s.teacher for s in (*self._train, *self._holdout) if s.teacher is not None]
        tensors = [tensor for part in held for tensor in (part.log_probs, part.indices) if tensor is not None]
        record["cache_bytes"] = sum(tensor.nbytes for tensor in tensors)

    def _recover(self, model: PreTrainedModel) -> None:
        """Train and merge adapters on a model that is on the device, and make the record."""
        with ExitStack() as stack:
            adapters = attach_adapters(model, self._names, self.rank, self.alpha, self.dropout)
            parameters = stack.enter_context(adapters)
            stack.enter_context(torch.enable_grad())
            if self.gradient_checkpointing:
                stack.enter_context(checkpoint_layers(model))
            settings = self._make_settings()
            training = AdapterTraining(model, parameters, settings, self._train, self._holdout, self._began)
            training.run()
        curve = training.curve
        merged = training.measure() if self._holdout else None
        self._record = {
            "settings": {n: v for n, v in self.model_dump().items() if n not in Modifier.model_fields},
            "versions": {"peft": version("peft")},
            "linears": len(self._names),
            "adapter_parameters": sum(parameter.numel() for parameter in parameters),
            "samples": {"trained": len(self._train), "held_out": len(self._holdout)},
            "teacher": self._teacher,
            "steps": len(curve.loss),
            "tokens_seen": curve.tokens_seen[-1],
            "seconds": round(time.perf_counter() - self._began, 3),
            "best_epoch": curve.best_epoch,
            "merged": merged,
            "holdout": curve.holdout,
            "train": {n: getattr(curve, n) for n in ("loss", "learning_rate", "tokens_seen", "seconds")},
        }
        held = f", held-out {curve.holdout[0]['loss']:.4f} -> {merged['loss']:.4f}" if merged else ""
        logger.info(
            f"LoRA recovery: {len(curve.loss)} steps, loss {curve.loss[0]:.4f} -> {curve.loss[-1]:.4f}{held}, "
            f"{self._record['seconds']:.1f} s"
        )

    def _make_settings(self) -> TrainingSettings:
        return TrainingSettings(
            epochs=self.epochs,
            max_steps=self.max_steps,
            learning_rate=self.learning_rate,
            schedule=self.schedule,
            warmup_fraction=self.warmup_fraction,
            weight_decay=self.weight_decay,
            batch_size=self.batch_size,
            micro_size=self._micro_size,
            max_grad_norm=self.max_grad_norm,
            seed=self.seed,
            distill_weight=None if self.distill == "none" else self.distill_weight,
            distill_temperature=self.distill_temperature,
        )
