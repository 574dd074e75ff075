"""Configuration of a recovery: the recipe's fields, passed down as one object."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from struprune_plugin.storage.registry import Config

Trained = Literal["adapters", "all", "norms_and_biases"]
_RATES: dict[Trained, float] = {"adapters": 1e-3, "all": 1e-4, "norms_and_biases": 1e-3}


def _read_weight(value: Any) -> Any:
    """Return the long form of a loss given as a number, its weight."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {"weight": value} if number else value


def _read_files(value: Any) -> Any:
    """Return the long form of a text given as a file or a list of files."""
    value = [value] if isinstance(value, str) else value
    return {"files": value} if isinstance(value, list) else value


class Adapters(Config):
    """Low-rank adapters on linears of the decoder layers, merged at the end: ``W + alpha / rank * B A`` (Hu et al., 2021).

    :param rank: rank of the adapters
    :param alpha: scale of the adapters, divided by the rank
    :param targets: linears to adapt: full names, last parts (``q_proj``, ``fc1``) or ``re:<pattern>``. By default all
        linears of the modules that hold units
    :param dropout: dropout on the inputs of the adapters; the model's own dropout stays off
    """

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    targets: list[str] | None = Field(default=None, min_length=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)


class Divergence(Config):
    """KL divergence from the dense model's distribution over the next token. A number alone is the weight.

    :param weight: weight in the sum of losses
    :param temperature: temperature of both distributions
    :param top_k: tokens kept per distribution of the dense model, beside one bucket for the rest; takes ``6 k + 2``
        bytes per token on the disk
    """

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    top_k: int = Field(default=64, ge=1)


class Loss(Config):
    """Weighted sum of losses per predicted token.

    :param cross_entropy: weight of the cross entropy with the text
    :param kl: KL divergence from the dense model's distribution: its weight, or its fields
    :param hidden: weight of one minus the cosine between each layer's output and the dense one, averaged over layers
    :param teacher: folder or hub name of the dense model, which runs layer by layer in passes of its own. By default
        the checkpoint that is pruned
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
            raise ValueError(
                "must hold one of cross_entropy, kl and hidden, got none. Set, for example, `loss: {kl: 1.0}`."
            )
        if self.teacher is not None and set(self.weights) == {"cross_entropy"}:
            raise ValueError(
                f"`teacher: {self.teacher}` has no effect with cross_entropy alone. Remove it, or add kl or hidden."
            )
        return self


class Text(Config):
    """Text to train on, packed into windows without padding. A file name or a list of them is a short form.

    :param files: JSON-lines files or hub data sets, mixed evenly
    :param column: field that holds the text
    :param window: tokens per window
    :param tokens: upper bound on the tokens read. By default all
    """

    files: list[str] = Field(min_length=1)
    column: str = "text"
    window: int = Field(default=512, ge=2)
    tokens: int | None = Field(default=None, ge=1)


class Schedule(Config):
    """Steps and their learning rates.

    :param epochs: passes over the training part, each in a new order
    :param max_steps: upper bound on the steps
    :param learning_rate: learning rate after the warm-up. By default 0.001, and 0.0001 for ``weights: all``
    :param decay: decay of the learning rate after the warm-up: ``cosine``, ``linear`` (both to zero) or ``constant``
    :param warmup_fraction: share of the steps in which the learning rate rises from zero, rounded up to whole steps
    """

    epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_fraction: float = Field(default=0.1, ge=0, lt=1)


class Optimizer(Config):
    """AdamW.

    :param weight_decay: weight decay
    :param max_grad_norm: bound on the gradient's norm
    :param clipping: ``layer`` clips each layer's gradient by its own norm, at once; ``global`` clips by the norm of
        all, so the float32 gradients of all layers wait on the host
    :param state_dtype: dtype of the moments: ``float32``, or ``bfloat16`` with stochastic rounding
    :param state_folder: folder for moments and float32 copies that memory does not hold
    """

    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_grad_norm: float = Field(default=1.0, gt=0)
    clipping: Literal["layer", "global"] = "layer"
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    state_folder: str | None = None


class Holdout(Config):
    """The last samples, which are not trained on; the best state on them is kept, the untrained model included.

    :param fraction: held-out share of the samples, at least one sample
    :param steps: steps between measurements; there is one more at the end. None measures after each epoch
    :param patience: stop after this many measurements without an improvement
    """

    fraction: float = Field(default=0.05, gt=0, lt=1)
    steps: int | None = Field(default=50, ge=1)
    patience: int | None = Field(default=None, ge=1)


class RecoveryConfig(BaseModel):
    """Settings of a recovery.

    :param weights: ``all`` trains the weights of the decoder layers and the final norm, ``norms_and_biases`` only their
        vectors. Embeddings and head stay. The default is ``all`` without ``adapters``
    :param adapters: train low-rank adapters in place of weights, and merge them
    :param loss: losses to minimise
    :param data: text to train on. By default the calibration samples
    :param schedule: steps and their learning rates
    :param optimizer: AdamW
    :param batch_size: sequences per step, over all processes
    :param micro_batch_size: sequences on the device at a time. None uses the calibration batch size
    :param holdout: samples that are not trained on. None keeps the values of the last step
    :param checkpoint_steps: with ``checkpoint_dir``: steps between saved states, from which a killed run continues
    :param compute: dtype of weights and hidden states in a layer: that of the ``model`` (bfloat16 for float16), or
        another
    :param memory: ``layer`` holds one decoder layer on the device (two while the next is fetched); ``model`` holds the
        whole model and a micro-batch's graph, and saves the traffic and a forward pass
    :param memory_budget: bytes that the device may hold; where they are few, the next layer is not fetched early and
        gradients are summed on the host. None is three layers beside the activations of a micro-batch; more saves
        traffic
    :param seed: seed of the adapters' start, the order of samples, dropout and rounding
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
            raise ValueError(f"`weights: {self.weights}` has no effect with adapters. Remove one of the two.")
        for name, value in (
            ("memory_budget", self.memory_budget),
            ("optimizer.state_folder", self.optimizer.state_folder),
        ):
            if self.memory == "model" and value is not None:
                raise ValueError(
                    f"`{name}: {value}` has no effect with `memory: model`. Remove it, or set `memory: layer`."
                )
        return self

    @property
    def trained(self) -> Trained:
        """Kind of the trained parameters."""
        return "adapters" if self.adapters else self.weights or "all"

    @property
    def learning_rate(self) -> float:
        """Learning rate after the warm-up."""
        return self.schedule.learning_rate or _RATES[self.trained]
