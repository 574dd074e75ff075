"""Output and exit status of every command: ``--json``, ``--quiet`` and one-line errors."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Container
from typing import Any, NoReturn

_ARGUMENTS = {"checkpoint_dir": "checkpoint", "dataset": "data", "offload_folder": "offload", "output_dir": "output"}
_ARGUMENTS |= {name: name for name in ("language", "limit", "reserved", "text", "vocabulary", "words")}


class Screen:
    """Output of one command; what else is printed goes to stderr, under ``--quiet`` nowhere, until :func:`run_command` ends."""

    def __init__(self, as_json: bool, quiet: bool):
        self.as_json, self.quiet, self._out, self._err = as_json, quiet, sys.stdout, sys.stderr
        if quiet:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
        sys.stdout = sys.stderr

    def set_log(self) -> None:
        """Show warnings and errors, under ``--quiet`` errors alone, or what ``LLM_COMPRESSOR_LOG_LEVEL`` asks for."""
        from loguru import logger

        logger.remove()
        asked = os.environ.get("LLM_COMPRESSOR_LOG_LEVEL")
        level = "ERROR" if self.quiet else (asked or "WARNING").upper()
        hidden: Any = {"llmcompressor.utils.dev": False}  # says: no accelerator
        if not asked:
            hidden["llmcompressor.utils.metric_logging"] = False  # seconds and errors of modules without names
        logger.add(self._err, level=level, format="{level}: {message}", filter=hidden)
        for name in ("torch.fx._symbolic_trace", "lm_eval"):
            logging.getLogger(name).setLevel(logging.ERROR)

    def show(self, record: Any, *parts: object) -> None:
        """Print a command's result: the record under ``--json``, otherwise the parts, separated by empty lines."""
        from pydantic_core import to_json

        if self.as_json:  # numbers that are not finite, which JSON lacks, become null
            parts = (to_json(record, indent=1, inf_nan_mode="null", fallback=str).decode(),)
        print("\n\n".join(map(str, parts)), file=self._out, flush=True)


def show_error(message: str) -> None:
    """Print one line on stderr."""
    print(f"struprune: {' '.join(message.split())}", file=sys.stderr)


def _name_option(place: str, options: Container[str]) -> str:
    """Return the option of a command that sets an argument; a text is its ``--data`` or its ``--text``."""
    name = _ARGUMENTS.get(place, "")
    if options and name not in options:
        name = {"data": "text", "text": "data"}.get(name, "")
    return f"--{name}" if name else place


def _terminate(*_: object) -> NoReturn:
    raise KeyboardInterrupt("terminated")  # as Ctrl-C does, so that cleanup runs


def run_command(run: Callable[[], object]) -> int:
    """Run a command and return its exit status: 0 when the whole job is done, 2 for bad input, 130 and 143 when stopped."""
    streams, before = (sys.stdout, sys.stderr), signal.signal(signal.SIGTERM, _terminate)
    try:
        try:
            run()
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
        place, colon, problem = str(error).partition(": ")
        show_error(f"error: {_name_option(place, getattr(run, 'keywords', {}))}{colon}{problem}")
        return 1 if failed or (isinstance(error, OSError) and error.errno is not None) else 2  # 1: not bad input
    except KeyboardInterrupt as stop:
        print(file=sys.stderr)  # below a bar, or the terminal's ^C
        show_error(str(stop) or "interrupted")
        return 128 + (signal.SIGTERM if str(stop) else signal.SIGINT)
