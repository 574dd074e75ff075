"""Memory of a run, counted from shapes alone, and what of it stays on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compressed_tensors.offload import disable_onloading
from llmcompressor.utils.dev import get_main_device
from loguru import logger
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.allocation.curves import count_moment_bytes
from struprune_plugin.linalg.second_moments import count_sums
from struprune_plugin.model.layers import (
    can_fuse_attention,
    count_parameters,
    find_layouts,
    measure_layer,
    read_hidden_size,
)
from struprune_plugin.model.structure.layout import LayerLayout
from struprune_plugin.model.unit_kind import UNIT_KINDS, UnitGroup, select_groups
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.setup import Setup
from struprune_plugin.pruning.selection import list_together
from struprune_plugin.runtime.device_context import find_free_bytes
from struprune_plugin.runtime.precision import describe_precision, find_widened
from struprune_plugin.storage.files import format_bytes

_STREAM_COPIES = 4  # of all hidden states, in the model's dtype: dense; the pruned path's inputs, attention and outputs
_LOGIT_COPIES = 5  # float32 copies of one sequence's logits
_CANDIDATES = 8  # allocations that are tried at once, each with its own weights of one layer
_OFFLOADED = 256  # tokens converted, and rows of a product, on the device at once with `offload`


@dataclass(frozen=True)
class Workload:
    """Calibration size of a run: sequences, tokens per sequence, sequences on the device at a time."""

    num_samples: int
    seq_length: int
    batch_size: int


@dataclass(frozen=True)
class Needs:
    """Bytes that a run holds."""

    device: int  # peak, with one layer at a time and the next one on its way there
    weights: int  # of the whole model as loaded, on the host
    movable: dict[str, int]  # between layers on the device if there is room, else on the host; slowest to move first
    computed_in: str  # dtype of the layers while they run and, where it is not the model's, why
    offload: bool  # nothing but one layer stays on the device

    def choose_kept(self) -> dict[str, int]:
        """Return the bytes that stay on the device, by what they hold: each that fits beside those before it."""
        free, kept = None if self.offload else find_free_bytes(), dict[str, int]()
        for name, size in self.movable.items():
            if free is not None and self.device + sum(kept.values()) + size <= free:
                kept[name] = size
        return kept

    def describe(self) -> list[tuple[str, str]]:
        """Return (name, text) of the bytes on the device and on the host."""
        kept = self.choose_kept()
        parts = {name: size for name, size in {"weights": self.weights, **self.movable}.items() if name not in kept}
        held = f"about {format_bytes(sum(parts.values()))}: {_list_bytes(parts)}"
        facts = [("computes in", self.computed_in), ("on the device", f"about {format_bytes(self.device)}")]
        facts.append(("on the host", held))
        return [*facts, ("stays on the device", _list_bytes(kept))] if kept else facts


def keep_on_device(model: PreTrainedModel, setup: Setup, batches: Sequence[dict[str, Tensor]]) -> dict[str, int]:
    """Return the bytes that stay on the device between the layers of a run, by what they hold; log them."""
    if find_free_bytes() is None:
        return {}
    shapes = [batch["input_ids"].shape for batch in batches]
    work = Workload(sum(s[0] for s in shapes), max(s[1] for s in shapes), max(s[0] for s in shapes))
    with disable_onloading():  # shapes and dtypes alone are read
        needs = count_needs(model, setup, work)
    kept = needs.choose_kept()
    logger.info(f"stays on the device: {_list_bytes(kept)} of {_list_bytes(needs.movable)}")
    return kept


def _list_bytes(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size) or "nothing"


def count_needs(model: PreTrainedModel, setup: Setup, work: Workload) -> Needs:
    """Return the bytes that a run needs, from shapes and measured units alone."""
    modifier, groups, hidden = setup.recipe, setup.groups, read_hidden_size(model)
    item, device = model.dtype.itemsize, _count_device(model, modifier, groups, work, hidden)
    computed_in = describe_precision(model.dtype, modifier.precision, get_main_device())
    modules = len({group.output_name for group in groups}) if modifier.sensitivity_samples is not None else 0
    movable = {
        "states": work.num_samples * work.seq_length * hidden * (_STREAM_COPIES * item + 4),
        "fisher": 8 * modules * hidden**2,
        "moments": 0,  # of all modules, if trials use them
    }
    if getattr(modifier.allocation, "trial_samples", 0):
        movable["moments"] = count_moment_bytes([g for g in groups if not g.unit.drops_entries], hidden)
    return Needs(device, count_parameters(model) * item, movable, computed_in, modifier.offload)


def _count_device(
    model: PreTrainedModel, modifier: StructuredModifier, groups: Sequence[UnitGroup], work: Workload, hidden: int
) -> int:
    """Return the peak bytes on the device: while moments are gathered, in a solve, in a backward pass, or at the logits."""
    layouts, tokens = find_layouts(model), work.batch_size * work.seq_length
    measures = modifier.allocation.measures
    largest, item = max(_count_bytes(layer) for layer, _ in layouts), model.dtype.itemsize
    weights = 2 * largest  # with the next layer's, on their way
    if model.dtype in find_widened(modifier.precision, get_main_device()):  # a copy of the layer that runs
        weights, item = weights + largest // item * 4, 4
    activations = max(_count_activations(model, index, *pair, work, item) for index, pair in enumerate(layouts))
    widest = max(group.num_columns for group in groups)
    head: Any = model.get_output_embeddings()
    backward = logits = 0
    if modifier.sensitivity_samples is not None:
        backward = 3 * activations + 4 * hidden * (tokens + hidden)
        logits = 4 * _LOGIT_COPIES * work.seq_length * head.out_features
    if modifier.offload:  # moments, solves and the head are on the host, and no layer is fetched ahead
        return weights - largest + max(activations + 12 * _OFFLOADED * (widest + 1), backward)

    def count_moments(summed: Sequence[UnitGroup]) -> int:
        return sum(4 * count_sums(group.num_columns, hidden) for group in summed)

    copies = 2 if modifier.dampening_frac == "auto" else 1  # moments of held-out sequences are apart
    solve = gathered = waiting = 0  # waiting, beside a solve: moments of a layer's experts, or trial weights
    for name in dict.fromkeys(group.layer_name for group in groups):
        layer = select_groups(groups, name)  # all modules for error curves, else one, or all its experts
        solve = max(solve, *(_count_solve(together, hidden) for together in list_together(layer)))
        experts = count_moments([group for group in layer if group.mixture])
        one = max(experts, *(count_moments([group]) for group in layer))
        gathered = max(gathered, count_moments(layer) * measures, copies * one)
        tried = _CANDIDATES * measures * model.dtype.itemsize * hidden * sum(group.num_columns for group in layer)
        waiting = max(waiting, copies * experts, tried)
    running = activations + gathered + 12 * tokens * (widest + 1)  # float32 tokens, a tile and its product
    return max(weights + max(running, solve + waiting, backward), _count_bytes(head) + activations + logits)


def _count_solve(groups: Sequence[UnitGroup], hidden: int) -> int:
    """Return the bytes of a solve in float64: systems, and cross moments and weights, more of which are alive in a stack."""
    columns, crosses = groups[0].num_columns + 1, 4 if len(groups) == 1 else 7
    return 8 * len(groups) * columns * (groups[0].unit.solve_copies * columns + crosses * hidden)


def _count_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _count_activations(
    model: PreTrainedModel, index: int, layer: nn.Module, layout: LayerLayout, work: Workload, item: int
) -> int:
    """Return the bytes of one layer's forward pass on a micro-batch, with ``item`` bytes per element."""
    config: Any = model.config.get_text_config(decoder=True)
    config = config.per_layer_config[index] if config.is_heterogeneous else config
    hidden, length = read_hidden_size(model), work.seq_length
    inside = [0, 0]  # numbers of mixers, and of what follows them
    for unit in layout.units:
        kind = UNIT_KINDS.parse(unit.kind)
        inside[not kind.is_mixer] += kind.count_activations(unit, layer, config)
    per_token = item * (max(inside) + 7 * hidden + 2 * length) + 20 * hidden
    maps = 0 if can_fuse_attention(model) else 12 * measure_layer(layout, layer).num_heads * length
    return work.batch_size * length * (per_token + maps)
