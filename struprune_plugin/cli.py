"""``struprune``: the command line."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from struprune_plugin import __version__
from struprune_plugin.arguments import (
    HelpFormatter,
    add_calibration,
    add_changes,
    add_device,
    add_dtype,
    add_recipe,
    choose_device,
    positive,
    read_changes,
    seed,
    set_logging,
)
from struprune_plugin.commands import add_compare, add_plan, add_report, add_sweep, draw_progress
from struprune_plugin.console import add_output_options, open_output, show, show_error
from struprune_plugin.early import check_device, check_model_name, check_place, check_recipe_name, check_text_file
from struprune_plugin.hub import check_push, push_folder
from struprune_plugin.manifest import MANIFEST_NAME, read_manifest
from struprune_plugin.report import (
    format_bytes,
    format_table,
    measure_weight_bytes,
    summarize_layers,
    summarize_manifest,
)
from struprune_plugin.shipped import describe_recipe, list_recipes
from struprune_plugin.verify import check_undamaged, find_damage, verify_folder

# Whatever needs torch or the host is imported by the command that needs it: help and early refusals take no seconds.
_BOOTSTRAP = 100  # draws; above 0 lets lm-eval give standard errors, those of means have a formula and draw nothing
_FORMS = ("uniform-padded", "masked", "block_configs", "static", "gguf")  # of struprune_plugin.export.forms


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 when the whole job is done, 2 for bad input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without our tables' signs is no reason to fail
    parser = _make_parser()
    _complete(parser)
    args = parser.parse_args(argv)
    try:
        with _raise_on_sigterm(), open_output(args):
            status = args.run(args)
            sys.stdout.flush()
            return status or 0
    except BrokenPipeError:  # whoever read has seen enough, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        failed = " (os error " in str(
            error
        )  # so the compiled libraries say that a disk is full, in classes of their own
        if not failed and not isinstance(error, (ValueError, OSError)):
            raise
        show_error(f"error: {' '.join(str(error).split())}")
        return 1 if failed or (isinstance(error, OSError) and error.errno is not None) else 2  # that is no bad input
    except (KeyboardInterrupt, _Terminated) as stop:
        print(file=sys.stderr)  # below a bar, or the terminal's ^C
        show_error("interrupted" if isinstance(stop, KeyboardInterrupt) else "terminated")
        return 128 + (signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM)


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks for completions, where argcomplete is there, and end; nothing happens otherwise."""
    if "_ARGCOMPLETE" in os.environ:
        with suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(parser)


class _Terminated(BaseException):
    """SIGTERM, as Ctrl-C is a KeyboardInterrupt: what was begun is undone on the way out."""


@contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    def stop(*_: object) -> NoReturn:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="struprune",
        description="Structured pruning of large language models: physically smaller, layer by layer.",
        epilog="Exit status: 0 when the whole job is done, 2 for bad input (one line on stderr says what), "
        "130 and 143 when stopped by Ctrl-C and SIGTERM, 1 otherwise.",
    )
    parser.add_argument("--version", action="version", version=f"struprune {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_prune(commands)
    add_plan(commands)
    _add_eval(commands)
    _add_convert(commands)
    _add_inspect(commands)
    add_report(commands)
    add_compare(commands)
    add_sweep(commands)
    _add_verify(commands)
    _add_recipes(commands)
    for command in commands.choices.values():
        add_output_options(command)
    return parser


def _add_prune(commands: Any) -> None:
    prune = commands.add_parser(
        "prune",
        help="prune a model with a recipe and write a folder that loads",
        description="Prune MODEL as the recipe says, and write a folder that transformers and lm-eval load.",
        formatter_class=HelpFormatter,
    )
    prune.add_argument("model", metavar="MODEL", help="a model folder or a hub name, e.g. facebook/opt-125m")
    add_recipe(prune, required=True)
    prune.add_argument("--output", required=True, metavar="OUT", type=Path, help="folder to write; whole or not at all")
    add_calibration(prune)
    add_changes(prune)
    prune.add_argument("--seed", type=seed, default=0, help="seed of every random choice")
    add_dtype(prune)
    prune.add_argument(
        "--offload", type=Path, metavar="FOLDER", help="for weights that the memory does not hold, while the run lasts"
    )
    prune.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="keep finished layers there until the run is over; after a kill the same command goes on there",
    )
    prune.add_argument("--overwrite", action="store_true", help="replace OUT if it is an earlier output, unchanged")
    prune.add_argument(
        "--push-to-hub", metavar="USER/NAME", help="upload the output there, too; a new repository is private"
    )
    prune.add_argument("--verbose", action="store_true", help="show the host's log")
    add_device(prune)
    prune.set_defaults(run=_prune)


def _add_eval(commands: Any) -> None:
    score = commands.add_parser(
        "eval",
        help="perplexity and lm-eval tasks of dense, pruned or quantised folders",
        description="Score models: token perplexity in fixed windows, lm-eval tasks, or both. Several models make a table.",
        formatter_class=HelpFormatter,
    )
    score.add_argument("paths", nargs="+", metavar="PATH", help="model folders or hub names")
    score.add_argument(
        "--text", type=Path, metavar="FILE.jsonl", help="text to score; the package's own where no --tasks are given"
    )
    score.add_argument("--text-column", default="text", metavar="NAME", help="column that holds the text")
    score.add_argument("--window", type=positive, default=256, metavar="N", help="context length in tokens")
    score.add_argument(
        "--stride", type=positive, metavar="N", help="tokens from window to window; the window itself if unset"
    )
    score.add_argument("--max-tokens", type=positive, metavar="N", help="score the first N tokens")
    score.add_argument(
        "--tasks", metavar="a,b", help="lm-eval tasks by the harness' own names, e.g. arc_easy,hellaswag"
    )
    score.add_argument("--include-path", metavar="DIR", help="folder with lm-eval task files, e.g. eval/tasks")
    score.add_argument(
        "--no-dense", action="store_true", help="do not add the local model that a folder was pruned from"
    )
    score.add_argument(
        "--no-keep", action="store_true", help="do not write the figures into the manifest and the card of our outputs"
    )
    score.add_argument("--limit", type=positive, metavar="N", help="examples a task")
    score.add_argument("--batch-size", type=positive, default=8, metavar="N", help="sequences at a time")
    score.add_argument(
        "--dtype", default="float32", choices=["auto", "float32", "bfloat16", "float16"], help="to compute in"
    )
    score.add_argument("--output", type=Path, metavar="FILE", help="write the figures here too, as JSON")
    add_device(score)
    score.set_defaults(run=_eval)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="write a pruned folder in a form that stock classes load",
        description="Write a pruned folder in another form: the same function, other shapes. uniform-padded: all layers padded "
        "with zeros to the largest, stock classes load it. masked: the dense model's shapes, zeros where units went. "
        "block_configs: every layer's own FFN width in the schema of Nemotron NAS models (LLaMA only). static: every layer's "
        "own sizes, linears that read the same input joined: the fewest steps in transformers. gguf: one file for llama.cpp, every "
        "layer of its own size (LLaMA only).",
    )
    convert.add_argument("path", metavar="OUT", type=Path, help="a pruned folder")
    convert.add_argument("--to", required=True, choices=_FORMS, help="form to write")
    convert.add_argument(
        "--output", required=True, metavar="DIR", type=Path, help="folder to write; whole or not at all"
    )
    convert.add_argument("--overwrite", action="store_true", help="replace DIR if it is an earlier output, unchanged")
    convert.set_defaults(run=_convert)


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="what a pruned folder contains, layer by layer",
        description="Print the manifest (struprune.json) of a pruned folder.",
    )
    inspect.add_argument("path", metavar="PATH", type=Path, help="a pruned folder")
    inspect.set_defaults(run=_inspect)


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="whether an output is what was written, byte by byte",
        description="Read every byte of OUT and compare it with the digests of when it was written: weights, configuration, "
        "modelling file, manifest. Exit status 0 where all is as written, 1 where something is damaged or missing.",
    )
    verify.add_argument("path", metavar="OUT", type=Path, help="an output of prune or convert")
    verify.set_defaults(run=_verify)


def _add_recipes(commands: Any) -> None:
    recipes = commands.add_parser(
        "recipes",
        help="the recipes that ship with the package",
        description="List the recipes that ship with the package: `prune --recipe NAME` takes them.",
    )
    recipes.set_defaults(run=_recipes)


def _prune(args: argparse.Namespace) -> None:
    changes = read_changes(args)
    check_device(args.device)
    check_recipe_name(args.recipe)
    check_text_file(args.data)
    check_model_name(args.model)
    if args.push_to_hub is not None:
        check_push(args.push_to_hub)
    from transformers import set_seed

    from struprune_plugin._register import StruPruneModifier, oneshot
    from struprune_plugin.checkpoint import check_checkpoint
    from struprune_plugin.data import DEMO_CALIBRATION, load_tokenizer, make_calibration_dataset
    from struprune_plugin.entrypoint import list_inputs
    from struprune_plugin.folder import check_apart, check_output
    from struprune_plugin.recipe import load_recipe

    choose_device(args.device)
    set_logging(args)
    recipe = load_recipe(args.recipe, changes=changes)
    if args.offload is not None:
        check_apart(args.output, args.offload)
        check_place("--offload", args.offload)
    kwargs = {"dataset": args.data}
    check_output(
        args.output, args.overwrite, list_inputs(args.model, args.recipe, recipe.modifiers, args.offload, kwargs)
    )
    check_checkpoint(args.model)
    set_seed(args.seed)
    tokenizer = load_tokenizer(args.model)
    dataset = make_calibration_dataset(
        args.data or DEMO_CALIBRATION, tokenizer, args.num_samples, args.seq_length, args.text_column
    )
    with _make_scratch(args.offload) as scratch, draw_progress(args, recipe):
        oneshot(
            model=args.model,
            recipe=recipe,
            output_dir=args.output,
            overwrite=args.overwrite,
            offload_folder=scratch,
            checkpoint_dir=args.checkpoint,
            dataset=dataset,
            batch_size=args.batch_size,
            num_calibration_samples=args.num_samples,
            shuffle_calibration_samples=False,
            precision=args.dtype,
        )
    record: dict[str, Any] = {"output": str(args.output), "bytes": measure_weight_bytes(args.output)}
    parts = [f"wrote {args.output}"]
    if any(isinstance(modifier, StruPruneModifier) for modifier in recipe.modifiers):
        record["manifest"] = manifest = read_manifest(args.output)
        parts = [summarize_layers(manifest), summarize_manifest(manifest, args.output), *parts]
    if args.push_to_hub is not None:
        record["hub"] = push_folder(args.output, args.push_to_hub)
        parts.append(f"pushed to {record['hub']}")
    show(args, record, "\n\n".join(parts))


@contextmanager
def _make_scratch(parent: Path | None) -> Iterator[str | None]:
    """Give a folder inside another that goes with the block; None without one."""
    if parent is None:
        yield None
        return
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield folder


def _read_tasks(args: argparse.Namespace) -> list[str]:
    """Return the names of lm-eval's tasks.

    :raises ValueError: an empty name; no folder of tasks; an option that nothing would use
    """
    tasks = [] if args.tasks is None else [name.strip() for name in args.tasks.split(",")]
    if not all(tasks):
        raise ValueError(
            f"--tasks: must be names with commas between them, got {args.tasks!r}. Correct it, or leave it out."
        )
    if args.include_path is not None and not Path(args.include_path).is_dir():
        raise ValueError(
            f"--include-path: must be a folder with task files, got {args.include_path!r}. Correct the path."
        )
    for name in ("include_path", "limit") if not tasks else ("stride", "max_tokens") if args.text is None else ():
        if getattr(args, name) is not None:
            needed = "--text" if tasks else "--tasks"
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option}: must be left out without {needed}, got {getattr(args, name)!r}. Give {needed}, too."
            )
    return tasks


def _eval(args: argparse.Namespace) -> None:
    check_device(args.device)
    tasks = _read_tasks(args)
    check_text_file(args.text)
    if args.output:
        _check_scores_file(args.output)
    for path in args.paths:
        check_model_name(path)
    from struprune_plugin import _register  # noqa: F401
    from struprune_plugin.data import DEMO_TEST, read_texts, tokenize_texts
    from struprune_plugin.evaluation import check_tasks, load_checkpoint, measure_perplexity, run_tasks
    from struprune_plugin.model.layers import count_parameters

    choose_device(args.device)
    set_logging(args)
    if tasks:
        check_tasks(tasks, args.include_path)
    text = args.text or (None if tasks else DEMO_TEST)
    texts = read_texts(text, args.text_column) if text else None
    scores: dict[str, dict[str, Any]] = {}
    for path in args.paths if args.no_dense else _add_dense(args.paths):
        model, tokenizer = load_checkpoint(path, args.dtype)
        score = scores[path] = {"parameters": 0, "bytes": measure_weight_bytes(path)}
        if texts is not None:
            tokens = tokenize_texts(tokenizer, texts, args.max_tokens)
            positions = getattr(model.config, "max_position_embeddings", args.window)
            if args.window > positions:
                raise ValueError(f"--window: must be at most the model's {positions} positions, got {args.window}.")
            score["perplexity"] = measure_perplexity(model, tokens, args.window, args.stride, args.batch_size)
            score["tokens"] = len(tokens)
        for task in tasks:  # one after the other: a progress bar each
            options: dict[str, Any] = {"bootstrap_iters": _BOOTSTRAP}
            results = run_tasks(model, tokenizer, [task], args.include_path, args.batch_size, args.limit, **options)
            score.update(
                {f"{name} {metric.split(',')[0]}": v for name, row in results.items() for metric, v in row.items()}
            )
        score["parameters"] = count_parameters(model)  # quantised weights are unpacked by the first forward pass
    settings = {"text": str(text) if text else None, "window": args.window, "stride": args.stride or args.window}
    settings |= {"max_tokens": args.max_tokens, "limit": args.limit, "dtype": args.dtype}
    record = {"settings": settings, "scores": scores}
    if not args.no_keep:
        _keep_scores(scores, settings)
    show(args, record, _format_scores(scores))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _keep_scores(scores: dict[str, dict[str, Any]], settings: dict[str, Any]) -> None:
    """Let what was measured of our outputs go with them, into manifest and card."""
    from struprune_plugin.results import keep_results, list_results

    for path, score in scores.items():
        if (Path(path) / MANIFEST_NAME).is_file():
            base = Path(read_manifest(path)["model"]["base"]).resolve()
            dense = next((other for name, other in scores.items() if Path(name).resolve() == base), {})
            if problem := keep_results(Path(path), list_results(score, dense, settings)):
                show_error(f"results are not kept with the output: {problem}")


def _check_scores_file(file: Path) -> None:
    """Refuse to write figures over what holds none.

    :raises ValueError: a folder, or a file that is not an earlier one of ours; a place where nothing can be written
    """
    if not file.exists():
        check_place("--output", file.parent)
        return
    try:
        ours = json.loads(file.read_text(encoding="utf-8")).keys() == {"settings", "scores"}
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise ValueError(
            f"--output: must be absent or an earlier file of scores, {file} is neither. Choose another path."
        )


def _add_dense(paths: list[str]) -> list[str]:
    """Put the model that a pruned folder was made from before it, where it can be found: the number to compare with."""
    found: list[str] = []
    for path in paths:
        if (Path(path) / MANIFEST_NAME).is_file():
            base = read_manifest(path)["model"]["base"]
            if Path(base).is_dir() and not any(
                Path(base).resolve() == Path(other).resolve() for other in paths + found
            ):
                found.append(base)
        found.append(path)
    return found


def _format_scores(scores: dict[str, dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for score in scores.values() for name in score if "stderr" not in name))
    columns = [name for name in columns if not name.endswith((" sample_len", " name", " alias")) and name != "tokens"]
    show = {"parameters": "{:,}".format, "bytes": lambda count: format_bytes(count) if count else "on the hub"}
    rows = [
        [path, *(show.get(name, "{:.4g}".format)(score[name]) if name in score else "" for name in columns)]
        for path, score in scores.items()
    ]
    return format_table(["model", *columns], rows)


def _convert(args: argparse.Namespace) -> None:
    if not args.path.is_dir():
        raise ValueError(f"{args.path}: must be a pruned folder, got none. Correct the path.")
    check_undamaged(args.path)
    from struprune_plugin import _register  # noqa: F401
    from struprune_plugin.card import try_write_card
    from struprune_plugin.checkpoint import check_whole
    from struprune_plugin.export.forms import convert_folder
    from struprune_plugin.folder import write_folder

    set_logging(args)
    if (args.path / "config.json").is_file():
        check_whole(str(args.path))
    with write_folder(args.output, args.overwrite, [args.path], measure_weight_bytes(args.path)) as partial:
        convert_folder(args.path, args.to, partial)
        base = read_manifest(args.path)["model"]["base"] if (args.path / MANIFEST_NAME).is_file() else ""
        try_write_card(partial, base)
    how = "; load it with trust_remote_code=True" if any(args.output.glob("*.py")) else ""
    size = measure_weight_bytes(args.output)
    record = {"output": str(args.output), "form": args.to, "bytes": size}
    show(args, record, f"wrote {args.output} ({format_bytes(size)} of weights{how})")


def _inspect(args: argparse.Namespace) -> int:
    manifest = read_manifest(args.path)
    damage = find_damage(args.path) if args.path.is_dir() else []
    folder = args.path if args.path.is_dir() else args.path.parent
    show(args, manifest, f"{summarize_layers(manifest)}\n\n{summarize_manifest(manifest, folder)}")
    for line in damage:
        show_error(f"damaged: {line}")
    return int(bool(damage))


def _verify(args: argparse.Namespace) -> int:
    verdict = verify_folder(args.path)
    rows = [[entry.name, f"{entry.num_bytes:,}", entry.state] for entry in verdict.entries]
    state = "damaged" if verdict.problems else "whole"
    lines = [format_table(["file", "bytes", "state"], rows), *verdict.notes]
    lines += [*(f"damaged: {line}" for line in verdict.problems), f"{args.path} is {state}"]
    show(args, {"path": str(args.path), "state": state, **asdict(verdict)}, "\n".join(lines))
    return int(bool(verdict.problems))


def _recipes(args: argparse.Namespace) -> None:
    recipes = {name: describe_recipe(file) for name, file in list_recipes().items()}
    width = max(map(len, recipes), default=0)
    show(args, recipes, "\n".join(f"{name.ljust(width)}  {told}" for name, told in recipes.items()))


if __name__ == "__main__":
    sys.exit(main())
