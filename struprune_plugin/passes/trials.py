"""Try plans before one is taken: how far each moves the model's own output, on calibration text that no solve has seen.

Error curves and sensitivities are of second order at the dense model, and a plan may lead far from it. Here every plan is carried
out on the dense model's moments, without repair of what is inherited, all of them in one pass; what counts is the KL
divergence of the model's next tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from llmcompressor.modifiers.utils.hooks import HooksMixin
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.device.room import Room
from struprune_plugin.layer.calls import pass_by, replace_weights, take_hidden
from struprune_plugin.layer.criteria import read_dense
from struprune_plugin.layer.gather import LayerObserver
from struprune_plugin.layer.methods import Methods
from struprune_plugin.layer.targets import TARGETS
from struprune_plugin.maths.elimination import expand_units
from struprune_plugin.maths.nested import solve_nested_weights
from struprune_plugin.maths.rotation import rotate_columns, rotate_moments
from struprune_plugin.maths.solve import damp_moments
from struprune_plugin.maths.statistics import Moments, move_moments
from struprune_plugin.model.layers import find_decoder_layers, find_linear
from struprune_plugin.model.units.group import UnitGroup, select_groups
from struprune_plugin.passes.rules import Evidence
from struprune_plugin.passes.sensitivity import shape_logits

Kept = Mapping[str, int]  # units by group


@dataclass
class _Path:
    """One plan's hidden states, from layer to layer.

    :param kept: of every group
    :param hidden: that enter the layer at hand, by batch, on the host; none while they are the dense ones
    """

    kept: Kept
    hidden: list[Tensor] = field(default_factory=list)


class TrialPass:
    """A pass over the dense model that changes nothing and ends in a divergence a plan.

    One decoder layer is on the device at a time. Moments are those of the dense path. For one process.

    :param groups: of all layers
    :param plans: kept units of every group, one a plan
    :param evidence: of an allocation pass: in which order the units of every group go, and the basis that they are rotated to
    :param num_fit: batches that the weights are solved on; those after them are tried
    :param moments: of those batches, on the host, where an allocation pass has kept them: they are then left out
    """

    def __init__(
        self,
        groups: Sequence[UnitGroup],
        plans: Sequence[Kept],
        evidence: Mapping[str, Evidence],
        methods: Methods,
        room: Room,
        num_fit: int,
        moments: Mapping[str, Moments] | None = None,
    ):
        self._groups, self._evidence, self._methods, self._room = groups, evidence, methods, room
        self._paths = [_Path(plan) for plan in plans]
        self._known = moments or {}
        self._num_fit = 0 if self._known else num_fit
        self._observer = LayerObserver(TARGETS["local"], room, all_groups=True)
        self._dense: list[Tensor] = []  # outputs of the last layer, by batch tried
        self._batches: list[dict[str, Tensor]] = []
        self._wraps = False  # whether decoder layers give tuples
        self._model: PreTrainedModel | None = None

    def begin(self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]]) -> None:
        self._model, self._batches = model, list(loader)[self._num_fit :]

    def see_tokens(self, tokens: Tensor) -> None:
        """Nothing depends on them."""

    def before_layer(self, name: str, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        fits = len(self._observer.calls) < self._num_fit
        if not self._observer.calls:
            self._dense.clear()
        with self._room.stage("statistics"):
            self._observer.before_layer(layer, select_groups(self._groups, name) if fits else [], args, kwargs)

    def after_layer(self, output: Any) -> None:
        with self._room.stage("statistics"):
            self._observer.after_layer(output)
        self._wraps = isinstance(output, tuple)
        if len(self._observer.calls) > self._num_fit:
            self._dense.append(self._room.park(take_hidden(output)))

    def end_layer(self, name: str, layer: nn.Module) -> None:
        weights = {group.name: self._solve(layer, group) for group in select_groups(self._groups, name)}
        for path in self._paths:
            self._advance(path, layer, select_groups(self._groups, name), weights)
        self._observer.finish_layer()

    def finish(self) -> None:
        self._observer.close()

    def abort(self) -> None:
        self._observer.close()

    @torch.no_grad()
    def measure(self) -> list[float]:
        """Return KL(dense ‖ pruned) in nats, mean over the tokens tried, one a plan.

        Call it once the pass is over: while it lasts, the host leaves the output embeddings out.
        """
        assert self._model is not None
        paths = [path.hidden or self._dense for path in self._paths]
        totals, count = [0.0] * len(paths), 0
        for index, batch in enumerate(tqdm(self._batches, desc="trials")):
            mask = batch.get("attention_mask")
            valid = (torch.ones_like(batch["input_ids"]) if mask is None else mask).bool()
            count += int(valid.sum())
            finals = []
            for hidden in (self._dense, *paths):
                final = _finish_forward(self._model, batch, hidden[index], self._wraps, self._room)
                finals.append(self._room.to_host(final[valid.to(final.device)]))
            found = _compare(self._model, finals, final.device, self._room)
            totals = [a + b for a, b in zip(totals, found, strict=True)]
        return [total / max(count, 1) for total in totals]

    def _solve(self, layer: nn.Module, group: UnitGroup) -> dict[int, tuple[Tensor, Tensor]]:
        """Return a consumer's weights, in the module's order, and bias, on the host, for every number of kept units asked for."""
        known = self._known.get(group.name)
        moments = self._observer.collect_moments(layer, group, "trials").all if known is None else known
        counts = sorted({path.kept[group.name] for path in self._paths} - {group.num_units})
        if not counts:
            return {}
        linear, host = find_linear(layer, group.consumer), self._room.to_host
        dtype = linear.weight.dtype
        with self._room.stage("trials"), self._room.solving():
            dense = read_dense(layer, group, self._room)
            if known is not None:
                moments = move_moments(known, lambda part: self._room.place(part, dense))
            damped = damp_moments(moments, dense, self._methods.damping, linear.bias is not None)
            solved = self._find_weights(group, damped, dense, counts)
            parts = {count: (group.to_module_order(weight[:, :-1]), weight[:, -1]) for count, weight in solved.items()}
            return {count: (host(weight.to(dtype)), host(bias.to(dtype))) for count, (weight, bias) in parts.items()}

    def _find_weights(
        self, group: UnitGroup, damped: Moments, dense: Tensor, counts: Sequence[int]
    ) -> dict[int, Tensor]:
        """Return the weights on the units that stay, zeros elsewhere, by how many stay, shape [d, n + 1]."""
        found, copies, place = self._evidence[group.name], group.columns_per_unit, self._room.place
        order = found.order.to(damped.gram.device)
        if not self._methods.restoration.solves:
            gone = {count: expand_units(order[: group.num_units - count], copies) for count in counts}
            return {count: dense.index_fill(1, columns, 0.0) for count, columns in gone.items()}
        if found.basis is None:
            return solve_nested_weights(damped, order, copies, counts, group.name)
        basis = place(found.basis, damped.gram)
        solved = solve_nested_weights(rotate_moments(damped, basis, copies), order, copies, counts, group.name)
        return {count: rotate_columns(weight, basis.mT, copies) for count, weight in solved.items()}

    def _advance(
        self,
        path: _Path,
        layer: nn.Module,
        groups: Sequence[UnitGroup],
        weights: Mapping[str, Mapping[int, tuple[Tensor, Tensor]]],
    ) -> None:
        """Bring a plan's hidden states through the layer, as the plan has it."""
        gone = {
            group.consumer: weights[group.name][kept]
            for group in groups
            if (kept := path.kept[group.name]) < group.num_units
        }
        if not gone and not path.hidden:
            return
        calls = self._observer.calls[self._num_fit :]
        inputs = path.hidden or [call.hidden for call in calls]
        with self._room.stage("trials"), HooksMixin.disable_hooks(), replace_weights(layer, gone):
            path.hidden = [
                self._room.park(call.repeat(layer, self._room, hidden))
                for call, hidden in zip(calls, inputs, strict=True)
            ]


def _finish_forward(
    model: PreTrainedModel, batch: dict[str, Tensor], hidden: Tensor, wraps: bool, room: Room
) -> Tensor:
    """Return what enters the output embeddings where the last decoder layer gives these hidden states.

    :param wraps: whether decoder layers give tuples
    """
    layers = [layer for _, layer in find_decoder_layers(model)]
    mask = batch.get("attention_mask")
    with HooksMixin.disable_hooks(), pass_by(layers, hidden, wraps, room):
        return model.base_model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False).last_hidden_state


def _compare(model: PreTrainedModel, finals: Sequence[Tensor], device: torch.device, room: Room) -> list[float]:
    """Return the sum of KL(first ‖ other) over tokens for every other, in nats, the logits in pieces.

    :param finals: inputs of the output embeddings, on the host, shape [tokens, d]
    :param device: where these are applied, unless on the host
    """
    head: Any = model.get_output_embeddings()
    size = max(1, room.placement.logits // model.config.vocab_size)
    totals = torch.zeros(len(finals) - 1, dtype=torch.float64)
    on_host = room.placement.embed_on_host

    def find_log_probs(final: Tensor) -> Tensor:
        logits = head(final if on_host else room.to_device(final, device)).float()
        return torch.log_softmax(shape_logits(model, logits), dim=-1)

    with room.on_host(on_host):
        for dense, *others in zip(*(final.split(size) for final in finals), strict=True):
            wanted = find_log_probs(dense)
            for index, other in enumerate(others):
                divergence = torch.nn.functional.kl_div(
                    find_log_probs(other), wanted, reduction="none", log_target=True
                )
                totals[index] += float(divergence.sum(-1).double().sum())
    return totals.tolist()
