"""Configuration of a recovery: the fields of the recipe, and the object that is passed down."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from struprune_plugin.storage.registry import Config

Trained = Literal["adapters", "all", "norms_and_biases"]
_RATES: dict[Trained, float] = {"adapters": 1e-3, "all": 1e-4, "norms_and_biases": 1e-3}


def _read_weight(value: Any) -> Any:
    """Return the long form of a loss that is given by its weight alone."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {"weight": value} if number else value


def _read_files(value: Any) -> Any:
    """Return the long form of a text that is given by its files alone."""
    value = [value] if isinstance(value, str) else value
    return {"files": value} if isinstance(value, list) else value


class Adapters(Config):
    """Low-rank adapters on linears of the decoder layers, merged in the end: ``W + alpha / rank * B A`` (Hu et al., 2021).

    :param rank: of the adapters
    :param alpha: scale of the adapters, divided by the rank
    :param targets: linears to adapt: full names, last parts (``q_proj``, ``fc1``) or ``re:<pattern>``; all of the
        modules that hold units where left out
    :param dropout: on the inputs of the adapters; the model's own dropout stays off
    """

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    targets: list[str] | None = Field(default=None, min_length=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)


class Divergence(Config):
    """KL divergence from the dense model's distribution over the next token. A number alone is the weight.

    :param weight: in the sum of losses
    :param temperature: T of both distributions
    :param top_k: tokens kept of each of the dense model's distributions, beside one bucket for the rest: on the disk,
        ``6 k + 2`` bytes a token
    """

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    top_k: int = Field(default=64, ge=1)


class Loss(Config):
    """Weighted sum of losses a predicted token.

    :param cross_entropy: weight of the cross entropy with the text
    :param kl: divergence from the dense model's distribution: its weight, or its fields
    :param hidden: weight of one minus the cosine between every layer's output and the dense one's, mean over layers
    :param teacher: folder or hub name of the dense model; the checkpoint that is being pruned where left out. It runs layer
        by layer, in passes of its own
    """

    cross_entropy: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    kl: Annotated[Divergence | None, BeforeValidator(_read_weight)] = None
    hidden: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    teacher: str | None = None

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the losses that are asked for, by name."""
        named = {"cross_entropy": self.cross_entropy, "kl": self.kl.weight if self.kl else None, "hidden": self.hidden}
        return {name: weight for name, weight in named.items() if weight is not None}

    @model_validator(mode="after")
    def _check(self) -> Loss:
        if not self.weights:
            raise ValueError("must hold one of cross_entropy, kl and hidden, got none. Take {kl: 1.0}, say.")
        if self.teacher is not None and set(self.weights) == {"cross_entropy"}:
            raise ValueError(
                f"teacher={self.teacher!r} has no effect with cross_entropy alone. Remove it, or add kl or hidden."
            )
        return self


class Text(Config):
    """Text to train on, packed into windows without padding. Files alone may stand for the whole.

    :param files: JSON-lines files or hub data sets, mixed evenly
    :param column: that holds the text
    :param window: tokens of a window
    :param tokens: read at most so many; all where left out
    """

    files: list[str] = Field(min_length=1)
    column: str = "text"
    window: int = Field(default=512, ge=2)
    tokens: int | None = Field(default=None, ge=1)


class Schedule(Config):
    """Steps and their learning rates.

    :param epochs: passes over the training part, each in an order of its own
    :param max_steps: stop after so many steps
    :param learning_rate: after the warm-up; 0.001, and 0.0001 for ``weights: all``, where left out
    :param decay: how it falls after the warm-up: ``cosine``, ``linear`` (both to zero) or ``constant``
    :param warmup_fraction: share of the steps in which it rises from zero, rounded up to whole steps
    """

    epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_fraction: float = Field(default=0.1, ge=0, lt=1)


class Optimizer(Config):
    """AdamW.

    :param weight_decay: of AdamW
    :param max_grad_norm: clip of the gradient's norm
    :param clipping: ``layer`` clips every layer's gradient by its own norm, at once; ``global`` by the norm of all, until which
        the float32 gradients of all layers wait on the host
    :param state_dtype: of the moments: ``float32``, or ``bfloat16``, rounded at random
    :param state_folder: where moments and float32 copies lie as files while it trains, if memory does not hold them
    """

    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_grad_norm: float = Field(default=1.0, gt=0)
    clipping: Literal["layer", "global"] = "layer"
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    state_folder: str | None = None


class Holdout(Config):
    """Samples, the last, of which none is trained on; what is best on them is kept, be it the model as it was.

    :param fraction: of the samples, at least one
    :param steps: measure them so often, and at the end; at the end of every epoch where none
    :param patience: stop after so many measurements without a better one
    """

    fraction: float = Field(default=0.05, gt=0, lt=1)
    steps: int | None = Field(default=50, ge=1)
    patience: int | None = Field(default=None, ge=1)


class RecoveryConfig(BaseModel):
    """What a recovery is asked for.

    :param weights: ``all`` trains the weights of the decoder layers and the norm after them, ``norms_and_biases`` their vectors
        alone. Embeddings and the head, which pruning leaves whole, stay. ``all`` where neither this nor ``adapters`` is given
    :param adapters: train low-rank adapters instead, and merge them
    :param loss: what is lowered
    :param data: text to train on; the calibration samples where left out
    :param schedule: steps and their learning rates
    :param optimizer: AdamW
    :param batch_size: sequences a step, of all processes together
    :param micro_batch_size: sequences on the device at a time; as many as a calibration batch holds where none
    :param holdout: samples of which none is trained on; where none, the last step's values are kept
    :param checkpoint_steps: with ``checkpoint_dir``: keep so often, in steps, what a killed run goes on from
    :param compute: dtype of weights and hidden states in a layer: ``model``'s own (bfloat16 for float16), or another
    :param memory: ``layer`` holds one decoder layer on the device (two while the next is fetched), ``model`` the whole model,
        so that weights do not travel
    :param memory_budget: bytes that the device may hold; the next layer is not fetched early where it does not fit, and gradients
        are added up on the host. None: three layers beside a micro-batch's activations; more spares traffic
    :param seed: of the adapters' start, the order of samples, dropout and rounding
    """

    weights: Literal["all", "norms_and_biases"] | None = None
    adapters: Adapters | None = None
    loss: Loss = Loss(kl=Divergence())
    data: Annotated[Text | None, BeforeValidator(_read_files)] = None
    schedule: Schedule = Schedule()
    optimizer: Optimizer = Optimizer()
    batch_size: int = Field(default=8, ge=1)
    micro_batch_size: int | None = Field(default=4, ge=1)
    holdout: Holdout | None = Holdout()
    checkpoint_steps: int = Field(default=50, ge=1)
    compute: Literal["model", "float32", "bfloat16"] = "model"
    memory: Literal["layer", "model"] = "layer"
    memory_budget: int | None = Field(default=None, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _check_combinations(self) -> RecoveryConfig:
        if self.adapters and self.weights:
            raise ValueError(f"weights={self.weights} has no effect beside adapters. Remove one of them.")
        for name, value in (
            ("memory_budget", self.memory_budget),
            ("optimizer.state_folder", self.optimizer.state_folder),
        ):
            if self.memory == "model" and value is not None:
                raise ValueError(f"{name}={value} has no effect with memory: model. Remove it, or set memory: layer.")
        return self

    @property
    def trained(self) -> Trained:
        """What is trained."""
        return "adapters" if self.adapters else self.weights or "all"

    @property
    def learning_rate(self) -> float:
        """Learning rate after the warm-up."""
        return self.schedule.learning_rate or _RATES[self.trained]
