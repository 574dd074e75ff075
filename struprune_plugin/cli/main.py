"""``struprune``: the command line, assembled from its commands, which are plain typer functions.

Commands import torch and llm-compressor only when they run, so that help and early errors take no seconds.
"""

import io
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from struprune_plugin import __version__
from struprune_plugin.cli import options as opt
from struprune_plugin.cli.console import Screen, run_command, show_error
from struprune_plugin.recipes.shipped import describe_recipe, find_recipe, list_recipes
from struprune_plugin.reporting import tables
from struprune_plugin.storage.files import check_place, format_bytes, measure_weight_bytes, own_folder, write_whole
from struprune_plugin.storage.manifest import MANIFEST_NAME, carry_manifest, read_manifest
from struprune_plugin.storage.vocabulary_record import carry_record

_OUT = "folder to write; it appears when it is complete"
_OFFLOAD = "folder for weights that do not fit in memory, during the run"
_CHECKPOINT = "folder for finished layers; after an interruption, the same command continues"
_PAGE = "page to write [default: OUT.html beside the folder]"
_RANKED = "text like that which the model will read, e.g. FILE.jsonl or c4"
_TRIMMED = "folder to write; it appears when it is complete [default: show the plan, write nothing]"
_GROWTH = "for auto: estimated growth of the bits of held-out text"
_UNUSED = "whether added tokens for later use, e.g. <unused12>, stay"
_WANTED = "also name the smallest model within this loss, e.g. '+5% perplexity'"


def prune(
    model: opt.Model,
    output: Annotated[Path, opt.option("--output", _OUT, "OUT")],
    recipe: opt.RecipeName = "struprune",
    seed: opt.Seed = 0,
    dtype: opt.Dtype = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    offload: Annotated[Path | None, opt.option("--offload", _OFFLOAD, "FOLDER")] = None,
    checkpoint: Annotated[Path | None, opt.option("--checkpoint", _CHECKPOINT, "DIR")] = None,
    overwrite: opt.Overwrite = False,
    num_samples: opt.NumSamples = None,
    seq_length: opt.SeqLength = None,
    batch_size: opt.BatchSize = 8,
    data: opt.Data = None,
    text_column: opt.TextColumn = "text",
    no_window_bos: opt.NoWindowBos = False,
    vocabulary: opt.SmallVocabulary = None,
    language: opt.Language = None,
    words: opt.Words = None,
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
    screen, changes = Screen(as_json, quiet), opt.read_changes(settings, budget, sparsity=sparsity, effort=effort)
    opt.prepare(screen, [model], recipe)
    from struprune_plugin.entrypoint import oneshot
    from struprune_plugin.modifiers.plan import count_from_whole
    from struprune_plugin.recipes.load import load_recipe
    from struprune_plugin.vocabulary.trim import trim_first

    windows = opt.choose_windows(model, trust_remote_code, num_samples, seq_length, changes)
    run = opt.describe_run(dtype, trust_remote_code, data, text_column, no_window_bos, windows, batch_size)
    ranking = opt.read_ranking(vocabulary, data, text_column, language, words)
    with ExitStack() as stack:
        scratch = None if offload is None else stack.enter_context(own_folder(offload))
        if ranking is None:
            oneshot(model, recipe, output, overwrite, scratch, checkpoint, seed, changes, **run)
        else:
            counted = count_from_whole(model, load_recipe(recipe, changes), trust_remote_code)
            first = trim_first(model, output, overwrite, trust_remote_code, (offload, checkpoint), **ranking)
            copy, folder = stack.enter_context(first)
            oneshot(copy, counted, folder, False, scratch, checkpoint, seed, **run)
    manifest = read_manifest(output).model_dump() if (output / MANIFEST_NAME).is_file() else None
    record = {"output": output, "bytes": measure_weight_bytes(output), "manifest": manifest}
    screen.show(record, *tables.summarize_output(output))


def plan(
    model: opt.Model,
    recipe: opt.RecipeName = "struprune",
    dtype: opt.Dtype = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    num_samples: opt.NumSamples = None,
    seq_length: opt.SeqLength = None,
    batch_size: opt.BatchSize = 8,
    data: opt.Data = None,
    text_column: opt.TextColumn = "text",
    vocabulary: opt.SmallVocabulary = None,
    language: opt.Language = None,
    words: opt.Words = None,
    settings: opt.Settings = None,
    sparsity: opt.Sparsity = None,
    budget: opt.Budget = None,
    effort: opt.Effort = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Predict the sizes of a pruning run's result and the memory of the run, without pruning.

    The plan loads no weights. It needs the model's configuration alone, and with --vocabulary the model's folder and --data.
    """
    screen, changes = Screen(as_json, quiet), opt.read_changes(settings, budget, sparsity=sparsity, effort=effort)
    opt.prepare(screen, [model], recipe)
    from struprune_plugin.modifiers.plan import Workload, format_plan, plan_run
    from struprune_plugin.recipes.load import load_recipe
    from struprune_plugin.vocabulary.trim import describe_trim
    from struprune_plugin.vocabulary.trim_plan import Ranking, check_source, plan_trim

    if data and vocabulary is None:
        raise ValueError("--data: must come with --vocabulary: a plan reads no other text. Leave it out.")
    work = Workload(*opt.choose_windows(model, trust_remote_code, num_samples, seq_length, changes), batch_size)
    modifiers = load_recipe(recipe, changes).modifiers
    ranking = opt.read_ranking(vocabulary, data, text_column, language, words)
    rows = None if ranking is None else plan_trim(check_source(model, trusts=trust_remote_code), Ranking(**ranking))
    forecast = plan_run(model, modifiers, work, dtype, trust_remote_code, rows)
    trimmed = None if rows is None else describe_trim(rows)
    title = f"{model} by {recipe}, sparsity {forecast.sparsity:g} of the layers' linear parameters, "
    title += f"{1 - forecast.parameters[1] / forecast.parameters[0]:.1%} of the whole model"
    title += "" if trimmed is None else " (rows of the vocabulary included)"
    record = {"model": model, "recipe": recipe, **asdict(forecast)}
    record |= {} if trimmed is None else {"vocabulary": trimmed.model_dump(exclude={"kept"})}
    parts = [] if trimmed is None else [tables.format_facts(tables.list_vocabulary_facts(trimmed))]
    screen.show(record, title, *parts, *format_plan(forecast))


def trim(
    model: opt.Model,
    text: Annotated[str, opt.option("--text", _RANKED, "FILE.jsonl")],
    output: Annotated[Path | None, opt.option("--output", _TRIMMED, "OUT")] = None,
    vocabulary: opt.Vocabulary = "auto",
    language: opt.Language = None,
    words: opt.Words = None,
    limit: Annotated[float, opt.option("--limit", _GROWTH, "SHARE")] = 0.005,
    reserved: Annotated[Literal["keep", "drop"], opt.option("--reserved", _UNUSED)] = "keep",
    text_column: Annotated[str, opt.option("--text-column", "column of the text in --text", "NAME")] = "text",
    trust_remote_code: opt.TrustRemoteCode = False,
    overwrite: opt.Overwrite = False,
    plot: Annotated[Path | None, opt.option("--plot", "also draw the curve (needs matplotlib)", "FILE.svg")] = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Remove tokens that a user's text does not need, from tokenizer, embeddings and head alike.

    Text whose tokens all stay is cut as before. Without --output, only the curve of sizes is shown.
    """
    screen, size = Screen(as_json, quiet), opt.read_vocabulary(vocabulary)
    ranked: dict[str, Any] = {"text_column": text_column, "language": language, "words": words}
    opt.prepare(screen, [model])
    from struprune_plugin.vocabulary.trim import check_plot, draw_curve, trim_vocabulary

    if plot is not None:
        check_plot(plot)
    ranked |= {"vocabulary": size, "limit": limit, "reserved": reserved}
    record = trim_vocabulary(model, output, text, overwrite, trust_remote_code, **ranked)
    summary = tables.summarize_vocabulary(record, output)
    if plot is not None:
        draw_curve(record, plot)
        summary.append(f"wrote {plot}")
    screen.show({"output": output, **record.model_dump(exclude={"kept"})}, *summary)


def eval_(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="model folders or hub names")],
    text: opt.ScoredText = None,
    window: opt.Window = 256,
    max_tokens: opt.MaxTokens = None,
    text_column: Annotated[str, opt.option("--text-column", "column of the text in --text", "NAME")] = "text",
    no_window_bos: opt.NoScoredBos = False,
    tasks: opt.Tasks = "",
    include_path: opt.IncludePath = None,
    limit: opt.Limit = None,
    batch_size: Annotated[int, opt.option("--batch-size", "sequences per batch", "N", min=1)] = 8,
    dtype: Annotated[opt.Floats, opt.option("--dtype", "dtype of the computation")] = "float32",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure perplexity and lm-eval tasks of dense, pruned or quantised models, in one table.

    Perplexity is per token, over windows of fixed length: it does not compare models with different tokenizers, bits per byte
    do. With --tasks alone both are left out.
    """
    screen = Screen(as_json, quiet)
    for option, value in {"--limit": limit, "--include-path": include_path}.items():
        if value and not tasks:
            raise ValueError(f"{option}: must come with --tasks, got {value} alone. Name tasks, or leave it out.")
    if max_tokens and tasks and not text:
        raise ValueError(f"--max-tokens: must come with --text, got {max_tokens} with --tasks alone. Leave it out.")
    opt.prepare(screen, paths)
    from struprune_plugin.evaluation.scores import Scoring, find_dense, format_scores, list_results, make_scorer
    from struprune_plugin.evaluation.text import DEMO_TEST
    from struprune_plugin.reporting.pages import keep_results

    source = text or (None if tasks else DEMO_TEST)
    harness = [name.strip() for name in tasks.split(",") if tasks], include_path, limit
    settings = *harness, batch_size, dtype, not no_window_bos, True
    asked = Scoring(source, text_column, window, max_tokens, trust_remote_code, *settings)
    dense, scorer = find_dense(paths), make_scorer(asked, paths)
    scores = {path: scorer(path) for path in dict.fromkeys(paths)}
    screen.show({"settings": asdict(asked), "scores": scores}, format_scores(scores))
    for path, base in dense.items():
        try:
            keep_results(Path(path), list_results(asked, scores, path, base))
        except OSError as error:
            show_error(f"the scores cannot be stored: {error}")


def convert(
    path: opt.Folder,
    to: Annotated[Literal["uniform-padded", "gguf"], opt.option("--to", "form to write")],
    output: Annotated[Path, opt.option("--output", _OUT, "DIR")],
    overwrite: opt.Overwrite = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Convert a pruned or trimmed folder to another form, for stock classes or other engines. The model's outputs stay the same.

    uniform-padded: all layers padded with zeros to the largest, for stock classes. gguf: one file for llama.cpp (LLaMA only).
    """
    screen = Screen(as_json, quiet)
    opt.prepare(screen, [str(path)])
    from struprune_plugin.export.outputs import convert_folder
    from struprune_plugin.reporting.pages import write_card
    from struprune_plugin.storage.output_folder import write_folder

    with write_folder(output, overwrite, [path]) as partial:
        convert_folder(path, to, partial, trust_remote_code)
        carry_manifest(path, partial)
        carry_record(path, partial)
        write_card(partial)
    size = measure_weight_bytes(output)
    record = {"output": output, "form": to, "bytes": size}
    screen.show(record, f"wrote {output} ({format_bytes(size)} of weights)")


def inspect(path: opt.Folder, as_json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """Show the content of a pruned folder, layer by layer.

    The figures come from the folder's manifest (struprune.json), which --json prints.
    """
    screen, manifest = Screen(as_json, quiet), read_manifest(path)
    screen.show(manifest.model_dump(), tables.summarize_layers(manifest), tables.summarize_manifest(manifest, path))


def report(
    path: opt.Folder,
    output: Annotated[Path | None, opt.option("--output", _PAGE, "FILE")] = None,
    overwrite: Annotated[bool, opt.option("--overwrite", "replace an existing page")] = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Write an HTML page about a pruned folder: sizes, what was removed where, errors, quality and the recipe.

    It is one file without scripts and needs no network.
    """
    screen, manifest = Screen(as_json, quiet), read_manifest(path)
    page = output or path.resolve().with_name(f"{path.resolve().name}.html")
    if page.exists() and not overwrite:
        raise ValueError(f"--output: {page} exists. Choose another path, or pass --overwrite.")
    from struprune_plugin.reporting.pages import make_page

    check_place("--output", page.parent)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_whole(page, make_page(path, manifest))
    screen.show({"page": page}, f"wrote {page}")


def recipes(as_json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """List the shipped recipes, for `prune --recipe NAME`."""
    purposes = {name: describe_recipe(file) for name, file in list_recipes().items()}
    Screen(as_json, quiet).show(purposes, tables.format_facts(list(purposes.items())))


def sweep(
    model: opt.Model,
    output: Annotated[Path, opt.option("--output", "folder for the models, JSON and a picture", "DIR")],
    sparsity: Annotated[str, opt.option("--sparsity", "a range, or 0.2,0.4", "A:B:STEP")] = "0.1:0.6:0.1",
    recipe: opt.RecipeName = "struprune",
    pick: Annotated[str | None, opt.option("--pick", _WANTED, "LOSS")] = None,
    seed: opt.Seed = 0,
    dtype: opt.Dtype = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    num_samples: opt.NumSamples = None,
    seq_length: opt.SeqLength = None,
    batch_size: opt.BatchSize = 8,
    data: opt.Data = None,
    text_column: opt.TextColumn = "text",
    no_window_bos: opt.NoWindowBos = False,
    settings: opt.Settings = None,
    text: opt.ScoredText = None,
    window: opt.Window = 256,
    max_tokens: opt.MaxTokens = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prune at several sparsities, each by a run of its own, and compare quality.

    DIR holds the model of every point, e.g. DIR/0.2; after an interruption, the same command continues.
    """
    screen, changes, sparsities = Screen(as_json, quiet), opt.read_changes(settings), opt.read_sparsities(sparsity)
    most = None if pick is None else opt.read_pick(pick)
    if taken := sorted({name.rpartition(".")[2] for name in changes} & {"sparsity", "budget"}):
        raise ValueError(f"--set: must leave {taken[0]} to --sparsity, which sets it for every point. Remove it.")
    opt.prepare(screen, [model], recipe)
    from struprune_plugin.entrypoint import oneshot
    from struprune_plugin.evaluation.scores import Scoring, format_scores, make_scorer
    from struprune_plugin.evaluation.sweep import DENSE, digest_files, draw_sweep, pick_point, run_points
    from struprune_plugin.evaluation.text import DEMO_TEST

    windows = opt.choose_windows(model, trust_remote_code, num_samples, seq_length, changes)
    run = opt.describe_run(dtype, trust_remote_code, data, text_column, no_window_bos, windows, batch_size)
    run["seed"] = seed
    source, column = text or DEMO_TEST, text_column if text else "text"
    asked = Scoring(source, column, window, max_tokens, trust_remote_code, window_bos=not no_window_bos)
    content = recipe if "\n" in recipe else find_recipe(recipe).read_text(encoding="utf-8")
    identity = {"model": model, "recipe": content, "changes": changes}
    identity |= {"run": run, "scoring": asdict(asked), "content": digest_files(model, run["dataset"], source)}

    def run_point(share: float, out: Path) -> None:
        oneshot(model, recipe, out, overwrite=out.exists(), changes={**changes, "sparsity": share}, **run)

    scores, refused = run_points(output, identity, sparsities, run_point, make_scorer(asked, [model]))
    draw_sweep(scores, output)
    record: dict[str, Any] = {"scores": scores}
    parts: list[object] = [format_scores(scores, DENSE), f"wrote {output}"]
    missing = [f"{point}: {why}" for point, why in refused.items()]
    problems = [f"--sparsity: left out: {'; '.join(missing)}"] if missing else []
    if most is not None:
        try:
            point = pick_point(scores, most)
            record["picked"] = {"point": point, "output": output / point}
            parts.append(f"picked {point}: {output / point}")
        except ValueError as error:
            problems.append(str(error))
    screen.show(record, *parts)
    if problems:
        raise ValueError(" ".join(problems))


# -- the whole ------------------------------------------------------------------------------------------------------

COMMANDS = (prune, trim, plan, eval_, convert, inspect, report, sweep, recipes)
_EPILOG = (
    "Exit status: 0 if the whole job is done, 2 for bad input (one line on stderr names the remedy), "
    "130 and 143 after Ctrl-C and SIGTERM, 1 for other failures."
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"struprune {__version__}")
        raise typer.Exit


_Version = Annotated[bool, opt.option("--version", "Show the version.", is_eager=True, callback=_show_version)]


def struprune(version: _Version = False) -> None:
    """Prune large language models structurally: smaller matrices, no sparse kernels."""


def make_app() -> typer.Typer:
    """Return the command line as a typer app."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback(epilog=_EPILOG)(struprune)
    for command in COMMANDS:
        name = command.__name__.rstrip("_")
        app.command(name)(wraps(command)(partial(partial, command)))  # whose call returns the command, to be run
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 when the whole job is done, 2 for bad input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # do not fail on terminals without the tables' characters
    try:
        run = typer.main.get_command(make_app())(argv, prog_name="struprune", standalone_mode=False)
    except typer.TyperException as error:  # of the parser: print one line in place of typer's panel
        show_error(f"error: {error.format_message().rstrip('.')} (see --help)")
        return error.exit_code
    return run_command(run) if callable(run) else run  # a status after --help
