"""What a recovery is asked for, whichever form of the recipe asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

Method = Literal["lora", "full", "norms_and_biases"]
Loss = Literal["cross_entropy", "kl", "hidden"]
Clipping = Literal["layer", "global"]
Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class Aim:
    """What is trained, and towards what. Fields as in the recipe, here and below."""

    method: Method
    rank: int
    alpha: float
    dropout: float
    losses: Mapping[str, float]
    distill_temperature: float
    distill_top_k: int
    hidden_distance: Literal["cosine", "fisher"] = "cosine"

    def asks(self, *names: Loss) -> bool:
        """Tell whether any of these losses counts."""
        return any(self.losses.get(name) for name in names)


@dataclass(frozen=True)
class Pace:
    """The steps."""

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


@dataclass(frozen=True)
class Watch:
    """What happens between steps.

    :param holdout_steps: every so many steps; at the end of every epoch where None
    """

    holdout_steps: int | None = None
    patience: int | None = None
    checkpoint_steps: int = 50


@dataclass(frozen=True)
class Place:
    """Where things live, and in what precision."""

    memory: Literal["layer", "model"]
    compute: Literal["model", "float32", "bfloat16"] = "model"
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    state_folder: str | None = None
    memory_budget: int | None = None
    measure_memory: bool = False


@dataclass(frozen=True)
class Choices:
    """All that a recovery is asked for, every field known."""

    aim: Aim
    pace: Pace
    watch: Watch
    place: Place


def make_choices(known: Mapping[str, Any]) -> Choices:
    """Sort fields by what they are about; those that are left out have the defaults above.

    :param known: values by the names of fields; others are passed over
    """

    def make(part: type) -> Any:
        return part(**{field.name: known[field.name] for field in fields(part) if field.name in known})

    return Choices(make(Aim), make(Pace), make(Watch), make(Place))
