import pytest
import torch
from helpers.models import save_opt

from struprune_plugin import SparsityAllocatorModifier, StruPruneModifier
from struprune_plugin.cli.options import choose_windows
from struprune_plugin.evaluation.text import DEMO_MODEL
from struprune_plugin.modifiers.allocator import complete_recipe
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


@pytest.mark.parametrize(
    ("allocator", "pruning", "wanted"),
    [
        ({"effort": "fast"}, {}, (8, 8, 0, False)),
        ({}, {"effort": "fast"}, (8, 8, 0, False)),
        ({"effort": "fast"}, {"effort": "best"}, (8, 8, 0, True)),
        ({}, {"effort": "fast", "rotate_values": True}, (8, 8, 0, True)),
        ({"rotate_values": True}, {"effort": "fast"}, (8, 8, 0, True)),
    ],
)
def test_an_effort_holds_for_the_whole_recipe(allocator, pruning, wanted):
    """The samples are those of the stage that decides on them, or else of the effort; values follow the pruning stage."""
    stage = SparsityAllocatorModifier(sparsity=0.3, allocation="error_curve", **allocator)
    assert read_effort(complete_recipe(StruPruneModifier(**pruning), [stage])) == wanted


def test_text_where_no_amount_is_given_follows_from_effort_and_device(tmp_path, monkeypatch):
    long = str(save_opt(tmp_path / "long", max_position_embeddings=1024))

    def choose(effort="default", samples=None, length=None, model=long):
        return choose_windows(model, False, samples, length, {"effort": effort})

    assert choose() == choose("fast") == (64, 256)
    assert choose("best") == (256, 256)
    assert choose("best", samples=8) == (8, 256)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert choose() == (64, 768)
    assert choose(model=str(DEMO_MODEL)) == (64, 256), "no more than the model has positions"
    assert choose("best") == (256, 256)
    assert choose(length=2048) == (64, 2048)
    assert choose(samples=128) == (128, 256), "more would not fit the text that ships"
