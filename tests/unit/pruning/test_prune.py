"""One decoder layer pruned on recorded calls, without the host."""

from dataclasses import replace

import pytest
import torch
from helpers.families import make_model
from helpers.models import make_opt

from struprune_plugin import StruPruneModifier
from struprune_plugin.export.convert import adopt_paddings
from struprune_plugin.layerwise.calls import LayerCall
from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.layerwise.statistics import LayerStatistics, ModuleView
from struprune_plugin.linalg.second_moments import accumulate_moments, make_moments
from struprune_plugin.linalg.solve import damp_moments, solve_kept_weights
from struprune_plugin.model.layers import find_decoder_layers, find_linear
from struprune_plugin.model.surgery import read_consumer
from struprune_plugin.model.units import find_groups
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.pruning.problem import Sensitivity
from struprune_plugin.pruning.prune_layer import Decision, Pruner
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.storage.manifest import AllocationRecord
from struprune_plugin.storage.resume_store import ResumeStore


def record_calls(model, num_batches=6):
    """Return the arguments with which the first decoder layer is called."""
    calls = []
    (_, layer), *_ = find_decoder_layers(model)
    handle = layer.register_forward_pre_hook(lambda _m, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    generator = torch.Generator().manual_seed(3)
    for _ in range(num_batches):
        model(torch.randint(4, 2000, (2, 24), generator=generator), use_cache=False)
    handle.remove()
    return layer, calls


def observe(layer, groups, calls, target="residual", hold_out=False):
    observed = LayerStatistics(TARGETS[target], DeviceContext(), changes=True, hold_out=hold_out)
    for args, kwargs in calls:
        observed.run_layer(layer, groups, LayerCall.record(args, kwargs, None, DeviceContext()))
    return observed


def prune_first_layer(model, shares, target="residual", **fields):
    layer, calls = record_calls(model)
    adopt_paddings(model, find_groups(model, "value_channels"))
    modifier = StruPruneModifier(sparsity=0.3, **fields)
    groups = [group for group in find_groups(model, modifier.attention_unit) if group.layer_index == 0]
    kept = {
        group.name: round(group.num_units * (1 - share) / group.num_blocks) * group.num_blocks
        for group, share in zip(groups, shares, strict=True)
    }
    config = modifier.make_config(target)
    observed = observe(layer, groups, calls, target, config.chooses_dampening)
    plan = UnitAllocation(kept, AllocationRecord("by hand"))
    pruner = Pruner(config, plan, Sensitivity(), DeviceContext())
    return layer, groups, kept, pruner.prune_layer(layer, groups, observed)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["opt", "llama"])
def test_prune_layer_slices_after_the_plan_and_records_it(model_type):
    model = make_model(model_type)
    layer, groups, kept, outcome = prune_first_layer(model, [0.5, 0.25])
    assert outcome.changed
    for group, record in zip(groups, outcome.groups, strict=True):
        assert record.name == group.name
        assert record.kept == kept[group.name] == len(record.keep)
        assert find_linear(layer, group.consumer).in_features == kept[group.name] * group.columns_per_unit
        assert record.error_after <= record.error_before
        assert record.sparsity == 1 - record.kept / group.num_units


@torch.no_grad()
def test_prune_layer_solves_as_the_formula_says():
    """method.md section 6: W = C_S (H_SS + damping)^-1, towards the dense weights, on what the consumer sees."""
    model = make_opt()
    layer, calls = record_calls(model)
    seen = []
    handle = layer.fc2.register_forward_hook(lambda _m, args, out: seen.append((args[0], out)))
    for args, kwargs in calls:
        layer(*args, **kwargs)
    handle.remove()
    group = next(g for g in find_groups(model, "none") if g.layer_index == 0)
    moments = make_moments(40, 24, "cpu", torch.float64)
    for inputs, outputs in seen:
        accumulate_moments(moments, inputs.flatten(0, -2), outputs.flatten(0, -2))
    damped = damp_moments(moments, read_consumer(layer, group), 0.01)
    layer, _, _, outcome = prune_first_layer(model, [0.5], "local", attention_unit="none", dampening_frac=0.01)
    keep = torch.tensor(outcome.groups[0].keep)
    wanted = solve_kept_weights(damped, keep, "fc2").weight
    torch.testing.assert_close(layer.fc2.weight.double(), wanted[:, :-1], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(layer.fc2.bias.double(), wanted[:, -1], rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_prune_layer_leaves_a_layer_alone_where_nothing_goes():
    model = make_opt()
    before = {name: value.clone() for name, value in model.model.decoder.layers[0].state_dict().items()}
    layer, _, _, outcome = prune_first_layer(model, [0, 0])
    assert not outcome.changed
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["granite", "llama", "phi", "gpt_neox"])
def test_in_the_first_layer_the_residual_target_is_the_modules_own_output(model_type):
    """Nothing is inherited there: what stands between the module and the residual stream must cancel."""
    model = make_model(model_type)
    layer, calls = record_calls(model)
    groups = [group for group in find_groups(model, "value_channels") if group.layer_index == 0]
    for group in groups if groups[-1].join.parallel else groups[:1]:
        residual, block = (
            observe(layer, groups, calls, target).collect_moments(layer, group, "").all
            for target in ("residual", "block")
        )
        torch.testing.assert_close(residual.cross, block.cross, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(residual.target_energy, block.target_energy, rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_decisions_survive_the_disk(tmp_path):
    model = make_opt()
    layer, calls = record_calls(model)
    groups = [group for group in find_groups(model, "value_channels") if group.layer_index == 0]
    observed = observe(layer, groups, calls)
    config = replace(StruPruneModifier(sparsity=0.3).make_config("residual"), chooses_dampening=False)
    plan = UnitAllocation({group.name: group.num_units // 2 for group in groups}, AllocationRecord("by hand"))
    moments = observed.collect_moments(layer, groups[0], "")
    pruner = Pruner(config, plan, Sensitivity(), DeviceContext())
    (decision,) = pruner.decide([ModuleView(layer, groups[0], observed)], [moments])
    store = ResumeStore(tmp_path)
    store.write("part", decision)
    again = store.read("part", Decision)
    assert again.record == decision.record
    assert decision.basis is not None
    assert again.producers.keys() == decision.producers.keys() != set()
    for name in ("keep", "weight", "basis"):
        assert torch.equal(getattr(again, name), getattr(decision, name))
    for name, rows in decision.producers.items():
        assert torch.equal(again.producers[name], rows)
