"""Probes of blocks of modules: how far one block, pruned alone, moves the model's output, compared with its error curves.

Curves and sensitivities are of second order, and treat an error as independent of its token. Where that is far from the truth (a
norm behind a module, errors that many tokens share), whole blocks of modules are affected: those of one kind in one part of the
depth. A few plans, each with the units of one block removed, measure by how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from struprune_plugin.allocation.rules.rule import GroupStatistics, Sizes
from struprune_plugin.linalg.rounding import expand_counts

_PARTS = 3  # parts of the depth
_NOISE = 0.1  # share of the mean divergence of a block, added to both sides, so that a small one has little effect
_MOST = 10.0  # largest factor that a curve is multiplied or divided by

Block = tuple[int, ...]  # indices of the sizes


def list_blocks(sizes: Sizes, layers: Mapping[str, int]) -> list[Block]:
    """Return blocks of modules of one kind in one part of the depth; none if there were only one.

    :param layers: index of the decoder layer, by the name of a group
    """
    blocks, num_layers = dict[tuple[str, int], list[int]](), max(layers.values()) + 1
    for place, size in enumerate(sizes):
        blocks.setdefault((size.kind, layers[size.name] * _PARTS // num_layers), []).append(place)
    return [tuple(block) for block in blocks.values()] if len(blocks) > 1 else []


def propose_blocks(sizes: Sizes, kept: Mapping[str, int], blocks: Sequence[Block]) -> list[Mapping[str, int]]:
    """Return one plan per block: its modules keep the units of an allocation, all others every unit.

    :param kept: kept units of the allocation, by group name
    """
    plans: list[Mapping[str, int]] = []
    for block in blocks:
        alone = [kept[size.name] if place in block else size.num_units for place, size in enumerate(sizes)]
        plans.append(expand_counts(sizes, alone))
    return plans


def bend_curves(
    statistics: Mapping[str, GroupStatistics],
    sizes: Sizes,
    kept: Mapping[str, int],
    divergences: Mapping[Block, float],
) -> dict[str, GroupStatistics]:
    """Return the statistics with the curves of every block scaled so that they agree with the measured divergences.

    :param statistics: statistics by the name of a size
    :param kept: kept units of the allocation with which the blocks were tried, by group name
    :param divergences: divergence of the model's output with a block's units removed, in nats
    """
    said = {
        block: sum(float(statistics[sizes[place].name].curve[kept[sizes[place].name]]) for place in block)
        for block in divergences
    }
    total, measured = sum(said.values()), sum(divergences.values())
    if not (total > 0 and measured > 0):
        return dict(statistics)
    bent, floor = dict(statistics), _NOISE / len(said)
    for block, divergence in divergences.items():
        factor = (divergence / measured + floor) / (said[block] / total + floor)
        factor = min(max(factor, 1 / _MOST), _MOST)
        for place in block:
            name = sizes[place].name
            bent[name] = replace(statistics[name], curve=statistics[name].curve * factor)
    return bent
