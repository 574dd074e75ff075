"""How many random cases a property test draws: the same ones in every run, or by ``make fuzz`` new ones and many more."""

import os

from hypothesis import settings

FUZZ = int(os.environ.get("STRUPRUNE_FUZZ", "0"))  # how many times as many cases `make fuzz` draws; 0 in a plain run


def examples(count: int) -> settings:
    """Return the settings of a property test that draws ``count`` cases.

    A plain run derives the cases from the test itself and keeps no database, so that it passes or fails alike everywhere.
    """
    fixed = {} if FUZZ else {"derandomize": True, "database": None}
    return settings(max_examples=count * max(FUZZ, 1), deadline=None, **fixed)
