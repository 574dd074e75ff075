"""Output of a mixture without some of its experts, from the class's own router on fewer rows and every expert's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.utils import patch_attr
from torch import Tensor, nn

from struprune_plugin.layerwise.calls import LayerCall
from struprune_plugin.layerwise.capture import Stopped
from struprune_plugin.model.structure.routing import Routing

_RANK = 1e-10  # relative to the largest eigenvalue: below it experts are linearly dependent


@contextmanager
def route_among(layer: nn.Module, routing: Routing, experts: str, keep: Sequence[int]) -> Iterator[None]:
    """Restrict a layer's router to some of its experts, as if the others were removed; the layer's weights do not change.

    Hooks registered within see the experts under their own indices.

    :param experts: name of the list of split experts
    :param keep: indices of the admissible experts, sorted
    """
    members: Any = layer.get_submodule(experts)
    kept = torch.tensor(keep)

    def name_experts(_module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, chosen, weights = args
        return hidden, kept.to(chosen.device)[chosen], weights

    with ExitStack() as stack:
        for module, own, value in list(routing.cut(layer, keep)):
            stack.enter_context(_shadow(module, own, value))
        stack.callback(members.register_forward_pre_hook(name_experts).remove)
        yield


@contextmanager
def _shadow(module: nn.Module, own: str, value: Any) -> Iterator[None]:
    """Shadow a module's attribute, parameter or buffer by another value."""
    held = vars(module)
    before = held.get(own)
    held[own] = value
    try:
        yield
    finally:
        del held[own]
        if before is not None:
            held[own] = before


@dataclass
class _Block:
    """Call of the module around a list of experts and its router.

    :param args: positional arguments
    :param kwargs: named arguments
    :param counts: flat indices of the counted tokens, shape [counted], int64; None where all count
    """

    args: tuple
    kwargs: dict[str, Any]
    counts: Tensor | None


class ExpertChoice:
    """Record of a list of experts on calibration tokens: a sketch of every expert's output, and the routing among fewer experts.

    :param layer: the decoder layer, on its device
    :param experts: name of the list of split experts
    :param projection: projection of outputs, shape [k, d], float32
    :ivar sketch: projected output of every expert, shape [experts, tokens, k], float32
    :ivar norms: norm of every expert's output, shape [experts, tokens], float32
    """

    def __init__(self, layer: nn.Module, routing: Routing, experts: str, projection: Tensor):
        self._layer, self._routing, self._experts, self._projection = layer, routing, experts, projection
        self._block = layer.get_submodule(routing.find_block(layer, experts))
        self._blocks: list[_Block] = []
        self._parts: list[tuple[Tensor, Tensor]] = []

    @property
    def num_experts(self) -> int:
        members: Any = self._layer.get_submodule(self._experts)
        return int(members.num_experts)

    @contextmanager
    def watch(self) -> Iterator[Callable[[LayerCall], None]]:
        """Observe the layer's forward passes; yield a function that records the last one."""
        seen: list[tuple[tuple, dict[str, Any]]] = []
        hidden: list[Tensor] = []
        members: Any = self._layer.get_submodule(self._experts)

        def take(call: LayerCall) -> None:
            tokens = None if call.tokens is None else call.tokens.to(hidden[0].device)
            states = hidden.pop() if tokens is None else hidden.pop()[tokens]
            self._blocks.append(_Block(*seen.pop(), tokens))
            outputs = [members[index](states).float() for index in range(self.num_experts)]
            sketch = torch.stack([output @ self._projection.mT for output in outputs])
            self._parts.append((sketch, torch.stack([output.norm(dim=1) for output in outputs])))

        with ExitStack() as stack:
            see = lambda _module, args, kwargs: seen.append((args, kwargs))  # noqa: E731
            stack.callback(self._block.register_forward_pre_hook(see, with_kwargs=True).remove)
            stack.callback(members.register_forward_pre_hook(lambda _m, args: hidden.append(args[0].detach())).remove)
            yield take

    def finish(self) -> None:
        """Concatenate the records of all passes."""
        self.sketch, self.norms = (torch.cat(parts, 1) for parts in zip(*self._parts, strict=True))
        self._parts.clear()

    def choose(self, keep: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the experts that every token is routed to and their weights, both [tokens, chosen], with only some experts left.

        :param keep: indices of the experts left, sorted
        """
        found: list[tuple[Tensor, Tensor]] = []

        def stop(_hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            found.append((chosen, weights.float()))
            raise Stopped

        members: Any = self._layer.get_submodule(self._experts)
        with patch_attr(members, "forward", stop), route_among(self._layer, self._routing, self._experts, keep):
            for block in self._blocks:
                with suppress(Stopped):
                    self._block(*block.args, **block.kwargs)
                if block.counts is not None:
                    chosen, weights = found.pop()
                    found.append((chosen[block.counts], weights[block.counts]))
        chosen, weights = (torch.cat(parts) for parts in zip(*found, strict=True))
        return chosen, weights

    def combine(self, keep: Sequence[int]) -> Tensor:
        """Return the sketch of the experts' sum with only some experts left, shape [tokens, k], float32."""
        chosen, weights = self.choose(keep)
        tokens = torch.arange(len(chosen), device=chosen.device)
        total = self.sketch.new_zeros(self.sketch.shape[1:])
        for place in range(chosen.shape[1]):
            total = total + weights[:, place, None] * self.sketch[chosen[:, place], tokens]
        return total

    def measure_rescaled(self, keep: Sequence[int], wanted: Tensor) -> float:
        """Return the summed squared error with only some experts left, each rescaled by a factor from a joint least-squares fit.

        :param wanted: target sketch, as :meth:`combine` returns it
        """
        chosen, weights = self.choose(keep)
        tokens, parts = torch.arange(len(chosen), device=chosen.device), self.sketch.new_zeros(self.sketch.shape)
        for place in range(chosen.shape[1]):
            own = chosen[:, place]
            parts[own, tokens] = weights[:, place, None] * self.sketch[own, tokens]
        flat, given = parts[list(keep)].flatten(1).double(), wanted.flatten().double()
        gram, cross = flat @ flat.mT, flat @ given
        explained = cross @ (torch.linalg.pinv(gram, rtol=_RANK, hermitian=True) @ cross)
        return max(float(wanted.square().sum(dtype=torch.float64) - explained), 0.0)

    def count_loads(self) -> tuple[Tensor, Tensor]:
        """Return per expert the sum over its tokens of the squared norm of its weighted and projected output, and the mean over its
        tokens of its weight times the norm of its output (REAP), both [experts], float64."""
        chosen, weights = self.choose(range(self.num_experts))
        energy, norms, count = torch.zeros(3, self.num_experts, dtype=torch.float64, device=chosen.device)
        tokens = torch.arange(len(chosen), device=chosen.device)
        for place in range(chosen.shape[1]):
            own, weight = chosen[:, place], weights[:, place]
            energy.index_add_(0, own, (weight * self.sketch[own, tokens].norm(dim=1)).square().double())
            norms.index_add_(0, own, (weight * self.norms[own, tokens]).double())
            count.index_add_(0, own, torch.ones_like(weight).double())
        return energy, norms / count.clamp(min=1)
