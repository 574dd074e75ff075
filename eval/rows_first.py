"""StruPrune where rows of the vocabulary go first: as many parameters as units alone, or COMPACT, would take."""

import tempfile
import time
from pathlib import Path

from torch import Tensor

from eval.peers import PeerResult
from eval.peers.compact import plan_rows
from struprune_plugin import oneshot
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.evaluation.text import pack_windows, tokenize_texts
from struprune_plugin.model.layers import count_prunable_parameters
from struprune_plugin.storage.checkpoint import load_tokenizer
from struprune_plugin.storage.manifest import read_manifest
from struprune_plugin.vocabulary.trim import write_trim


def prune_rows_first(folder: str, windows: Tensor, sparsity: float) -> PeerResult:
    """Remove the rows that COMPACT removes, then units by the default recipe; arguments as of ``prune_compact``.

    Units are calibrated on the text of the same windows, in the tokens that stay and in at most as many windows.
    """
    model = load_checkpoint(folder, "auto")[0]
    prunable = count_prunable_parameters(model)
    plan = plan_rows(folder, model, windows, sparsity * prunable)
    del model
    start, in_rows = time.perf_counter(), plan.num_removed
    with tempfile.TemporaryDirectory() as scratch:
        trimmed, out = Path(scratch) / "trimmed", Path(scratch) / "pruned"
        trimmed.mkdir()
        write_trim(plan, trimmed)
        tokenizer = load_tokenizer(trimmed)
        texts = [plan.source.loaded.decode(window, clean_up_tokenization_spaces=False) for window in windows.tolist()]
        tokens, length = tokenize_texts(tokenizer, texts, windows.numel()), windows.shape[1]
        data = pack_windows(tokens[: len(tokens) // length * length].view(-1, length))
        oneshot(
            str(trimmed),
            "struprune",
            out,
            changes={"sparsity": sparsity - in_rows / prunable},
            dataset=data,
            batch_size=8,
            num_calibration_samples=len(data),
            shuffle_calibration_samples=False,
        )
        seconds, removed = time.perf_counter() - start, read_manifest(out).budget.met_sparsity
        pruned = load_checkpoint(str(out), "auto")[0]
    note = f"{plan.size:,} of {plan.source.num_rows:,} rows stay"
    return PeerResult(pruned, removed, seconds, note, tokenizer, in_rows / plan.source.num_parameters)
