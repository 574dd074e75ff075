"""REAP (Lasby et al. 2025): removes the experts with the least router-weighted output; llm-compressor's own code.

A router of sigmoids that chooses k experts chooses k among those left, by the scores and the bias of choice that they had; its
weights are not normed anew where the configuration does not ask for it. No fewer than k experts can stay.
"""

import tempfile
import time
from pathlib import Path

from llmcompressor.modifiers.pruning import REAPPruningModifier
from torch import Tensor
from transformers import PreTrainedModel

from eval.peers import PeerResult
from struprune_plugin import oneshot
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.evaluation.text import pack_windows
from struprune_plugin.model.experts import linearize_experts
from struprune_plugin.model.layers import count_prunable_parameters

_BATCH = 8


def prune_reap(folder: str, windows: Tensor, share: float) -> PeerResult:
    """Drop a share of the experts of every layer.

    :param windows: calibration tokens, shape [windows, length], int64
    :param share: of every layer's experts, rounded down to whole ones
    :raises ValueError: fewer experts would stay than a token goes to
    """
    start = time.perf_counter()
    dataset = pack_windows(windows)
    with tempfile.TemporaryDirectory() as scratch:
        model = oneshot(
            model=folder,
            recipe=REAPPruningModifier(sparsity=share, report_path=str(Path(scratch) / "retained.json")),
            dataset=dataset,
            batch_size=_BATCH,
            num_calibration_samples=len(dataset),
            shuffle_calibration_samples=False,
            moe_calibrate_all_experts=False,
        )
    before, after = count_experts(load_checkpoint(folder, "auto")[0]), count_experts(model)
    return PeerResult(model, 1 - after / before, time.perf_counter() - start)


def count_experts(model: PreTrainedModel) -> int:
    """Return the number of the parameters of a mixture's routed experts, which are linearized."""
    linearize_experts(model)
    return count_prunable_parameters(model, mixtures=True) - count_prunable_parameters(model)
