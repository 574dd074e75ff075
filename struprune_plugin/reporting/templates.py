"""Rendering of the templates beside this file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@cache
def _open_environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def fill_template(name: str, /, **values: Any) -> str:
    """Return a rendered template; in HTML, all values but :class:`markupsafe.Markup` are escaped."""
    return _open_environment().get_template(f"{name}.jinja").render(**values)
