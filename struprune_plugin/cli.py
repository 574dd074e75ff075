"""``struprune``: prune, eval, convert, inspect, verify and recipes from the command line."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from struprune_plugin.early import check_device, check_model_name, check_recipe_name, check_text_file
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
_FORMS = ("uniform-padded", "masked", "block_configs", "gguf")  # of struprune_plugin.export.forms


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 when the whole job is done, 2 for bad input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without our tables' signs is no reason to fail
    args = _make_parser().parse_args(argv)
    try:
        with _raise_on_sigterm():
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
        print(f"struprune: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if failed or (isinstance(error, OSError) and error.errno is not None) else 2  # that is no bad input
    except (KeyboardInterrupt, _Terminated) as stop:
        print(f"\nstruprune: {'interrupted' if isinstance(stop, KeyboardInterrupt) else 'terminated'}", file=sys.stderr)
        return 128 + (signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM)


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
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_prune(commands)
    _add_eval(commands)
    _add_convert(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_recipes(commands)
    return parser


def _add_prune(commands: Any) -> None:
    prune = commands.add_parser(
        "prune",
        help="prune a model with a recipe and write a folder that loads",
        description="Prune MODEL as the recipe says, and write a folder that transformers and lm-eval load.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    prune.add_argument("model", metavar="MODEL", help="a model folder or a hub name, e.g. facebook/opt-125m")
    prune.add_argument(
        "--recipe", required=True, metavar="R", help="a recipe file, or a name that `struprune recipes` lists"
    )
    prune.add_argument("--output", required=True, metavar="OUT", type=Path, help="folder to write; whole or not at all")
    data = prune.add_argument_group("calibration text")
    data.add_argument(
        "--data",
        metavar="SRC",
        help="FILE.jsonl, c4, wikitext2 or a hub data set; the package's own sample where left out",
    )
    data.add_argument("--text-column", default="text", metavar="NAME", help="column that holds the text")
    data.add_argument("--num-samples", type=_positive, default=64, metavar="N", help="sequences")
    data.add_argument("--seq-length", type=_positive, default=256, metavar="N", help="tokens a sequence")
    data.add_argument("--batch-size", type=_positive, default=8, metavar="N", help="sequences on the device at a time")
    change = prune.add_argument_group("changes to the recipe")
    change.add_argument(
        "--sparsity", type=float, metavar="R", help="fraction of decoder parameters to remove, in [0, 1)"
    )
    change.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        metavar="FIELD=VALUE",
        help="set a field, e.g. attention_unit=head, or LoRARecoveryModifier.alpha=8 where several modifiers have it; "
        "may be repeated",
    )
    change.add_argument(
        "--memory-budget",
        type=_bytes,
        metavar="BYTES",
        help="what the device may hold, e.g. 4GB; refused where too little",
    )
    prune.add_argument("--seed", type=_seed, default=0, help="seed of every random choice")
    prune.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of the model"
    )
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
    prune.add_argument("--verbose", action="store_true", help="show the host's log")
    _add_device(prune)
    prune.set_defaults(run=_prune)


def _add_eval(commands: Any) -> None:
    score = commands.add_parser(
        "eval",
        help="perplexity and lm-eval tasks of dense, pruned or quantised folders",
        description="Score models: token perplexity in fixed windows, lm-eval tasks, or both. Several models make a table.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    score.add_argument("paths", nargs="+", metavar="PATH", help="model folders or hub names")
    score.add_argument(
        "--text", type=Path, metavar="FILE.jsonl", help="text to score; the package's own where no --tasks are given"
    )
    score.add_argument("--text-column", default="text", metavar="NAME", help="column that holds the text")
    score.add_argument("--window", type=_positive, default=256, metavar="N", help="context length in tokens")
    score.add_argument(
        "--stride", type=_positive, metavar="N", help="tokens from window to window; the window itself if unset"
    )
    score.add_argument("--max-tokens", type=_positive, metavar="N", help="score the first N tokens")
    score.add_argument("--tasks", metavar="a,b", help="lm-eval tasks")
    score.add_argument("--include-path", metavar="DIR", help="folder with lm-eval task files, e.g. eval/tasks")
    score.add_argument(
        "--no-dense", action="store_true", help="do not add the local model that a folder was pruned from"
    )
    score.add_argument("--limit", type=_positive, metavar="N", help="examples a task")
    score.add_argument("--batch-size", type=_positive, default=8, metavar="N", help="sequences at a time")
    score.add_argument(
        "--dtype", default="float32", choices=["auto", "float32", "bfloat16", "float16"], help="to compute in"
    )
    score.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    _add_device(score)
    score.set_defaults(run=_eval)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="write a pruned folder in a form that stock classes load",
        description="Write a pruned folder in another form: the same function, other shapes. uniform-padded: all layers padded "
        "with zeros to the largest, stock classes load it. masked: the dense model's shapes, zeros where units went. "
        "block_configs: every layer's own FFN width in the schema of Nemotron NAS models (LLaMA only). gguf: one file for "
        "llama.cpp, every layer of its own size (LLaMA only).",
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
    inspect.add_argument("--json", action="store_true", help="the whole manifest as JSON")
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


def _positive(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, below 10^9, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or len(text) > 10 or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^32 - 1, got {text!r}")
    return int(text)


def _bytes(text: str) -> int:
    """Read a number of bytes: digits, or digits before kB, MB, GB."""
    number, unit = text, 1
    for name, value in (("kB", 10**3), ("MB", 10**6), ("GB", 10**9)):
        if text.endswith(name):
            number, unit = text.removesuffix(name), value
    is_number = number.isascii() and number.replace(".", "", 1).isdigit()
    if not is_number or not 1 <= float(number) * unit < 2**63:
        raise argparse.ArgumentTypeError(f"must be a number of bytes, e.g. 500MB or 4GB, got {text!r}")
    return round(float(number) * unit)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:N")


def _choose_device(device: str) -> None:
    """Let the host and torch see only the device asked for.

    By now an import may have started CUDA, after which it no longer looks at the environment; so start afresh.
    """
    import torch

    check_device(device)
    kind, _, index = device.partition(":")
    visible = "" if kind == "cpu" else index or None
    if torch.version.cuda and visible is not None and os.environ.get("CUDA_VISIBLE_DEVICES") != visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: {device!r} must be present, torch finds no such GPU. Use --device auto or cpu.")


def _quiet(verbose: bool) -> None:
    """Leave progress bars, our own words and errors; drop what a user cannot act on."""
    from loguru import logger

    if verbose:
        return
    logger.remove()
    logger.add(sys.stderr, level="WARNING", format="{level}: {message}", filter=_is_actionable)
    for name in ("torch.fx._symbolic_trace", "lm_eval"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _is_actionable(record: Any) -> bool:
    return "No accelerator available" not in record["message"]


def _prune(args: argparse.Namespace) -> None:
    changes = _read_changes(args)
    check_device(args.device)
    check_recipe_name(args.recipe)
    check_text_file(args.data)
    check_model_name(args.model)
    from transformers import set_seed

    from struprune_plugin._register import StruPruneModifier, oneshot
    from struprune_plugin.checkpoint import check_checkpoint
    from struprune_plugin.data import DEMO_CALIBRATION, load_tokenizer, make_calibration_dataset
    from struprune_plugin.entrypoint import list_inputs
    from struprune_plugin.folder import check_apart, check_output
    from struprune_plugin.recipe import load_recipe

    _choose_device(args.device)
    _quiet(args.verbose)
    recipe = load_recipe(args.recipe, changes=changes)
    if args.offload is not None:
        check_apart(args.output, args.offload)
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
    with _make_scratch(args.offload) as scratch:
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
    if not any(isinstance(modifier, StruPruneModifier) for modifier in recipe.modifiers):
        print(f"wrote {args.output}")
        return
    manifest = read_manifest(args.output)
    print(summarize_layers(manifest), summarize_manifest(manifest, args.output), f"wrote {args.output}", sep="\n\n")


@contextmanager
def _make_scratch(parent: Path | None) -> Iterator[str | None]:
    """Give a folder inside another that goes with the block; None without one."""
    if parent is None:
        yield None
        return
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield folder


def _read_changes(args: argparse.Namespace) -> dict[str, Any]:
    import yaml

    given = [("--set", *change.partition("=")) for change in args.changes]
    changes: dict[str, Any] = {}
    for option, field, equals, text in given:
        if not field or not equals:
            raise ValueError(f"{option}: must be FIELD=VALUE, got {field + equals + text!r}.")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
            problem = " ".join(str(error).split())
            raise ValueError(f"{option}: {field} must be valid YAML, got {text!r}: {problem}. Correct it.") from None
        _add_change(changes, option, field, value)
    if args.sparsity is not None:
        _add_change(changes, "--sparsity", "sparsity", args.sparsity)
    if args.memory_budget is not None:
        _add_change(changes, "--memory-budget", "memory_budget", args.memory_budget)
    return changes


def _add_change(changes: dict[str, Any], option: str, field: str, value: object) -> None:
    if field in changes:
        raise ValueError(f"{option}: {field} must be set once, got {changes[field]!r} and {value!r}. Give one.")
    changes[field] = value


def _eval(args: argparse.Namespace) -> None:
    check_device(args.device)
    check_text_file(args.text)
    for path in args.paths:
        check_model_name(path)
    from struprune_plugin import _register  # noqa: F401
    from struprune_plugin.data import DEMO_TEST, read_texts, tokenize_texts
    from struprune_plugin.evaluation import load_checkpoint, measure_perplexity, run_tasks
    from struprune_plugin.model.layers import count_parameters

    _choose_device(args.device)
    _quiet(verbose=False)
    tasks = args.tasks.split(",") if args.tasks else []
    text = args.text or (None if tasks else DEMO_TEST)
    texts = read_texts(text, args.text_column) if text else None
    if args.json:
        _check_scores_file(args.json)
        args.json.parent.mkdir(parents=True, exist_ok=True)
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
        if tasks:
            results = run_tasks(model, tokenizer, tasks, args.include_path, args.batch_size, args.limit)
            score.update(
                {f"{task} {name.split(',')[0]}": v for task, row in results.items() for name, v in row.items()}
            )
        score["parameters"] = count_parameters(model)  # quantised weights are unpacked by the first forward pass
    print(_format_scores(scores))
    if args.json:
        settings = {"text": str(text) if text else None, "window": args.window, "stride": args.stride or args.window}
        args.json.write_text(json.dumps({"settings": settings, "scores": scores}, indent=1) + "\n", encoding="utf-8")


def _check_scores_file(file: Path) -> None:
    """Refuse to write figures over what holds none.

    :raises ValueError: a folder, or a file that is not an earlier one of ours
    """
    if not file.exists():
        return
    try:
        ours = json.loads(file.read_text(encoding="utf-8")).keys() == {"settings", "scores"}
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise ValueError(
            f"--json: must be absent or an earlier file of scores, {file} is neither. Choose another path."
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
    columns = [name for name in columns if not name.endswith((" sample_len", " name", " alias"))]
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
    from struprune_plugin.checkpoint import check_whole
    from struprune_plugin.export.forms import convert_folder
    from struprune_plugin.folder import write_folder

    _quiet(verbose=False)
    if (args.path / "config.json").is_file():
        check_whole(str(args.path))
    with write_folder(args.output, args.overwrite, [args.path], measure_weight_bytes(args.path)) as partial:
        convert_folder(args.path, args.to, partial)
    how = "; load it with trust_remote_code=True" if any(args.output.glob("*.py")) else ""
    print(f"wrote {args.output} ({format_bytes(measure_weight_bytes(args.output) or 0)} of weights{how})")


def _inspect(args: argparse.Namespace) -> int:
    manifest = read_manifest(args.path)
    damage = find_damage(args.path) if args.path.is_dir() else []
    if args.json:
        print(json.dumps(manifest, indent=1))
    else:
        folder = args.path if args.path.is_dir() else args.path.parent
        print(summarize_layers(manifest), summarize_manifest(manifest, folder), sep="\n\n")
    for line in damage:
        print(f"struprune: damaged: {line}", file=sys.stderr)
    return int(bool(damage))


def _verify(args: argparse.Namespace) -> int:
    verdict = verify_folder(args.path)
    rows = [[entry.name, f"{entry.num_bytes:,}", entry.state] for entry in verdict.entries]
    print(format_table(["file", "bytes", "state"], rows), *verdict.notes, sep="\n")
    for line in verdict.problems:
        print(f"damaged: {line}")
    print(f"{args.path} is {'damaged' if verdict.problems else 'whole'}")
    return int(bool(verdict.problems))


def _recipes(_: argparse.Namespace) -> None:
    recipes = list_recipes()
    width = max(map(len, recipes), default=0)
    print("\n".join(f"{name.ljust(width)}  {describe_recipe(file)}" for name, file in recipes.items()))


if __name__ == "__main__":
    sys.exit(main())
