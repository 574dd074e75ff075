"""Cost table for a budget of time: the seconds of a model's modules in transformers, by their number of kept units.

    python -m eval.costs MODEL --output costs.json [--phase token|prompt] [--length 512] [--batch 1] [--attention-unit head]

Times the whole model by turns with copies in which the modules of one kind keep an eighth, two eighths, … of their units in all
layers. Run it on the machine that will serve. All layers must be alike, without experts. Then::

    struprune prune MODEL --budget '{speedup: 1.3, costs: costs.json}' --output OUT
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from eval.measure import count_own_seconds, time_turns
from struprune_plugin.allocation.cost_table import CostTable, ModuleCosts, describe_module, describe_shapes
from struprune_plugin.export.any_class import replace_conv1d
from struprune_plugin.export.convert import adopt_paddings
from struprune_plugin.model.layers import find_decoder_layers, find_layouts, find_linear
from struprune_plugin.model.surgery import slice_group
from struprune_plugin.model.units import find_groups
from struprune_plugin.model.units.group import UnitGroup

ROUNDS = {"prompt": 9, "token": 41}


def list_grid(group: UnitGroup) -> list[int]:
    """Return eighths of a group's units in whole steps of 8, whole per block, and one step less than all: kernels that need equal
    widths, such as attention's, are fast at all units alone."""
    width = group.num_units // group.num_blocks
    step = 8 if width >= 64 else 1
    widths = {max(step, round(width * part / 8 / step) * step) for part in range(1, 8)} | {width - step, width}
    return sorted(count * group.num_blocks for count in widths if count > 0)


def make_run(model: PreTrainedModel, phase: str, tokens: torch.Tensor) -> Callable[[], object]:
    """Return a run over a prompt, or over one token more than are in the cache."""
    if phase == "prompt":
        return lambda: model(tokens, use_cache=True, logits_to_keep=1)
    cache = DynamicCache(config=model.config)
    model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return lambda: model(tokens[:, -1:], past_key_values=cache, use_cache=True)


@torch.no_grad()
def compare(dense: PreTrainedModel, changed: PreTrainedModel, phase: str, tokens: torch.Tensor) -> tuple[float, float]:
    """Return the median seconds of the dense model, and those of the changed one over them, run by turns."""
    seconds = time_turns(
        {"dense": make_run(dense, phase, tokens), "changed": make_run(changed, phase, tokens)}, ROUNDS[phase]
    )
    ratios = [b / a for a, b in zip(seconds["dense"], seconds["changed"], strict=True)]
    return statistics.median(seconds["dense"]), statistics.median(ratios)


def cut_group(model: PreTrainedModel, group: UnitGroup, units: int) -> None:
    """Cut a group to the first units of each block; its consumer gets zeros, which take the same time."""
    layer, places = model.get_submodule(group.layer_name), torch.arange(group.num_units).view(group.num_blocks, -1)
    keep, linear = places[:, : units // group.num_blocks].flatten(), find_linear(layer, group.consumer)
    shape = (linear.out_features, len(keep) * group.columns_per_unit + 1)
    slice_group(layer, group, keep, torch.zeros(shape, device=linear.weight.device))


def measure(model: PreTrainedModel, attention_unit: str, phase: str, batch: int, length: int) -> CostTable:
    """Return the cost table of a dense model.

    :raises ValueError: layers of several kinds, or experts
    """
    replace_conv1d(model)
    layouts = [layout for _, layout in find_layouts(model)]
    if any(layout != layouts[0] for layout in layouts) or layouts[0].experts is not None:
        raise ValueError(f"model: all layers must be alike, without experts, got {model.config.model_type}.")
    groups = find_groups(model, attention_unit)  # type: ignore[arg-type]
    tokens = torch.randint(5, model.config.vocab_size - 1, (batch, length), device=model.device)
    layers, firsts = len(find_decoder_layers(model)), [group for group in groups if group.layer_index == 0]
    dense, whole, modules, saved = [], [], [], 0.0

    def time_cut(first: UnitGroup, units: int) -> float:
        """Return the seconds with the modules of one kind cut, over those of the dense model."""
        changed = copy.deepcopy(model)
        adopt_paddings(changed, groups)
        for group in groups:
            if group.consumer == first.consumer:
                cut_group(changed, group, units)
        took, ratio = compare(model, changed, phase, tokens)
        dense.append(took)
        print(f"{first.consumer}: {units} of {first.num_units} units, {ratio:.3f} of the dense seconds", flush=True)
        return ratio

    for first in firsts:
        if first.num_units > first.num_blocks:
            grid = list_grid(first)
            ratios = [time_cut(first, units) for units in grid]
            seconds = [statistics.median(dense) * (ratio - min(ratios)) / layers for ratio in ratios]
            modules.append(ModuleCosts(module=describe_module(model, first), units=grid, seconds=seconds))
            whole.append(ratios[-1])
            saved += layers * seconds[-1]
    took = statistics.median(dense)
    about = f"transformers, {phase}, {length} tokens, batch {batch}, {model.dtype}, {torch.get_num_threads()} threads, "
    about += torch.cuda.get_device_name() if tokens.is_cuda else platform.processor() or platform.machine()
    rest = max(took * statistics.mean(whole) - saved, 0.0)
    return CostTable(about=about, dense=took, rest=rest, shapes=describe_shapes(model), modules=modules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--phase", choices=sorted(ROUNDS), default="token")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--attention-unit", choices=["value_channels", "head", "none"], default="value_channels")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="auto").to(device).eval()
    with count_own_seconds():
        table = measure(model, asked.attention_unit, asked.phase, asked.batch, asked.length)
    asked.output.write_text(json.dumps(table.model_dump(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
