"""Measured couplings between rows and columns of the linears in one decoder layer.

Every row of a linear's output is perturbed alone, in a separate batch element, and the inputs of all later linears are compared
with those of the unperturbed layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

COPIES = 48  # copies of the sequence: the number of rows perturbed in one forward pass
_FAINT = 1e-4  # relative to the mean size of the inputs: a smaller change is rounding
LINEARS = (nn.Linear, Conv1D)


@dataclass(frozen=True)
class Call:
    """One call of a decoder layer on :data:`COPIES` copies of one sequence.

    :param args: positional arguments; the hidden states come first, or are in ``kwargs``
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, layer: nn.Module) -> Any:
        """Run the layer and return its output."""
        return layer(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Coupling:
    """Coupling of the rows of one linear with the columns of another.

    :param reached: whether a row changes a column, shape [rows, columns], bool
    :param later: the same at tokens after the perturbed one
    """

    reached: Tensor
    later: Tensor


def list_linears(layer: nn.Module) -> dict[str, nn.Module]:
    """Return all linears of a layer by name."""
    return {name: module for name, module in layer.named_modules() if isinstance(module, LINEARS)}


@torch.no_grad()
def record_linears(layer: nn.Module, call: Call, length: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the inputs and outputs of the linears that a layer calls exactly once, on all tokens, in the order of the calls.

    :param length: number of tokens of the sequence
    :return: both of shape [tokens, columns or rows]
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    again: set[str] = set()

    def see(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple, output: Any) -> None:
            if name in inputs or not isinstance(output, Tensor):  # a router, for instance
                again.add(name)
                return
            inputs[name], outputs[name] = args[0].detach().clone(), output.detach().clone()  # later code may write

        return hook

    with ExitStack() as stack:
        for name, module in list_linears(layer).items():
            stack.callback(module.register_forward_hook(see(name)).remove)
        call.run(layer)
    known = [name for name, seen in inputs.items() if name not in again and is_whole(seen, length)]
    return {n: split_copies(inputs[n], length)[0] for n in known}, {
        n: split_copies(outputs[n], length)[0] for n in known
    }


def is_whole(seen: Tensor, length: int) -> bool:
    """Return whether a tensor has an entry for every token of every copy."""
    return seen.shape[:-1].numel() == COPIES * length


def split_copies(seen: Tensor, length: int) -> Tensor:
    """Return a tensor split into the copies, shape [copies, tokens, width]."""
    return seen.reshape(COPIES, length, -1)


@torch.no_grad()
def measure_couplings(
    layer: nn.Module, call: Call, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> dict[tuple[str, str], Coupling]:
    """Return the coupling of every linear with every later linear that it reaches, by (producer, consumer).

    :param inputs: as :func:`record_linears` returns them
    :param outputs: as :func:`record_linears` returns them
    """
    found: dict[tuple[str, str], Coupling] = {}
    names = list(inputs)
    for place, name in enumerate(names[:-1]):
        after, third = {other: inputs[other] for other in names[place + 1 :]}, len(outputs[name]) // 3
        everywhere = _disturb(layer, call, name, outputs[name], after, slice(None))
        at_one = _disturb(layer, call, name, outputs[name], after, slice(third, third + 1))
        for other in after:
            if everywhere[other][0].any():
                found[name, other] = Coupling(everywhere[other][0], at_one[other][1])
    return found


def _disturb(
    layer: nn.Module, call: Call, name: str, output: Tensor, after: Mapping[str, Tensor], tokens: slice
) -> dict[str, tuple[Tensor, Tensor]]:
    """Perturb the rows of one linear at ``tokens``, each row in a separate copy.

    Return by linear which columns change at any token, and which change at later tokens, each of shape [rows, columns], bool.

    :param after: the unperturbed inputs of the linears to compare, shape [tokens, columns]
    """
    length, rows = output.shape
    size = 2 * output.abs().max() + 0.1  # large enough to activate channels that an activation function holds at zero
    signs = torch.where(torch.arange(length) % 2 == 0, 1.0, -1.0).to(output)
    found: dict[str, list[tuple[Tensor, Tensor]]] = {other: [] for other in after}
    for start in range(0, rows, COPIES):
        count = min(COPIES, rows - start)
        change = output.new_zeros(COPIES, length, rows)
        for copy in range(count):
            change[copy, tokens, start + copy] = size * signs[tokens]

        def hook(_module: nn.Module, _args: tuple, out: Tensor, change: Tensor = change) -> Tensor:
            return out + change.reshape(out.shape)

        with watch_inputs(layer, after) as seen, ExitStack() as stack:
            stack.callback(layer.get_submodule(name).register_forward_hook(hook).remove)
            call.run(layer)
        for other, dense in after.items():
            if other in seen and is_whole(seen[other], length):
                moved = (split_copies(seen[other], length)[:count] - dense).abs()
                moved = moved > _FAINT * (dense.abs().mean() + 1e-3)
            else:  # the linear now reads other tokens
                moved = torch.ones(count, *dense.shape, dtype=torch.bool)
            found[other].append((moved.any(1), moved[:, tokens.stop or length :].any(1)))
    return {other: tuple(map(torch.cat, zip(*parts, strict=True))) for other, parts in found.items()}  # type: ignore[misc]


@contextmanager
def watch_inputs(layer: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Record the inputs of a layer's linears while it runs."""
    seen: dict[str, Tensor] = {}

    def see(name: str) -> Callable[..., None]:
        return lambda _module, args: seen.__setitem__(name, args[0].detach())

    with ExitStack() as stack:
        for name in names:
            stack.callback(layer.get_submodule(name).register_forward_pre_hook(see(name)).remove)
        yield seen
