import pytest
import torch
from helpers.families import make_model
from helpers.models import make_opt

from eval.groups import find_groups
from struprune_plugin.model.layers import find_decoder_layers


def test_find_groups_costs_equal_the_design_table():
    """method.md section 1: 2 d + 1 for a channel, 4 d d_head + 3 d_head for a head."""
    costs = {group.kind: group.unit_cost for group in find_groups(make_opt(), "head")}
    assert costs == {"ffn": 2 * 24 + 1, "head": 4 * 24 * 6 + 3 * 6}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["re:.*mlp.*"]}, r"targets: 're:\.\*mlp\.\*' must match .* got no match"),
        ({"ignore": ["layers.7.fc2"]}, "ignore: 'layers.7.fc2' must match"),
        ({"attention_unit": "none", "prune_ffn": False}, "at least one module must be left to prune, got none"),
        ({"ignore": ["re:.*"]}, "at least one module must be left to prune, got none"),
    ],
)
def test_find_groups_that_match_nothing_raise(options, message):
    with pytest.raises(ValueError, match=message):
        find_groups(make_opt(), **({"attention_unit": "value_channels"} | options))


def test_list_head_weights_partitions_the_attention_weights():
    model = make_opt()
    layer = find_decoder_layers(model)[0][1]
    group = find_groups(model, "head")[0]
    heads = group.unit.list_weights(layer, group)
    assert len(heads) == 4
    expected = [
        layer.self_attn.q_proj.weight[6:12],
        layer.self_attn.k_proj.weight[6:12],
        layer.self_attn.v_proj.weight[6:12],
    ]
    expected.append(layer.self_attn.out_proj.weight[:, 6:12].T)
    torch.testing.assert_close(heads[1], torch.cat([w.reshape(-1) for w in expected]))


@pytest.mark.parametrize(("clip", "rotates"), [(8.0, False), (None, True)])
def test_values_that_a_class_clips_are_not_rotated(clip, rotates):
    """A random instance's are so small that no clipping shows."""
    groups = find_groups(make_model("olmo", clip_qkv=clip), "value_channels")
    assert {group.rotates for group in groups if group.unit.is_mixer} == {rotates}
