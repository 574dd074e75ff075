import ast
import inspect
import json
import os
import pty
import subprocess
import sys
import textwrap
from contextlib import suppress
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from helpers.families import MODEL_TYPES
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eval import serve
from struprune_plugin.export import modeling_struprune


def test_vllm_finds_every_architecture_by_the_entry_point(monkeypatch):
    """vLLM itself is not here: its registry is played."""
    registered = {"StruPruneOPTForCausalLM": "kept"}
    registry = SimpleNamespace(
        get_supported_archs=lambda: set(registered), register_model=lambda name, where: registered.update({name: where})
    )
    vllm = ModuleType("vllm")
    vllm.ModelRegistry = registry
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    (point,) = entry_points(group="vllm.general_plugins", name="struprune")
    point.load()()
    assert registered.pop("StruPruneOPTForCausalLM") == "kept"
    assert {where.rpartition(":")[2] for where in registered.values()} == {"TransformersForCausalLM"}
    assert len(registered) > 150
    described = {f"StruPrune{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]}" for name in MODEL_TYPES}
    assert described - {*registered} == {"StruPruneOPTForCausalLM"}
    for name in described:
        assert issubclass(getattr(modeling_struprune, name), getattr(transformers, name.removeprefix("StruPrune")))
        assert getattr(modeling_struprune, name)._supports_attention_backend  # what that backend asks


ALONE = """
import os, sys
from types import ModuleType, SimpleNamespace
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

folder, terminal = sys.argv[1], os.dup(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
print(1, AutoTokenizer.from_pretrained(folder)("one two").input_ids, flush=True)  # nobody to ask
os.dup2(terminal, 0)
print(2, AutoTokenizer.from_pretrained(folder)("one two").input_ids, flush=True)  # the one that asks
print(3, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)("one two").input_ids, flush=True)

for name in ("llmcompressor", "compressed_tensors", "loguru", "psutil", "peft", "lm_eval", "datasets"):
    sys.modules[name] = None  # importing it fails, as where it is not installed
found = {}
vllm = ModuleType("vllm")
vllm.ModelRegistry = SimpleNamespace(get_supported_archs=set, register_model=found.__setitem__)
sys.modules["vllm"] = vllm
from struprune_plugin.export import vllm_plugin as serving

serving.register()
model = AutoModelForCausalLM.from_pretrained(folder)
assert type(model).__name__ in found
assert type(AutoModel.from_pretrained(folder)).__name__ == "StruPruneOPTModel"
print(4, AutoTokenizer.from_pretrained(folder)("one two").input_ids, flush=True)
assert "transformers_modules" not in sys.modules
"""


def test_at_a_terminal_transformers_asks_once_and_an_engine_needs_it_alone(opt, prune_once, tmp_path):
    """Stock transformers reads the model's configuration before the tokenizer's, and asks whether to trust it; told not to, or
    knowing our types, it does not. llm-compressor cannot be installed beside vLLM, which pins another compressed-tensors.

    One process for all: its start is what takes time.
    """
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", ALONE, str(prune_once(opt, "value_channels")[1])]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        os.write(ours, b"n\n")  # waits in the terminal until it is asked for
        said = b""
        with suppress(OSError):  # the other end is closed
            while piece := os.read(ours, 4096):
                said += piece
    os.close(ours)
    ids = AutoTokenizer.from_pretrained(opt)("one two").input_ids
    assert process.returncode == 0, said.decode()
    assert [f"{number} {ids}" in said.decode() for number in (1, 2, 3, 4)] == [True] * 4
    assert said.count(b"Do you wish to run the custom code?") == 2, "the first question goes unheard"


def test_auto_map_names_what_engines_ask_for(opt, prune_once):
    config = json.loads((prune_once(opt, "value_channels")[1] / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "modeling_struprune.StruPruneOPTConfig",
        "AutoModel": "modeling_struprune.StruPruneOPTModel",
        "AutoModelForCausalLM": "modeling_struprune.StruPruneOPTForCausalLM",
    }


@pytest.mark.parametrize("name", ["StruPruneOPTModel", "StruPruneLlamaModel", "StruPruneGPTNeoXForCausalLM"])
def test_derived_classes_have_no_annotations_that_vllm_would_check(name):
    """It compares arguments with the annotations of ``__init__``, which are texts in that file."""
    parameters = inspect.signature(modeling_struprune.derive_class(name).__init__).parameters.values()
    assert all(parameter.annotation is inspect.Parameter.empty for parameter in parameters)


def test_attention_looks_the_engines_kernel_up_where_vllm_reads():
    """It reads the source of ``forward`` for a lookup in ALL_ATTENTION_FUNCTIONS and one call of what that gives."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(modeling_struprune.StruPruneAttention.forward)))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign | ast.Assign)]
    lookups = [node.target.id for node in found if "ALL_ATTENTION_FUNCTIONS" in ast.unparse(node.value)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in lookups]
    assert len(lookups) == len(calls) == 1
    assert "scaling" in {keyword.arg for keyword in calls[0].keywords}


@pytest.mark.parametrize(("unit", "own"), [("none", False), ("head", False), ("value_channels", True)])
def test_layers_whose_values_are_whole_load_with_stock_attention(opt, prune_once, unit, own):
    model = AutoModelForCausalLM.from_pretrained(prune_once(opt, unit)[1])
    kinds = {type(layer.self_attn).__name__ for layer in model.model.decoder.layers}
    assert ("StruPruneOPTAttention" in kinds) == own
    assert own or kinds == {"OPTAttention"}


@pytest.mark.parametrize("kind", ["none", "flags", "logits"])
def test_attend_one_is_what_the_formula_says(kind):
    """softmax(q k^T / sqrt(d) + mask) v, with two query heads to a value head and narrow values."""
    batch, heads, shared, tokens, width, narrow = 2, 4, 2, 5, 8, 3
    make = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads, 1, width, generator=make, dtype=torch.float64)
    key = torch.randn(batch, shared, tokens, width, generator=make, dtype=torch.float64)
    value = torch.randn(batch, shared, tokens, narrow, generator=make, dtype=torch.float64)
    seen = torch.tensor([[True] * 5, [False, False, True, True, True]])[:, None, None]
    added = torch.zeros(batch, 1, 1, tokens, dtype=torch.float64).masked_fill(~seen, -1e9)
    mask = {"none": None, "flags": seen, "logits": added}[kind]
    logits = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / width**0.5
    weights = torch.softmax(logits if kind == "none" else logits + added, -1)
    expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2).flatten(-2)
    got = modeling_struprune.attend_one(query, key, value, mask, width**-0.5)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", ["opt", "llama"])
def test_every_layers_configuration_tells_its_head_size(save_family, prune_once, model_type):
    """vLLM sizes a layer's cache by it, and by hidden_size / heads where there is none."""
    folder = save_family(model_type)
    dense = AutoModelForCausalLM.from_pretrained(folder)
    width = next(m.head_dim for m in dense.modules() if hasattr(m, "q_proj"))
    config = AutoConfig.from_pretrained(prune_once(folder, "head")[1])
    assert {layer.head_dim for layer in config.per_layer_config} == {width}


@pytest.mark.parametrize(
    ("form", "off", "passed"),
    [
        ("value_channels", 9e-4, True),
        ("value_channels", 2e-3, False),
        ("w8a8", 1.4, True),
        ("w8a8", 1.6, False),
        ("w4a16", 0.1, False),
    ],
)
def test_vllm_s_answers_are_judged_by_transformers_and_quantised_ones_by_the_dense_model(form, off, passed):
    rows = [{"model": "m", "form": name, "worst": worst} for name, worst in (("dense-w8a8", 0.5), (form, off))]
    assert serve.passes(rows[1], rows) == passed  # w4a16: no dense one to compare with
    assert not serve.passes({"model": "m", "form": form, "failed": "no server"}, rows)
