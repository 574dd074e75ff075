"""The manifest: typed, whole or refused in one line that names the file and the place."""

import json
import shutil

import pytest

from struprune_plugin import StruPruneModifier
from struprune_plugin.cli import main as cli
from struprune_plugin.storage.manifest import Manifest, read_manifest, write_manifest


def make_manifest():
    """Return a manifest as a run writes it, of two layers."""
    solve = {"target_energy": 2.0, "error_before": 0.2, "error_after": 0.1, "damping": 0.01, "admm": None}
    groups = [
        {
            **{
                "name": f"model.layers.{layer}.{name}",
                "layer": layer,
                "kind": kind,
                "num_units": units,
                "num_blocks": blocks,
            },
            **{"unit_cost": 9, "kept": len(keep), "sparsity": 1 - len(keep) / units, "scores": None, **solve},
            **{"condition_number": 10.0, "scale": None, "keep": keep},
        }
        for layer in range(2)
        for name, kind, units, blocks, keep in (
            ("self_attn.o_proj", "value_channels", 8, 2, [0, 2, 5, 6]),
            ("mlp.down_proj", "ffn", 6, 1, [1, 2, 5]),
        )
    ]
    return {
        "versions": {"torch": "2.13.0"},
        "model": {"base": "m", "type": "t", "parameters_before": 200, "parameters_after": 100},
        "settings": StruPruneModifier(sparsity=0.3).dump_fields(),
        "seed": 0,
        "calibration": {"num_sequences": 8, "num_tokens": 256, "sha256": "0"},
        "budget": {
            **{"prunable_parameters": 180, "asked_sparsity": 0.3, "removed_parameters": 54, "met_sparsity": 0.3},
            "rounding": [{"kind": "ffn", "width_multiple": 2, "because": ["x"], "modules": ["y"]}],
            "limit": {"name": "bytes", "asked": 4e2, "planned": 399.5},
        },
        "allocation": {"method": "softmax", "temperature": 1.0, "searched": [{"temperature": 1.0, "error": 0.1}]},
        "memory_measure": "none",
        "stages": [{"name": "solve", "seconds": 0.1, "peak_bytes": None}],
        "sensitivity": {},
        "groups": groups,
        "experts": [
            {
                "name": "model.layers.0.mlp.experts",
                "layer": 0,
                "num_experts": 4,
                "keep": [0, 2],
                "removed_parameters": 9,
            }
        ],
        "recovery": {"settings": {"rank": 8}, "steps": 3, "tokens_seen": 9, "seconds": 0.1},
    }


@pytest.fixture
def manifest():
    content = make_manifest()
    return Manifest.model_validate_json(json.dumps(content), strict=True)


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
            r"struprune\.json: groups\[1\]\.layer must be as this version of StruPrune writes it, got '1'",
        ),
        (lambda m: m["model"].update(parameters_after=-1), r"struprune\.json: model\.parameters_after must be"),
        (lambda m: m["budget"].pop("rounding"), r"struprune\.json: budget\.rounding must be .*required"),
        (lambda m: m.update(notes="mine"), r"struprune\.json: notes must be .*not permitted"),
        (lambda m: m.update(groups=m["groups"][:1] * 2), "groups must have different names"),
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
    with pytest.raises(
        ValueError, match=r"struprune\.json: .* must be as this version of StruPrune writes it, got"
    ) as refusal:
        read_manifest(tmp_path)
    assert "\n" not in str(refusal.value)


# -- kept units ---------------------------------------------------------------------------------------------------


@pytest.fixture
def out(opt, prune_once, tmp_path):
    """A pruned folder of one's own."""
    return shutil.copytree(prune_once(opt, "head")[1], tmp_path / "out")


def edit_json(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content, indent=1) + "\n")


KEEPS = {
    "reversed": lambda m: m["groups"][0]["keep"].reverse(),
    "twice": lambda m: m["groups"][0]["keep"].__setitem__(0, m["groups"][0]["keep"][1]),
    "out of range": lambda m: m["groups"][0]["keep"].__setitem__(-1, 10**9),
    "negative": lambda m: m["groups"][0]["keep"].__setitem__(0, -1),
    "no number": lambda m: m["groups"][0]["keep"].__setitem__(0, True),
}


@pytest.mark.parametrize("kind", KEEPS)
def test_kept_units_that_were_changed_are_refused(out, kind, capsys):
    edit_json(out / "struprune.json", KEEPS[kind])
    with pytest.raises(ValueError, match=r"struprune\.json: groups\[0\].*(keep must be sorted|keep\[0\] must be)"):
        read_manifest(out)
    assert cli.main(["inspect", str(out)]) == 2
    assert capsys.readouterr().err.startswith("struprune: error: ")
