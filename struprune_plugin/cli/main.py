"""``struprune``: the command line, assembled from one file per command."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from struprune_plugin import __version__
from struprune_plugin.cli.console import show_error
from struprune_plugin.cli.convert_command import convert
from struprune_plugin.cli.eval_command import score
from struprune_plugin.cli.inspect_command import inspect
from struprune_plugin.cli.options import make_callback
from struprune_plugin.cli.plan_command import plan
from struprune_plugin.cli.prune_command import prune
from struprune_plugin.cli.recipes_command import recipes
from struprune_plugin.cli.report_command import report
from struprune_plugin.cli.sweep_command import sweep

# Commands import torch and llm-compressor only when they run, so that help and early errors take no seconds.
COMMANDS: dict[str, Callable[..., int | None]] = {
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
        app.command(name)(make_callback(command))
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 when the whole job is done, 2 for bad input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # do not fail on terminals without the tables' characters
    try:
        status: int = typer.main.get_command(make_app())(argv, prog_name="struprune", standalone_mode=False)
    except typer.TyperException as error:  # of the parser: print one line in place of typer's panel
        context = getattr(error, "ctx", None)
        message = " ".join(error.format_message().replace("Value error, ", "").split())
        command = context.command_path if context else "struprune"
        show_error(f"error: {message.rstrip('.')} (see {command} --help)")
        return error.exit_code
    return status
