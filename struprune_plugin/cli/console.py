"""Output and exit status of every command: ``--json``, ``--quiet`` and one-line errors."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

_OPTIONS = {  # arguments in Python's messages -> options
    "checkpoint_dir": "--checkpoint",
    "dataset": "--data",
    "offload_folder": "--offload",
    "output_dir": "--output",
    "recipe": "--recipe",
    "tasks": "--tasks",
    "text": "--text",
}


class Screen:
    """Output of one command; what else is printed goes to stderr, under ``--quiet`` nowhere, until :func:`run_command` ends.

    :param as_json: print the record of the result and nothing else
    :param quiet: print no progress bars and no warnings
    """

    def __init__(self, as_json: bool, quiet: bool):
        self.as_json, self.quiet, self._out, self._err = as_json, quiet, sys.stdout, sys.stderr
        if quiet:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
        sys.stdout = sys.stderr

    def set_log(self, verbose: bool = False) -> None:
        """Show warnings and errors, under ``--quiet`` errors alone, or all that llm-compressor logs."""
        from loguru import logger

        if verbose:
            os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "INFO")  # otherwise a run hides llm-compressor's steps
            return
        logger.remove()
        level, hidden = "ERROR" if self.quiet else "WARNING", {"llmcompressor.utils.dev": False}  # says: no accelerator
        logger.add(self._err, level=level, format="{level}: {message}", filter=hidden)  # type: ignore[arg-type]
        for name in ("torch.fx._symbolic_trace", "lm_eval"):
            logging.getLogger(name).setLevel(logging.ERROR)

    def show(self, record: Any, *parts: RenderableType) -> None:
        """Print a command's result: the record under ``--json``, otherwise the parts, separated by empty lines."""
        if self.as_json:
            print(json.dumps(record, indent=1), file=self._out)
        else:
            console = _open_console(self._out)
            for index, part in enumerate(parts):
                console.print(*([""] if index else []), part, sep="\n", soft_wrap=True)
        self._out.flush()

    def show_error(self, message: str) -> None:
        """Print one line on stderr, also under ``--quiet``."""
        show_error(message, self._err)


def _open_console(stream: Any) -> Console:
    return Console(file=stream, markup=False, highlight=False, emoji=False)


def show_error(message: str, stream: TextIO | None = None) -> None:
    """Print one line on a stream, stderr by default."""
    _open_console(stream or sys.stderr).print(Text.assemble(("struprune:", "red"), f" {message}"), soft_wrap=True)


class _Terminated(BaseException):
    """SIGTERM as an exception, as KeyboardInterrupt is for Ctrl-C, so that cleanup runs."""


def _raise_terminated(*_: object) -> NoReturn:
    raise _Terminated


def run_command(run: Callable[[], object]) -> int:
    """Run a command and return its exit status: 0 when the whole job is done, 2 for bad input, 130 and 143 when stopped."""
    streams, before = (sys.stdout, sys.stderr), signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        try:
            run()
            streams[0].flush()
            return 0
        finally:
            sys.stdout, sys.stderr = streams
            signal.signal(signal.SIGTERM, before)
    except BrokenPipeError:  # the reader has closed the pipe, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        failed = " (os error " in str(error)  # how compiled libraries report a full disk, in their own classes
        if not failed and not isinstance(error, (ValueError, OSError)):
            raise
        place, colon, told = " ".join(str(error).split()).partition(": ")
        show_error(f"error: {_OPTIONS.get(place, place)}{colon}{told}")
        return 1 if failed or (isinstance(error, OSError) and error.errno is not None) else 2  # 1: not bad input
    except (KeyboardInterrupt, _Terminated) as stop:
        print(file=sys.stderr)  # below a bar, or the terminal's ^C
        interrupted = isinstance(stop, KeyboardInterrupt)
        show_error("interrupted" if interrupted else "terminated")
        return 128 + (signal.SIGINT if interrupted else signal.SIGTERM)
