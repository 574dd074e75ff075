import copy

import pytest
import torch
from helpers.models import SHAPES, make_opt

from struprune_plugin.export.convert import adopt_paddings
from struprune_plugin.model.surgery import mask_group, slice_group
from struprune_plugin.model.units import find_groups


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("unit", ["head", "value_channels"])
def test_slice_group_pruned_equals_masked(shape, unit):
    """The same indices, as smaller modules and as zero columns, give the same logits."""
    pruned = make_opt(**SHAPES[shape]).double()
    masked = copy.deepcopy(pruned)
    adopt_paddings(pruned, find_groups(pruned, unit))
    generator = torch.Generator().manual_seed(3)
    for group in find_groups(pruned, unit):
        per_block = group.num_units // group.num_blocks
        kept = [
            torch.randperm(per_block, generator=generator)[: per_block // 2].sort().values
            for _ in range(group.num_blocks)
        ]
        keep = torch.cat([block * per_block + units for block, units in enumerate(kept)])
        weight = torch.randn(24, len(keep) * group.columns_per_unit + 1, generator=generator, dtype=torch.float64)
        slice_group(pruned.get_submodule(group.layer_name), group, keep, weight)
        mask_group(masked.get_submodule(group.layer_name), group, keep, weight)
    ids = torch.randint(4, 2048, (2, 20), generator=generator)
    torch.testing.assert_close(pruned(ids).logits, masked(ids).logits, rtol=1e-10, atol=1e-10)
    assert pruned.num_parameters() < masked.num_parameters()
