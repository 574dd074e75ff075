import pytest
import torch
from helpers.cuts import cut_units
from helpers.models import SHAPES, make_opt


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("unit", ["head", "value_channels"])
def test_slice_group_pruned_equals_masked(shape, unit):
    """The same indices, as smaller modules and as zero columns, give the same logits."""
    pruned = make_opt(**SHAPES[shape]).double()
    masked = cut_units(pruned, unit)
    ids = torch.randint(4, 2048, (2, 20), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(pruned(ids).logits, masked(ids).logits, rtol=1e-10, atol=1e-10)
    assert pruned.num_parameters() < masked.num_parameters()
