"""Runs that die after a number of finished parts."""

import pytest

from struprune_plugin.storage.resume_store import ResumeStore


class Killed(BaseException):
    """End of a process."""


def stop_after(monkeypatch, count):
    """Let a run die right after so many parts; return the names of those that are written from now on."""
    written, inner = [], ResumeStore.write

    def write(self, part, *args):
        inner(self, part, *args)
        written.append(part)
        if len(written) == count:
            raise Killed

    monkeypatch.setattr(ResumeStore, "write", write)
    return written


def kill_after(count, run):
    """Call ``run``, which dies right after so many parts."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, count)
        with pytest.raises(Killed):
            run()
