"""What an output folder may replace, and what is left where a run ends badly. No model is needed for that."""

import errno
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from filelock import FileLock

from struprune_plugin.storage.files import own_folder
from struprune_plugin.storage.manifest import Manifest, write_manifest
from struprune_plugin.storage.output_folder import check_output, write_folder

pytestmark = pytest.mark.durable


_CONTENT: dict = {
    "versions": {},
    "model": {"base": "", "type": "", "parameters_before": 2, "parameters_after": 1},
    "settings": {},
    "seed": 0,
    "calibration": {"num_sequences": 1, "num_tokens": 1, "sha256": ""},
    "budget": {
        "prunable_parameters": 1,
        "asked_sparsity": 0.5,
        "removed_parameters": 1,
        "met_sparsity": 0.5,
        "rounding": [],
    },
    "allocation": {"method": "uniform"},
    "memory_measure": "",
    "stages": [],
    "groups": [],
}
MANIFEST = Manifest.model_validate(_CONTENT)


def write(out: Path, text: str = "ours", overwrite: bool = False, **files: str) -> Path:
    """Write an output of ours."""
    with write_folder(out, overwrite) as partial:
        (partial / "model.safetensors").write_text(text)
        write_manifest(MANIFEST, partial)
        for name, content in files.items():
            (partial / name).write_text(content)
    return out


def read_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_weights(folder: Path) -> str:
    return (folder / "model.safetensors").read_text()


def test_an_earlier_output_is_replaced(tmp_path):
    out = write(tmp_path / "out", **{"model.safetensors.index.json": "gone"})
    with pytest.raises(ValueError, match="or pass overwrite"):
        write(out)
    write(out, "second", overwrite=True)
    assert read_weights(out) == "second"
    assert read_names(out) == ["model.safetensors", "struprune.json"]
    assert read_names(tmp_path) == ["out"]


def test_a_copied_output_is_still_ours(tmp_path):
    shutil.copytree(write(tmp_path / "out"), tmp_path / "copy")
    write(tmp_path / "copy", overwrite=True)


@pytest.mark.parametrize("content", [{"precious.txt": "mine"}, {"config.json": "{}", "model.safetensors": "weights"}])
def test_what_is_no_output_of_ours_is_never_replaced(tmp_path, content):
    out = tmp_path / "out"
    out.mkdir()
    for name, text in content.items():
        (out / name).write_text(text)
    with pytest.raises(ValueError, match="must be empty or absent"):
        write(out)
    with pytest.raises(
        ValueError, match=r"must hold an earlier output of StruPrune and nothing else to be overwritten"
    ):
        write(out, overwrite=True)
    assert {path.name: path.read_text() for path in out.iterdir()} == content
    assert read_names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    "name", ["notes.txt", "adapter_model.safetensors", "checkpoints/step.safetensors", "empty/", ".hidden", "link@"]
)
def test_an_output_that_holds_anything_else_is_never_replaced(tmp_path, name):
    out = write(tmp_path / "out")
    path = out / name.rstrip("/@")
    path.parent.mkdir(exist_ok=True)
    if name.endswith("/"):
        path.mkdir()
    elif name.endswith("@"):
        path.symlink_to(tmp_path)
    else:
        path.write_text("mine")
    with pytest.raises(ValueError, match=rf"holds also {re.escape(name.rstrip('/@').split('/')[0])}"):
        write(out, overwrite=True)
    assert os.path.lexists(path)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("place", ["out", "out/model", "link"])
def test_inputs_are_never_replaced(tmp_path, place, overwrite):
    out = write(tmp_path / "out")
    (tmp_path / "link").symlink_to(out)
    (out / "model").mkdir()
    with pytest.raises(ValueError, match="must not be or hold the input"):
        check_output(out, overwrite, [tmp_path / place])


def test_outputs_beside_inputs_and_hub_names_are_fine(tmp_path):
    check_output(tmp_path / "model" / "out", True, [tmp_path / "model", "c4", "some/name", tmp_path / "data.jsonl"])


def test_the_current_folder_a_home_and_a_root_are_never_replaced(tmp_path, monkeypatch):
    work, home = write(tmp_path / "work"), tmp_path / "homes" / "me"
    (work / "inside").mkdir()
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work / "inside")
    for folder, what in ((".", "current"), ("..", "current"), (home, "home"), (home.parent, "home"), ("/", "root")):
        with pytest.raises(ValueError, match=f"must not be or hold the ({what}|current) folder"):
            check_output(Path(folder), overwrite=True)


def test_places_that_cannot_become_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/out"):
        with pytest.raises(ValueError, match="must be in a folder that can be written"):
            write(tmp_path / folder, overwrite=True)
    assert read_names(tmp_path) == ["file"]


def test_a_mount_point_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(ValueError, match="must not be or hold the mount point"):
        write(tmp_path / "out")


def test_an_empty_folder_and_parents_are_fine(tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    write(tmp_path / "a" / "b" / "out")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "a").stat().st_mode  # not private to the user


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link")
    assert read_weights(tmp_path / "real") == "ours"
    assert read_names(tmp_path) == ["link", "real"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_block_that_fails_leaves_nothing(tmp_path, error):
    out = write(tmp_path / "out")

    def write_half(folder: Path, overwrite: bool) -> None:
        with write_folder(folder, overwrite) as partial:
            (partial / "half").write_text("")
            raise error

    for folder, overwrite in ((out, True), (tmp_path / "new", False)):
        with pytest.raises(error):
            write_half(folder, overwrite)
    assert read_names(tmp_path) == ["out"]
    assert read_weights(out) == "ours"


def test_a_full_disk_is_told_with_its_remedy(tmp_path):
    with (
        pytest.raises(OSError, match=r"out cannot be written: the disk is full\. Free"),
        write_folder(tmp_path / "out", False),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert read_names(tmp_path) == []


def find_finished(folder: Path) -> Path:
    (path,) = folder.glob("out.finished-*")
    return path


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_another_made_meanwhile_is_kept_and_so_is_the_output(tmp_path, overwrite):
    out = tmp_path / "out"

    def write_while_another_does() -> None:
        with write_folder(out, overwrite) as partial:
            (partial / "x").write_text("done")
            out.mkdir()
            (out / "theirs").write_text("mine")

    with pytest.raises(ValueError, match="output_dir: must"):
        write_while_another_does()
    assert (out / "theirs").read_text() == "mine"
    assert (find_finished(tmp_path) / "x").read_text() == "done"
    assert len(read_names(tmp_path)) == 2


@pytest.mark.parametrize("moved", ["out to old", "new to out"])
def test_a_rename_that_fails_gives_the_old_folder_back_and_keeps_the_output(tmp_path, monkeypatch, moved):
    out = write(tmp_path / "out", "first")
    rename, failed = Path.rename, []

    def fail_once(self, other):
        if f"{self.name} to {Path(other).name}" == moved and not failed:
            failed.append(self)
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(OSError, match="Device or resource busy"):
        write(out, "second", overwrite=True)
    assert len(failed) == 1
    assert read_weights(out) == "first"
    assert read_weights(find_finished(tmp_path)) == "second"
    assert len(read_names(tmp_path)) == 2


def die_while_writing(out: Path, moment: str, overwrite: bool = False) -> None:
    """Write an output in another process, which is killed: in the block, or before a rename of what has this name."""
    pid = os.fork()
    if pid == 0:
        rename = Path.rename

        def die(self, other):
            if self.name == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(self, other)

        Path.rename = die
        with write_folder(out, overwrite) as partial:
            (partial / "model.safetensors").write_text("second")
            if moment == "block":
                os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert (out.parent / f".{out.name}.partial").is_dir()


@pytest.mark.parametrize("moment", ["block", "new"])
def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path, moment):
    die_while_writing(tmp_path / "out", moment)
    assert not (tmp_path / "out").exists()
    write(tmp_path / "out", "third")
    assert read_weights(tmp_path / "out") == "third"
    assert read_names(tmp_path) == ["out"]


def test_a_run_killed_between_two_renames_gives_the_earlier_output_back(tmp_path):
    out = write(tmp_path / "out", "first")
    die_while_writing(out, "new", overwrite=True)
    assert not out.exists()
    with pytest.raises(ValueError, match="must be empty or absent"):  # the folder is back, and is not overwritten
        write(out, "third")
    assert read_weights(out) == "first"
    assert read_names(tmp_path) == ["out"]


def test_two_runs_never_write_the_same_output(tmp_path):
    out = tmp_path / "out"
    with write_folder(out, False) as partial:
        (partial / "x").write_text("done")
        with pytest.raises(ValueError, match="must not be written by another run"):
            write(out)
    assert (out / "x").read_text() == "done"


def test_an_own_folder_is_removed_and_so_are_those_of_killed_processes(tmp_path):
    parent, pid = tmp_path / "offload", os.fork()
    if pid == 0:
        with own_folder(parent) as folder:
            folder.mkdir()
            (folder / "weights").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (parent / "mine").write_text("")
    assert read_names(parent) == ["mine", f"struprune-{pid}", f"struprune-{pid}.lock"]
    alive = FileLock(parent / "struprune-1.lock")
    (parent / "struprune-1").mkdir()

    def fail():
        with own_folder(parent) as folder:
            folder.mkdir()
            assert read_names(parent) == ["mine", "struprune-1", "struprune-1.lock", folder.name, f"{folder.name}.lock"]
            raise KeyboardInterrupt

    with alive, pytest.raises(KeyboardInterrupt):
        fail()
    assert set(read_names(parent)) <= {"mine", "struprune-1", "struprune-1.lock"}
    assert (parent / "struprune-1").is_dir()


def test_a_folder_beside_a_lock_of_somebody_else_stays(tmp_path):
    (tmp_path / "struprune-models").mkdir()
    (tmp_path / "struprune-models.lock").write_text("")
    with own_folder(tmp_path):
        pass
    assert read_names(tmp_path) == ["struprune-models", "struprune-models.lock"]
