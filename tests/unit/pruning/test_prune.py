"""One decoder layer pruned on recorded calls, without the host."""

import pytest
import torch
from helpers.families import make_model

from eval.groups import find_groups
from struprune_plugin.layerwise.calls import LayerCall, split_call
from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.layerwise.statistics import LayerStatistics
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.runtime.device_context import DeviceContext


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
        name, hidden, arguments = split_call(args, kwargs)
        observed.run_layer(
            layer, groups, LayerCall(hidden, arguments, torch.ones(hidden.shape[:2]).bool(), hidden.device, name)
        )
    return observed


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["granite", "llama", "phi", "gpt_neox"])
def test_in_the_first_layer_the_residual_target_is_the_modules_own_output(model_type):
    """Nothing is inherited there: what stands between the module and the residual stream must cancel."""
    model = make_model(model_type)
    layer, calls = record_calls(model)
    groups = [group for group in find_groups(model, "value_channels") if group.layer_index == 0]
    for group in groups if groups[-1].join.parallel else groups[:1]:
        residual, block = (
            observe(layer, groups, calls, target).collect_moments(layer, [group], "").select(0).all
            for target in ("residual", "block")
        )
        torch.testing.assert_close(residual.cross, block.cross, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(residual.target_energy, block.target_energy, rtol=1e-4, atol=1e-3)
