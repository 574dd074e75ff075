"""Trained parameters and their AdamW moments, in memory or in files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from struprune_plugin.layerwise.runner import LayerwiseRunner
from struprune_plugin.model.layers import QUANTISER_PARAMETERS
from struprune_plugin.recovery.recovery_config import Optimizer, Trained
from struprune_plugin.runtime.distributed import count_ranks, find_rank, gather, send_from

REST = "rest"  # of names: what stands on the last layer
_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # torch.optim.AdamW's


class TrainedStates:
    """Every trained parameter with its moments, beside the model's weights or in files.

    A parameter in 16 bits has a copy in float32 that is moved in its place, and is rounded from it after every step. Of several
    processes each holds the copies and moments of its own part of the parameters, moves these, and sends them to the others.

    :param parameters: by name; the model's own
    :param optimizer: moments in float32 are float64 where the parameter is
    :param folder: where copies and moments lie as files; in memory where None
    :param seed: of the rounding of moments
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        folder: Path | None = None,
        seed: int = 0,
    ):
        self.parameters, self._weight_decay = dict(parameters), optimizer.weight_decay
        self._folder, self._seed = folder, seed
        self._masters: dict[str, Tensor] = {}
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self._ranks = assign_ranks(
            {name: parameter.numel() for name, parameter in self.parameters.items()}, count_ranks()
        )
        for name in self._list_own():
            parameter = self.parameters[name]
            value = parameter.detach()
            exact = value.dtype.itemsize >= 4
            wide = value.dtype if exact else torch.float32
            wide = torch.bfloat16 if optimizer.state_dtype == "bfloat16" else wide
            self._masters[name] = value if exact else self._keep(f"{name}.master", value, torch.float32)
            zeros = value.new_zeros(()).expand(value.shape)
            self._moments[name] = (
                self._keep(f"{name}.first", zeros, wide),
                self._keep(f"{name}.second", zeros, wide),
            )

    def _list_own(self) -> list[str]:
        """Return the names of the parameters that this process updates."""
        return [name for name, rank in self._ranks.items() if rank == find_rank()]

    def holds(self, name: str) -> bool:
        """Return whether this process updates a parameter."""
        return name in self._masters

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies and moments that this process holds."""
        copies = [copy for name, copy in self._masters.items() if copy.dtype != self.parameters[name].dtype]
        held = [*copies, *(moment for pair in self._moments.values() for moment in pair)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def _keep(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of a tensor, in a file where there is a folder."""
        if self._folder is None:
            return value.to(dtype, copy=True, memory_format=torch.contiguous_format)
        self._folder.mkdir(parents=True, exist_ok=True)
        held = torch.from_file(str(self._folder / f"{name}.bin"), shared=True, size=value.numel(), dtype=dtype)
        return held.view(value.shape).copy_(value)

    @torch.no_grad()
    def update(self, name: str, gradient: Tensor, step: int, rate: float) -> None:
        """Update one parameter by a step of torch's AdamW; do nothing if another process updates it.

        :param gradient: of the parameter's shape, where the parameter is
        :param step: from 1
        """
        if not self.holds(name):
            return
        master, moments = self._masters[name], self._moments[name]
        wide = [moment.to(master.dtype) for moment in moments]
        adamw(
            *([master], [gradient.to(master.dtype)], [wide[0]], [wide[1]], []),
            state_steps=[torch.tensor(step - 1.0)],  # adamw counts this one
            foreach=False,  # parameter by parameter, without copies of all
            amsgrad=False,
            maximize=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=rate,
            weight_decay=self._weight_decay,
            eps=_EPSILON,
        )
        if moments[0].dtype != master.dtype:
            generator = torch.Generator(master.device).manual_seed(self._draw(name, step))
            for moment, value in zip(moments, wide, strict=True):
                moment.copy_(round_randomly(value, generator))
        parameter = self.parameters[name]
        if parameter.dtype != master.dtype:
            parameter.copy_(master)

    def share(self, names: Iterable[str]) -> None:
        """Send parameters from the process that updates them to all others."""
        for name in names:
            send_from(self.parameters[name].data, self._ranks[name])

    def _draw(self, name: str, step: int) -> int:
        """Return a seed per parameter and step, the same in all processes."""
        return int.from_bytes(hashlib.sha256(f"{self._seed} {name} {step}".encode()).digest()[:7])

    # -- kept and taken back --------------------------------------------------------------------------------------

    def list_values(self) -> dict[str, Tensor]:
        """Return the values that this process updates, by name."""
        return {f"{name}.value": value for name, value in self._masters.items()}

    def list_tensors(self) -> dict[str, Tensor]:
        """Return all tensors that this process needs to resume, by name."""
        held = self.list_values()
        for name, (first, second) in self._moments.items():
            held |= {f"{name}.first": first, f"{name}.second": second}
        return held

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what :meth:`list_values` or :meth:`list_tensors` gave, bit by bit."""
        for name in self._masters:
            self._masters[name].copy_(tensors[f"{name}.value"])
            self.parameters[name].copy_(self._masters[name])
            for part, moment in zip(("first", "second"), self._moments[name], strict=True):
                if f"{name}.{part}" in tensors:
                    moment.copy_(tensors[f"{name}.{part}"])
        self.share(self.parameters)

    def is_finite(self) -> bool:
        """Return whether all values of all processes are finite."""
        return all(gather(all(bool(value.isfinite().all()) for value in self._masters.values())))


def assign_ranks(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Divide parameters among processes: the largest first, each to the process with the fewest values so far.

    :param sizes: values of every parameter
    :return: number of the process, by name, in the order of ``sizes``
    """
    loads, ranks = [0] * num_ranks, {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        ranks[name] = loads.index(min(loads))
        loads[ranks[name]] += sizes[name]
    return {name: ranks[name] for name in sizes}


def list_trained(runner: LayerwiseRunner, trained: Trained) -> dict[str, nn.Parameter]:
    """Return the trained parameters, keyed as :class:`~struprune_plugin.recovery.step.Stepper` expects."""
    found = {
        f"{index}.{name}": parameter
        for index, layer in enumerate(runner.layers)
        for name, parameter in list_layer_parameters(layer, trained).items()
    }
    if trained != "adapters":  # project_in of OPT-350M is a matrix, and stands before the layers
        vectors = {n: p for n, p in runner.rest.items() if isinstance(p, nn.Parameter) and p.dim() == 1}
        found |= {f"{REST}.{name}": parameter for name, parameter in vectors.items()}
    return found


def list_layer_parameters(layer: nn.Module, trained: Trained) -> dict[str, nn.Parameter]:
    """Return the trained parameters of one layer by name; with adapters, those that require a gradient."""
    named = {n: p for n, p in layer.named_parameters() if n.rpartition(".")[2] not in QUANTISER_PARAMETERS}
    if trained == "adapters":
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    return {name: parameter for name, parameter in named.items() if trained == "all" or parameter.dim() == 1}


def round_randomly(value: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, up or down at random, so that its expectation is the value.

    A running mean of squares moves by a thousandth a step, less than a bfloat16 tells apart: rounded to the nearest, it would
    stand still.

    :param generator: on the tensor's device
    """
    noise = torch.randint(0, 1 << 16, value.shape, generator=generator, device=value.device, dtype=torch.int32)
    bits = (value.contiguous().view(torch.int32) + noise) & -(1 << 16)
    return bits.view(torch.float32).to(torch.bfloat16)
