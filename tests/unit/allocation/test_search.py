"""Blocks of modules shifted around a plan, and the plan of least divergence."""

import pytest
import torch
from helpers.models import make_dataset, run_oneshot
from helpers.trials import read_texts, watch_trials

from struprune_plugin import StruPruneModifier, read_manifest
from struprune_plugin.allocation.probes import list_blocks
from struprune_plugin.allocation.search import search_blocks, shift_blocks
from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.modifiers import planning
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.storage.records import AllocationRecord

SIZES = [
    GroupSize(f"{layer}.{kind}", kind, units, cost, 1)
    for layer in range(6)
    for kind, units, cost in (("attention", 96, 10), ("ffn", 256, 20))
]
LAYERS = [layer for layer in range(6) for _ in range(2)]
BLOCKS = list_blocks(SIZES, LAYERS, 6)
COUNTS = [60 + layer if kind == "attention" else 100 + layer for layer in range(6) for kind in ("attention", "ffn")]


def count_parameters(counts):
    return sum(count * size.unit_cost for count, size in zip(counts, SIZES, strict=True))


@pytest.mark.parametrize("doublings", [-2, -1, 1, 2])
def test_a_shift_keeps_the_total_and_moves_a_block_against_all_others(doublings):
    for block in BLOCKS:
        shifted = shift_blocks(SIZES, COUNTS, {block: doublings}, 0.95)
        assert abs(count_parameters(shifted) - count_parameters(COUNTS)) <= 10
        sign = (
            1 if doublings > 0 else -1
        )  # of the block's losses; all others move against it, by less than a unit at least
        moved = [sign * (before - after) for before, after in zip(COUNTS, shifted, strict=True)]
        assert all(move > 0 for place, move in enumerate(moved) if place in block)
        assert all(move <= 0 for place, move in enumerate(moved) if place not in block)
        assert min(moved) < 0


def test_no_shift_changes_nothing_and_a_bound_holds():
    assert shift_blocks(SIZES, COUNTS, {}, 0.95) == COUNTS
    shifted = shift_blocks(SIZES, COUNTS, {BLOCKS[0]: 6}, 0.8)
    assert all(count >= 0.2 * size.num_units - 1 for count, size in zip(shifted, SIZES, strict=True))
    assert abs(count_parameters(shifted) - count_parameters(COUNTS)) <= 10


def test_a_module_that_keeps_everything_can_lose_units_by_a_shift():
    counts = [
        size.num_units if place in BLOCKS[2] else count
        for place, (size, count) in enumerate(zip(SIZES, COUNTS, strict=True))
    ]
    shifted = shift_blocks(SIZES, counts, {BLOCKS[2]: 3}, 0.95)
    assert all(shifted[place] < SIZES[place].num_units for place in BLOCKS[2])


def make_plan(shifts):
    return UnitAllocation(
        {str(BLOCKS.index(block)): by for block, by in shifts.items()}, AllocationRecord("error_curve")
    )


def search(errors, refused=()):
    """Search with a divergence of 1 plus the errors of what is shifted; return the shifts found and the plans measured."""
    seen = []

    def make(shifts):
        return None if any(shift in refused for shift in shifts.items()) else make_plan(shifts)

    def measure(plans):
        seen.extend(plans)
        return [1 + sum(errors.get((int(name), by), 0.5) for name, by in plan.kept.items()) for plan in plans]

    start = make_plan({})
    return search_blocks(start, BLOCKS, make, measure), start, seen


def test_the_blocks_that_gain_alone_are_shifted_together():
    found, _, seen = search({(0, 1): -0.1, (3, -1): -0.2, (5, 1): -0.05})
    assert found.kept == {"3": -1, "0": 1, "5": 1}
    assert len(seen) == 1 + 2 * len(BLOCKS) + 2


def test_one_direction_of_a_block_is_taken():
    found, *_ = search({(0, 1): -0.1, (0, -1): -0.2})
    assert found.kept == {"0": -1}


def test_nothing_is_found_where_no_shift_gains_or_meets_the_budget():
    found, start, _ = search({})
    assert found is start
    found, start, _ = search({(0, 1): -0.1}, refused=[(BLOCKS[0], 1)])
    assert found is start


@pytest.mark.parametrize("far", [0.0, 1.0])
def test_a_run_searches_far_from_the_dense_model_and_takes_what_other_text_confirms(far, opt, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "FAR", far)
    seen = watch_trials(monkeypatch)
    recipe = StruPruneModifier(sparsity=0.3, allocation={"rule": "error_curve", "trial_samples": 4})
    run_oneshot(str(opt), recipe, make_dataset(16), num_calibration_samples=16, output_dir=str(tmp_path / "out"))
    manifest = read_manifest(tmp_path / "out")
    tried, taken = manifest.allocation.tried, manifest.allocation.taken
    assert ("searched" in tried) == (far == 0)
    assert tried[taken] == min(tried.values())
    assert manifest.budget.met_sparsity == pytest.approx(0.3, abs=0.005)
    probes, judges, *searches = read_texts(seen)
    assert not torch.equal(probes, judges)
    assert bool(searches) == (far == 0)
    if searches:  # the search reads one half of the held-out text, and the other decides
        *read, decided = searches
        assert all(torch.equal(text, probes) for text in read)
        assert torch.equal(decided, judges)
