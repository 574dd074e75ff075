import pytest

from struprune_plugin import SparsityAllocatorModifier, StruPruneModifier
from struprune_plugin.cli.options import count_samples
from struprune_plugin.recipes.load import load_recipe


def read_effort(modifier):
    """Return the fields that an effort sets: samples of the sensitivity, of error curves, of trials; rotation."""
    rule = modifier.allocation
    return modifier.sensitivity.samples, rule.samples, rule.trial_samples, modifier.rotate_values


@pytest.mark.parametrize(
    ("effort", "wanted"), [("default", (16, 16, 4, True)), ("fast", (8, 8, 0, False)), ("best", (64, 64, 16, True))]
)
def test_an_effort_sets_what_the_recipe_leaves(effort, wanted):
    found = load_recipe("struprune", changes={"effort": effort}).modifiers[0]
    assert read_effort(found) == wanted
    assert StruPruneModifier(**found.dump_fields()).dump_fields() == found.dump_fields()
    if effort == "default":
        assert found.dump_fields() == StruPruneModifier(sparsity=found.sparsity).dump_fields()


def test_what_a_recipe_says_is_not_for_the_effort():
    said = {"allocation": {"rule": "error_curve", "samples": 5}, "rotate_values": True}
    assert read_effort(StruPruneModifier(sparsity=0.3, effort="best", **said)) == (64, 5, 16, True)
    assert read_effort(StruPruneModifier(sparsity=0.3, effort="fast", **said)) == (8, 5, 0, True)
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
