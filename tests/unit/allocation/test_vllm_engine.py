"""vLLM as an engine of cost tables: the folders that it is given, the script that runs it, and what is refused."""

import json
import sys
from importlib.util import find_spec

import pytest
import torch
from helpers.families import make_model
from helpers.models import make_opt

from struprune_plugin.allocation.costs.engine_process import EngineProcess
from struprune_plugin.allocation.costs.engines import find_table, list_kinds, list_units
from struprune_plugin.allocation.costs.measure_costs import Change, Run, measure_costs
from struprune_plugin.allocation.costs.vllm_engine import VLLMEngine, time_folders, write_stock
from struprune_plugin.export.any_class import replace_conv1d

RUN = Run(("prompt", "token"), 2, 12)
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
PLAYED = """
import json
import sys

__version__ = "played"


class ModelRegistry:
    get_supported_archs = staticmethod(lambda: set())
    register_model = staticmethod(lambda name, place: None)


class SamplingParams:
    def __init__(self, **options):
        self.left = options["max_tokens"]


class Answer:
    def __init__(self, name):
        self.request_id = name


class LLM:
    def __init__(self, folder, **options):
        with open(folder + "/config.json") as file:
            self.kind = json.load(file)["architectures"][0]
        if options["max_model_len"] < 20:
            raise ValueError("too short")
        print("noise", self.kind, options["enforce_eager"])
        self.llm_engine, self.left = self, {}

    def add_request(self, name, prompt, options):
        assert name not in self.left
        self.left[name] = options.left

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        assert self.left, "there is nothing to do"
        for name in list(self.left):
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
        return [Answer(name) for name in self.left] or [Answer("last")]

    def abort_request(self, names):
        assert set(names) == set(self.left)
        self.left.clear()
"""


@pytest.fixture(scope="module")
def llama():
    return make_model("llama", **SIZES, num_hidden_layers=4)


@pytest.fixture
def asked(monkeypatch):
    """Jobs that the script would have got, each with the folders' configurations."""
    jobs = []

    def ask(self, job, python):
        configs = []
        for folder in job["folders"]:
            with open(f"{folder}/config.json") as file:
                configs.append(json.load(file))
        named = [folder.rpartition("/")[2] for folder in job["folders"]]
        if named == ["dense", "changed"]:
            jobs.append({**job, "configs": configs})
        else:
            assert named == ["changed", "dense"], "the same pair in the other order"
            assert configs == jobs[-1]["configs"][::-1]
        scales = [1.0 if name == "dense" else 0.5 for name in named]
        seconds = [{phase: [2 * scale, scale, 3 * scale] for phase in job["phases"]} for scale in scales]
        return {"seconds": seconds, "machine": "a test"}

    monkeypatch.setattr(EngineProcess, "ask", ask)
    return jobs


def test_the_dense_folder_is_stock_and_the_changed_one_is_as_pruning_saves_it(llama, asked):
    engine = VLLMEngine(llama, torch.float32, RUN, 4)
    ffn, values, heads = list_kinds(llama, ["ffn", "value_channels", "head"])
    ones = [Change(ffn, 128), Change(values, 8), Change(heads, 1)]
    changes = [[], *([one] for one in ones), [Change(ffn, 128), Change(heads, 1)], None]
    assert engine.compare(changes[0]) == {"prompt": (1.0, 0.5), "token": (1.0, 0.5)}
    for some in changes[1:]:
        engine.compare(some)
    assert all(job["configs"][0]["architectures"] == ["LlamaForCausalLM"] for job in asked)
    assert all(job["configs"][0]["num_hidden_layers"] == engine.num_layers == 4 for job in asked)
    assert all(job["configs"][1]["architectures"] == ["StruPruneLlamaForCausalLM"] for job in asked)
    assert all(job["prompts"] == asked[0]["prompts"] and len(job["prompts"]) == 2 for job in asked)
    whole, narrow, few_values, few_heads, both, nothing = (job["configs"][1] for job in asked)
    layers = [f"{index}" for index in range(4)]
    assert not any(whole.get("per_layer_config") or {}.values())
    assert [narrow["per_layer_config"][name]["intermediate_size"] for name in layers] == [128] * 4
    assert [few_values["per_layer_config"][name]["value_head_dim"] for name in layers] == [4] * 4
    assert [few_heads["per_layer_config"][name]["num_key_value_heads"] for name in layers] == [1] * 4
    assert [both["per_layer_config"][name]["intermediate_size"] for name in layers] == [128] * 4
    assert [both["per_layer_config"][name]["num_key_value_heads"] for name in layers] == [1] * 4
    assert nothing["num_hidden_layers"] == engine.num_whole == 1
    assert engine.machine == "a test"


@pytest.mark.parametrize("model", ["llama", "opt", "gpt2"])
def test_every_kind_of_units_has_a_line(model, asked):
    dense = make_opt() if model == "opt" else make_model(model)
    replace_conv1d(dense)
    units = list_units(dense)
    table = measure_costs(VLLMEngine(dense, torch.float32, RUN, 2), dense, list_kinds(dense, units), RUN)
    assert (table.engine, table.machine, table.dtype) == ("vllm", "a test", "float32")
    assert [module.module.partition(" ")[0] for module in table.phases[0].modules] == units


def test_a_layer_keeps_its_attention(llama):
    ffn, values, heads = list_kinds(llama, ["ffn", "value_channels", "head"])
    engine = VLLMEngine(llama, torch.float32, RUN, 4)
    assert [engine.can_remove(group) for group in (ffn, values, heads)] == [False, False, False]


def time_dense_twice(model, folder, run):
    write_stock(model, folder)
    return time_folders([folder, folder], model.config, torch.float32, run)


def test_the_script_steps_through_prompts_and_tokens(llama, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(PLAYED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    times, machine = time_dense_twice(llama, tmp_path / "dense", RUN)
    assert set(times) == {"prompt", "token"}
    assert all(seconds > 0 for pair in times.values() for seconds in pair)
    assert machine.endswith("vllm played")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_a_python_without_vllm_is_refused(llama, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"^vllm: .* must have vLLM and run the models, got ModuleNotFoundError: No module named 'vllm'\. .*--python",
    ):
        find_table("vllm", llama, torch.float32, ["ffn"], RUN)


def test_a_script_that_dies_says_its_last_word(tmp_path):
    (tmp_path / "dies.py").write_text("import sys\nsys.exit('out of luck\\n')")
    process = EngineProcess("it", "a library", tmp_path / "dies.py")
    with pytest.raises(
        ValueError, match=rf"^it: {sys.executable} must have a library and run the models, got out of luck\. "
    ):
        process.ask({}, "")
    with pytest.raises(
        ValueError, match=r"^--python: must be a Python with a library, got .*nowhere.*Correct the path"
    ):
        process.ask({}, str(tmp_path / "nowhere"))
