"""Which entire experts stay, and how a budget is split between them and the rest."""

import pytest
import torch
from helpers.mixtures import make_mixture

from eval.groups import find_groups
from struprune_plugin.allocation.rounding import GroupSize, split_budget
from struprune_plugin.model.experts import linearize_experts, list_experts
from struprune_plugin.model.structure.tiny import draw_tokens
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.units.entire_experts import EntireExperts, find_entire_experts
from struprune_plugin.units.expert_routing import list_counts


def make_plain(counts, num_groups=1, cost=10):
    return EntireExperts({}, list(counts), [cost], 0, routing=None, num_groups=num_groups)


def test_experts_of_largest_score_stay_the_same_number_of_every_group():
    scores = {"list": [5.0, 1.0, 4.0, 3.0, 2.0, 0.5, 0.5, 9.0]}
    assert make_plain(range(8, 0, -1)).keep_best(scores, 4)["list"] == [0, 2, 3, 7]
    assert make_plain(range(8, 0, -2), 2).keep_best(scores, 4)["list"] == [0, 2, 4, 7]
    assert make_plain(range(8, 0, -1)).keep_best(scores, 7)["list"] == [0, 1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize(("asked", "left"), [(0, 4), (25, 3), (45, 2), (56, 2)])
def test_a_split_meets_the_budget_and_experts_lose_about_as_much_as_the_rest(asked, left):
    sizes = [GroupSize("a", "ffn", 10, 4, 1)]  # 36 can go
    found, share = split_budget(make_plain([4, 3, 2]), sizes, 80, asked / 80)
    assert found == left
    assert (4 - found) * 10 + 40 * share == pytest.approx(asked)


def test_a_budget_that_cannot_be_met_names_what_can():
    with pytest.raises(ValueError, match=r"must be at most 0.5000, at which 2 of 4 experts .*, got 0.8000"):
        split_budget(make_plain([4, 3, 2]), [], 40, 0.8)
    assert split_budget(make_plain([4, 3, 2]), [], 40, 0.35) == (3, 0.0)


def test_groups_that_are_chosen_first_keep_two_each():
    config = make_mixture("deepseek_v3").config
    assert config.n_group == 2
    assert list_counts(config, 8) == (range(8, 3, -2), 2)
    config.num_experts_per_tok = 3
    assert list_counts(config, 8) == (range(8, 5, -2), 2)
    assert list_counts(make_mixture("mixtral").config, 8) == (range(8, 1, -1), 1)


@pytest.mark.parametrize(("num_experts", "step"), [(16, 1), (30, 1), (36, 2), (60, 2), (64, 4), (128, 8)])
def test_many_experts_go_a_few_at_a_time(num_experts, step):
    counts, _ = list_counts(make_mixture("mixtral").config, num_experts)
    assert counts == range(num_experts, 1, -step)


@pytest.fixture(params=["mixtral", "deepseek_v3", "ernie4_5_moe"])
def taken_apart(request):
    model = make_mixture(request.param)
    linearize_experts(model)
    return model, find_entire_experts(model, find_groups(model, "none", False, prune_experts=True), [])


@torch.no_grad()
def test_scores_are_means_of_router_weight_times_output_norm_without_padding(taken_apart):
    model, entries = taken_apart
    tokens, mask = draw_tokens(model.config, 3, 16), torch.ones(3, 16, dtype=torch.int64)
    mask[1, 10:] = 0
    batches = [{"input_ids": part, "attention_mask": m} for part, m in zip(tokens.split(2), mask.split(2), strict=True)]
    found = entries.score(model, batches, DeviceContext())
    assert found.keys() == entries.lists.keys()
    name, members = list(list_experts(model))[-1]
    seen = []
    members.register_forward_pre_hook(lambda _module, args: seen.append(args))
    model(tokens, attention_mask=mask)
    hidden, chosen, weights = (part[mask.flatten().bool()] for part in seen[0])
    for expert, score in enumerate(found[name]):
        given = [
            float(w * members[expert](h[None]).norm())
            for h, row, own in zip(hidden, chosen, weights, strict=True)
            for e, w in zip(row, own, strict=True)
            if e == expert
        ]
        assert score == pytest.approx(sum(given) / max(len(given), 1), rel=1e-4)
