"""The lock holds what the package needs, by versions that it allows, with hashes and without addresses."""

import re

import pytest
from helpers.models import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from eval.lock import add_wheel, list_installed, read_needs

LOCK = (ROOT / "requirements-lock.txt").read_text(encoding="utf-8")
PINS = dict(re.findall(r"^([a-z0-9.-]+)(?:\[[\w,]+\])?==(\S+) \\$", LOCK, re.MULTILINE))


def test_the_lock_holds_allowed_versions_of_all_that_is_needed():
    assert len(PINS) > 100
    for need in read_needs():
        version = PINS[canonicalize_name(need.name)]
        assert need.specifier.contains(version), f"{need}: `make lock` again, the lock has {version}"


def test_every_line_of_the_lock_is_a_pin_or_a_hash():
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    pattern = r"[a-z0-9.-]+(\[[\w,]+\])?==[\w.]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?"
    assert [line for line in lines if not re.fullmatch(pattern, line)] == []
    starts = re.findall(r"==[\w.]+ \\\n(.*)", LOCK)
    assert all(line.startswith("    --hash=") for line in starts), "no pin without a hash"


def test_list_installed_finds_what_is_needed_indirectly_and_names_what_is_missing():
    found = list_installed([Requirement("lm-eval[hf]")])
    assert {"lm-eval[hf]", "torch", "accelerate", "typepy[datetime]"} <= set(found)
    with pytest.raises(ValueError, match="lock: no-such-package must be installed"):
        list_installed([Requirement("no-such-package")])


def test_list_installed_leaves_out_extras_that_nobody_asked_for():
    assert "fsspec" in list_installed([Requirement("fsspec")])
    assert "aiohttp" not in list_installed([Requirement("fsspec")])
    assert "aiohttp" in list_installed([Requirement("fsspec[http]")])
    assert all(isinstance(version, Version) for version in list_installed([Requirement("fsspec")]).values())


def test_add_wheel_adds_its_hash_to_its_version_alone(tmp_path):
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    wheel.write_bytes(b"")
    lines = "tqdm==1 \\\n    --hash=sha256:aa\ntorch==2.13.0 \\\n    --hash=sha256:bb\n"
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    added = f"torch==2.13.0 \\\n    --hash=sha256:{empty} \\\n    --hash=sha256:bb\n"
    assert add_wheel(lines, wheel).endswith(f", which the tests ran with\n{added}")
    with pytest.raises(ValueError, match="--wheel must be of a version that is installed"):
        add_wheel(lines.replace("2.13.0", "2.12.0"), wheel)
