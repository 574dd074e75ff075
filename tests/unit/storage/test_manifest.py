"""The manifest: typed, whole or refused in one line that names the file and the place."""

import json
import math

import pytest

from struprune_plugin.storage.manifest import Manifest, ResultRecord, read_manifest, write_manifest


@pytest.fixture
def manifest(opt, prune_once):
    """The manifest of a run, with every part that some runs add."""
    content = read_manifest(prune_once(opt, "value_channels")[1]).model_dump()
    content["budget"] |= {
        "rounding": [{"kind": "ffn", "width_multiple": 2, "because": ["x"], "modules": ["y"]}],
        "limit": {"name": "bytes", "asked": 4e2, "planned": 399.5},
    }
    content["experts"] = [{"name": "a", "layer": 0, "num_experts": 4, "keep": [0, 2], "removed_parameters": 9}]
    content["recovery"] = {"settings": {"rank": 8}, "steps": 3, "tokens_seen": 9, "seconds": 0.1}
    return Manifest.model_validate_json(json.dumps(content), strict=True)


def test_what_is_written_is_read_as_it_was(manifest, tmp_path):
    write_manifest(manifest, tmp_path)
    assert read_manifest(tmp_path) == manifest
    before = (tmp_path / "struprune.json").read_bytes()
    write_manifest(read_manifest(tmp_path), tmp_path)
    assert (tmp_path / "struprune.json").read_bytes() == before
    content = json.loads(before)
    assert "evaluation" not in content, "nothing was measured"
    assert not {"temperature", "searched"} & content["allocation"].keys(), "what the rule has no use for"
    assert content["groups"][0]["error_after"] == manifest.groups[0].error_after


def test_numbers_that_are_not_finite_are_null(manifest, tmp_path):
    write_manifest(manifest.model_copy(update={"evaluation": [ResultRecord("perplexity", math.inf, 2.0)]}), tmp_path)
    assert "Infinity" not in (tmp_path / "struprune.json").read_text()
    assert read_manifest(tmp_path).evaluation == [ResultRecord("perplexity", None, 2.0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["groups"][1].update(layer="1"), r"struprune\.json: groups\[1\]\.layer must be as .*, got '1'"),
        (lambda m: m["model"].update(parameters_after=-1), r"struprune\.json: model\.parameters_after must be"),
        (lambda m: m["budget"].pop("rounding"), r"struprune\.json: budget\.rounding must be .*required"),
        (lambda m: m.update(notes="mine"), r"struprune\.json: notes must be .*not permitted"),
        (lambda m: m["groups"][0]["keep"].__setitem__(0, -1), r"struprune\.json: groups\[0\]\.keep\[0\] must be"),
    ],
)
def test_another_form_is_refused_by_its_place(manifest, tmp_path, change, message):
    content = manifest.model_dump()
    change(content)
    (tmp_path / "struprune.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as refusal:
        read_manifest(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format_version": 1}', '{"format_version": 2}', "[" * 9999])
def test_what_is_no_manifest_of_this_version_is_refused(tmp_path, content):
    (tmp_path / "struprune.json").write_text(content)
    with pytest.raises(ValueError, match=r"struprune\.json: .* must be as this version of StruPrune writes") as refusal:
        read_manifest(tmp_path)
    assert "\n" not in str(refusal.value)
