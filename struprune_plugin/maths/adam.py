"""AdamW on plain tensors, and moments in sixteen bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamRates:
    """The constants of AdamW (Loshchilov and Hutter, 2019)."""

    decay: float = 0.0
    beta_first: float = 0.9
    beta_second: float = 0.999
    floor: float = 1e-8


def update_adamw(
    value: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, rate: float, rates: AdamRates
) -> None:
    """Take one step, in place, operation by operation as ``torch.optim.AdamW`` does.

    :param value: what is trained, any shape
    :param first: running mean of the gradients
    :param second: running mean of their squares
    :param step: from 1
    :param rate: the learning rate of this step
    """
    value.mul_(1 - rate * rates.decay)
    first.lerp_(gradient, 1 - rates.beta_first)
    second.mul_(rates.beta_second).addcmul_(gradient, gradient, value=1 - rates.beta_second)
    correction = math.sqrt(1 - rates.beta_second**step)
    spread = (second.sqrt() / correction).add_(rates.floor)
    value.addcdiv_(first, spread, value=-rate / (1 - rates.beta_first**step))


def round_randomly(value: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, up or down at random, so that its expectation is the value.

    A running mean of squares moves by a thousandth a step, less than a bfloat16 tells apart: rounded to the nearest, it would
    stand still.

    :param generator: on the tensor's device
    """
    noise = torch.randint(0, 1 << 16, value.shape, generator=generator, device=value.device, dtype=torch.int32)
    bits = (value.contiguous().view(torch.int32) + noise) & -(1 << 16)
    return bits.view(torch.float32).to(torch.bfloat16)
