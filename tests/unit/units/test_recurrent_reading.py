"""Heads of recurrent mixers, read from which columns every row reaches."""

import torch

from struprune_plugin.units.recurrent_reading import _find_blocks


def test_a_row_that_changes_one_column_too_little_still_reaches_all():
    queries = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool()
    reached = {"v_proj": torch.eye(8).bool(), "q_proj": queries, "g_a_proj": torch.ones(2, 8).bool()}
    reached["g_a_proj"][0, 3] = False
    assert _find_blocks(reached, 8) == {4}
    assert reached["g_a_proj"].all()
    reached["g_a_proj"][1, :3] = False
    assert _find_blocks(reached, 8) == set()
