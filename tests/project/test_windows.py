"""The package needs nothing that Windows lacks."""

import ast
import os
import subprocess
import sys

from helpers.models import ROOT

from struprune_plugin.storage import files

PACKAGE = ROOT / "struprune_plugin"
POSIX = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "syslog"}
ABSENT = {
    "fork",
    "sync",
    "getuid",
    "geteuid",
    "killpg",
    "setsid",
    "mkfifo",
    "O_DIRECTORY",
    "SIGKILL",
    "SIGHUP",
    "SIGUSR1",
}
IMPORT_ALL = """
import pkgutil, sys
sys.modules["fcntl"] = None  # as on Windows
import struprune_plugin
for found in pkgutil.walk_packages(struprune_plugin.__path__, "struprune_plugin."):
    __import__(found.name)
"""


def test_every_module_is_imported_where_there_is_no_fcntl():
    subprocess.run([sys.executable, "-c", IMPORT_ALL], check=True, cwd=ROOT, capture_output=True)


def test_no_module_names_what_windows_lacks():
    for file in PACKAGE.rglob("*.py"):
        tree = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        named = {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}
        named |= {str(node.module) for node in tree if isinstance(node, ast.ImportFrom)}
        parts = [node for node in tree if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
        assert not named & POSIX, file
        assert not {node.attr for node in parts if node.value.id in ("os", "signal")} & ABSENT, file


def test_folders_that_cannot_be_opened_are_not_flushed(tmp_path, monkeypatch):
    opened, inner = [], os.open

    def fake_open(path, flags):
        if path.is_dir():
            raise PermissionError("as on Windows")
        opened.append(flags)
        return inner(path, flags)

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(files.os, "open", fake_open)
    files.write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"
    assert opened == [os.O_RDONLY]
