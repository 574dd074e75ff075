"""What a recovery is asked for, whichever form of the recipe asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Method = Literal["lora", "full", "norms_and_biases"]
Loss = Literal["cross_entropy", "kl", "hidden"]
Clipping = Literal["layer", "global"]
Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class Choices:
    """Fields of the recipe, see :class:`~struprune_plugin.modifiers.recovery.RecoveryModifier`, all of them known.

    :param holdout_steps: every so many steps; at the end of every epoch where None
    """

    method: Method
    memory: Literal["layer", "model"]
    rank: int
    alpha: float
    dropout: float
    losses: Mapping[str, float]
    distill_temperature: float
    distill_top_k: int
    epochs: int
    max_steps: int | None
    learning_rate: float
    schedule: Schedule
    warmup_fraction: float
    weight_decay: float
    batch_size: int
    micro_batch_size: int
    max_grad_norm: float
    clipping: Clipping
    seed: int
    hidden_distance: Literal["cosine", "fisher"] = "cosine"  # from here on: what the short form does not name
    holdout_steps: int | None = None
    patience: int | None = None
    checkpoint_steps: int = 50
    compute: Literal["model", "float32", "bfloat16"] = "model"
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    state_folder: str | None = None
    memory_budget: int | None = None
    measure_memory: bool = False

    def asks(self, *names: Loss) -> bool:
        """Tell whether any of these losses counts."""
        return any(self.losses.get(name) for name in names)
