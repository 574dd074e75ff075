"""Couplings of the linears in a decoder layer: each row is perturbed alone, and the inputs of later linears are compared."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from struprune_plugin.model.structure.locate import list_linears

COPIES = 48  # copies of the sequence: the number of rows perturbed in one forward pass
_FAINT = 1e-4  # relative to the mean size of the inputs: a smaller change is rounding


@dataclass
class Call:
    """One call of a module on :data:`COPIES` copies of one sequence.

    :param args: positional arguments; the hidden states come first, or are in ``kwargs``
    :param hidden: copy of its hidden states, since later code may write to them
    :param output: what it returned, a copy where it is a tensor; None while it runs
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str = ""
    hidden: Any = None
    output: Any = None

    def run(self, module: nn.Module) -> Any:
        """Call a module in the same way and return its output, of several parts the first."""
        output = module(*self.args, **self.kwargs)
        return output[0] if isinstance(output, (tuple, list)) else output


@contextmanager
def watch(root: nn.Module, names: Iterable[str]) -> Iterator[list[Call]]:
    """Record the calls of modules of ``root`` during the block, in the order in which they begin."""
    calls: list[Call] = []

    def begin(name: str, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.append(Call(args, kwargs, name, _copy(args[0] if args else kwargs.get("hidden_states"))))

    def end(name: str, _module: nn.Module, _args: tuple, output: Any) -> None:
        call = next(call for call in reversed(calls) if call.name == name and call.output is None)
        call.output = _copy(output)

    with ExitStack() as stack:
        for name in names:
            module = root.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(partial(begin, name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(end, name)).remove)
        yield calls


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def is_whole(seen: Any, length: int) -> bool:
    """Return whether a value is a tensor with an entry for every token of every copy."""
    return isinstance(seen, Tensor) and seen.shape[:-1].numel() == COPIES * length


def split_copies(seen: Tensor, length: int) -> Tensor:
    """Return a tensor split into the copies, shape [copies, tokens, width]."""
    return seen.reshape(COPIES, length, -1)


@dataclass(frozen=True)
class Coupling:
    """Whether a row of one linear changes a column of another, at all and at later tokens, shape [rows, columns], bool."""

    reached: Tensor
    later: Tensor


@dataclass(frozen=True)
class Measured:
    """Measurements of one call of a tiny layer, or of one of its experts.

    :param layers: all layers of the same kind; the first is measured
    :param inputs: inputs of the linears that are called once, on all tokens, in the order of the calls, shape [tokens, columns]
    :param outputs: outputs of the same linears, shape [tokens, rows]
    :param couplings: couplings of every linear with the later linears that it reaches, by (producer, consumer)
    """

    layers: Sequence[nn.Module]
    call: Call
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    couplings: Mapping[tuple[str, str], Coupling]

    @property
    def layer(self) -> nn.Module:
        return self.layers[0]

    @property
    def length(self) -> int:
        """Number of tokens of the sequence on which the layer was measured."""
        return int(self.call.hidden.shape[:-1].numel()) // COPIES


@torch.no_grad()
def measure(layers: Sequence[nn.Module], call: Call, length: int, asks_later: bool = True) -> Measured:
    """Return the measurements of a call of the first of several layers of one kind, on a sequence of ``length`` tokens.

    :param asks_later: whether to measure which columns change at later tokens; else none is said to
    """
    with watch(layers[0], list_linears(layers[0])) as calls:
        call.run(layers[0])
    times = Counter(each.name for each in calls)
    once = [each for each in calls if times[each.name] == 1 and is_whole(each.hidden, length)]
    once = [each for each in once if isinstance(each.output, Tensor)]  # a router returns several
    inputs = {each.name: split_copies(each.hidden, length)[0] for each in once}
    outputs = {each.name: split_copies(each.output, length)[0] for each in once}
    couplings: dict[tuple[str, str], Coupling] = {}
    for place, name in enumerate(inputs):
        after, third = {other: inputs[other] for other in [*inputs][place + 1 :]}, len(outputs[name]) // 3
        everywhere = _disturb(layers[0], call, name, outputs[name], after, slice(None))
        one = slice(third, third + 1)
        at_one = _disturb(layers[0], call, name, outputs[name], after, one) if asks_later else everywhere
        for other in after:
            if everywhere[other][0].any():
                couplings[name, other] = Coupling(everywhere[other][0], at_one[other][1])
    return Measured(layers, call, inputs, outputs, couplings)


def _disturb(
    layer: nn.Module, call: Call, name: str, output: Tensor, after: Mapping[str, Tensor], tokens: slice
) -> dict[str, tuple[Tensor, Tensor]]:
    """Perturb the rows of one linear at ``tokens``, each in a separate copy, and compare the linears whose inputs ``after`` has.

    Return by linear which columns change at any token, and which change at later tokens, each of shape [rows, columns], bool.
    """
    length, rows = output.shape
    size = 2 * output.abs().max() + 0.1  # large enough to activate channels that an activation function holds at zero
    signs = torch.where(torch.arange(length) % 2 == 0, 1.0, -1.0).to(output)
    changes: dict[str, list[tuple[Tensor, Tensor]]] = {other: [] for other in after}
    for start in range(0, rows if after else 0, COPIES):
        count = min(COPIES, rows - start)
        change = output.new_zeros(COPIES, length, rows)
        for copy in range(count):
            change[copy, tokens, start + copy] = size * signs[tokens]

        def hook(_module: nn.Module, _args: tuple, out: Tensor, change: Tensor = change) -> Tensor:
            return out + change.reshape(out.shape)

        with watch(layer, after) as calls, ExitStack() as stack:
            stack.callback(layer.get_submodule(name).register_forward_hook(hook).remove)
            call.run(layer)
        seen = {each.name: each.hidden for each in calls}
        for other, dense in after.items():
            if is_whole(seen.get(other), length):
                moved = (split_copies(seen[other], length)[:count] - dense).abs()
                moved = moved > _FAINT * (dense.abs().mean() + 1e-3)
            else:  # the linear now reads other tokens
                moved = torch.ones(count, *dense.shape, dtype=torch.bool)
            changes[other].append((moved.any(1), moved[:, tokens.stop or length :].any(1)))
    return {other: tuple(map(torch.cat, zip(*parts, strict=True))) for other, parts in changes.items()}  # type: ignore[misc]
