"""docs/architecture.md: rooms exist, stops are functions of the files that they link to, and a run calls them in that order."""

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
from helpers.models import ROOT, run_oneshot, save_opt

import struprune_plugin
from struprune_plugin.export.rehearsal import rehearse

PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = Path(struprune_plugin.__file__).parent
STOPS = re.findall(
    r"^\d+\. \[`([\w.]+)`\]\(\.\./(struprune_plugin/[\w/]+\.py)\) ", PAGE.read_text("utf-8"), re.MULTILINE
)


def resolve(name):
    """Return what a dotted name stands for: a module of the package, then its attributes."""
    parts = name.split(".")
    length = next(n for n in range(len(parts), 0, -1) if (PACKAGE.joinpath(*parts[:n]).with_suffix(".py")).is_file())
    value = importlib.import_module(".".join(["struprune_plugin", *parts[:length]]))
    for part in parts[length:]:
        value = getattr(value, part)
    return value


def test_the_walk_is_short_and_counted():
    text = PAGE.read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
    assert numbers == list(range(1, len(STOPS) + 1))
    assert 8 <= len(STOPS) <= 12
    assert len(text.splitlines()) <= 90


def test_the_map_lists_the_rooms_as_ls_does():
    (block,) = re.findall(r"^```text\nstruprune_plugin/\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    folders = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("__"))
    assert re.findall(r"^  (\w+)/ ", block, re.MULTILINE) == folders


@pytest.mark.parametrize(("name", "file"), STOPS, ids=[name for name, _ in STOPS])
def test_stops_are_functions_of_the_files_that_they_link_to(name, file):
    assert Path(inspect.unwrap(resolve(name)).__code__.co_filename) == ROOT / file


def test_other_names_of_the_page_exist():
    names = re.findall(r"^\| \w+ \| `([\w.]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(names) == 5
    for name in names:
        assert callable(resolve(name))


def test_a_run_calls_the_stops_in_the_order_of_the_page(tmp_path):
    """The first call of each stop; with `allocation: uniform` no pass but the rehearsal runs layers before."""
    codes = {inspect.unwrap(resolve(name)).__code__: name for name, _ in STOPS}
    called, rehearsing = [], []

    def record(frame, event, _argument):
        if frame.f_code is rehearse.__code__:
            rehearsing[:] = [frame] if event == "call" else []
        if event == "call" and not rehearsing and codes.get(frame.f_code) not in (None, *called):
            called.append(codes[frame.f_code])

    folder, before = save_opt(tmp_path / "model"), sys.getprofile()
    sys.setprofile(record)
    try:
        run_oneshot(str(folder), sparsity=0.3, allocation="uniform", output_dir=str(tmp_path / "out"))
    finally:
        sys.setprofile(before)
    assert called == [name for name, _ in STOPS]
