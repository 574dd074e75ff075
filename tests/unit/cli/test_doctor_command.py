"""``struprune doctor``: what is there of what is needed."""

import json

import psutil
import pytest

from struprune_plugin.cli import doctor_command
from struprune_plugin.cli import main as cli
from struprune_plugin.cli.doctor_command import Package


def test_a_machine_on_which_the_tests_run_is_well(monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    states = {package["name"]: package["state"] for package in found["packages"]}
    assert {states[name] for name in ("python", "struprune-plugin", "torch", "transformers", "llmcompressor")} == {"ok"}
    assert "pytest" not in states  # nobody needs it to prune
    assert found["devices"][0]["total"] == psutil.virtual_memory().total
    assert set(found["engines"]) == {"vLLM", *(f"llama.cpp: {name}" for name in doctor_command._BINARIES)}
    assert found["hub"] == {"offline": True}
    assert found["problems"] == []


@pytest.mark.parametrize(
    ("package", "state", "is_problem"),
    [
        (Package("a", "2.13.0+cpu", "<2.15,>=2.11", True), "ok", False),
        (Package("a", "2.15.0", "<2.15,>=2.11", True), "not supported", True),
        (Package("a", "0.1", ">=1", False), "not supported", True),
        (Package("a", None, ">=1", True), "missing", True),
        (Package("a", None, ">=1", False), "not installed", False),
        (Package("a", "2.15.0.dev1", ">=2.11", True), "ok", False),
    ],
)
def test_states_are_those_of_the_versions(package, state, is_problem):
    assert (package.state, package.is_problem) == (state, is_problem)


def test_what_is_missing_is_named_with_its_remedy(monkeypatch, capsys):
    versions = {"peft": None, "torch": "1.0"}
    find = doctor_command._find_version
    monkeypatch.setattr(
        doctor_command, "_find_version", lambda name: versions[name] if name in versions else find(name)
    )
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr()
    assert "peft: must be <0.22,>=0.21, got none. Run `pip install" in printed.err
    assert "torch: must be <2.15,>=2.11, got 1.0." in printed.err
    assert "not supported" in printed.out


def test_a_package_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr(doctor_command, "_PACKAGE", "no-such-package")
    assert [package.is_problem for package in doctor_command.list_packages()] == [True]


def test_engines_are_found_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "llama-cli").write_text("#!/bin/sh\n")
    (tmp_path / "llama-cli").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_command.list_engines()["llama.cpp: llama-cli"] == str(tmp_path / "llama-cli")
    assert doctor_command.list_engines()["llama.cpp: llama-server"] is None
