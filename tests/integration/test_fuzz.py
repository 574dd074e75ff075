"""A few hundred of what `python -m eval.fuzz --examples 10000` feeds."""

import pytest
from transformers.utils import logging as transformers_logging

from eval.fuzz import Tally, _note, fuzz, make_manifest
from struprune_plugin.storage.manifest import digest_manifest, parse_manifest


@pytest.mark.parametrize(("kind", "num_examples"), [("recipes", 200), ("manifests", 150), ("configs", 30)])
def test_nothing_but_refusals_in_the_house_s_form(kind, num_examples):
    level = transformers_logging.get_verbosity()
    try:
        tally = fuzz(kind, num_examples)
    finally:
        transformers_logging.set_verbosity(level)
    assert not tally.crashes, "\n".join(tally.told.values())
    assert tally.total >= num_examples / 2
    assert tally.refused > tally.accepted > 0


def test_the_manifest_that_is_changed_is_a_good_one():
    content = make_manifest()
    parse_manifest({**content, "sha256": digest_manifest(content)}, "here")


def test_a_crash_is_told_once_with_an_example():
    tally = Tally()
    for value in (1, 2):
        try:
            raise KeyError(value)
        except KeyError as error:
            _note(tally, error, {"a": value})
    assert (tally.total, len(tally.told)) == (2, 1)
    assert "{'a': 1}" in next(iter(tally.told.values()))
