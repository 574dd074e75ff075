"""The steps that move adapters, and the loss that they lower."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.recovery.adapters import switch_dropout
from struprune_plugin.recovery.distillation import measure_divergence, stack_teacher
from struprune_plugin.recovery.samples import Sample, make_micro_batches

Schedule = Literal["cosine", "linear", "constant"]
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TrainingSettings:
    """Fields of the recipe, see :class:`~struprune_plugin.modifiers.lora.LoRARecoveryModifier`.

    :param micro_size: samples on the device at a time
    :param distill_weight: None without a teacher
    """

    epochs: int
    max_steps: int | None
    learning_rate: float
    schedule: Schedule
    warmup_fraction: float
    weight_decay: float
    batch_size: int
    micro_size: int
    max_grad_norm: float
    seed: int
    distill_weight: float | None
    distill_temperature: float


@dataclass
class Curve:
    """What the manifest tells of a training run; lists have one entry a step, ``holdout`` one an epoch.

    ``tokens_seen`` counts predicted tokens; ``seconds`` is since the start; ``best_epoch`` 0 is the model as it was.
    """

    loss: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    tokens_seen: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    holdout: list[dict[str, float]] = field(default_factory=list)
    best_epoch: int | None = None


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


class AdapterTraining:
    """One training run of the adapters on a model that is on the device.

    :param train: samples to train on
    :param holdout: samples of which none is trained on; may be empty
    :param began: when the stage began, for the curve's seconds
    :ivar curve: how it went
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parameters: list[nn.Parameter],
        settings: TrainingSettings,
        train: list[Sample],
        holdout: list[Sample],
        began: float,
    ):
        self.curve = Curve()
        self._model, self._parameters, self._settings = model, parameters, settings
        self._train, self._holdout, self._began = train, holdout, began

    def run(self) -> None:
        """Take every step; leave the best epoch's adapters where there is a held-out part."""
        optimizer = torch.optim.AdamW(
            self._parameters, lr=self._settings.learning_rate, weight_decay=self._settings.weight_decay
        )
        # float16 gradients vanish unless they are scaled up
        scaler = torch.amp.GradScaler(self._model.device.type, enabled=self._model.dtype == torch.float16)
        batches = self._list_batches()
        best = self._end_epoch(0, [])
        with tqdm(total=len(batches), desc="LoRA recovery") as bar:
            for step, (epoch, batch) in enumerate(batches):
                factor = find_rate_factor(step, len(batches), self._settings.schedule, self._settings.warmup_fraction)
                for group in optimizer.param_groups:
                    group["lr"] = self._settings.learning_rate * factor
                loss = self._take_step(optimizer, scaler, batch)
                self._log_step(loss, self._settings.learning_rate * factor, batch)
                bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                bar.update()
                if step + 1 == len(batches) or batches[step + 1][0] != epoch:
                    best = self._end_epoch(epoch, best)
        with torch.no_grad():
            for parameter, value in zip(self._parameters, best, strict=True):
                parameter.copy_(value)
                self._check_finite(bool(parameter.isfinite().all()), "an adapter")

    def _list_batches(self) -> list[tuple[int, list[Sample]]]:
        """Return (epoch from 1, samples) of every step."""
        batches = []
        for epoch in range(1, self._settings.epochs + 1):
            generator = torch.Generator().manual_seed(self._settings.seed + epoch)
            order = torch.randperm(len(self._train), generator=generator).tolist()
            for start in range(0, len(order), self._settings.batch_size):
                batches.append((epoch, [self._train[i] for i in order[start : start + self._settings.batch_size]]))
        return batches[: self._settings.max_steps]

    def _take_step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, batch: list[Sample]) -> float:
        """Change the adapters by one batch; return its loss before."""
        switch_dropout(self._model, True)
        num_targets = sum(sample.num_targets for sample in batch)
        total = 0.0
        for micro in make_micro_batches(batch, self._settings.micro_size):
            loss = self._measure_losses(micro)["loss"] / num_targets
            scaler.scale(loss).backward()
            total += loss.item()
        self._check_finite(math.isfinite(total), "the loss")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return total

    def _measure_losses(self, micro: list[Sample]) -> dict[str, Tensor]:
        """Return the losses of samples of one length, each a sum over predicted tokens."""
        tokens = torch.stack([sample.tokens for sample in micro]).to(self._model.device)
        with torch.autocast(self._model.device.type, self._model.dtype, enabled=self._model.dtype in _HALF):
            logits = self._model(input_ids=tokens, use_cache=False).logits[:, :-1]
        logits = logits.float()
        cross_entropy = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        if self._settings.distill_weight is None:
            return {"loss": cross_entropy}
        teacher = stack_teacher(micro, self._model.device)
        divergence = measure_divergence(logits, teacher, self._settings.distill_temperature).sum()
        weight = self._settings.distill_weight
        loss = (1 - weight) * cross_entropy + weight * divergence
        return {"loss": loss, "cross_entropy": cross_entropy, "divergence": divergence}

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Return the mean losses a predicted token of the held-out part."""
        switch_dropout(self._model, False)
        num_targets = sum(sample.num_targets for sample in self._holdout)
        sums: dict[str, float] = {}
        for micro in make_micro_batches(self._holdout, self._settings.micro_size):
            for name, value in self._measure_losses(micro).items():
                sums[name] = sums.get(name, 0.0) + value.item() / num_targets
        return sums

    def _end_epoch(self, epoch: int, best: list[Tensor]) -> list[Tensor]:
        """Measure the held-out loss; return the adapters to keep so far, on the host."""
        curve = self.curve
        if self._holdout:
            lowest = min((row["loss"] for row in curve.holdout), default=math.inf)
            losses = self.measure()
            self._check_finite(math.isfinite(losses["loss"]), "the held-out loss")
            curve.holdout.append({"epoch": epoch, "step": len(curve.loss), **losses})
            if not losses["loss"] < lowest and best:
                return best
            curve.best_epoch = epoch
        return [parameter.detach().cpu().clone() for parameter in self._parameters]

    def _log_step(self, loss: float, rate: float, batch: list[Sample]) -> None:
        curve = self.curve
        before = curve.tokens_seen[-1] if curve.tokens_seen else 0
        curve.loss.append(loss)
        curve.learning_rate.append(rate)
        curve.tokens_seen.append(before + sum(sample.num_targets for sample in batch))
        curve.seconds.append(round(time.perf_counter() - self._began, 3))

    def _check_finite(self, finite: bool, what: str) -> None:
        if not finite:
            raise ValueError(
                f"LoRARecoveryModifier: {what} must be finite, got NaN or Inf at step {len(self.curve.loss) + 1}. "
                f"Lower learning_rate ({self._settings.learning_rate:g}), or load the model in a wider dtype."
            )
