"""Output and exit status of every command: ``--json``, ``--quiet`` and one-line errors."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NoReturn, TextIO

import typer
from rich.console import Console, RenderableType
from rich.text import Text


@dataclass
class Screen:
    """Output options of every command, and the output itself."""

    title: ClassVar = "Output"
    json: Annotated[bool, typer.Option("--json", help="print the results as JSON, and nothing else on stdout")] = False
    quiet: Annotated[
        bool, typer.Option("--quiet", help="print only results and errors: no progress bars, no warnings")
    ] = False
    out: TextIO = field(init=False, default_factory=lambda: sys.stdout)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Reserve stdout for :meth:`show` under ``--json``, and hide progress bars under ``--quiet``, in the block."""
        with redirect_stdout(sys.stderr) if self.json else nullcontext(), _hide_bars() if self.quiet else nullcontext():
            yield

    def show(self, record: Any, *parts: RenderableType) -> None:
        """Print a command's result: the record under ``--json``, otherwise the parts, separated by empty lines."""
        if self.json:
            print(json.dumps(record, indent=1), file=self.out)
        else:
            console = _open_console(self.out)
            for index, part in enumerate(parts):
                console.print(*([""] if index else []), part, sep="\n", soft_wrap=True)
        self.out.flush()

    def set_logging(self, verbose: bool = False) -> None:
        """Show StruPrune's messages and warnings that a user can act on; under ``--quiet`` only errors."""
        from loguru import logger

        if verbose:
            os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "INFO")  # otherwise a run hides llm-compressor's steps
            return
        logger.remove()
        level = "ERROR" if self.quiet else "WARNING"
        logger.add(sys.stderr, level=level, format="{level}: {message}", filter=_is_actionable)
        if self.quiet:
            from transformers.utils import logging as transformers_logging

            transformers_logging.disable_progress_bar()
            transformers_logging.set_verbosity_error()
        for name in ("torch.fx._symbolic_trace", "lm_eval"):
            logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def _hide_bars() -> Iterator[None]:
    """Hide all progress bars in the block, including those that llm-compressor enables explicitly."""
    from tqdm.std import tqdm

    init = tqdm.__init__

    def init_disabled(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "disable": True})

    tqdm.__init__ = init_disabled  # type: ignore[method-assign]
    try:
        yield
    finally:
        tqdm.__init__ = init  # type: ignore[method-assign]


def _is_actionable(record: Any) -> bool:
    return "No accelerator available" not in record["message"]


def _open_console(stream: TextIO) -> Console:
    return Console(file=stream, markup=False, highlight=False, emoji=False)


def show_error(message: str) -> None:
    """Print one line on stderr."""
    _open_console(sys.stderr).print(Text.assemble(("struprune:", "red"), f" {message}"), soft_wrap=True)


def run_command(run: Callable[[], int | None], screen: Screen) -> int:
    """Run a command and return its exit status: 0 when the whole job is done, 2 for bad input, 130 and 143 when stopped."""
    try:
        with _raise_on_sigterm(), screen.open():
            status = run()
            sys.stdout.flush()
            return status or 0
    except BrokenPipeError:  # the reader has closed the pipe, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        failed = " (os error " in str(error)  # how compiled libraries report a full disk, in their own classes
        if not failed and not isinstance(error, (ValueError, OSError)):
            raise
        show_error(f"error: {' '.join(str(error).split())}")
        return 1 if failed or (isinstance(error, OSError) and error.errno is not None) else 2  # 1: not bad input
    except (KeyboardInterrupt, _Terminated) as stop:
        print(file=sys.stderr)  # below a bar, or the terminal's ^C
        interrupted = isinstance(stop, KeyboardInterrupt)
        show_error("interrupted" if interrupted else "terminated")
        return 128 + (signal.SIGINT if interrupted else signal.SIGTERM)


class _Terminated(BaseException):
    """SIGTERM as an exception, as KeyboardInterrupt is for Ctrl-C, so that cleanup runs."""


@contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    def stop(*_: object) -> NoReturn:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
