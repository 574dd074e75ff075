"""``struprune``: the command line, assembled from its commands."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import cleandoc
from typing import Annotated, Any

import typer

from struprune_plugin import __version__
from struprune_plugin.cli.console import run_command, show_error
from struprune_plugin.cli.convert_command import convert
from struprune_plugin.cli.eval_command import score
from struprune_plugin.cli.inspect_command import inspect, recipes, report
from struprune_plugin.cli.plan_command import plan
from struprune_plugin.cli.prune_command import prune
from struprune_plugin.cli.sweep_command import sweep

# Commands import torch and llm-compressor only when they run, so that help and early errors take no seconds.
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
