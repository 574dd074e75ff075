"""``struprune prune``: one pruning run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated, Any

from struprune_plugin.cli import options as opt
from struprune_plugin.cli.console import Screen
from struprune_plugin.reporting.tables import measure_weight_bytes, summarize_output
from struprune_plugin.storage.files import check_place
from struprune_plugin.storage.manifest import MANIFEST_NAME, read_manifest

_OFFLOAD = "folder for weights that do not fit in memory, during the run"
_CHECKPOINT = "folder for finished layers; after an interruption, the same command continues"


def prune(
    model: opt.Model,
    output: Annotated[Path, opt.option("--output", "folder to write; it appears when it is complete", "OUT")],
    recipe: opt.RecipeName = "struprune",
    seed: opt.Seed = 0,
    dtype: opt.Dtype = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    offload: Annotated[Path | None, opt.option("--offload", _OFFLOAD, "FOLDER")] = None,
    checkpoint: Annotated[Path | None, opt.option("--checkpoint", _CHECKPOINT, "DIR")] = None,
    overwrite: opt.Overwrite = False,
    verbose: Annotated[bool, opt.option("--verbose", "show llm-compressor's log")] = False,
    device: opt.Device = "auto",
    num_samples: opt.NumSamples = None,
    seq_length: opt.SeqLength = 256,
    batch_size: opt.BatchSize = 8,
    data: opt.Data = None,
    text_column: opt.TextColumn = "text",
    settings: opt.Settings = None,
    sparsity: opt.Sparsity = None,
    budget: opt.Budget = None,
    effort: opt.Effort = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prune a model by a recipe and write a folder that transformers and lm-eval load.

    The recipe may end with quantisers. Without --data, calibration uses a sample of books that ships with the package.
    """
    screen = Screen(as_json, quiet)
    changes = opt.read_changes(settings, sparsity=sparsity, budget=budget, effort=effort)
    opt.check_names(recipe, [model], [data], device)
    if offload is not None:
        check_place("--offload", offload)
    opt.prepare(device, screen, verbose)
    from struprune_plugin.entrypoint import oneshot

    scratch = None if offload is None else offload / f"struprune-{os.getpid()}"
    count = opt.count_samples(num_samples, changes)
    try:
        oneshot(
            model=model,
            recipe=recipe,
            changes=changes,
            output_dir=output,
            overwrite=overwrite,
            offload_folder=scratch,
            checkpoint_dir=checkpoint,
            seed=seed,
            precision=dtype,
            trust_remote_code_model=trust_remote_code,
            **opt.describe_calibration(data, text_column, count, seq_length, batch_size),
        )
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    record: dict[str, Any] = {"output": str(output), "bytes": measure_weight_bytes(output)}
    if (output / MANIFEST_NAME).is_file():
        record["manifest"] = read_manifest(output).model_dump()
    screen.show(record, *summarize_output(output))
