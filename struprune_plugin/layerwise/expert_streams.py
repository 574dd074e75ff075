"""Streams of a mixture's experts: each expert sees the tokens routed to it, weighted by the router."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from struprune_plugin.layerwise.calls import LayerCall
from struprune_plugin.layerwise.capture import Visit
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.units.group import UnitGroup


@dataclass(frozen=True)
class _Routing:
    """Decisions of a router for one batch.

    :param tokens: by expert, indices of the tokens that it saw, in its order
    :param weights: by expert, factors on its outputs in the same order, float32
    :param energy: sum over experts of the squared weights, shape [tokens], float32
    """

    tokens: Sequence[Tensor]
    weights: Sequence[Tensor]
    energy: Tensor


def _read_routing(experts: Any, args: tuple[Any, ...]) -> _Routing | None:
    """Return the routing in the arguments of a list of experts; None where they hold no router's choice (Llama 4)."""
    if len(args) < 3:
        return None
    chosen, weights = args[1], args[2].float()
    tokens, given = [], []
    for index in range(experts.num_experts):
        place, rows = torch.where((chosen == index).T)  # the order of llm-compressor's experts
        tokens.append(rows)
        given.append(weights[rows, place])
    return _Routing(tokens, given, weights.square().sum(1))


@dataclass(frozen=True)
class Repair:
    """Error that the experts of a layer have to repair.

    :param error: error to be added to their sum, shape [tokens, d], float32
    :param factors: factors on the tokens' errors, shape [tokens], float32
    """

    error: Tensor
    factors: Tensor

    @classmethod
    def of(cls, wanted: Tensor, now: Tensor) -> Repair:
        """Return the difference between two streams; a token's factor is the inverse RMS of its stream, which norms divide by.

        The first token of a text may hold nine tenths of the energy.

        :param wanted: stream of the dense model, shape [tokens, d], float32
        :param now: present stream, shape [tokens, d], float32
        """
        return cls(wanted - now, now.square().mean(1).clamp(min=1e-12).rsqrt())


@contextmanager
def capture_experts(
    layer: nn.Module, groups: Sequence[UnitGroup]
) -> Iterator[Callable[[LayerCall, Repair | None], Iterator[tuple[UnitGroup, Visit]]]]:
    """Observe a decoder layer's experts; yield a function that returns every group's visit of the last forward pass, once.

    The function takes the call and the error that the experts have to repair, or None. An error r is split among the experts of a
    token such that they change least: the one with weight g changes by ``g r / sum g^2``.

    :param groups: groups of one list of experts
    """
    seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    sources: dict[str, Tensor] = {}
    routing: list[_Routing | None] = []
    experts = layer.get_submodule(groups[0].experts) if groups else None

    def see_source(name: str) -> Callable[[nn.Module, tuple], None]:
        return lambda _module, args: sources.update({name: args[0].detach()})

    def see(name: str) -> Callable[[nn.Module, tuple, Tensor], None]:
        def hook(_module: nn.Module, args: tuple, output: Tensor) -> None:
            parts = (sources.pop(name), args[0].detach(), output.detach())
            seen[name] = tuple(part.reshape(-1, part.shape[-1]) for part in parts)  # type: ignore[assignment]

        return hook

    def take(call: LayerCall, repair: Repair | None) -> Iterator[tuple[UnitGroup, Visit]]:
        chosen = routing.pop()
        for group in groups:
            yield group, _make_visit(seen.pop(group.consumer), chosen, group.expert_index, repair, call)

    with ExitStack() as stack:
        if experts is not None:
            decide = lambda module, args: routing.append(_read_routing(module, args))  # noqa: E731
            stack.callback(experts.register_forward_pre_hook(decide).remove)
        for group in groups:
            first = find_linear(layer, next(iter(group.producers)))
            stack.callback(first.register_forward_pre_hook(see_source(group.consumer)).remove)
            stack.callback(find_linear(layer, group.consumer).register_forward_hook(see(group.consumer)).remove)
        yield take


@contextmanager
def capture_sum(layer: nn.Module, group: UnitGroup | None) -> Iterator[Callable[[], Tensor]]:
    """Observe the join of the experts' sum with the residual stream; yield a function that returns the last pass's stream after it.

    The stream is in units of the sum, shape [tokens, d], float32. It is added in float32, because a layer's own output is rounded
    to its dtype, which hides small errors where some channels of the stream are large.

    :param group: a group of an expert, or of a module beside the experts; None captures nothing
    """
    seen: dict[str, Tensor] = {}

    def see(name: str, output: Any) -> None:
        part = output[0] if isinstance(output, tuple) else output
        seen[name] = part.detach().float().reshape(-1, part.shape[-1])

    def take() -> Tensor:
        assert group is not None
        return seen["residual"] / group.join.scale + seen["sum"]

    with ExitStack() as stack:
        if group is not None and group.join.is_direct:
            residual, block = (layer.get_submodule(name) for name in (group.join.residual, group.join.block))
            hook = lambda _module, args, kwargs: see("residual", args or kwargs["hidden_states"])  # noqa: E731
            stack.callback(residual.register_forward_pre_hook(hook, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(lambda _module, _args, output: see("sum", output)).remove)
        yield take


def _make_visit(
    seen: tuple[Tensor, Tensor, Tensor], routing: _Routing | None, index: int, repair: Repair | None, call: LayerCall
) -> Visit:
    """Return one expert's visit, with its tokens sorted, and without those of weight 0."""
    source, inputs, output = seen
    if routing is None:  # the expert saw every token multiplied by its weight, so those of weight 0 are zero
        tokens, weights = torch.arange(len(source), device=source.device), source.ne(0).any(1).float()
        counts = weights
    else:
        tokens, weights = routing.tokens[index], routing.weights[index]
        counts = weights
    order = tokens.argsort(stable=True)
    order = order[counts[order] != 0]
    tokens, weights, counts, target = tokens[order], weights[order], counts[order], output[order].float()
    if repair is not None and routing is not None:
        share = weights / routing.energy[tokens].clamp(min=1e-12)
        target = target + share[:, None] * repair.error[tokens]
        counts = counts * repair.factors[tokens]
    return Visit(source[order], inputs[order], target, call, tokens, counts)
