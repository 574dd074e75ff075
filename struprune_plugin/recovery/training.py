"""The training loop: sample order, learning rates, held-out losses, checkpoints, best values."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tqdm import tqdm
from transformers import get_scheduler

from struprune_plugin.layerwise.runner import MicroBatch
from struprune_plugin.layerwise.samples import Sample, make_micro_batches
from struprune_plugin.recovery.adapters import switch_dropout
from struprune_plugin.recovery.objective import Objective
from struprune_plugin.recovery.recovery_config import Loss, RecoveryConfig, Schedule
from struprune_plugin.recovery.step import Stepper
from struprune_plugin.recovery.teacher import LayerwiseTeacher
from struprune_plugin.runtime.distributed import split_range
from struprune_plugin.storage.resume_store import ResumeStore

_STATE = "recovery-"  # of the parts of a store that a run goes on from


@dataclass
class RunCurve:
    """The manifest's curves of a run: one entry per step, in ``holdout`` one per measurement.

    ``tokens_seen`` counts predicted tokens; ``seconds`` those spent on steps, without measurements; ``best_step`` 0 is the
    model as it was.
    """

    loss: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    tokens_seen: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    holdout: list[dict[str, Any]] = field(default_factory=list)
    best_step: int | None = None


@dataclass(frozen=True)
class Texts:
    """Texts of a run; every process has all of them.

    :param train: samples to train on
    :param holdout: samples of which none is trained on; may be empty
    :param micro_size: sequences on the device at a time
    :param watched: more texts whose cross entropy is told with every held-out measurement
    """

    train: list[Sample]
    holdout: list[Sample]
    micro_size: int
    watched: Mapping[str, list[Sample]] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        """All samples in the teacher's numbering: training samples first."""
        return [*self.train, *self.holdout]

    def describe(self) -> str:
        """Return a digest of the training and held-out samples."""
        digest = hashlib.sha256(f"{len(self.train)} {len(self.holdout)}".encode())
        for sample in self.samples:
            digest.update(sample.tokens.numpy().tobytes() + b"|")
        return digest.hexdigest()


def list_rates(num_steps: int, peak: float, schedule: Schedule) -> list[float]:
    """Return the learning rate of every step: transformers' schedule, from its second step on, as the first is at rate 0.

    :param peak: rate after the warm-up
    """
    optimizer = torch.optim.SGD([torch.zeros(())], lr=peak)  # a scheduler wants one; it moves nothing
    name = "constant_with_warmup" if schedule.decay == "constant" else schedule.decay
    scheduler = get_scheduler(name, optimizer, math.ceil(schedule.warmup_fraction * num_steps), num_steps + 1)
    rates = []
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def list_batches(num_samples: int, config: RecoveryConfig) -> list[list[int]]:
    """Return the sample numbers of every step; each epoch is shuffled anew."""
    batches = []
    for epoch in range(1, config.schedule.epochs + 1):
        generator = torch.Generator().manual_seed(config.seed + epoch)
        order = torch.randperm(num_samples, generator=generator).tolist()
        batches += [order[i : i + config.batch_size] for i in range(0, num_samples, config.batch_size)]
    return batches[: config.schedule.max_steps]


def split_over_ranks(numbers: Sequence[int]) -> list[int]:
    """Return this process' share of a batch or a held-out part."""
    return [numbers[place] for place in split_range(len(numbers))]


class RecoveryRun:
    """One run of training.

    :param stepper: takes the steps
    :param teacher: tells of samples; None without a loss that asks it
    :param store: holds the best values and, where it outlasts the run, what a killed one goes on from
    :param durable: whether it does
    :ivar curve: how it went
    :ivar states: the trained parameters with their moments
    """

    def __init__(
        self,
        config: RecoveryConfig,
        texts: Texts,
        stepper: Stepper,
        teacher: LayerwiseTeacher | None,
        store: ResumeStore,
        durable: bool,
    ):
        self.curve, self.states = RunCurve(), stepper.states
        self._config, self._texts, self._stepper = config, texts, stepper
        self._teacher, self._store, self._durable = teacher, store, durable
        self._objective, self._plain = stepper.objective, Objective(stepper.runner, Loss(cross_entropy=1.0))
        self._batches = list_batches(len(texts.train), config)
        self._rates = list_rates(len(self._batches), config.learning_rate, config.schedule)
        steps = config.holdout.steps if config.holdout else None
        self._measure_steps = steps or math.ceil(len(texts.train) / config.batch_size)

    def run(self) -> None:
        """Take all remaining steps; set the best values in the model if there is a held-out part.

        :raises ValueError: a loss, or a gradient, that is not finite
        """
        done, total = self._resume(), len(self._batches)
        if not done:
            self._measure(0)
        with tqdm(total=total, initial=done, desc="recovery") as bar:
            for step in range(done + 1, total + 1):
                self._take_step(step)
                bar.set_postfix(loss=f"{self.curve.loss[-1]:.4f}", refresh=False)
                bar.update()
                if (step % self._measure_steps == 0 or step == total) and self._measure(step):
                    break
                self._keep(step)
        self._take_best()

    # -- steps ----------------------------------------------------------------------------------------------------

    def _take_step(self, step: int) -> None:
        start, curve, numbers, rate = time.perf_counter(), self.curve, self._batches[step - 1], self._rates[step - 1]
        num_targets = sum(self._texts.train[number].num_targets for number in numbers)
        switch_dropout(self._stepper.runner.model, True)
        losses = self._stepper.take(self._ask(split_over_ranks(numbers)), num_targets, step, rate)
        loss = self._objective.weigh(losses)
        self._check_finite(loss, "the loss", step)
        curve.loss.append(loss)
        curve.learning_rate.append(rate)
        curve.tokens_seen.append(num_targets + (curve.tokens_seen[-1] if curve.tokens_seen else 0))
        spent = time.perf_counter() - start + (curve.seconds[-1] if curve.seconds else 0.0)
        curve.seconds.append(round(spent, 3))

    def _look_up(self, samples: Iterable[Sample]) -> list[MicroBatch]:
        """Return samples as micro-batches."""
        return [self._stepper.runner.embed(micro) for micro in make_micro_batches(samples, self._texts.micro_size)]

    def _ask(self, numbers: Sequence[int]) -> list[MicroBatch]:
        """Return samples as micro-batches with the teacher's targets."""
        known, weights = self._texts.samples, self._objective.weights
        samples = [known[number] for number in numbers]
        if self._teacher is not None and "kl" in weights:
            samples = [self._teacher.read_logits(*pair) for pair in zip(numbers, samples, strict=True)]
        micro_batches = self._look_up(samples)
        if self._teacher is not None and "hidden" in weights:
            self._teacher.show_hidden(micro_batches)
        return micro_batches

    def list_asked(self) -> list[int]:
        """Return the numbers of the samples whose distributions this process reads."""
        return [*{number for batch in self._batches for number in split_over_ranks(batch)}, *self._list_held()]

    def _list_held(self) -> list[int]:
        """Return the numbers of this process' share of the held-out part."""
        return split_over_ranks(range(len(self._texts.train), len(self._texts.samples)))

    # -- held-out -------------------------------------------------------------------------------------------------

    def measure_holdout(self) -> dict[str, float]:
        """Return the held-out losses per predicted token; empty without a held-out part."""
        if not self._texts.holdout:
            return {}
        losses = self._measure_part(self._objective, self._ask(self._list_held()), self._texts.holdout)
        return {**losses, "loss": self._objective.weigh(losses)}

    def _measure_part(
        self, objective: Objective, micro_batches: list[MicroBatch], samples: Sequence[Sample]
    ) -> dict[str, float]:
        """Return the losses per predicted token of samples.

        :param micro_batches: this process' share of them
        """
        switch_dropout(self._stepper.runner.model, False)
        return objective.average(objective.measure(micro_batches), sum(sample.num_targets for sample in samples))

    def _measure(self, step: int) -> bool:
        """Record the held-out losses, store the values if they are the best so far; return whether to stop early."""
        curve, losses = self.curve, self.measure_holdout()
        for name, samples in self._texts.watched.items():
            share = self._look_up(samples[number] for number in split_range(len(samples)))
            losses[name] = self._measure_part(self._plain, share, samples)["cross_entropy"]
        seen = curve.tokens_seen[-1] if curve.tokens_seen else 0
        if losses:
            curve.holdout.append({"step": step, "tokens_seen": seen, **losses})
        if not self._texts.holdout:
            return False
        self._check_finite(losses["loss"], "the held-out loss", step)
        earlier = [row["loss"] for row in curve.holdout[:-1]]
        if not earlier or losses["loss"] < min(earlier):
            curve.best_step = step
            self._store.write("best", {"step": step}, self.states.list_values())
        patience = self._config.holdout.patience if self._config.holdout else None
        since = sum(row["step"] > (curve.best_step or 0) for row in curve.holdout)
        return patience is not None and since >= patience

    def _take_best(self) -> None:
        if self.curve.best_step not in (None, len(self.curve.loss)):
            held = self._store.read("best")
            if held is None:
                raise OSError(f"{self._store.folder}: the file of the best weights is missing. Run the recipe again.")
            self.states.take(held[1])
        self._check_finite(0.0 if self.states.is_finite() else math.nan, "what is trained", len(self.curve.loss))

    def _check_finite(self, value: float, what: str, step: int) -> None:
        if not math.isfinite(value):
            raise ValueError(
                f"recovery: {what} must be finite, got NaN or Inf at step {step}. Lower schedule.learning_rate "
                f"({self._config.learning_rate:g}), or compute in a wider dtype."
            )

    # -- kept -----------------------------------------------------------------------------------------------------

    def _keep(self, step: int) -> None:
        """Store a checkpoint if one is due, and remove the one before."""
        if not self._durable or step % self._config.checkpoint_steps:
            return
        record = {"step": step, "curve": asdict(self.curve), "data": self._texts.describe()}
        before = self._store.list_parts(_STATE)
        self._store.write(f"{_STATE}{step:08d}", record, self.states.list_tensors())
        for part in before:
            self._store.remove(part)

    def _resume(self) -> int:
        """Load the last complete checkpoint; return its step, 0 without one.

        :raises ValueError: it was made of other texts
        """
        for part in reversed(self._store.list_parts(_STATE)):
            held = self._store.read(part)
            if held is None:
                continue
            if held[0]["data"] != self._texts.describe():
                raise ValueError(
                    "checkpoint_dir: recovery must continue with the text that it began with, got another. Pass the same data, or "
                    "choose another folder."
                )
            self.curve = RunCurve(**held[0]["curve"])
            self.states.take(held[1])
            return int(held[0]["step"])
        return 0
