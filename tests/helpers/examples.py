"""How many random cases a property test draws: the same ones in every run."""

from hypothesis import settings


def examples(count: int) -> settings:
    """Return the settings of a property test that draws ``count`` cases.

    The cases are derived from the test itself and no database is kept, so that it passes or fails alike everywhere.
    """
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)
