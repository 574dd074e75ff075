"""``struprune prune``: one pruning run."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from rich.console import RenderableType

from struprune_plugin.cli import options as opt
from struprune_plugin.cli.console import Screen
from struprune_plugin.reporting.tables import measure_weight_bytes, summarize_layers, summarize_manifest
from struprune_plugin.storage.files import check_place
from struprune_plugin.storage.manifest import read_manifest

_OFFLOAD = "folder for weights that do not fit in memory, during the run"
_CHECKPOINT = "folder for finished layers; after an interruption, the same command continues"


def prune(
    model: opt.Model,
    recipe: opt.RecipeName,
    output: Annotated[Path, opt.option("--output", "folder to write; it appears when it is complete", "OUT")],
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
    count = opt.count_samples(num_samples, changes)
    opt.check_names(device, recipe, [model], [data])
    opt.prepare(device, screen, verbose)
    from struprune_plugin.entrypoint import list_inputs, oneshot
    from struprune_plugin.evaluation.calibration import make_dataset
    from struprune_plugin.evaluation.sampling import SELF
    from struprune_plugin.evaluation.scoring import load_checkpoint
    from struprune_plugin.evaluation.text import DEMO_CALIBRATION, load_tokenizer
    from struprune_plugin.modifiers import StruPruneModifier
    from struprune_plugin.recipes.load import load_recipe
    from struprune_plugin.storage.checkpoint import check_checkpoint
    from struprune_plugin.storage.output_folder import check_output

    loaded = load_recipe(recipe, changes=changes)
    if offload is not None:
        check_place("--offload", offload)
    check_output(output, overwrite, list_inputs(model, recipe, offload, {"dataset": data}))
    check_checkpoint(model, trust_remote_code)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    source = data or DEMO_CALIBRATION
    own = load_checkpoint(model, "auto", trust_remote_code)[0] if source == SELF else model
    dataset = make_dataset(own, tokenizer, source, count, seq_length, text_column)
    if offload is not None:
        offload.mkdir(parents=True, exist_ok=True)
    with nullcontext() if offload is None else tempfile.TemporaryDirectory(dir=offload) as scratch:
        oneshot(
            model=model,
            recipe=loaded,
            output_dir=output,
            overwrite=overwrite,
            offload_folder=scratch,
            checkpoint_dir=checkpoint,
            seed=seed,
            dataset=dataset,
            tokenizer=tokenizer,
            batch_size=batch_size,
            num_calibration_samples=count,
            shuffle_calibration_samples=False,
            precision=dtype,
            trust_remote_code_model=trust_remote_code,
        )
    record: dict[str, Any] = {"output": str(output), "bytes": measure_weight_bytes(output)}
    parts: list[RenderableType] = [f"wrote {output}"]
    if any(isinstance(modifier, StruPruneModifier) for modifier in loaded.modifiers):
        manifest = read_manifest(output)
        record["manifest"] = manifest.model_dump()
        parts = [summarize_layers(manifest), summarize_manifest(manifest, output), *parts]
    screen.show(record, *parts)
