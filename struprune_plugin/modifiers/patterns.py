"""Checks of a recipe's patterns: they must be valid, and matching them must not take exponential time."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PREFIX = "re:"
_REPEAT = r"(?:[*+]|\{\d*,\d*\})"
_NESTED = (
    re.compile(  # a repeated group with a repeat or alternatives inside may match one text in exponentially many ways
        rf"\((?:[^()\\]|\\.)*(?:{_REPEAT}|\|)(?:[^()\\]|\\.)*\)\)*{_REPEAT}"
    )
)


def check_patterns(field: str, names: Iterable[str]) -> None:
    """Raise if a pattern is invalid, or if matching it may take exponential time.

    :param field: name of the recipe's field, for messages
    :param names: plain names, and patterns as ``re:<pattern>``
    :raises ValueError: in these cases
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
                f"{field} must not hold patterns with nested repetitions, which may take very long to match, got {name!r}. Use one "
                "repetition, such as re:.*fc2."
            )
