"""Bytes on host and device that a run needs, counted from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from llmcompressor.modifiers import Modifier

from struprune_plugin.linalg.second_moments import count_sums
from struprune_plugin.model.footprint import read_sizes
from struprune_plugin.model.layers import count_parameters
from struprune_plugin.runtime.offload_plan import (
    WHOLE,
    Demands,
    Sizes,
    estimate_device,
    find_least_budget,
    place_parts,
)
from struprune_plugin.storage.checkpoint import is_packed
from struprune_plugin.storage.files import format_bytes
from struprune_plugin.studies.probe import Workload
from struprune_plugin.studies.sizes import Shapes, count_kept_moments, find_pruning

_STREAM_COPIES = (
    4  # of every token's hidden states, in the model's dtype: inputs and outputs of the dense and the pruned path
)


@dataclass(frozen=True)
class Needs:
    """Bytes that a run holds.

    :param device: peak on the device, with one layer at a time and the next one on its way there
    :param least: least possible ``memory_budget``
    :param budget: ``memory_budget`` of the recipe; None if it has none
    :param weights: weights of the whole model as loaded, on the host
    :param states: hidden states and targets of the calibration tokens, on the host
    :param moments: second moments on the host: of all modules if trials use them, of one layer if a budget places them there
    :param sensitivity: Fisher information of all modules, on the host
    :param packed: low-bit format that the weights are stored in and dequantised from; empty if there is none
    """

    device: int
    least: int
    budget: int | None
    weights: int
    states: int
    moments: int
    sensitivity: int
    packed: str

    @property
    def host(self) -> int:
        return self.weights + self.states + self.moments + self.sensitivity

    def describe(self) -> list[tuple[str, str]]:
        """Return (name, text) of the bytes on the device and on the host."""
        under = "with no budget" if self.budget is None else f"under memory_budget {format_bytes(self.budget)}"
        parts = {name: getattr(self, name) for name in ("weights", "states", "moments", "sensitivity")}
        told = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        device = f"about {format_bytes(self.device)} {under}, at least {format_bytes(self.least)}"
        return [("device, counted", device), ("host, counted", f"about {format_bytes(self.host)}: {told}")]

    def describe_source(self) -> list[tuple[str, str]]:
        """Return (name, text) of weights that are dequantised on loading; empty if there are none."""
        unpacked = f"stored in {self.packed}, dequantised as it is loaded: {format_bytes(self.weights)}"
        return [("source", unpacked)] if self.packed else []


def count_needs(shapes: Shapes, modifiers: Sequence[Modifier], work: Workload) -> Needs:
    """Return the bytes that a run needs.

    :raises ValueError: the recipe's ``memory_budget`` is too small
    """
    _, modifier = find_pruning(modifiers)
    groups = modifier.find_groups(shapes.model)
    sizes = read_sizes(shapes.model, groups, torch.Size([work.batch_size, work.seq_length]))
    senses, budget = modifier.sensitivity_samples is not None, modifier.memory_budget
    passes = [Demands(False, modifier.dampening_frac == "auto", senses)]
    if modifier.allocation.measures:
        passes.append(Demands(True, False, senses))
    plans = [WHOLE if budget is None else place_parts(budget, sizes, each) for each in passes]
    hidden = shapes.model.config.get_text_config(decoder=True).hidden_size
    on_host = max(_count_layer_moments(sizes) * plan.gather_on_host for plan in plans)
    modules = len({group.output_name for group in groups})
    quantised = getattr(shapes.config, "quantization_config", None)
    return Needs(
        device=max(estimate_device(plan, sizes, each) for plan, each in zip(plans, passes, strict=True)),
        least=max(find_least_budget(sizes, each) for each in passes),
        budget=budget,
        weights=count_parameters(shapes.model) * shapes.dtype.itemsize,
        states=work.num_samples * work.seq_length * hidden * (_STREAM_COPIES * shapes.dtype.itemsize + 4),
        moments=max(count_kept_moments(modifier, groups, hidden), on_host),
        sensitivity=4 * modules * hidden**2 if senses else 0,
        packed=quantised["quant_method"] if is_packed(shapes.config) else "",  # type: ignore[index]
    )


def _count_layer_moments(sizes: Sizes) -> int:
    """Return the bytes of the second moments of the largest layer, those of held-out sequences included."""
    return max(2 * sum(4 * count_sums(c.inputs, c.outputs) for c in layer) for layer in sizes.layers)
