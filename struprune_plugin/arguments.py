"""Arguments that several commands share, and what they do to a process. Nothing heavy is imported before a command asks for it."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from typing import Any

from struprune_plugin.early import check_device
from struprune_plugin.shipped import list_recipes

_PICK = re.compile(r"([+-])(\d+(?:[.]\d+)?)(%?) (\S+)")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default is None or action.default is False or action.default == []
        return action.help if plain else super()._get_help_string(action)


def add_recipe(parser: argparse.ArgumentParser, **options: Any) -> None:
    recipe: Any = parser.add_argument(
        "--recipe", metavar="R", help="a recipe file, or a name that `struprune recipes` lists", **options
    )
    recipe.completer = lambda **_: list(list_recipes())  # for argcomplete


def add_calibration(parser: argparse.ArgumentParser, source: bool = True) -> None:
    """Add the options that say what is calibrated on.

    :param source: which text, too, not only how much
    """
    data = parser.add_argument_group("calibration text")
    if source:
        data.add_argument(
            "--data",
            metavar="SRC",
            help="FILE.jsonl, c4, wikitext2 or a hub data set; the package's own sample where left out",
        )
        data.add_argument("--text-column", default="text", metavar="NAME", help="column that holds the text")
    data.add_argument("--num-samples", type=positive, default=64, metavar="N", help="sequences")
    data.add_argument("--seq-length", type=length, default=256, metavar="N", help="tokens a sequence")
    data.add_argument("--batch-size", type=positive, default=8, metavar="N", help="sequences on the device at a time")


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`read_changes` reads."""
    change = parser.add_argument_group("changes to the recipe")
    change.add_argument(
        "--sparsity", type=share, metavar="R", help="fraction of decoder parameters to remove, in [0, 1)"
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
        type=number_of_bytes,
        metavar="BYTES",
        help="what the device may hold, e.g. 4GB; refused where too little",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of the model"
    )


def positive(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, below 10^9, got {text!r}")
    return int(text)


def length(text: str) -> int:
    if positive(text) < 2:  # a token alone has no context
        raise argparse.ArgumentTypeError(f"must be at least 2 tokens, got {text!r}")
    return int(text)


def share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number in [0, 1), e.g. 0.3, got {text!r}") from None


def seed(text: str) -> int:
    if not text.isdecimal() or len(text) > 10 or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^32 - 1, got {text!r}")
    return int(text)


def number_of_bytes(text: str) -> int:
    """Read a number of bytes: digits, or digits before kB, MB, GB."""
    number, unit = text, 1
    for name, value in (("kB", 10**3), ("MB", 10**6), ("GB", 10**9)):
        if text.endswith(name):
            number, unit = text.removesuffix(name), value
    is_number = number.isascii() and number.replace(".", "", 1).isdigit()
    if not is_number or not 1 <= float(number) * unit < 2**63:
        raise argparse.ArgumentTypeError(f"must be a number of bytes, e.g. 500MB or 4GB, got {text!r}")
    return round(float(number) * unit)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:N")


def choose_device(device: str) -> None:
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


def set_logging(args: argparse.Namespace) -> None:
    """Leave progress bars, our own words and errors; drop what a user cannot act on, and under --quiet all but errors."""
    from loguru import logger

    if getattr(args, "verbose", False):
        return
    logger.remove()
    logger.add(
        sys.stderr, level="ERROR" if args.quiet else "WARNING", format="{level}: {message}", filter=_is_actionable
    )
    if args.quiet:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
    for name in ("torch.fx._symbolic_trace", "lm_eval"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _is_actionable(record: Any) -> bool:
    return "No accelerator available" not in record["message"]


def read_changes(args: argparse.Namespace) -> dict[str, Any]:
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


def read_sparsities(text: str) -> list[float]:
    """Read ``first:last:step`` or a list with commas.

    :raises ValueError: neither, or a number that is no sparsity
    """
    try:
        found = [float(part) for part in text.split(",")] if ":" not in text else _spread(*map(float, text.split(":")))
    except (ValueError, TypeError):
        found = []
    if not found or not all(0 < value < 1 for value in found) or len(set(found)) < len(found):
        raise ValueError(
            f"--sparsity: must be first:last:step or numbers with commas, each above 0 and below 1, got {text!r}. Correct it."
        )
    return found


def _spread(first: float, last: float, step: float) -> list[float]:
    """Return the numbers from one to another; none where these are no range, or one of more than a hundred."""
    count = (last - first) / step if step > 0 else -1.0
    return [round(first + index * step, 6) for index in range(int(count + 1e-6) + 1)] if 0 <= count < 100 else []


def read_pick(text: str) -> tuple[float, bool, str]:
    """Read what may be lost: ``+5% perplexity``, ``-0.01 arc_easy``; return (most, whether relative, of what).

    :raises ValueError: another form
    """
    found = _PICK.fullmatch(text.strip())
    if found is None or (found[1] == "+") != (found[4] == "perplexity"):
        raise ValueError(
            f"--pick: must be like '+5% perplexity' or '-1% TASK', got {text!r}. Say how much perplexity may rise or a task fall."
        )
    return float(found[2]) / (100 if found[3] else 1), bool(found[3]), found[4]
