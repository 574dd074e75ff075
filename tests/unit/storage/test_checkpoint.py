"""Broken checkpoints, by file and by tensor: transformers would fill what is missing with random numbers."""

import json
import shutil

import pytest
import torch
from helpers.models import make_dataset, run_oneshot, save_model, save_wide_opt
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.evaluation.text import DEMO_MODEL
from struprune_plugin.storage.checkpoint import check_checkpoint, check_written, find_checkpoint, list_tensors

LAYER = "model.decoder.layers.1.fc2.weight"


@pytest.fixture
def broken(opt, tmp_path):
    """A copy to break."""
    return shutil.copytree(opt, tmp_path / "model")


def change_weights(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def change_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def refuse(folder, message):
    with pytest.raises(ValueError, match=message):
        load_checkpoint(str(folder))


def test_pruned_and_sharded_checkpoints_pass(opt, prune_once, tmp_path):
    load_checkpoint(str(prune_once(opt, "value_channels")[1]))
    save_model(AutoModelForCausalLM.from_pretrained(opt), tmp_path / "sharded")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(opt).save_pretrained(tmp_path / "sharded", max_shard_size="50kB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert list_tensors(tmp_path / "sharded") == list_tensors(opt)
    load_checkpoint(str(tmp_path / "sharded"))


def test_a_missing_shard_and_a_broken_index_are_named(opt, tmp_path):
    save_model(AutoModelForCausalLM.from_pretrained(opt), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(opt).save_pretrained(tmp_path, max_shard_size="50kB")
    sorted(tmp_path.glob("model-*.safetensors"))[1].unlink()
    refuse(tmp_path, "must hold whole weights that fit its config.json")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ')
    refuse(tmp_path, "must hold whole weights that fit its config.json, got")


@pytest.mark.parametrize("name", [LAYER, "model.decoder.embed_tokens.weight", "model.decoder.final_layer_norm.bias"])
def test_a_missing_tensor_is_named(broken, name):
    change_weights(broken, lambda tensors: tensors.pop(name))
    refuse(broken, rf"must hold every tensor that its config.json asks for, got ({name}|lm_head.weight) missing")


def test_a_tensor_of_another_shape_is_named(broken):
    change_weights(broken, lambda tensors: tensors.update({LAYER: torch.zeros(24, 39)}))
    refuse(broken, rf"{LAYER} of shape \[24, 39\] in place of \[24, 40\]")
    change_config(broken, ffn_dim=39)
    refuse(broken, r"fc1.bias of shape \[40\] in place of \[39\]")


@pytest.mark.parametrize("scheme", ["W8A8", "W4A16"])
def test_quantised_checkpoints_are_whole_too(tmp_path, scheme):
    folder = save_wide_opt(tmp_path / "dense")
    stages = (
        "p_stage:\n  p_modifiers:\n    StruPruneModifier: {sparsity: 0.2, width_multiple: 32, attention_unit: none}\n"
        f"q_stage:\n  q_modifiers:\n    QuantizationModifier: {{config_groups: {{g: {{targets: [Linear], weights: "
        f"{{num_bits: {scheme[1]}, type: int, strategy: group, group_size: 32}}}}}}, ignore: [lm_head]}}\n"
    )
    run_oneshot(str(folder), stages, make_dataset(16), output_dir=str(tmp_path / "out"))
    load_checkpoint(str(tmp_path / "out"))
    file = next((tmp_path / "out").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if "layers.1.fc2.weight" in name)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.fc2"):
        load_checkpoint(str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "path", "told"),
    [
        ("adapter_config.json", "", "got an adapter. Merge the adapter into its model first"),
        ("model.gguf", "", "got GGUF, .* Pass the folder of safetensors that it was made from"),
        ("model.gguf", "model.gguf", "got GGUF"),
        ("model.bin", "model.bin", "got a file. Correct"),
        ("model.bin", "", "got a folder without a config.json"),
        ("model.bin", "no/such", "got no such folder"),
    ],
)
def test_what_is_no_model_folder_is_refused_with_the_remedy(name, path, told, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=f"must be a model folder or a hub name that can be loaded, {told}"):
        check_checkpoint(str(tmp_path / path))


def test_what_is_not_on_this_machine_has_no_folder():
    assert find_checkpoint(str(DEMO_MODEL)) == DEMO_MODEL
    assert find_checkpoint("nobody/has-this-model") is None
    assert find_checkpoint("/no/such/folder") is None


# -- .bin files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pickled(opt, tmp_path):
    """A copy whose weights are in a ``.bin`` file."""
    folder = shutil.copytree(opt, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_bin_files_that_are_whole_pass(pickled):
    load_checkpoint(str(pickled))


def test_a_tensor_that_a_bin_file_lacks_or_has_in_another_shape_is_named(pickled):
    file = pickled / "pytorch_model.bin"
    tensors = torch.load(file, weights_only=True)
    torch.save({**tensors, LAYER: tensors[LAYER][:, :-1].clone()}, file)
    refuse(pickled, rf"{LAYER} of shape \[24, 39\] in place of \[24, 40\]")
    del tensors[LAYER]
    torch.save(tensors, file)
    refuse(pickled, r"must hold every tensor .*layers\.1\.fc2\.weight missing")


class Trap:
    def __reduce__(self):
        return (open, ("trapped", "w"))


@pytest.mark.parametrize("kind", ["cut", "trap"])
def test_a_bin_file_that_is_broken_or_hostile_is_refused_unread(kind, pickled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = pickled / "pytorch_model.bin"
    if kind == "trap":
        torch.save({"x": Trap()}, file)
    else:
        file.write_bytes(file.read_bytes()[:5000])
    refuse(pickled, "must hold whole weights that fit its config.json, got")
    assert not (tmp_path / "trapped").exists()


def test_a_folder_whose_weights_nobody_loads_holds_none(pickled):
    (pickled / "pytorch_model.bin").rename(pickled / "training_args.bin")
    refuse(pickled, "must hold whole weights")


def drop_a_tensor(tensors):
    del tensors["model.decoder.layers.1.fc1.weight"]
    return r"no model.decoder.layers.1.fc1.weight"


def cut_a_tensor(tensors):
    tensors["model.decoder.layers.1.fc1.weight"] = tensors["model.decoder.layers.1.fc1.weight"][:3].clone()
    return r".*fc1.weight of shape \[3, 24\] in place of \[40, 24\]"


def change_a_value(tensors):
    for tensor in tensors.values():
        tensor += 1
    return r"other values of"


def lose_all(tensors):
    tensors.clear()
    return r"no .* and \d+ more"


@pytest.mark.parametrize("change", [drop_a_tensor, cut_a_tensor, change_a_value, lose_all])
def test_what_was_written_is_read_back(change, opt, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(opt)
    model.save_pretrained(tmp_path)
    check_written(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    told = change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(OSError, match=f"what was written must be the weights of the model, got {told}"):
        check_written(tmp_path, model)


def test_a_file_that_is_cut_short_or_absent_is_not_what_was_written(opt, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(opt)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OSError, match="what was written must be"):
        check_written(tmp_path, model)
    file.unlink()
    with pytest.raises(OSError, match="what was written must be"):
        check_written(tmp_path, model)
