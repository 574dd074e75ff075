"""Check of a recipe's patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable


def check_patterns(field: str, names: Iterable[str]) -> None:
    """Raise if a pattern is invalid.

    :param field: name of the recipe's field, for messages
    :param names: plain names, and patterns as ``re:<pattern>``
    :raises ValueError: in that case
    """
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"{field} must hold names or valid patterns, got {name!r}: {error}. Correct the pattern."
            ) from None
