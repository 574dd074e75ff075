"""Norms behind consumers: an error reaches the stream divided by the RMS of the output, so errors are measured relative to it."""

from dataclasses import replace

import pytest
import torch
from helpers.families import make_model

from eval.coverage import make_config
from eval.groups import find_groups
from struprune_plugin.allocation.candidates import describe_doubt
from struprune_plugin.allocation.sensitivity import measure_fisher
from struprune_plugin.layerwise.capture import record
from struprune_plugin.layerwise.dense_reference import TARGETS, DenseReference
from struprune_plugin.layerwise.passes import stream_layers
from struprune_plugin.layerwise.statistics import LayerStatistics
from struprune_plugin.model.experts import linearize_experts
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.tiny import build_tiny
from struprune_plugin.runtime.device_context import DeviceContext

EPS = 1e-6


def _list_norms(model):
    """Return {consumer: module whose output a norm rescales} of the groups of a model."""
    return {group.name: group.join.norm for group in find_groups(model, "value_channels", prune_experts=True)}


@pytest.mark.parametrize("model_type", ["gemma2", "olmo2", "glm4", "exaone4"])
def test_a_norm_behind_a_consumer_is_found(model_type):
    norms = _list_norms(build_tiny(make_config(model_type, 2)))
    assert norms
    assert all(name.endswith(f".{norm}") and norm for name, norm in norms.items())


@pytest.mark.parametrize("model_type", ["llama", "opt", "gpt_neox", "qwen3_5_text"])
def test_norms_before_a_consumer_or_of_the_stream_are_none(model_type):
    assert set(_list_norms(build_tiny(make_config(model_type, 4))).values()) == {""}


def test_experts_and_a_shared_one_behind_one_norm_have_errors_relative_to_their_sum():
    structure = find_structure(build_tiny(make_config("afmoe", 4)))
    mixtures = [layout for layout in structure.layouts if any(unit.of_mixture for unit in layout.units)]
    assert mixtures
    for kind in mixtures:
        assert {unit.join.norm for unit in kind.units if unit.kind in ("ffn", "experts")} == {"mlp"}


def _observe(model, batch, groups, see):
    """Return the moments of all groups of the first layer that has them, and what hooks saw there."""
    statistics, seen = LayerStatistics(TARGETS["local"], DeviceContext()), {}
    with torch.no_grad():
        for step in stream_layers(model, [batch], statistics.context, "test"):
            own = [group for group in groups if group.layer_name == step.name]
            handles = [step.layer.get_submodule(name).register_forward_hook(_keep(seen, name)) for name in see]
            step.observe(statistics, own)
            for handle in handles:
                handle.remove()
            if any(group.join.norm for group in own):
                return {g.consumer: statistics.collect_moments(step.layer, [g], "").select(0).all for g in own}, seen
            statistics.finish_layer()
    raise AssertionError("no layer has a norm behind a consumer")


def _keep(seen, name):
    def hook(_module, args, output):
        seen[name] = args[0].flatten(0, -2), (output[0] if isinstance(output, tuple) else output).flatten(0, -2)

    return hook


def test_moments_are_those_of_inputs_and_outputs_divided_by_the_rms():
    model, kept = make_model("gemma2"), torch.arange(36).remainder(12) < 8
    groups = find_groups(model, "none")
    ids = torch.randint(4, 2048, (3, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": kept.view(3, 12).long()}
    found, seen = _observe(model, batch, groups, ["mlp.down_proj"])
    inputs, outputs = (part[kept].double() for part in seen["mlp.down_proj"])
    rms = (outputs.square().mean(1, keepdim=True) + EPS).sqrt()
    moments = found["mlp.down_proj"]
    relative = torch.cat([inputs, torch.ones_like(rms)], 1) / rms
    torch.testing.assert_close(moments.gram.double(), relative.T @ relative, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(moments.cross.double(), (outputs / rms).T @ relative, rtol=1e-4, atol=1e-4)
    assert float(moments.target_energy) == pytest.approx(outputs.shape[1] * int(kept.sum()), rel=1e-4)


@pytest.mark.parametrize("model_type", ["gemma2", "olmo2", "glm4", "exaone4"])
def test_the_norm_itself_is_found(model_type):
    for group in find_groups(build_tiny(make_config(model_type, 2)), "value_channels"):
        assert "norm" in group.join.normalizer
        assert group.join.scale == 1


@pytest.mark.parametrize("consumer", ["self_attn.o_proj", "mlp.down_proj"])
def test_a_target_behind_a_norm_makes_up_for_the_error_of_the_stream(consumer):
    """All but what lies along the output, which the norm removes, and what is of second order."""
    model, context = make_model("gemma2"), DeviceContext()
    ids = torch.randint(4, 2048, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        step = next(iter(stream_layers(model, [{"input_ids": ids}], context, "test")))
        group = next(group for group in find_groups(model, "value_channels") if group.consumer == consumer)
        call, reference = step.flows[0].enter(0), DenseReference(TARGETS["residual"], context)
        with record(step.layer, [group]) as seen:
            reference.run(step.layer, [group], call, 0)
            dense = seen.inputs[group.join.residual] + seen.outputs[group.join.normalizer]
            noise = torch.randn(call.hidden.shape, generator=torch.Generator().manual_seed(2))
            replace(call, hidden=call.hidden + 1e-4 * noise).run(step.layer, context)
            output, residual = seen.outputs[group.consumer], seen.read_residual(group)
        target, _ = reference.find_target(group, seen, 0)
        norm = step.layer.get_submodule(group.join.normalizer)
        before, after = (dense - residual - norm(each) for each in (output, target))
        along = torch.nn.functional.normalize(output, dim=1)
        errors = [error / seen.read_gain(group) for error in (before, after)]
        missed = [error - (error * along).sum(1, keepdim=True) * along for error in errors]
    assert float(missed[1].norm()) < 0.02 * float(missed[0].norm())


def test_outputs_of_zero_count_as_much_as_the_norm_lets_through():
    model = make_model("gemma2")
    for name, parameter in model.named_parameters():
        if name.endswith("layers.0.mlp.down_proj.weight"):
            parameter.data.zero_()
    groups = find_groups(model, "none")
    ids = torch.randint(4, 2048, (1, 8), generator=torch.Generator().manual_seed(1))
    found, seen = _observe(model, {"input_ids": ids}, groups, ["mlp.down_proj"])
    inputs = seen["mlp.down_proj"][0].double() / EPS**0.5
    torch.testing.assert_close(
        found["mlp.down_proj"].gram[:-1, :-1].double(),
        inputs.T @ inputs,
        rtol=1e-4,
        atol=float(inputs.square().sum()) * 1e-5,
    )


def test_experts_behind_a_norm_are_weighted_by_the_rms_of_their_sum():
    model = build_tiny(make_config("afmoe", 4))
    linearize_experts(model)
    groups = [group for group in find_groups(model, "none", prune_experts=True) if group.mixture]
    ids = torch.randint(4, 60, (2, 16), generator=torch.Generator().manual_seed(1))
    experts = groups[0].mixture
    found, seen = _observe(model, {"input_ids": ids}, groups, ["mlp"])
    rms = (seen["mlp"][1].double().square().mean(1) + EPS).sqrt()
    # the bias' entry is the sum of squared factors on the errors of an expert's tokens
    total = sum(float(m.gram[-1, -1]) for name, m in found.items() if name.startswith(experts))
    layer = model.get_submodule(groups[0].layer_name)
    calls = {}
    layer.get_submodule(experts).register_forward_pre_hook(lambda _m, args: calls.update(weights=args[2]))
    with torch.no_grad():
        model(ids)
    weights = calls["weights"].double()
    assert total == pytest.approx(float((weights.square().sum(1) / rms.square()).sum()), rel=1e-3)


def test_fisher_information_is_that_of_errors_relative_to_the_rms():
    """F = E[rms(y)^2 g g^T], by autograd through the whole model, the same labels."""
    model = make_model("gemma2")
    groups = find_groups(model, "value_channels")
    ids = torch.randint(4, 2048, (3, 12), generator=torch.Generator().manual_seed(2))
    found = measure_fisher(model, [{"input_ids": ids}], groups, 3, DeviceContext())
    outputs = {}

    def watch(name):
        def see(_module, _args, output):
            output.retain_grad()
            outputs[name] = output

        return see

    for group in groups:
        model.get_submodule(group.name).register_forward_hook(watch(group.name))
    logits = model(ids).logits
    draws = [torch.rand(12, generator=torch.Generator().manual_seed(row), dtype=torch.float64) for row in range(3)]
    heights = torch.softmax(logits, -1).double().cumsum(-1)
    labels = torch.searchsorted(heights, torch.stack(draws)[..., None] * heights[..., -1:], right=True)
    (-torch.log_softmax(logits, -1).gather(-1, labels)).sum().backward()
    for group in groups:
        output, gradient = (
            part.detach().flatten(0, 1).double() for part in (outputs[group.name], outputs[group.name].grad)
        )
        moved = gradient * (output.square().mean(1, keepdim=True) + EPS).sqrt()
        naive = moved.T @ moved / len(moved)
        torch.testing.assert_close(found[group.name], naive, rtol=1e-3, atol=1e-5 * float(naive.max()))


def test_a_rule_that_uniform_beats_is_in_doubt():
    tried = {"error_curve": 1.4, "half uniform": 1.3, "uniform": 1.17, "probed": 1.1}
    doubt = describe_doubt(tried, "error_curve", {"half uniform", "uniform"})
    assert "'uniform' diverges by 1.17 nats and 'error_curve' by 1.4" in doubt
    assert describe_doubt({**tried, "error_curve": 1.1}, "error_curve", {"half uniform", "uniform"}) is None
    assert describe_doubt({"error_curve": 1.4}, "error_curve", {"half uniform", "uniform"}) is None
