"""The order in which whole experts go, and how a budget is split between them and the rest."""

from itertools import combinations

import pytest
import torch
from helpers.mixtures import make_mixture

from struprune_plugin.allocation.whole_experts import DropMeasurer, Mixture, order_drops
from struprune_plugin.layerwise.expert_choice import ExpertChoice, route_among
from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.model.experts import take_apart
from struprune_plugin.model.structure.routing import find_routing, list_counts
from struprune_plugin.model.structure.tiny import draw_tokens
from struprune_plugin.model.units import find_groups
from struprune_plugin.modifiers.mixtures import list_splits
from struprune_plugin.pruning.config import KeptExperts
from struprune_plugin.pruning.signals import Sensitivity
from struprune_plugin.runtime.device_context import DeviceContext


def make_plain(counts, num_groups=1, cost=10):
    return Mixture(None, {}, list(counts), num_groups, cost)


def test_each_step_takes_the_expert_whose_loss_leaves_the_least_error():
    generator = torch.Generator().manual_seed(0)
    errors = {
        keep: float(torch.rand((), generator=generator)) for n in range(2, 7) for keep in combinations(range(6), n)
    }
    order = order_drops(make_plain(range(6, 1, -1)), [0.0] * 6, 6, lambda keep: errors[tuple(keep)])
    left = list(range(6))
    for step, error in zip(order.steps[:-1], order.errors[1:], strict=True):
        found = {gone: errors[tuple(e for e in left if e != gone)] for gone in left}
        assert step == [min(found, key=found.get)]
        assert error == min(found.values())
        left.remove(step[0])
    assert order.steps[-1] == left == order.list_kept(4)
    assert order.list_kept(0) == [*range(6)]


def test_groups_lose_one_each_and_only_the_least_scores_are_tried():
    asked = []

    def measure(keep):
        asked.append(keep)
        return sum(2.0**-e for e in keep)  # the first ones cost most to keep: they go first

    order = order_drops(make_plain(range(8, 3, -2), 2), [*range(8)], 2, measure)
    assert order.steps == [[0, 4], [1, 5], [2, 3, 6, 7]]
    assert all(len([e for e in keep if e < 4]) == len(keep) / 2 for keep in asked)
    assert len(asked) == 1 + 2 * 2 * 2


@pytest.mark.parametrize(("asked", "lefts"), [(0, [4]), (25, [4, 3, 2]), (45, [2]), (60, [2])])
def test_splits_meet_the_budget(asked, lefts):
    sizes = [GroupSize("a", "ffn", 10, 4, 1)]  # 36 can go
    splits = list_splits(make_plain([4, 3, 2], cost=10), lambda _left: sizes, asked)
    assert [split.left for split in splits if 0 <= split.share <= 0.9][-1] == lefts[-1]
    for split in splits:
        removed = (4 - split.left) * 10 + 40 * split.share
        assert removed == pytest.approx(asked) or len(splits) == 1


def test_a_budget_that_cannot_be_met_names_what_can():
    with pytest.raises(ValueError, match=r"2 of 4 experts of a layer must stay"):
        list_splits(make_plain([4, 3, 2], cost=10), lambda _left: [], 40)
    (split,) = list_splits(make_plain([4, 3, 2], cost=10), lambda _left: [], 14)
    assert (split.left, split.share) == (3, 0.0)


def test_groups_that_are_chosen_first_keep_two_each():
    config = make_mixture("deepseek_v3").config
    assert config.n_group == 2
    assert list_counts(config, 8) == (range(8, 3, -2), 2)
    config.num_experts_per_tok = 3
    assert list_counts(config, 8) == (range(8, 5, -2), 2)
    assert list_counts(make_mixture("mixtral").config, 8) == (range(8, 1, -1), 1)


@pytest.fixture(params=["mixtral", "deepseek_v3", "ernie4_5_moe"])
def taken_apart(request):
    model = make_mixture(request.param)
    routing = find_routing(model)
    take_apart(model)
    groups = find_groups(model, "none", False, prune_experts=True)
    return model, routing, groups


@torch.no_grad()
def test_routing_among_some_is_dropping_the_others(taken_apart):
    model, routing, groups = taken_apart
    tokens, keep = draw_tokens(model.config, 2, 16), [1, 2, 3, 4, 5, 7]
    name, layer = groups[-1].experts, model.get_submodule(groups[-1].layer_name)
    before = model(tokens).logits
    with route_among(layer, routing, name, keep):
        among = model(tokens).logits
    assert torch.equal(model(tokens).logits, before)
    assert not torch.allclose(among, before)
    routing.drop(layer, name, keep)
    torch.testing.assert_close(model(tokens).logits, among, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_error_of_a_choice_is_that_of_the_lists_output(taken_apart):
    """Without a sketch (as many directions as the output has, none drawn) it is exact, padding left out."""
    model, routing, groups = taken_apart
    group, layer = groups[-1], model.get_submodule(groups[-1].layer_name)
    tokens = draw_tokens(model.config, 2, 16)
    choice, seen = ExpertChoice(layer, routing, group.experts, torch.eye(96)), []
    members = layer.get_submodule(group.experts)
    members.register_forward_hook(lambda _m, _a, output: seen.append(output.double()))
    call = type("Call", (), {"tokens": torch.tensor([*range(10), *range(16, 32)])})()
    with choice.watch() as take:
        model(tokens)
        take(call)
    choice.finish()
    keep = [0, 1, 2, 4, 5, 6]
    with route_among(layer, routing, group.experts, keep):
        model(tokens)
    wanted = (seen[1] - seen[0])[call.tokens].square().sum()
    found = (choice.combine(keep) - choice.combine(range(8))).double().square().sum()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_rescaling_is_least_squares_over_the_experts(taken_apart):
    model, routing, groups = taken_apart
    group, layer = groups[-1], model.get_submodule(groups[-1].layer_name)
    choice, keep = ExpertChoice(layer, routing, group.experts, torch.eye(96)), [0, 1, 2, 4, 5, 6]
    call = type("Call", (), {"tokens": None})()
    with choice.watch() as take:
        model(draw_tokens(model.config, 2, 16))
        take(call)
    choice.finish()
    wanted, columns = choice.combine(range(8)).double(), []
    chosen, weights = choice.choose(keep)
    for index in keep:
        factor = (weights * (chosen == index)).sum(1, keepdim=True)
        columns.append((factor * choice.sketch[index]).double().flatten())
    design = torch.stack(columns, 1)
    left = (
        wanted.flatten() - design @ torch.linalg.lstsq(design, wanted.flatten()[:, None], driver="gelsd").solution[:, 0]
    )
    found = choice.measure_rescaled(keep, wanted.float())
    assert found == pytest.approx(float(left.square().sum()), rel=1e-3)
    assert found < float((choice.combine(keep).double() - wanted).square().sum())


def test_a_sketch_keeps_errors_about_as_they_are(taken_apart):
    model, routing, groups = taken_apart
    lists = {}
    for group in groups:
        lists.setdefault(group.output_name, []).append(group)
    counts, num_groups = list_counts(model.config, 8)
    mixture = Mixture(routing, lists, list(counts), num_groups, 1)
    batches = [{"input_ids": draw_tokens(model.config, 4, 16)}]
    orders = DropMeasurer(mixture, "error", Sensitivity(), DeviceContext()).measure(model, batches)
    assert orders.keys() == lists.keys()
    for order in orders.values():
        assert order.errors[0] == 0
        assert order.errors[-1] > 0
        assert sorted(e for step in order.steps for e in step) == [*range(8)]


def test_experts_that_stay_are_numbered_anew(taken_apart):
    _, routing, groups = taken_apart
    names = dict.fromkeys(group.output_name for group in groups)
    kept = KeptExperts(routing, {name: [1, 3, 4, 6] for name in names})
    left = kept.list_left(groups)
    assert [group.expert_index for group in left] == [0, 1, 2, 3] * len(names)
    renamed = kept.rename(groups, {group.name: group.expert_index for group in groups})
    assert renamed == {group.name: [1, 3, 4, 6][group.expert_index] for group in left}
    assert kept.count == 4
