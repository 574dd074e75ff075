"""A disk that lacks the room for what a run writes is found before the run."""

import shutil
from types import SimpleNamespace

import pytest
from helpers.families import make_model
from helpers.models import run_oneshot, save_model
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoConfig

from struprune_plugin import StruPruneModifier
from struprune_plugin.cli import main as cli
from struprune_plugin.storage import loading
from struprune_plugin.storage.files import check_room

RECIPE = {"sparsity": 0.3, "allocation": "uniform", "sensitivity": "none"}


@pytest.fixture
def llama(tmp_path):
    return str(save_model(make_model("llama"), tmp_path / "llama"))


def leave(monkeypatch, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))


def test_the_room_is_that_of_what_is_written(llama, tmp_path, monkeypatch):
    run_oneshot(llama, output_dir=str(tmp_path / "done"), **RECIPE)
    written = (tmp_path / "done" / "model.safetensors").stat().st_size
    for free, refused in ((written * 0.97, True), (written * 1.05, False)):
        leave(monkeypatch, int(free))
        out = tmp_path / f"out {refused}"
        if refused:
            with pytest.raises(ValueError, match=r"output_dir: the disk must have \d+ kB free .*, got \d+ kB at"):
                run_oneshot(llama, output_dir=str(out), **RECIPE)
        else:
            run_oneshot(llama, output_dir=str(out), **RECIPE)
        assert out.exists() != refused
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_needs_room_beside_the_output(llama, tmp_path, monkeypatch):
    run_oneshot(llama, output_dir=str(tmp_path / "done"), **RECIPE)
    leave(monkeypatch, int((tmp_path / "done" / "model.safetensors").stat().st_size * 1.05))
    with pytest.raises(ValueError, match="checkpoint_dir: the disk must have"):
        run_oneshot(llama, output_dir=str(tmp_path / "out"), checkpoint_dir=str(tmp_path / "parts"), **RECIPE)
    assert not (tmp_path / "parts").exists()


def test_other_recipes_conversions_and_offloading_need_room_too(llama, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    run_oneshot(llama, output_dir=str(out), **RECIPE)
    leave(monkeypatch, 1000)
    for form in ("uniform-padded", "gguf"):
        assert cli.main(["convert", str(out), "--to", form, "--output", str(tmp_path / form)]) == 2
        assert "--output: the disk must have" in capsys.readouterr().err
    with pytest.raises(ValueError, match="output_dir: the disk must have"):
        run_oneshot(llama, QuantizationModifier(scheme="W8A8", ignore=["lm_head"]), output_dir=str(tmp_path / "w8a8"))
    recipe = [StruPruneModifier(**RECIPE), QuantizationModifier(scheme="W8A8", ignore=["lm_head"])]
    with pytest.raises(ValueError, match="output_dir: the disk must have"):
        run_oneshot(llama, recipe, output_dir=str(tmp_path / "both"))
    memory = SimpleNamespace(available=5 * 10**9)
    monkeypatch.setattr(loading, "psutil", SimpleNamespace(virtual_memory=lambda: memory))
    with pytest.raises(ValueError, match="offload_folder: the disk must have"):
        run_oneshot(llama, offload_folder=str(tmp_path / "offload"), **RECIPE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "out"]


def test_what_goes_to_one_disk_is_summed(tmp_path, monkeypatch):
    leave(monkeypatch, 100)
    check_room([("a", tmp_path / "not" / "there", 60), ("b", tmp_path, 40)])
    with pytest.raises(ValueError, match="b: the disk must have 101 B free"):
        check_room([("a", tmp_path / "not" / "there", 60), ("b", tmp_path, 41)])


def test_a_second_copy_of_the_weights_needs_no_room(llama, tmp_path, monkeypatch):
    folder, asked = shutil.copytree(llama, tmp_path / "copy"), []
    size = (folder / "model.safetensors").stat().st_size
    shutil.copyfile(folder / "model.safetensors", folder / "consolidated.safetensors")
    monkeypatch.setattr(loading, "psutil", SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=0)))
    monkeypatch.setattr(loading, "check_room", lambda wanted: asked.extend(wanted) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loading.load_model(str(folder), AutoConfig.from_pretrained(folder), {}, tmp_path / "offload")
    assert [needed for *_, needed in asked] == [size + 5 * 10**9]
