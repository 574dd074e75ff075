"""Patterns of recipes: refused where they cannot be read, or where matching them may never end."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PREFIX = "re:"
_REPEAT = r"(?:[*+]|\{\d*,\d*\})"
_NESTED = (
    re.compile(  # a repeated group that repeats, or chooses, inside: it may match one text in exponentially many ways
        rf"\((?:[^()\\]|\\.)*(?:{_REPEAT}|\|)(?:[^()\\]|\\.)*\)\)*{_REPEAT}"
    )
)


def check_patterns(field: str, names: Iterable[str]) -> None:
    """Refuse patterns that no name can be compared with.

    :param field: of the recipe, for messages
    :param names: plain names, and patterns as ``re:<pattern>``
    :raises ValueError: the same
    """
    for name in names:
        if not name.startswith(_PREFIX):
            continue
        pattern = name.removeprefix(_PREFIX)
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"{field} must hold names or valid patterns, got {name!r}: {error}. Correct the pattern."
            ) from None
        if _NESTED.search(pattern):
            raise ValueError(
                f"{field} must hold patterns without repeats in repeats, which may take for ever, got {name!r}. Repeat once: "
                "re:.*fc2 for instance."
            )
