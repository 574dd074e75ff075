import pytest

from struprune_plugin import SparsityAllocatorModifier, StruPruneModifier
from struprune_plugin.cli.options import count_samples
from struprune_plugin.modifiers.effort import EFFORTS
from struprune_plugin.recipes.load import load_recipe


def test_the_default_effort_is_what_the_fields_say_by_themselves():
    assert (
        StruPruneModifier(sparsity=0.3, effort="default").dump_fields() == StruPruneModifier(sparsity=0.3).dump_fields()
    )
    fields = StruPruneModifier(sparsity=0.3)
    assert (fields.sensitivity.samples, fields.allocation.samples, fields.allocation.trial_samples) == (16, 16, 4)
    assert fields.rotate_values


@pytest.mark.parametrize("name", ["fast", "best"])
def test_an_effort_sets_what_the_recipe_leaves(name):
    effort, found = EFFORTS[name], load_recipe("struprune", changes={"effort": name}).modifiers[0]
    assert found.sensitivity.samples == effort.sensitivity_samples
    assert (found.allocation.samples, found.allocation.trial_samples) == (effort.samples, effort.trial_samples)
    assert found.rotate_values is effort.rotate_values
    again = StruPruneModifier(**found.dump_fields())
    assert again.dump_fields() == found.dump_fields()


def test_what_a_recipe_says_is_not_for_the_effort():
    said = {"allocation": {"rule": "error_curve", "samples": 5}, "rotate_values": True}
    found = StruPruneModifier(sparsity=0.3, effort="best", **said)
    assert (found.allocation.samples, found.allocation.trial_samples) == (5, EFFORTS["best"].trial_samples)
    assert found.rotate_values
    other = StruPruneModifier(sparsity=0.3, effort="fast", allocation="uniform", importance="wanda", sensitivity="none")
    assert other.allocation.rule == "uniform"
    assert other.sensitivity is None
    assert StruPruneModifier(sparsity=0.3, effort="best", output="uniform").allocation.rule == "uniform"


def test_stages_of_one_recipe_share_an_effort():
    stages = load_recipe("struprune_softmax", changes={"effort": "fast"}).modifiers
    allocator, pruning = (
        next(m for m in stages if type(m) is kind) for kind in (SparsityAllocatorModifier, StruPruneModifier)
    )
    assert allocator.effort == pruning.effort == "fast"
    assert not {"allocation", "sensitivity"} & pruning.model_fields_set


def test_the_best_effort_takes_four_times_the_text_where_no_number_is_given():
    assert count_samples(None, {}) == count_samples(None, {"effort": "fast"}) == 64
    assert count_samples(None, {"effort": "best"}) == 256
    assert count_samples(8, {"effort": "best"}) == 8
