"""``struprune``: the command line, assembled from its commands, which are plain typer functions.

Commands import torch and llm-compressor only when they run, so that help and early errors take no seconds.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial, wraps
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from struprune_plugin import __version__
from struprune_plugin.cli import options as opt
from struprune_plugin.cli.console import Screen, run_command, show_error
from struprune_plugin.recipes.shipped import describe_recipe, find_recipe, list_recipes
from struprune_plugin.reporting.tables import (
    format_facts,
    measure_weight_bytes,
    summarize_layers,
    summarize_manifest,
    summarize_output,
)
from struprune_plugin.storage.files import check_model, format_bytes, write_whole
from struprune_plugin.storage.manifest import MANIFEST_NAME, carry_manifest, read_manifest

_OFFLOAD = "folder for weights that do not fit in memory, during the run"
_CHECKPOINT = "folder for finished layers; after an interruption, the same command continues"
_NO_KEEP = "do not store the scores in the manifest and the model card"
_PAGE = "page to write [default: OUT.html beside the folder]"
_WANTED = "also name the smallest model within this loss, e.g. '+5% perplexity'"
_FORMS = Literal["uniform-padded", "gguf"]  # of struprune_plugin.export.forms


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

    The recipe may end with quantisers. Without --data, calibration uses a sample of text that ships with the package.
    """
    screen = Screen(as_json, quiet)
    changes = opt.read_changes(settings, sparsity=sparsity, budget=budget, effort=effort)
    opt.prepare(screen, recipe, [model], [data], device, verbose)
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
            **describe_calibration(data, text_column, count, seq_length, batch_size),
        )
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    record: dict[str, Any] = {"output": str(output), "bytes": measure_weight_bytes(output)}
    if (output / MANIFEST_NAME).is_file():
        record["manifest"] = read_manifest(output).model_dump()
    screen.show(record, *summarize_output(output))


def plan(
    model: opt.Model,
    recipe: opt.RecipeName = "struprune",
    dtype: opt.Dtype = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    num_samples: opt.NumSamples = None,
    seq_length: opt.SeqLength = 256,
    batch_size: opt.BatchSize = 8,
    settings: opt.Settings = None,
    sparsity: opt.Sparsity = None,
    budget: opt.Budget = None,
    effort: opt.Effort = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Predict the sizes of a pruning run's result and the memory of the run, without pruning.

    Parameters and bytes of the result, and the bytes that the run holds on the device and on the host. The plan needs the
    model's configuration alone; it loads no weights.
    """
    screen = Screen(as_json, quiet)
    changes = opt.read_changes(settings, sparsity=sparsity, budget=budget, effort=effort)
    opt.prepare(screen, recipe, [model])
    from struprune_plugin.recipes.load import load_recipe
    from struprune_plugin.studies.plan import Workload, format_plan, plan_run

    modifiers = load_recipe(recipe, changes=changes).modifiers
    work = Workload(opt.count_samples(num_samples, changes), seq_length, batch_size)
    found = plan_run(model, modifiers, work, dtype, trust_remote_code)
    record = {"model": model, "recipe": recipe, **asdict(found)}
    told = f"sparsity {found.sparsity:g} of the layers' linear parameters (embeddings and head stay)"
    screen.show(record, f"{model} by {recipe}, {told}", *format_plan(found))


def score(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="model folders or hub names")],
    text: opt.ScoredText = None,
    window: opt.Window = 256,
    stride: Annotated[int | None, opt.whole("--stride", "tokens between window starts [default: the window]")] = None,
    max_tokens: opt.MaxTokens = None,
    text_column: Annotated[str, opt.option("--text-column", "column of the text in --text", "NAME")] = "text",
    tasks: opt.Tasks = None,
    include_path: opt.IncludePath = None,
    limit: opt.Limit = None,
    batch_size: Annotated[int, opt.whole("--batch-size", "sequences per batch")] = 8,
    dtype: Annotated[opt.Floats, opt.option("--dtype", "dtype of the computation")] = "float32",
    trust_remote_code: opt.TrustRemoteCode = False,
    no_dense: Annotated[bool, opt.option("--no-dense", "do not score the dense model beside a pruned one")] = False,
    no_keep: Annotated[bool, opt.option("--no-keep", _NO_KEEP)] = False,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure perplexity and lm-eval tasks of dense, pruned or quantised models.

    Perplexity is per token, over windows of fixed length; with --tasks alone it is left out. Several models give one table.
    """
    screen, names = Screen(as_json, quiet), opt.read_tasks(tasks, include_path)
    idle = {"--include-path": include_path, "--limit": limit} if not names else {}
    if names and text is None:
        idle = {"--stride": stride, "--max-tokens": max_tokens}
    for name, value in idle.items():
        if value is not None:
            needed = "--text" if names else "--tasks"
            raise ValueError(f"{name}: has no effect without {needed}, got {value!r}. Add {needed}, or remove {name}.")
    opt.prepare(screen, None, paths, [text], device)
    from struprune_plugin.evaluation.text import DEMO_TEST
    from struprune_plugin.reporting.pages import keep_results
    from struprune_plugin.studies.scores import Scoring, find_dense, format_scores, list_results, make_scorer

    source = text or (None if names else DEMO_TEST)
    asked = Scoring(
        text=None if source is None else str(source),
        text_column=text_column,
        window=window,
        stride=stride,
        max_tokens=max_tokens,
        tasks=names,
        include_path=include_path,
        limit=limit,
        batch_size=batch_size,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    dense = {} if no_dense and no_keep else find_dense(paths)
    beside = {} if no_dense else {path: base for path, base in dense.items() if base in paths or Path(base).is_dir()}
    models = list(dict.fromkeys(each for path in paths for each in (beside.get(path, path), path)))
    scorer = make_scorer(asked, models)
    scores = {path: scorer(path) for path in models}
    screen.show({"settings": asdict(asked), "scores": scores}, format_scores(scores))
    for path, base in dense.items() if not no_keep else ():
        problem = keep_results(Path(path), list_results(asked, scores[path], scores.get(base, {})))
        if problem:
            screen.show_error(f"the scores are not stored with the output: {problem}")


def convert(
    path: opt.Folder,
    to: Annotated[_FORMS, opt.option("--to", "form to write")],
    output: Annotated[Path, opt.option("--output", "folder to write; it appears when it is complete", "DIR")],
    overwrite: opt.Overwrite = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Convert a pruned folder to another form, for stock classes or other engines.

    The model's outputs stay the same. uniform-padded: all layers padded with zeros to the largest, for stock classes. gguf: one
    file for llama.cpp, sizes per layer (LLaMA only).
    """
    screen = Screen(as_json, quiet)
    check_model(str(path))
    from struprune_plugin import registration  # noqa: F401
    from struprune_plugin.export.forms import convert_folder
    from struprune_plugin.reporting.pages import write_card
    from struprune_plugin.storage.output_folder import write_folder

    screen.set_log()
    with write_folder(output, overwrite, [path], measure_weight_bytes(path)) as partial:
        convert_folder(path, to, partial, trust_remote_code)
        carry_manifest(path, partial)
        write_card(partial)
    how = "; load it with trust_remote_code=True" if any(output.glob("*.py")) else ""
    size = measure_weight_bytes(output)
    record = {"output": str(output), "form": to, "bytes": size}
    screen.show(record, f"wrote {output} ({format_bytes(size)} of weights{how})")


def inspect(path: opt.Folder, as_json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """Show the content of a pruned folder, layer by layer.

    The figures come from the folder's manifest (struprune.json), which --json prints.
    """
    screen, manifest = Screen(as_json, quiet), read_manifest(path)
    folder = path if path.is_dir() else path.parent
    screen.show(manifest.model_dump(), summarize_layers(manifest), summarize_manifest(manifest, folder))


def report(
    path: opt.Folder,
    output: Annotated[Path | None, opt.option("--output", _PAGE, "FILE")] = None,
    overwrite: Annotated[bool, opt.option("--overwrite", "replace an existing page")] = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Write an HTML page about a pruned folder.

    The page shows sizes, what was removed where, errors, quality and the recipe. It is one file without scripts and needs no
    network.
    """
    screen, manifest = Screen(as_json, quiet), read_manifest(path)
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    page = output or folder.with_name(f"{folder.name}.html")
    if page.is_dir() or (page.exists() and not overwrite):
        raise ValueError(f"--output: {page} exists. Choose another path, or pass --overwrite.")
    if not page.parent.is_dir():
        raise ValueError(f"--output: the folder {page.parent} does not exist. Create it, or choose another path.")
    from struprune_plugin.reporting.pages import make_page

    write_whole(page, make_page(folder, manifest))
    screen.show({"page": str(page)}, f"wrote {page}")


def recipes(as_json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """List the shipped recipes, for `prune --recipe NAME`."""
    told = {name: describe_recipe(file) for name, file in list_recipes().items()}
    Screen(as_json, quiet).show(told, format_facts(list(told.items())))


def sweep(
    model: opt.Model,
    output: Annotated[Path, opt.option("--output", "folder for the models, the table, JSON and a picture", "DIR")],
    sparsity: Annotated[
        str, opt.option("--sparsity", "a range, or a list such as 0.2,0.4", "A:B:STEP")
    ] = "0.1:0.6:0.1",
    recipe: opt.RecipeName = "struprune",
    pick: Annotated[str | None, opt.option("--pick", _WANTED, "LOSS")] = None,
    seed: opt.Seed = 0,
    dtype: opt.Dtype = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    device: opt.Device = "auto",
    num_samples: opt.NumSamples = None,
    seq_length: opt.SeqLength = 256,
    batch_size: opt.BatchSize = 8,
    data: opt.Data = None,
    text_column: opt.TextColumn = "text",
    settings: opt.Settings = None,
    text: opt.ScoredText = None,
    window: opt.Window = 256,
    max_tokens: opt.MaxTokens = None,
    tasks: opt.Tasks = None,
    include_path: opt.IncludePath = None,
    limit: opt.Limit = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prune at several sparsities, each by a run of its own, and compare quality.

    DIR holds the model of every point, e.g. DIR/0.2; after an interruption, the same command continues.
    """
    screen, changes = Screen(as_json, quiet), opt.read_changes(settings)
    sparsities, names = opt.read_sparsities(sparsity), opt.read_tasks(tasks, include_path)
    wanted = None if pick is None else opt.read_pick(pick, names)
    opt.prepare(screen, recipe, [model], [data, text], device)
    from struprune_plugin.entrypoint import oneshot
    from struprune_plugin.evaluation.text import DEMO_TEST
    from struprune_plugin.recipes.load import load_recipe
    from struprune_plugin.storage.checkpoint import check_checkpoint
    from struprune_plugin.studies.scores import Scoring, format_scores, make_scorer
    from struprune_plugin.studies.sweep import PICTURE_NAME, draw_sweep, pick_point, run_points

    check_checkpoint(model, trust_remote_code)
    load_recipe(recipe, changes={**changes, "sparsity": sparsities[0]})  # refused before anything is scored
    run: dict[str, Any] = {"precision": dtype, "seed": seed, "trust_remote_code_model": trust_remote_code}
    count = opt.count_samples(num_samples, changes)
    run |= describe_calibration(data, text_column, count, seq_length, batch_size)
    asked = Scoring(
        text=str(text or DEMO_TEST),
        text_column=text_column if text else "text",
        window=window,
        max_tokens=max_tokens,
        tasks=names,
        include_path=include_path,
        limit=limit,
        batch_size=batch_size,
        trust_remote_code=trust_remote_code,
    )
    scorer = make_scorer(asked, [model])

    def prune(sparsity: float, out: Path) -> None:
        own = {**changes, "sparsity": sparsity}
        oneshot(model=model, recipe=recipe, changes=own, output_dir=out, overwrite=out.exists(), **run)

    told = {
        "model": model,
        "recipe": find_recipe(recipe).read_text(encoding="utf-8"),
        "changes": str(changes),
        "run": {name: str(value) for name, value in run.items()},
        "scoring": asdict(asked),
    }
    scores = run_points(output, told, sparsities, prune, scorer)
    parts: list[Any] = [format_scores(scores)]
    parts += [f"{point}: refused, {found['refused']}" for point, found in scores.items() if "refused" in found]
    parts.append(f"wrote {output}")
    try:
        draw_sweep(scores, output / PICTURE_NAME)
    except ImportError:
        parts.append('no picture without matplotlib: pip install "struprune-plugin[plots]"')
    record: dict[str, Any] = {"scores": scores}
    if wanted is not None:
        point = pick_point(scores, wanted)
        record["picked"] = {"point": point, "output": str(output / point)}
        parts.append(f"picked {point}: {output / point}")
    screen.show(record, *parts)


def describe_calibration(
    data: str | None, text_column: str, num_samples: int, seq_length: int, batch_size: int
) -> dict[str, Any]:
    """Return the calibration arguments of :func:`struprune_plugin.oneshot`; the same command calibrates on the same samples."""
    from struprune_plugin.evaluation.text import DEMO_CALIBRATION

    return {
        "dataset": data or DEMO_CALIBRATION,
        "text_column": text_column,
        "num_calibration_samples": num_samples,
        "max_seq_length": seq_length,
        "batch_size": batch_size,
        "shuffle_calibration_samples": False,
    }


# -- the whole ------------------------------------------------------------------------------------------------------

COMMANDS: dict[str, Callable[..., None]] = {
    "prune": prune,
    "plan": plan,
    "eval": score,
    "convert": convert,
    "inspect": inspect,
    "report": report,
    "sweep": sweep,
    "recipes": recipes,
}
_EPILOG = (
    "Exit status: 0 if the whole job is done, 2 for bad input (one line on stderr names the remedy), "
    "130 and 143 after Ctrl-C and SIGTERM, 1 for other failures."
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"struprune {__version__}")
        raise typer.Exit


def struprune(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Prune large language models structurally: smaller matrices, no sparse kernels."""


def make_app() -> typer.Typer:
    """Return the command line as a typer app."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback(epilog=_EPILOG)(struprune)
    for name, command in COMMANDS.items():
        paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
        told = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)  # typer keeps their line ends
        app.command(name, help=told)(_defer(command))
    return app


def _defer(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """Return a callback that returns the command with its options, for a call after the parser has ended."""

    @wraps(command)
    def bind(**options: Any) -> Callable[[], None]:
        return partial(command, **options)

    return bind


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 when the whole job is done, 2 for bad input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # do not fail on terminals without the tables' characters
    try:
        run = typer.main.get_command(make_app())(argv, prog_name="struprune", standalone_mode=False)
    except typer.TyperException as error:  # of the parser: print one line in place of typer's panel
        context = getattr(error, "ctx", None)
        message = " ".join(error.format_message().replace("Value error, ", "").split())
        where = context.command_path if context else "struprune"
        show_error(f"error: {message.rstrip('.')} (see {where} --help)")
        return error.exit_code
    return run_command(run) if callable(run) else run  # a status after --help
