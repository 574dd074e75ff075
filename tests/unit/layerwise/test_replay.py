"""The last run of a pruned layer takes what attention returned before its FFN was pruned: the same outputs, with less work."""

import pytest
import torch

from eval.coverage import make_config
from eval.groups import find_groups
from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.layerwise.passes import enter_device_context, stream_layers
from struprune_plugin.layerwise.statistics import LayerStatistics
from struprune_plugin.model.structure.tiny import build_tiny, draw_tokens
from struprune_plugin.model.unit_kind import select_groups


@pytest.mark.parametrize(
    "model_type", ["llama", "opt", "gpt_neox"]
)  # one module after the other; without; side by side
def test_a_changed_layer_returns_the_same_with_attention_from_the_run_before(model_type):
    model = build_tiny(make_config(model_type, 2))
    groups, mask = find_groups(model, "value_channels"), torch.ones(2, 16, dtype=torch.int64)
    mask[1, 11:] = 0
    batches, ran, entered = [{"input_ids": draw_tokens(model.config, 2, 16), "attention_mask": mask}], [], []
    with torch.no_grad(), enter_device_context(model) as context:
        statistics = LayerStatistics(TARGETS["residual"], context, changes=True)
        for step in stream_layers(model, batches, context, "", propagates=True):
            entered.append(step.flows[0].states.hidden)
            own = select_groups(groups, step.name)
            step.observe(statistics, own)
            for group in own:
                statistics.collect_moments(step.layer, [group], "")
                step.layer.get_submodule(group.consumer).weight.mul_(0.5)
            linear = step.layer.get_submodule(next(iter(own[0].producers)))
            linear.register_forward_hook(lambda *_: ran.append(1))
            statistics.finish_layer()
        assert not ran
        again = model(**batches[0], output_hidden_states=True).hidden_states[1]
    assert ran
    assert torch.equal(entered[1][mask.bool()], again[mask.bool()])
