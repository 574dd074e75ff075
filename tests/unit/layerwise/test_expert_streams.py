"""Statistics of experts: their own tokens, weighed by the router, and their share of the error that is to be repaired."""

from contextlib import nullcontext

import pytest
import torch
from compressed_tensors.offload import offload_module

from eval.coverage import make_config
from eval.groups import find_groups
from struprune_plugin.layerwise.capture import record
from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.layerwise.passes import stream_layers
from struprune_plugin.layerwise.statistics import LayerStatistics
from struprune_plugin.model.experts import linearize_experts, run_experts_fast
from struprune_plugin.model.structure.tiny import build_tiny, draw_tokens
from struprune_plugin.model.unit_kind import select_groups
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.units.expert_streams import visit_experts


@pytest.fixture
def model():
    model = build_tiny(make_config("mixtral", 2))
    linearize_experts(model)
    return model


def make_batches(model, padded=0):
    tokens = draw_tokens(model.config, 4, 16)
    mask = torch.ones_like(tokens)
    mask[0, 16 - padded :] = 0
    return [{"input_ids": tokens[part], "attention_mask": mask[part]} for part in (slice(0, 2), slice(2, 4))]


def see_experts(model, batch):
    """Return (inputs, outputs) of every expert's last linear in the first layer, and the router's choice, by plain hooks."""
    layer = model.get_submodule("model.layers.0")
    seen, handles = {}, []
    experts = layer.mlp.experts
    handles.append(experts.register_forward_pre_hook(lambda _m, args: seen.update(routing=args[1:])))
    for index in range(experts.num_experts):
        linear = experts[index].down_proj
        handles.append(linear.register_forward_hook(lambda _m, args, out, i=index: seen.update({i: (args[0], out)})))
    with torch.no_grad():
        model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen, experts


@pytest.mark.parametrize("padded", [0, 5])
def test_moments_are_those_of_the_experts_own_tokens_weighed(model, padded):
    batches = make_batches(model, padded)
    groups = [group for group in find_groups(model, "none", prune_experts=True) if group.layer_index == 0]
    statistics = LayerStatistics(TARGETS["local"], DeviceContext())
    step = next(iter(stream_layers(model, batches, statistics.context, "test")))
    step.observe(statistics, select_groups(groups, step.name))
    for index, group in enumerate(groups):
        gram, cross, rows = 0.0, 0.0, 0
        for batch in batches:
            seen, _ = see_experts(model, batch)
            chosen, weights = seen["routing"]
            place, tokens = torch.where((chosen == index).T)
            valid = batch["attention_mask"].flatten().bool()[tokens]
            inputs, output = (part[valid].double() for part in seen[index])
            factor = weights[tokens, place][valid].double()[:, None]
            inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], 1) * factor
            gram, cross, rows = gram + inputs.T @ inputs, cross + (output * factor).T @ inputs, rows + len(inputs)
        found = statistics.collect_moments(step.layer, [group], "").select(0)
        torch.testing.assert_close(found.all.gram.double(), gram, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.all.cross.double(), cross, rtol=1e-4, atol=1e-4)
        assert found.num_rows == [rows]


def test_what_experts_of_a_token_are_to_add_makes_up_the_error(model):
    (batch, _), layer = make_batches(model), model.get_submodule("model.layers.0")
    statistics = LayerStatistics(TARGETS["local"], DeviceContext())
    step = next(iter(stream_layers(model, [batch], statistics.context, "test")))
    call = step.flows[0].enter(0)
    groups = [group for group in find_groups(model, "none", prune_experts=True) if group.layer_index == 0]
    wrong = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
    missing = wrong, torch.full((32,), 0.5)
    with torch.no_grad(), record(layer, groups) as seen:
        call.run(layer, statistics.context)
        plain = {group.name: visit for group, visit in visit_experts(layer, groups, seen, call, None)}
        added, chosen = torch.zeros_like(wrong), see_experts(model, batch)[0]["routing"][0]
        for group, visit in visit_experts(layer, groups, seen, call, missing):
            change = visit.target - plain[group.name].target
            own = plain[group.name].factors
            torch.testing.assert_close(visit.factors, 0.5 * own)
            added[(chosen == group.entry).any(1)] += own[:, None] * change
    torch.testing.assert_close(added, wrong, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("offloads", [False, True])
def test_experts_sorted_by_token_run_as_llmcompressor_runs_them(model, offloads):
    experts = model.get_submodule("model.layers.0.mlp.experts")
    if offloads:
        offload_module(experts, "cpu", "cpu")
    forward = experts.forward
    hidden = torch.randn(20, model.config.hidden_size, generator=torch.Generator().manual_seed(0), requires_grad=True)
    chosen = (
        torch.randn(20, experts.num_experts).topk(2).indices.clamp(max=experts.num_experts - 2)
    )  # the last sees none
    weights, seen, outcomes = torch.rand(20, 2, requires_grad=True), [], []
    for index in range(experts.num_experts):
        experts[index].register_forward_hook(lambda _m, args, _out, i=index: seen.append((i, args[0].clone())))
    for fast in (False, True):
        with run_experts_fast(model) if fast else nullcontext():
            found = experts(hidden, chosen, weights)
        found.square().sum().backward()
        outcomes.append((found, hidden.grad, weights.grad, *(tokens for _, tokens in seen)))
        assert [index for index, _ in seen] == list(range(experts.num_experts))
        hidden.grad = weights.grad = None
        seen.clear()
    for plain, found in zip(*outcomes, strict=True):
        assert torch.equal(plain, found)
    assert experts.forward == forward


def send_elsewhere(_module, args):
    """Send what goes to the first expert to one that a token does not go to yet."""
    hidden, chosen, weights = args
    other = torch.where(chosen == 0, 0, chosen).sum(1, keepdim=True)  # the other one of two
    return hidden, torch.where(chosen == 0, other % 3 + 1, chosen), weights


@torch.no_grad()
def test_an_expert_without_a_token_still_has_moments(model):
    model.get_submodule("model.layers.0.mlp.experts").register_forward_pre_hook(send_elsewhere)
    groups = [group for group in find_groups(model, "none", prune_experts=True) if group.layer_index == 0]
    statistics = LayerStatistics(TARGETS["local"], DeviceContext())
    step = next(iter(stream_layers(model, make_batches(model), statistics.context, "test")))
    step.observe(statistics, groups)
    first, *others = [statistics.collect_moments(step.layer, [group], "").select(0) for group in groups]
    assert first.num_rows == [0]
    assert not first.determines
    assert torch.equal(first.all.gram, torch.eye(len(first.all.gram)) * 1e-12)
    assert sum(sum(other.num_rows) for other in others) == 2 * 64  # two experts for each of 64 tokens
