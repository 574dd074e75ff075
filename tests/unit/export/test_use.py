"""What users do with a loaded output as with a dense model: heads of other tasks, other layers, copies by pickle."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from helpers.cuts import cut_units
from helpers.models import ROOT
from helpers.use_output import IDS, TASKS, copy_by_pickle, keep_layers, use_head
from torch import nn
from transformers import AutoModelForCausalLM

from eval.coverage import make_config
from struprune_plugin.export.convert import adopt_config
from struprune_plugin.model.structure.tiny import build_tiny

TYPES = ["llama", "qwen3", "gemma3_text", "qwen3_moe"]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Folders of models of four layers, each of another width, by type."""
    folders = {}
    for name in TYPES:
        model = build_tiny(make_config(name, 4))
        cut_units(model, "value_channels", is_uneven=True)
        adopt_config(model)
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    return folders


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def test_an_output_is_used_without_this_package(outputs, tmp_path):
    own = {"HF_MODULES_CACHE": str(tmp_path), "PYTHONPATH": ""}
    command = [sys.executable, "-P", str(ROOT / "tests/helpers/use_output.py"), str(outputs["llama"])]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"heads": {task: [True, True] for task in TASKS}, "pickled": True, "dropped": True}


@pytest.mark.parametrize(
    ("name", "task"),
    [("llama", "QuestionAnswering"), ("qwen3", "TokenClassification"), ("gemma3_text", "SequenceClassification")]
    + [("qwen3_moe", task) for task in TASKS],
)
def test_heads_of_other_tasks_are_trained_saved_and_loaded(outputs, name, task):
    assert use_head(outputs[name], task, TASKS[task]) == (True, True)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("places", [[0, 1], [0, 2, 3], [3, 0]])
def test_the_layout_follows_the_layers_that_are_there(outputs, name, places, tmp_path):
    model = load(outputs[name])
    keep_layers(model, places)
    wanted = model(IDS).logits
    model.save_pretrained(tmp_path / "first")
    again = load(tmp_path / "first")
    assert torch.equal(again(IDS).logits, wanted)
    widths = [layer.mlp.down_proj.in_features for layer in model.model.layers if hasattr(layer.mlp, "down_proj")]
    assert [config.intermediate_size for config in again.config.per_layer_config][: len(widths)] == widths or not widths
    keep_layers(again, [len(places) - 1])  # once more
    again.save_pretrained(tmp_path / "second")
    assert torch.equal(load(tmp_path / "second")(IDS).logits, again(IDS).logits)


def test_a_layer_may_be_repeated_and_fewer_may_be_loaded(outputs, tmp_path):
    model = load(outputs["llama"])
    model.model.layers.insert(1, copy.deepcopy(model.model.layers[3]))
    keep_layers(model, range(5))
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(IDS).logits, model(IDS).logits)
    first = load(outputs["llama"], num_hidden_layers=2)
    keep_layers(model, [0, 2])
    assert torch.equal(first(IDS).logits, model(IDS).logits)


def test_a_folder_that_states_fewer_layers_than_its_layout_has_the_first(outputs, tmp_path):
    """As versions wrote it that left the layout as it was."""
    model = load(outputs["llama"])
    keep_layers(model, [0, 1])
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    old, new = (json.loads(each.read_text()) for each in (outputs["llama"] / "config.json", file))
    file.write_text(json.dumps(new | {name: old[name] for name in ("layout", "per_layer_config")}))
    assert torch.equal(load(tmp_path)(IDS).logits, model(IDS).logits)


def test_layers_that_no_layout_describes_are_refused(outputs, tmp_path):
    model = load(outputs["llama"])
    model.model.layers = model.model.layers[:2]
    with pytest.raises(
        ValueError, match=r"model\.layers must have num_hidden_layers = 4 layers, got 2\. Set model\.config"
    ):
        model.save_pretrained(tmp_path)
    model.model.layers[1] = type(model.model.layers[0])(model.config.make_dense(), 1)
    with pytest.raises(ValueError, match=r"model\.layers\.1 must be a layer of the loaded model or a copy of one"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"num_hidden_layers: must be at most 4, .* got 5\. Set it"):
        load(outputs["llama"], num_hidden_layers=5)


@pytest.mark.parametrize("name", TYPES)
def test_a_model_is_copied_by_pickle(outputs, name):
    model = load(outputs[name])
    again = copy_by_pickle(model)
    assert type(again) is type(model)
    assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    again.model.layers[0].self_attn.v_proj.weight.data.zero_()
    assert model.model.layers[0].self_attn.v_proj.weight.any(), "nothing is shared"
    assert isinstance(again.model.layers[0].self_attn.v_proj, nn.Linear)
    assert copy_by_pickle(model.config).to_dict() == model.config.to_dict()
