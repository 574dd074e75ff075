"""``LoRARecoveryModifier``: train low-rank adapters on a pruned model, and merge them."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from struprune_plugin.modifiers.recovery_stage import RecoveryStage
from struprune_plugin.recovery.choices import Choices

_DISTILLATION = ("distill_weight", "distill_temperature", "distill_top_k")


class LoRARecoveryModifier(RecoveryStage):
    """
    Trains low-rank adapters (LoRA) on the linears of a pruned model's decoder layers, and merges them: ``W + alpha / rank
    * B A``. Names, shapes, classes and dtype stay as they were. Source: Hu et al., 2021.

    A short form of :class:`~struprune_plugin.modifiers.recovery.RecoveryModifier` with ``method: lora, memory: model,
    clipping: global``: the whole model is on the device while it trains, the calibration samples are the training data, and the
    held-out loss is measured at every epoch. As many samples as a calibration batch holds are on the device at a time.

    :param epochs: passes over the training part
    :param learning_rate: of AdamW, after the warm-up
    :param gradient_checkpointing: hold one decoder layer on the device, and run it again in the backward pass: less memory, a third
        slower
    :param distill: ``none``, or ``kl``: mix in the divergence from the dense model's distribution
    :param distill_weight: w in ``(1 - w) * cross entropy + w * divergence``, in [0, 1]; at 1
        text of other kinds than the samples gains most

    Example recipe::

        pruning_stage:
          pruning_modifiers:
            StruPruneModifier: {sparsity: 0.3}
        recovery_stage:
          recovery_modifiers:
            LoRARecoveryModifier: {rank: 8, epochs: 2}
    """

    epochs: int = Field(default=2, ge=1)
    learning_rate: float = Field(default=5e-4, gt=0, allow_inf_nan=False)
    gradient_checkpointing: bool = False
    holdout_fraction: float = Field(default=0.1, ge=0, lt=1)
    distill: Literal["none", "kl"] = "none"
    distill_weight: float = Field(default=1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _check_fields(self) -> LoRARecoveryModifier:
        if self.teacher is not None and self.distill == "none":
            raise ValueError(
                f"teacher must be left out where distill is none, got {self.teacher!r}. Set distill: kl to learn from it."
            )
        for name in _DISTILLATION if self.distill == "none" else ():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:  # saved recipes spell defaults too; they ask for nothing
                raise ValueError(
                    f"{name} must be left out where distill is none, got {value}. Set distill: kl, or leave it out."
                )
        return self

    def _choose(self, largest: int) -> Choices:
        losses = {"cross_entropy": 1.0}
        if self.distill == "kl":
            losses = {"cross_entropy": 1 - self.distill_weight, "kl": self.distill_weight}
        return Choices(
            **self._read_choices(),
            method="lora",
            memory="layer" if self.gradient_checkpointing else "model",
            losses=losses,
            micro_batch_size=largest,
            clipping="global",
        )

    @property
    def asks_teacher(self) -> bool:
        return self.distill == "kl"

    def _tell(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return a record that counts by epochs, too, and calls the divergence by its name."""
        steps = math.ceil(record["samples"]["trained"] / self.batch_size)  # of an epoch

        def rename(row: dict[str, Any] | None) -> dict[str, Any] | None:
            return row and {"divergence" if name == "kl" else name: value for name, value in row.items()}

        best = record["best_step"]
        return {
            **record,
            "adapter_parameters": record["trained_parameters"],
            "best_epoch": None if best is None else math.ceil(best / steps),
            "holdout": [{"epoch": math.ceil(row["step"] / steps), **(rename(row) or {})} for row in record["holdout"]],
            "merged": rename(record["merged"]),
        }
