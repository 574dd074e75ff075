"""A recovery from its first step to its last: order, rates, held-out losses, checkpoints, the best that is kept."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.distributed import get_rank
from tqdm import tqdm

from struprune_plugin.device.ranks import count_ranks, sum_over_ranks
from struprune_plugin.passes.journal import Journal
from struprune_plugin.recovery.adapters import switch_dropout
from struprune_plugin.recovery.choices import Choices, Schedule
from struprune_plugin.recovery.layered import Flow, LayeredModel
from struprune_plugin.recovery.samples import Sample, make_micro_batches
from struprune_plugin.recovery.states import TrainedStates
from struprune_plugin.recovery.step import Objective, Stepper
from struprune_plugin.recovery.teacher import LayeredTeacher

_STATE = "recovery-"  # of the parts of a journal that a run goes on from


@dataclass
class RunCurve:
    """What the manifest tells of a run; lists have one entry a step, ``holdout`` one a measurement.

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
    """What a run reads; every process has all of it.

    :param train: samples to train on
    :param holdout: samples of which none is trained on; may be empty
    :param watched: more texts whose cross entropy is told with every held-out measurement
    """

    train: list[Sample]
    holdout: list[Sample]
    watched: Mapping[str, list[Sample]] = field(default_factory=dict)

    def describe(self) -> str:
        """Return a digest of what is trained on and held out."""
        digest = hashlib.sha256(f"{len(self.train)} {len(self.holdout)}".encode())
        for sample in (*self.train, *self.holdout):
            digest.update(sample.tokens.numpy().tobytes() + b"|")
        return digest.hexdigest()


def find_rate_factor(step: int, num_steps: int, schedule: Schedule, warmup_fraction: float) -> float:
    """Return the factor on the learning rate at a step: a linear rise, then the schedule down to zero (or none).

    :param step: from 0 to ``num_steps`` - 1
    :param warmup_fraction: share of the steps in which it rises, rounded up to whole steps
    :return: in (0, 1]
    """
    warmup = math.ceil(warmup_fraction * num_steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(num_steps - warmup, 1)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress if schedule == "linear" else 1.0


def list_batches(num_samples: int, choices: Choices) -> list[list[int]]:
    """Return the numbers of the samples of every step, each epoch in an order of its own."""
    batches = []
    for epoch in range(1, choices.epochs + 1):
        generator = torch.Generator().manual_seed(choices.seed + epoch)
        order = torch.randperm(num_samples, generator=generator).tolist()
        batches += [order[i : i + choices.batch_size] for i in range(0, num_samples, choices.batch_size)]
    return batches[: choices.max_steps]


def take_share(items: Sequence[Any]) -> list[Any]:
    """Return this process' share of a batch or a held-out part: every so many-th."""
    return list(items[get_rank() :: count_ranks()]) if count_ranks() > 1 else list(items)


class RecoveryRun:
    """One run of training.

    :param teacher: tells of samples; None without a loss that asks it
    :param journal: holds the best values and, where it outlasts the run, what a killed one goes on from
    :param checkpoint_steps: keep so often what a killed run goes on from; never where None
    :ivar curve: how it went
    """

    def __init__(
        self,
        model: LayeredModel,
        states: TrainedStates,
        stepper: Stepper,
        objective: Objective,
        choices: Choices,
        texts: Texts,
        teacher: LayeredTeacher | None,
        journal: Journal,
        checkpoint_steps: int | None,
    ):
        self.curve = RunCurve()
        self._model, self._states, self._stepper, self._objective = model, states, stepper, objective
        self._choices, self._texts, self._teacher, self._journal = choices, texts, teacher, journal
        self._batches, self._checkpoint_steps = list_batches(len(texts.train), choices), checkpoint_steps
        self._measure_steps = choices.holdout_steps or math.ceil(len(texts.train) / choices.batch_size)

    def run(self) -> None:
        """Take every step that is left; leave the best values in the model where there is a held-out part.

        :raises ValueError: a loss, or a gradient, that is not finite
        """
        began, done = time.perf_counter(), self._resume()
        spent = self.curve.seconds[-1] if self.curve.seconds else 0.0
        if not done:
            self._measure(0)
        total = len(self._batches)
        with tqdm(total=total, initial=done, desc="recovery") as bar:
            for step in range(done + 1, total + 1):
                start = time.perf_counter()
                losses = self._take_step(step)
                spent += time.perf_counter() - start
                self.curve.seconds.append(round(spent, 3))
                tokens = self.curve.tokens_seen[-1] - (self.curve.tokens_seen[done - 1] if done else 0)
                rate = tokens / max(time.perf_counter() - began, 1e-9)
                bar.set_postfix(loss=f"{losses['loss']:.4f}", tokens=f"{rate:,.0f}/s", refresh=False)
                bar.update()
                if (step % self._measure_steps == 0 or step == total) and self._measure(step):
                    break
                self._keep(step)
        self._take_best()

    # -- steps ----------------------------------------------------------------------------------------------------

    def _take_step(self, step: int) -> dict[str, float]:
        choices, curve, numbers = self._choices, self.curve, self._batches[step - 1]
        factor = find_rate_factor(step - 1, len(self._batches), choices.schedule, choices.warmup_fraction)
        num_targets = sum(self._texts.train[number].num_targets for number in numbers)
        switch_dropout(self._model.model, True)
        flows = self._make_flows(take_share(numbers), self._texts.train, 0)
        losses = self._stepper.take(flows, num_targets, step, choices.learning_rate * factor)
        losses["loss"] = self._objective.sum_up(losses)
        self._check_finite(losses["loss"], "the loss", step)
        curve.loss.append(losses["loss"])
        curve.learning_rate.append(choices.learning_rate * factor)
        curve.tokens_seen.append(num_targets + (curve.tokens_seen[-1] if curve.tokens_seen else 0))
        return losses

    def _make_flows(
        self, numbers: Sequence[int], samples: Sequence[Sample], first: int, plain: bool = False
    ) -> list[Flow]:
        """Return micro-batches with what the teacher says of them.

        :param first: number, at the teacher's, of the first of ``samples``
        :param plain: ask no teacher
        """
        chosen = [samples[number] for number in numbers]
        if self._teacher is not None and self._objective.kl and not plain:
            pairs = zip(numbers, chosen, strict=True)
            chosen = [self._teacher.read_logits(first + number, sample) for number, sample in pairs]
        flows = [self._model.start(micro) for micro in make_micro_batches(chosen, self._choices.micro_batch_size)]
        if self._teacher is not None and self._objective.hidden and not plain:
            self._teacher.show_hidden(flows)
        return flows

    def count_trained(self) -> int:
        """Return the number of values that are trained."""
        return sum(parameter.numel() for parameter in self._states.parameters.values())

    def list_asked(self) -> list[int]:
        """Return the numbers of the samples whose distributions this process reads, held-out ones after those to train on."""
        asked = {number for batch in self._batches for number in take_share(batch)}
        held = take_share(range(len(self._texts.holdout)))
        return [*asked, *(len(self._texts.train) + number for number in held)]

    # -- held-out -------------------------------------------------------------------------------------------------

    def measure(self) -> dict[str, float]:
        """Return the losses a predicted token of the held-out part, and the cross entropy of watched texts by name."""
        found = self.measure_holdout() if self._texts.holdout else {}
        switch_dropout(self._model.model, False)
        for name, samples in self._texts.watched.items():
            found[name] = self._measure_part(samples, 0, plain=True)["cross_entropy"]
        return found

    def measure_holdout(self) -> dict[str, float]:
        """Return the losses a predicted token of the held-out part."""
        switch_dropout(self._model.model, False)
        found = self._measure_part(self._texts.holdout, len(self._texts.train), plain=False)
        return {**found, "loss": self._objective.sum_up(found)}

    def _measure_part(self, samples: list[Sample], first: int, plain: bool) -> dict[str, float]:
        flows = self._make_flows(take_share(range(len(samples))), samples, first, plain)
        sums = self._stepper.measure(flows, plain)
        total = sum_over_ranks(torch.tensor(list(sums.values()), dtype=torch.float64))
        num_targets = sum(sample.num_targets for sample in samples)
        return {name: value / num_targets for name, value in zip(sums, total.tolist(), strict=True)}

    def _measure(self, step: int) -> bool:
        """Take down the held-out losses, and the values where they are the best so far; tell whether it is time to stop."""
        curve, losses = self.curve, self.measure()
        seen = curve.tokens_seen[-1] if curve.tokens_seen else 0
        if losses:
            curve.holdout.append({"step": step, "tokens_seen": seen, **losses})
        if not self._texts.holdout:
            return False
        self._check_finite(losses["loss"], "the held-out loss", step)
        earlier = [row["loss"] for row in curve.holdout[:-1]]
        if not earlier or losses["loss"] < min(earlier):
            curve.best_step = step
            self._journal.write("best", {"step": step}, self._states.list_values())
        since = sum(row["step"] > (curve.best_step or 0) for row in curve.holdout)
        return self._choices.patience is not None and since >= self._choices.patience

    def _take_best(self) -> None:
        if self.curve.best_step not in (None, len(self.curve.loss)):
            held = self._journal.read("best")
            if held is None:
                raise OSError(
                    f"{self._journal.folder}: the best values must be there to be read, got none. Run it again."
                )
            self._states.take(held[1])
        self._check_finite(0.0 if self._states.is_finite() else math.nan, "what is trained", len(self.curve.loss))

    def _check_finite(self, value: float, what: str, step: int) -> None:
        if not math.isfinite(value):
            raise ValueError(
                f"recovery: {what} must be finite, got NaN or Inf at step {step}. Lower learning_rate "
                f"({self._choices.learning_rate:g}), or compute in a wider dtype."
            )

    # -- kept -----------------------------------------------------------------------------------------------------

    def _keep(self, step: int) -> None:
        """Make a step durable where it is time, and let go of the one before."""
        every = self._checkpoint_steps
        if every is None or step % every:
            return
        record = {"step": step, "curve": asdict(self.curve), "data": self._texts.describe()}
        before = self._journal.list_parts(_STATE)
        self._journal.write(f"{_STATE}{step:08d}", record, self._states.list_tensors())
        for part in before:
            self._journal.remove(part)

    def _resume(self) -> int:
        """Take in the last step that is whole; return its number, 0 where there is none.

        :raises ValueError: it was made of other texts
        """
        for part in reversed(self._journal.list_parts(_STATE)):
            held = self._journal.read(part)
            if held is None:
                continue
            if held[0]["data"] != self._texts.describe():
                raise ValueError(
                    "checkpoint_dir: recovery must go on with the text that it began with, got another. Give the same data, or "
                    "choose another folder."
                )
            self.curve = RunCurve(**held[0]["curve"])
            self._states.take(held[1])
            return int(held[0]["step"])
        return 0
