import pytest

from struprune_plugin.report import format_bytes, format_table


def test_format_table_aligns_columns():
    assert format_table(["name", "n"], [["a", 5], ["bcdef", 1234]]).splitlines() == [
        "name      n",
        "─────  ────",
        "a         5",
        "bcdef  1234",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (4_460_000, "4.46 MB"), (999_700, "1 MB"), (2e12, "2 TB"), (3e15, "3000 TB")],
)
def test_format_bytes_gives_three_digits(count, text):
    assert format_bytes(count) == text
