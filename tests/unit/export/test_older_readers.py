"""What older readers find in an output: the source's keys that still hold, and its tokenizer's files."""

import json
import subprocess
import sys
from fnmatch import fnmatch

import pytest
from helpers.families import make_model
from helpers.models import run_oneshot, save_model
from transformers import AutoTokenizer, Gemma3TextConfig, GPTNeoXConfig, LlamaConfig, OPTConfig

from struprune_plugin.cli import main as cli
from struprune_plugin.export import modeling_struprune as modeling
from struprune_plugin.export.older_readers import copy_carried, keep_old_keys
from struprune_plugin.storage import checkpoint
from struprune_plugin.storage.output_folder import TEMPLATES

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
KEYS = {  # class -> keys as transformers 4 wrote them
    "llama3": (LlamaConfig, {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"}),
    "type": (LlamaConfig, {"rope_theta": 50000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "gemma3": (Gemma3TextConfig, {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": None}),
    "neox": (GPTNeoXConfig, {"rotary_pct": 0.5, "rotary_emb_base": 30000}),
    "no rope": (OPTConfig, {"torch_dtype": "float16"}),
}


def write_source(folder, kind, keys):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind.model_type, "use_cache": False, **keys}))
    return kind.from_pretrained(folder)


def read(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("is_stock", [True, False])
@pytest.mark.parametrize("name", KEYS)
def test_keys_of_the_old_spelling_stand_beside_the_new(name, is_stock, tmp_path):
    kind, keys = KEYS[name]
    config = write_source(tmp_path / "source", kind, keys)
    config.save_pretrained(tmp_path / "out")
    keep_old_keys(tmp_path / "source", tmp_path / "out", config, is_stock)
    found = read(tmp_path / "out")
    assert {key: found[key] for key in keys} == keys
    assert kind.from_pretrained(tmp_path / "out").to_dict() | keys == kind.from_pretrained(
        tmp_path / "source"
    ).to_dict() | keys | {"transformers_version": found["transformers_version"]}


def test_keys_that_no_longer_hold_are_not_kept(tmp_path):
    config = write_source(tmp_path / "source", *KEYS["llama3"])
    config.use_cache, config.dtype = True, "float32"
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1234.0}
    for is_stock in (False, True):
        config.save_pretrained(tmp_path / "out")
        keep_old_keys(tmp_path / "source", tmp_path / "out", config, is_stock)
        found = read(tmp_path / "out")
        assert (found["torch_dtype"], found.get("use_cache", True)) == ("float32", True)
        derived = (1234.0, {"rope_type": "linear", "factor": 2.0}) if is_stock else (None, None)
        assert (found.get("rope_theta"), found.get("rope_scaling")) == derived


def test_a_source_without_the_old_keys_gives_them_to_stock_classes(tmp_path):
    for name in ("llama3", "gemma3"):
        kind, keys = KEYS[name]
        config = write_source(tmp_path / name, kind, keys)
        config.save_pretrained(tmp_path / f"new {name}")
        config.save_pretrained(tmp_path / f"out {name}")
        keep_old_keys(tmp_path / f"new {name}", tmp_path / f"out {name}", config, is_stock=True)
        found = read(tmp_path / f"out {name}")
        assert {key: found[key] for key in keys} == keys


@pytest.fixture
def hub(tmp_path):
    """A folder as transformers 4 wrote it."""
    folder = save_model(make_model("llama"), tmp_path / "hub")
    config = read(folder)
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5, "torch_dtype": config.pop("dtype")}))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "extra_special_tokens": {}}
    (folder / "tokenizer_config.json").write_text(json.dumps(said | {"pad_token": "<pad>", "chat_template": "{{ 1 }}"}))
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    return folder


def list_tokenizer(folder):
    names = ["*token*.json", "*.jinja", "vocab*", "merges*"]
    return {file.name: file.read_bytes() for name in names for file in folder.glob(name)}


def test_outputs_hold_the_tokenizer_s_files_and_the_old_keys(hub, tmp_path):
    out, stock, uniform = (tmp_path / name for name in ("out", "stock", "uniform"))
    run_oneshot(str(hub), sparsity=0.3, output_dir=out)
    assert cli.main(["convert", str(out), "--to", "uniform-padded", "--output", str(stock)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(hub)
    run_oneshot(
        str(hub), sparsity=0.3, output="uniform", attention_unit="none", output_dir=uniform, tokenizer=tokenizer
    )
    for folder in (out, stock, uniform):
        assert list_tokenizer(folder) == list_tokenizer(hub)
        assert {"rope_theta": 5e5, "torch_dtype": "float32"}.items() <= read(folder).items()


def test_a_changed_tokenizer_is_saved_under_its_old_class(hub, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(hub)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    run_oneshot(str(hub), sparsity=0.3, output_dir=tmp_path / "out", tokenizer=tokenizer)
    said = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (said["tokenizer_class"], said["additional_special_tokens"]) == ("PreTrainedTokenizerFast", ["<end>"])
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("a<end>b")["input_ids"] == tokenizer("a<end>b")["input_ids"]


def test_the_modelling_file_tells_older_transformers_what_it_needs():
    lines = f"import transformers; transformers.__version__ = '4.57.1'; exec(open({modeling.__file__!r}).read())"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert "ImportError: modeling_struprune.py: transformers must be 5.15 or newer, got 4.57.1. Install" in done.stderr


@pytest.mark.parametrize(("model_type", "named"), [("mistral", "LlamaTokenizerFast"), ("opt", None)])
def test_an_output_s_tokenizer_is_of_the_class_that_the_model_s_own_type_decides(model_type, named, tmp_path):
    folder = save_model(make_model(model_type), tmp_path / "hub")
    said = {"tokenizer_class": named} if named else {}
    (folder / "tokenizer_config.json").write_text(json.dumps({**said, "model_max_length": 64}))
    run_oneshot(str(folder), sparsity=0.3, output_dir=tmp_path / "out")
    before, after = map(AutoTokenizer.from_pretrained, (folder, tmp_path / "out"))
    assert (type(after), after("Hello you, 12 cats")) == (type(before), before("Hello you, 12 cats"))
    assert after.special_tokens_map == before.special_tokens_map


def test_code_that_a_tokenizer_imports_goes_with_it_and_folders_stay_writable(tmp_path):
    source, output = tmp_path / "source", tmp_path / "out"
    (source / TEMPLATES).mkdir(parents=True)
    output.mkdir()
    (source / "tokenization_x.py").write_text("from .tools import declare\n")
    (source / "tools.py").write_text("declare = 1\n")
    (source / "modeling_x.py").write_text("")
    (source / TEMPLATES / "tool_use.jinja").write_text("{{ tools }}")
    (source / TEMPLATES).chmod(0o555)
    copy_carried(source, output)
    copied = {str(file.relative_to(output)) for file in output.rglob("*") if file.is_file()}
    assert copied == {"tokenization_x.py", "tools.py", f"{TEMPLATES}/tool_use.jinja"}
    assert (output / TEMPLATES).stat().st_mode & 0o200


def test_files_that_loading_does_not_fetch_are_fetched_from_the_hub(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda name, **options: asked.update(options, name=name))
    for name in ("owner/model", str(tmp_path), "no/hub/name"):
        checkpoint.fetch_carried(name, "v2")
    assert (asked["name"], asked["revision"]) == ("owner/model", "v2")
    files = ("preprocessor_config.json", "LICENSE", "README.md", f"{TEMPLATES}/tool_use.jinja")
    assert all(any(fnmatch(file, pattern) for pattern in asked["allow_patterns"]) for file in files)
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda *args, **options: 1 / 0)
    checkpoint.fetch_carried("owner/model")  # a warning
