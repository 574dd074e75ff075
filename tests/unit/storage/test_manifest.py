"""The manifest: typed, whole or refused in one line that names the file and the place."""

import json

import pytest

from eval.fuzz import make_manifest
from struprune_plugin.storage.manifest import digest_manifest, parse_manifest, read_manifest, write_manifest
from struprune_plugin.storage.records import EvaluationRecord


@pytest.fixture
def manifest():
    content = make_manifest()
    return parse_manifest({**content, "sha256": digest_manifest(content)}, "here")


def test_what_is_written_is_read_as_it_was(manifest, tmp_path):
    write_manifest(manifest, tmp_path)
    assert read_manifest(tmp_path) == manifest
    before = (tmp_path / "struprune.json").read_bytes()
    write_manifest(read_manifest(tmp_path), tmp_path)
    assert (tmp_path / "struprune.json").read_bytes() == before
    content = json.loads(before)
    assert "evaluation" not in content, "nothing was measured"
    assert content["allocation"].keys() == {"method", "temperature", "searched"}, "what the rule has no use for"
    assert content["groups"][0]["error_after"] == manifest.groups[0].error_after


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m["groups"][1].update(layer="1"),
            r"struprune\.json: groups\[1\]\.layer must be as it was written, got '1'",
        ),
        (lambda m: m["model"].update(parameters_after=-1), r"struprune\.json: model\.parameters_after must be"),
        (lambda m: m["budget"].pop("rounding"), r"struprune\.json: budget\.rounding must be .*required"),
        (lambda m: m.update(notes="mine"), r"struprune\.json: notes must be .*not permitted"),
        (lambda m: m.update(groups=m["groups"][:1] * 2), "groups must have different names"),
        (lambda m: m["model"].update(parameters_before=1), "parameters_before must be at least 1"),
    ],
)
def test_another_form_is_refused_by_its_place(manifest, tmp_path, change, message):
    content = manifest.model_dump()
    change(content)
    (tmp_path / "struprune.json").write_text(json.dumps({**content, "sha256": digest_manifest(content)}))
    with pytest.raises(ValueError, match=message) as refusal:
        read_manifest(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"seed": 7}, {"sha256": None}])
def test_a_content_that_its_digest_is_not_of_is_refused(manifest, tmp_path, change):
    write_manifest(manifest, tmp_path)
    file = tmp_path / "struprune.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match="must be as it was written, but its content does not match its sha256"):
        read_manifest(file)


def test_results_are_typed(manifest):
    with pytest.raises(ValueError, match="perplexity"):
        EvaluationRecord(perplexity=[{"text": "a"}])
