"""``struprune prune``: one pruning run."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import RenderableType

from struprune_plugin.cli.console import Screen
from struprune_plugin.cli.options import (
    RECIPE,
    Calibration,
    Changes,
    Device,
    Dtype,
    Model,
    Overwrite,
    Seed,
    check_names,
    flag,
    option,
    prepare,
)
from struprune_plugin.reporting.tables import measure_weight_bytes, summarize_layers, summarize_manifest
from struprune_plugin.storage.files import check_place
from struprune_plugin.storage.manifest import read_manifest


@dataclass(frozen=True)
class Run:
    """Settings of a run."""

    recipe: Annotated[str, RECIPE]
    output: Annotated[Path, option("folder to write; it appears when it is complete", "OUT")]
    seed: Seed = 0
    dtype: Dtype = "auto"
    offload: Annotated[
        Path | None, option("folder for weights that do not fit in memory, during the run", "FOLDER")
    ] = None
    checkpoint: Annotated[
        Path | None, option("folder for finished layers; after an interruption, the same command continues", "DIR")
    ] = None
    overwrite: Overwrite = False
    verbose: Annotated[bool, flag("--verbose", "show llm-compressor's log")] = False
    device: Device = "auto"


def prune(model: Model, run: Run, calibration: Calibration, changes: Changes, screen: Screen) -> None:
    """Prune a model by a recipe and write a folder that transformers and lm-eval load.

    The recipe may end with quantisers. Without --data, calibration uses a sample of books that ships with the package.
    """
    changed = changes.read()
    num_samples = calibration.count_samples(changed)
    check_names(run.device, run.recipe, [model], [calibration.data])
    prepare(run.device, screen, run.verbose)
    from transformers import set_seed

    from struprune_plugin.entrypoint import list_inputs
    from struprune_plugin.evaluation.calibration import make_dataset
    from struprune_plugin.evaluation.text import DEMO_CALIBRATION, load_tokenizer
    from struprune_plugin.recipes.load import load_recipe
    from struprune_plugin.registration import StruPruneModifier, oneshot
    from struprune_plugin.storage.checkpoint import check_checkpoint
    from struprune_plugin.storage.output_folder import check_output

    recipe = load_recipe(run.recipe, changes=changed)
    if run.offload is not None:
        check_place("--offload", run.offload)
    inputs = list_inputs(model, run.recipe, run.offload, {"dataset": calibration.data})
    check_output(run.output, run.overwrite, inputs)
    check_checkpoint(model)
    set_seed(run.seed)
    dataset = make_dataset(
        model,
        load_tokenizer(model),
        calibration.data or DEMO_CALIBRATION,
        num_samples,
        calibration.seq_length,
        calibration.text_column,
    )
    if run.offload is not None:
        run.offload.mkdir(parents=True, exist_ok=True)
    with nullcontext() if run.offload is None else tempfile.TemporaryDirectory(dir=run.offload) as scratch:
        oneshot(
            model=model,
            recipe=recipe,
            output_dir=run.output,
            overwrite=run.overwrite,
            offload_folder=scratch,
            checkpoint_dir=run.checkpoint,
            dataset=dataset,
            batch_size=calibration.batch_size,
            num_calibration_samples=num_samples,
            shuffle_calibration_samples=False,
            precision=run.dtype,
        )
    record: dict[str, Any] = {"output": str(run.output), "bytes": measure_weight_bytes(run.output)}
    parts: list[RenderableType] = [f"wrote {run.output}"]
    if any(isinstance(modifier, StruPruneModifier) for modifier in recipe.modifiers):
        manifest = read_manifest(run.output)
        record["manifest"] = manifest.model_dump()
        parts = [summarize_layers(manifest), summarize_manifest(manifest, run.output), *parts]
    screen.show(record, *parts)
