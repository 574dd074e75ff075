"""Gradient-descent tuning of an FFN that has lost channels, towards the dense FFN's output on the same inputs.

A least-squares solve updates the weights behind the kept channels; tuning also updates those before them. The output of an FFN
depends on one token alone, and the dense FFN gives a target for any input: inputs drawn from the distribution of those seen
serve as training data, too, and guard against overfitting to a few thousand tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from tqdm import tqdm

from struprune_plugin.layerwise.capture import Visit
from struprune_plugin.layerwise.module_view import ModuleView
from struprune_plugin.linalg.solve import sqrt_psd
from struprune_plugin.model.ffn_weights import FFN, read_ffn, write_ffn
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.storage.records import TuningRecord
from struprune_plugin.storage.registry import Config

_BATCH = 512  # calibration tokens per step; as many inputs are drawn
_HOLD_EVERY = 8  # one of this many sequences is held out
_WARM_UP = 5  # steps
_FLOOR = 1e-3  # least root mean square of a parameter, so that a bias of zeros is trained, too
_FAINTEST = 1e-3  # share of the median energy of the residual stream: below it, the weight of a token rises no further
_JITTER = 1e-4  # share of the inputs' mean variance added to each variance: some inputs may be constant


class FFNTuning(Config):
    """Tuning of each FFN that has lost channels, see :func:`tune_ffn`.

    :param epochs: passes over the calibration data
    :param learning_rate: learning rate of Adam, relative to the root mean square of each parameter
    """

    epochs: int = Field(ge=1)
    learning_rate: float = Field(default=0.01, gt=0, allow_inf_nan=False)


@dataclass(frozen=True)
class FFNData:
    """Inputs and targets of an FFN on the calibration data, on the host, without padding.

    :param inputs: shape [tokens, d]
    :param weights: weight of the error at each token: the inverse energy of the residual stream that it is added to, as the
        following norms scale it; mean 1, shape [tokens], float32
    :param held: mask of the tokens of held-out sequences, shape [tokens], bool
    """

    inputs: Tensor
    weights: Tensor
    held: Tensor


@torch.no_grad()
def gather_inputs(group: UnitGroup, dense: FFN, visits: Iterable[Visit], context: DeviceContext) -> FFNData:
    """Return the inputs of an FFN, every eighth sequence held out.

    :param visits: all batches
    """
    inputs, energies, held, first = [], [], [], 0
    for visit in visits:
        batch, length = visit.call.batch_shape
        stream = context.to_device(visit.call.list_tokens(visit.call.hidden), visit.source.device).float()
        if group.join.is_direct:
            stream = stream + group.join.scale * dense(visit.source.to(dense.second[0].dtype)).float()
        apart = (torch.arange(first + 1, first + batch + 1) % _HOLD_EVERY == 0).repeat_interleave(length)
        first += batch
        tokens = slice(None) if visit.call.tokens is None else visit.call.tokens.cpu()
        source, energy = context.to_host(visit.source), context.to_host(stream.square().mean(-1))
        with context.on_host():
            inputs.append(source[tokens])
            energies.append(energy[tokens])
            held.append(apart[tokens])
    with context.on_host():
        energy = torch.cat(energies)
        weights = 1 / energy.clamp(min=max(_FAINTEST * float(energy.median()), 1e-30))
        return FFNData(torch.cat(inputs), weights / weights.mean(), torch.cat(held))


def prepare_tuning(
    module: ModuleView, root: Tensor | None, settings: FFNTuning
) -> Callable[[ModuleView], TuningRecord]:
    """Record an FFN and its inputs before it loses channels; return the function that tunes it afterwards.

    :param root: R, as in :class:`Teacher`
    """
    dense = read_ffn(module.layer, module.group)
    data = gather_inputs(module.group, dense, module.visit_batches(), module.context)
    teacher = Teacher(dense, data, root, module.context)
    return lambda now: tune_ffn(now.layer, now.group, teacher, settings)


def tune_ffn(layer: nn.Module, group: UnitGroup, teacher: Teacher, settings: FFNTuning) -> TuningRecord:
    """Train a sliced FFN on the dense FFN's outputs, in place, unless no epoch lowers the held-out error.

    Minimises ``sum_t w_t ||R (f(x_t) - f_dense(x_t))||^2`` over the calibration tokens and as many inputs drawn from a normal
    distribution of their mean and covariance; w_t as in :class:`FFNData`, R the root of the output's Fisher information. The
    rate of Adam is relative to each parameter's root mean square and falls along a half cosine. Weights are float32; products
    are bfloat16 if the layer's dtype has 16 bits. The best epoch's weights are kept; epoch 0 is the FFN before tuning.

    :param group: the sliced group
    :param teacher: the FFN before it lost channels
    """
    now = read_ffn(layer, group)
    student = now.copy(torch.float32)
    parameters = student.list_parameters()
    scales = [max(float(p.detach().square().mean().sqrt()), _FLOOR) for p in parameters]
    adam = torch.optim.Adam([{"params": [p]} for p in parameters], betas=(0.9, 0.99))
    curve, best, best_epoch = [teacher.measure(student)], now, 0
    batches = math.ceil(len(teacher.train) / _BATCH)  # per epoch
    generator, step = torch.Generator().manual_seed(0), 0
    for epoch in tqdm(range(1, settings.epochs + 1), desc=f"tuning {group.name}"):
        for tokens in teacher.shuffle(generator, batches):
            falling = 0.5 * (1 + math.cos(math.pi * step / (settings.epochs * batches)))
            rate = settings.learning_rate * falling * min(1.0, (step + 1) / _WARM_UP)
            for place, scale in zip(adam.param_groups, scales, strict=True):
                place["lr"] = rate * scale
            with torch.enable_grad():
                loss = teacher.find_loss(student, tokens, generator)
                adam.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            step += 1
        curve.append(teacher.measure(student))
        if curve[-1] < curve[best_epoch]:
            best, best_epoch = student.copy(), epoch
    if best_epoch:
        write_ffn(layer, group, best)
    return TuningRecord(curve, best_epoch)


class Teacher:
    """Dense FFN on the calibration data, from which the error of another FFN is measured.

    :param root: R, shape [d, d]; None weights all outputs alike
    :ivar train: tokens that are not held out, on the host
    """

    def __init__(self, dense: FFN, data: FFNData, root: Tensor | None, context: DeviceContext):
        self._dense, self._data, self._context = dense, data, context
        self._like = dense.second[0]
        self._root = None if root is None else context.to_device(root, self._like.device, torch.float32)
        with context.on_host():
            self.train = (~data.held).nonzero().flatten()
            self._apart = data.held.nonzero().flatten() if data.held.any() else self.train
        self._mean, self._root_of_spread = self._describe_inputs()
        self._energy = self._sum(lambda seen: self._dense(seen.to(self._like.dtype)).float())  # of the held-out tokens

    def _describe_inputs(self) -> tuple[Tensor, Tensor]:
        """Return the inputs' weighted mean, shape [d], and a root of their covariance, shape [d, d], float32."""
        size, device = self._data.inputs.shape[1], self._like.device
        total, products = torch.zeros(size, device=device), torch.zeros(size, size, device=device)
        with self._context.on_host():
            count = float(self._data.weights[self.train].sum())
        for tokens in self._split(self.train):
            seen, weights = self._take(tokens)
            total += (seen * weights[:, None]).sum(0)
            products.addmm_((seen * weights[:, None]).mT, seen)
        mean = total / count
        spread = (products / count - torch.outer(mean, mean)).double()
        spread.diagonal().add_(_JITTER * spread.diagonal().mean().clamp(min=1e-30))
        return mean, sqrt_psd(spread).float()

    def _take(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and weights of tokens on the device, float32."""
        with self._context.on_host():
            inputs, weights = self._data.inputs[tokens], self._data.weights[tokens]
        device = self._like.device
        return self._context.to_device(inputs, device).float(), self._context.to_device(weights, device)

    def shuffle(self, generator: torch.Generator, parts: int) -> Sequence[Tensor]:
        """Return the tokens that are not held out, in random order, in ``parts`` parts."""
        with self._context.on_host():
            return self.train[torch.randperm(len(self.train), generator=generator)].chunk(parts)

    def _split(self, tokens: Tensor) -> Sequence[Tensor]:
        with self._context.on_host():
            return tokens.split(_BATCH)

    def find_loss(self, student: FFN, tokens: Tensor, generator: torch.Generator) -> Tensor:
        """Return the mean error at given tokens and at as many drawn inputs, relative to the dense output's mean energy."""
        seen, weights = self._take(tokens)
        with self._context.on_host():
            noise = torch.randn(seen.shape, generator=generator)  # the same for every device
        with self._narrow():
            drawn = self._mean + self._context.to_device(noise, seen.device) @ self._root_of_spread
            given, wanted = self._answer(student, torch.cat([seen, drawn.to(seen.dtype)]))
            error = self._weigh(given - wanted, torch.cat([weights, torch.ones_like(weights)])) / len(given)
        return error * len(self._apart) / self._energy

    def measure(self, student: FFN) -> float:
        """Return the error at the held-out tokens, relative to the energy of the dense FFN's output."""
        return self._sum(lambda seen: torch.sub(*self._answer(student, seen))) / self._energy

    @torch.no_grad()
    def _sum(self, find: Callable[[Tensor], Tensor]) -> float:
        """Return the weighted energy of the outputs that ``find`` gives at the held-out tokens, above 0."""
        total = 0.0
        for tokens in self._split(self._apart):
            seen, weights = self._take(tokens)
            with self._narrow():
                total += float(self._weigh(find(seen), weights))
        return max(total, 1e-300)

    def _narrow(self) -> AbstractContextManager[Any]:
        """Return a context in which products are bfloat16 if the layer's dtype has 16 bits."""
        device, is_narrow = self._like.device.type, self._like.dtype in (torch.bfloat16, torch.float16)
        can = is_narrow and torch.amp.is_autocast_available(device)
        return torch.autocast(device, torch.bfloat16) if can else nullcontext()

    def _answer(self, student: FFN, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the student's outputs and the dense FFN's, float32."""
        with torch.no_grad():
            wanted = self._dense(inputs.to(self._like.dtype)).float()
        return student(inputs).float(), wanted

    def _weigh(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum over tokens of the energies of outputs or errors."""
        if self._root is not None:
            outputs = (outputs @ self._root.mT).float()
        return (outputs.square().sum(-1) * weights).sum()
