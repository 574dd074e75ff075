"""Units taken out of tiny models at random: sliced and masked models must agree."""

import copy

import torch

from eval.coverage import make_config
from eval.groups import find_groups
from struprune_plugin.export.any_class import replace_conv1d
from struprune_plugin.export.convert import adopt_config, adopt_paddings
from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.second_moments import with_bias_index
from struprune_plugin.model.structure.tiny import build_tiny
from struprune_plugin.model.surgery import mask_group, read_consumer, slice_group


@torch.no_grad()
def cut_units(model, unit, seed=3, prune_ffn=True, is_uneven=False):
    """Slice a model, a third of the units of every group; return a copy that is masked by the same units.

    Consumers get twice their weights in both. :param is_uneven: whether the later a layer, the more of its FFN goes
    """
    groups, masked = find_groups(model, unit, prune_ffn=prune_ffn), copy.deepcopy(model)
    adopt_paddings(model, groups)
    generator = torch.Generator().manual_seed(seed)
    for group in groups:
        layer, per_block = model.get_submodule(group.layer_name), group.num_units // group.num_blocks
        count = per_block * 2 // 3 - (2 * group.layer_index if is_uneven and group.kind == "ffn" else 0)
        starts = range(0, group.num_units, per_block)
        keep = [torch.randperm(per_block, generator=generator)[:count].sort().values + start for start in starts]
        keep = torch.cat(keep)
        columns = with_bias_index(unit_columns(keep, group.columns_per_unit), group.num_columns)
        weight = 2 * read_consumer(layer, group)[:, columns].double()
        slice_group(layer, group, keep, weight)
        mask_group(masked.get_submodule(group.layer_name), group, keep, weight)
    return masked


def save_pruned(model_type, folder):
    """Save a tiny model of a type that keeps two thirds of its channels; return it."""
    model = build_tiny(make_config(model_type, 2))
    replace_conv1d(model)
    cut_units(model, "value_channels")
    adopt_config(model)
    model.save_pretrained(folder)
    return model
