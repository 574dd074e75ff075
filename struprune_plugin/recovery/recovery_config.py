"""Configuration of a recovery: the recipe's fields, passed down as one object."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from struprune_plugin.storage.registry import Config, Patterns


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
    targets: Annotated[Patterns, Field(min_length=1)] | None = None
    dropout: float = Field(default=0.0, ge=0, lt=1)


class Schedule(Config):
    """Steps and their learning rates.

    :param epochs: passes over the training part, each in a new order
    :param max_steps: upper bound on the steps
    :param learning_rate: learning rate after the warm-up
    :param decay: decay of the learning rate after the warm-up: ``cosine``, ``linear`` (both to zero) or ``constant``
    :param warmup_fraction: share of the steps in which the learning rate rises from zero, rounded up to whole steps
    """

    epochs: int = Field(default=2, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=5e-4, gt=0, allow_inf_nan=False)
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_fraction: float = Field(default=0.1, ge=0, lt=1)


class Optimizer(Config):
    """AdamW.

    :param weight_decay: weight decay
    :param max_grad_norm: bound on the norm of all adapters' gradient
    """

    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_grad_norm: float = Field(default=1.0, gt=0)


class Holdout(Config):
    """The last samples, which are not trained on; the best adapters on them are kept, the untrained ones included.

    :param fraction: held-out share of the samples, at least one sample
    :param steps: steps between measurements; there is one more at the end. None measures after each epoch
    """

    fraction: float = Field(default=0.1, gt=0, lt=1)
    steps: int | None = Field(default=None, ge=1)


class RecoveryConfig(BaseModel):
    """Settings of a recovery.

    :param adapters: the low-rank adapters that are trained
    :param schedule: steps and their learning rates
    :param optimizer: AdamW
    :param batch_size: sequences per step; as many as a calibration batch holds are on the device at a time
    :param holdout: samples that are not trained on. None keeps the adapters of the last step
    :param seed: seed of the adapters' start, the order of samples, and dropout
    """

    adapters: Adapters = Adapters()
    schedule: Schedule = Schedule()
    optimizer: Optimizer = Optimizer()
    batch_size: int = Field(default=8, ge=1)
    holdout: Holdout | None = Holdout()
    seed: int = 0
