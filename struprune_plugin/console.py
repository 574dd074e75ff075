"""What all commands have in common: ``--json`` and ``--quiet``, and colours on terminals alone. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, TextIO

_BOLD, _RED, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[0m"


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command takes."""
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--json", action="store_true", help="results as JSON, and nothing else on stdout")
    shown.add_argument("--quiet", action="store_true", help="no progress bars, no warnings: results and errors alone")


@contextmanager
def open_output(args: argparse.Namespace) -> Iterator[None]:
    """Give the command in the block where :func:`show` writes; under ``--json`` all else that is printed goes to stderr."""
    args.stdout = sys.stdout
    with ExitStack() as stack:
        if getattr(args, "json", False):
            stack.enter_context(redirect_stdout(sys.stderr))
        if getattr(args, "quiet", False):
            stack.enter_context(_hide_bars())
        yield


@contextmanager
def _hide_bars() -> Iterator[None]:
    """Draw no progress bars while the block lasts, whoever asks for one."""
    from tqdm.std import tqdm

    init = tqdm.__init__

    def init_disabled(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "disable": True})

    tqdm.__init__ = init_disabled  # type: ignore[method-assign]
    try:
        yield
    finally:
        tqdm.__init__ = init  # type: ignore[method-assign]


def show(args: argparse.Namespace, record: Any, text: str) -> None:
    """Print a command's result: the record under ``--json``, the text otherwise."""
    out: TextIO = args.stdout
    if args.json:
        print(json.dumps(record, indent=1), file=out)
    else:
        print(_embolden_headers(text) if has_colours(out) else text, file=out)
    out.flush()


def show_error(message: str) -> None:
    """Print one line on stderr."""
    prefix = f"{_RED}struprune:{_PLAIN}" if has_colours(sys.stderr) else "struprune:"
    print(f"{prefix} {message}", file=sys.stderr)


def has_colours(stream: TextIO) -> bool:
    """Tell whether a stream is a terminal that takes colours, and nobody has asked for none (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _embolden_headers(text: str) -> str:
    """Make the line over every rule of a table bold."""
    return re.sub(r"^(.+)(\n─+(?:  ─+)*)$", rf"{_BOLD}\1{_PLAIN}\2", text, flags=re.MULTILINE)
