"""Blocks of modules tried alone, and curves bent to what they say."""

from dataclasses import replace

import pytest
import torch
from helpers.models import make_dataset, run_oneshot
from helpers.trials import read_texts, watch_trials

from struprune_plugin import StruPruneModifier, read_manifest
from struprune_plugin.allocation.candidates import list_blocks, propose_blocks, scale_curves
from struprune_plugin.allocation.rounding import GroupSize
from struprune_plugin.allocation.rules import RULES, Budget, GroupStatistics

SIZES = [
    GroupSize(f"{layer}.{kind}", kind, 8, cost, 1)
    for layer in range(6)
    for kind, cost in (("attention", 10), ("ffn", 20))
]
LAYERS = {size.name: int(size.name[0]) for size in SIZES}
KEPT = {size.name: 5 for size in SIZES}


def make_statistics(scale=None):
    curve = torch.arange(8, -1, -1, dtype=torch.float64) ** 2
    nothing = torch.zeros(8)
    return {
        size.name: GroupStatistics(1.0, curve * (1.0 if scale is None else scale(size)), nothing, nothing.long())
        for size in SIZES
    }


def test_blocks_are_modules_of_one_kind_in_a_third_of_the_depth():
    blocks = list_blocks(SIZES, LAYERS)
    assert sorted(blocks) == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11)]
    tied = [replace(SIZES[1], tied=(("0.ffn", 1), ("1.ffn", 1)))]
    assert list_blocks(tied, LAYERS) == []  # one block only: nothing to compare


def test_a_blocks_plan_leaves_all_others_whole():
    blocks = list_blocks(SIZES, LAYERS)
    for block, plan in zip(blocks, propose_blocks(SIZES, KEPT, blocks), strict=True):
        assert {name for name, kept in plan.items() if kept == 5} == {SIZES[place].name for place in block}
        assert set(plan.values()) == {5, 8}


@pytest.mark.parametrize("truth", [0.25, 4.0])
def test_curves_that_are_wrong_for_a_block_are_bent_to_the_truth(truth):
    """The first third of attention costs more, or less, than its curves say."""
    told = make_statistics()
    blocks = list_blocks(SIZES, LAYERS)

    def measure(block):
        return sum(9.0 for _ in block) * (truth if block == (0, 2) else 1.0)

    bent = scale_curves(told, SIZES, KEPT, {block: measure(block) for block in blocks})
    factors = {name: float(bent[name].curve[0] / told[name].curve[0]) for name in told}
    ratio = factors["0.attention"] / factors["5.ffn"]
    assert 1 < (ratio if truth > 1 else 1 / ratio) <= max(truth, 1 / truth)  # towards the truth, not past it
    assert len({round(factors[SIZES[place].name], 9) for block in blocks[1:] for place in block}) == 1

    rule, budget = RULES.parse("error_curve"), Budget(0.3, 1440, 0.3, "none")
    before, after = rule.decide(SIZES, told, budget), rule.decide(SIZES, bent, budget)
    assert (after.num_keep["0.attention"] > before.num_keep["0.attention"]) == (truth > 1)


def test_blocks_that_show_nothing_change_nothing():
    told = make_statistics()
    blocks = list_blocks(SIZES, LAYERS)
    bent = scale_curves(told, SIZES, dict.fromkeys(KEPT, 8), dict.fromkeys(blocks, 0.0))
    assert all(torch.equal(bent[name].curve, told[name].curve) for name in told)


def test_candidates_are_judged_on_sequences_that_no_block_was_tried_on(opt, tmp_path, monkeypatch):
    seen = watch_trials(monkeypatch)
    recipe = StruPruneModifier(sparsity=0.3, allocation={"rule": "error_curve", "trial_samples": 2})
    run_oneshot(str(opt), recipe, make_dataset(16), num_calibration_samples=16, output_dir=str(tmp_path / "out"))
    probes, judges = read_texts(seen)
    assert len(probes) == len(judges) == 2
    assert not torch.equal(probes, judges)
    tried = read_manifest(tmp_path / "out").allocation.tried
    assert any("probed" in name for name in tried)
