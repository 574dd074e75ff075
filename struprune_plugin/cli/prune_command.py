"""``struprune prune``: one pruning run."""

from __future__ import annotations

import os
import re
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

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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
    push_to_hub: Annotated[str | None, option("upload the output to a Hub repository, private if new", "USER/NAME")] = (
        None
    )
    verbose: Annotated[bool, flag("--verbose", "show llm-compressor's log")] = False
    device: Device = "auto"


def prune(model: Model, run: Run, calibration: Calibration, changes: Changes, screen: Screen) -> None:
    """Prune a model by a recipe and write a folder that transformers and lm-eval load.

    The recipe may end with quantisers. Without --data, calibration uses a sample of books that ships with the package.
    """
    changed = changes.read()
    num_samples = calibration.count_samples(changed)
    check_names(run.device, run.recipe, [model], [calibration.data])
    if run.push_to_hub is not None:
        _check_push(run.push_to_hub)
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
    inputs = list_inputs(model, run.recipe, recipe.modifiers, run.offload, {"dataset": calibration.data})
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
    if run.push_to_hub is not None:
        record["hub"] = push_folder(run.output, run.push_to_hub)
        parts.append(f"pushed to {record['hub']}")
    screen.show(record, *parts)


def _check_push(name: str) -> None:
    """Raise, before any work, if a repository name is invalid or if this machine cannot push."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import is_offline_mode

    if not _HUB_NAME.fullmatch(name) or ".." in name or "--" in name:
        raise ValueError(f"--push-to-hub: must be USER/NAME, got {name!r}. Give both parts.")
    if is_offline_mode():
        raise ValueError(
            "--push-to-hub: cannot upload while HF_HUB_OFFLINE is set. Unset HF_HUB_OFFLINE, or remove --push-to-hub."
        )
    if not get_token():
        raise ValueError("--push-to-hub: must have a login at the Hub, got no token. Run `hf auth login`.")


def push_folder(folder: Path, name: str) -> str:
    """Upload an output to a Hub repository, created as private if absent, and return its address.

    :raises OSError: the Hub refuses or cannot be reached; the folder stays unchanged
    """
    from huggingface_hub import HfApi, get_token

    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a model pruned with StruPrune")
    except Exception as error:  # the Hub's client raises errors of many classes
        told = " ".join(str(error).split()).replace(get_token() or os.devnull, "…")
        failure = OSError(
            f"--push-to-hub: the upload to {name} failed: {told} The output in {folder} is complete. Upload it later by "
            f"`hf upload {name} {folder}`."
        )
        failure.errno = getattr(error, "errno", None) or 5
        raise failure from None
    return f"https://huggingface.co/{name}"
