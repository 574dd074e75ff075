"""Shared experts: what every token passes beside a router's choice joins the stream with it, and makes up for its errors."""

import pytest
import torch
from datasets import Dataset
from helpers.models import run_oneshot
from transformers import AutoTokenizer

from eval.coverage import make_config
from eval.groups import find_groups
from struprune_plugin import read_manifest
from struprune_plugin.evaluation.text import DEMO_MODEL
from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.layerwise.passes import stream_layers
from struprune_plugin.layerwise.statistics import LayerStatistics
from struprune_plugin.model.experts import linearize_experts
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.tiny import build_tiny, draw_tokens
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.units.expert_reading import ExpertsLayout
from struprune_plugin.units.ffn import FFNLayout

ADDED = {"glm4_moe": True, "deepseek_v3": True, "qwen2_moe": False}  # Qwen's is multiplied by a gate of the token
ALONE = {"attention_unit": "none", "prune_ffn": False}


@pytest.mark.parametrize("model_type", ADDED)
def test_a_shared_expert_joins_the_stream_with_the_others_where_it_is_added(model_type):
    layouts = [
        each
        for each in find_structure(build_tiny(make_config(model_type, 4))).layouts
        if each.list_units(ExpertsLayout)
    ]
    assert layouts
    for layout in layouts:
        shared = [ffn for ffn in layout.list_units(FFNLayout) if "shared" in ffn.output]
        assert shared
        assert all((ffn.join == layout.units[-1].join) is ADDED[model_type] for ffn in shared)
    assert layouts[0].units[-1].join.is_direct


def test_a_shared_expert_is_asked_for_its_output_and_what_the_stream_lacks():
    model = build_tiny(make_config("glm4_moe", 2))
    linearize_experts(model)
    groups = find_groups(model, "none", prune_experts=True)
    shared = next(group for group in groups if group.join.block and not group.mixture)
    assert [group.name for group in groups if group.layer_index == shared.layer_index][-1] == shared.name
    batches = [{"input_ids": draw_tokens(model.config, 2, 16), "attention_mask": torch.ones(2, 16, dtype=torch.int64)}]
    statistics = LayerStatistics(TARGETS["residual"], DeviceContext(), changes=True)
    with torch.no_grad():
        for step in stream_layers(model, batches, statistics.context, "test", propagates=True):
            own = [group for group in groups if group.layer_name == step.name]
            step.observe(statistics, own)
            if step.name == shared.layer_name:
                break
            statistics.finish_layer()
        layer, call = step.layer, statistics.calls[0]
        dense = call.run(layer, statistics.context).hidden.flatten(0, 1)
        expert = layer.get_submodule(shared.join.block).experts[0].down_proj
        expert.weight.mul_(0.5)
        seen = {}
        linear = layer.get_submodule(shared.consumer)
        linear.register_forward_hook(lambda _m, args, out: seen.update(x=args[0].flatten(0, -2), y=out.flatten(0, -2)))
        now = call.run(layer, statistics.context).hidden.flatten(0, 1)
        moments = statistics.collect_moments(layer, [shared], "").select(0).all
    factors = now.square().mean(1).rsqrt()[:, None]
    inputs = seen["x"] * factors
    target = (seen["y"] + dense - now) * factors
    torch.testing.assert_close(moments.gram[:-1, :-1], inputs.T @ inputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moments.cross[:, :-1], target.T @ inputs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("update", ["least_squares", "none"])
def test_a_shared_expert_that_keeps_its_channels_is_solved_behind_the_others(update, tmp_path):
    model = build_tiny(make_config("glm4_moe", 2))
    layer = next(i for i, kind in enumerate(model.model.layers) if hasattr(kind.mlp, "shared_experts"))
    before = model.model.layers[layer].mlp.shared_experts.down_proj.weight.clone()
    ids = draw_tokens(model.config, 16, 32, seed=1)
    fields = {"sparsity": 0.3, **ALONE, "weight_update": update, "experts": "channels"}
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    model.save_pretrained(tmp_path / "dense")
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(tmp_path / "dense")

    def run(out, **fields):
        folders = {"output_dir": str(tmp_path / out), "dataset": data, "num_calibration_samples": 16}
        return run_oneshot(str(tmp_path / "dense"), **folders, **fields)

    pruned = run("out", **fields)
    after = pruned.model.layers[layer].mlp.shared_experts.down_proj.weight
    records = [group for group in read_manifest(tmp_path / "out").groups if "shared" in group.name]
    assert after.shape == before.shape
    assert torch.equal(after, before) is (update == "none")
    assert [record.kept == record.num_units for record in records] == [True] * len(records)
    assert bool(records) is (update == "least_squares")
    if records:
        assert all(record.error_after < record.error_before for record in records)
