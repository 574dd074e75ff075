"""Inputs that others feed to such tools: each gives the right output, or is refused in one line before work."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from datasets import Dataset, DatasetDict
from helpers.families import make_model
from helpers.models import make_dataset, run_oneshot, save_model
from loguru import logger
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from struprune_plugin.cli import main as cli
from struprune_plugin.evaluation.calibration import prepare_dataset
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, make_calibration_dataset, read_texts
from struprune_plugin.storage.manifest import read_manifest

TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
FILES = {  # what tokenizers, processors and llama.cpp's converter read beside the tokenizer that is loaded
    "chat_template.json": '{"chat_template": "{{ messages }}"}',
    "preprocessor_config.json": "{}",
    "processor_config.json": "{}",
    "tokenizer.model": "pieces",
    "vocab.json": "{}",
    "merges.txt": "a b",
    "added_tokens.json": "{}",
}
AHEAD = {  # layers that predict several tokens ahead, as checkpoints name them
    "model.layers.2.eh_proj.weight": "num_nextn_predict_layers",
    "mtp.layers.0.fc.weight": "mtp_num_hidden_layers",
    "model.mtp.fc.weight": "num_mtp_layers",
    "some_other_head.weight": "",
}


@pytest.fixture
def llama(tmp_path) -> Path:
    return save_model(make_model("llama"), tmp_path / "llama")


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def run(model, **kwargs):
    return run_oneshot(model if isinstance(model, nn.Module) else str(model), sparsity=0.3, **kwargs)


def prune_and_convert(folder, tmp_path):
    """Prune by the command line, convert, and return both folders."""
    out, stock = tmp_path / "out", tmp_path / "stock"
    options = ["--recipe", "struprune", "--num-samples", "16", "--seq-length", "32", "--set", "allocation=uniform"]
    assert cli.main(["prune", str(folder), *options, "--output", str(out), "--quiet"]) == 0
    assert cli.main(["convert", str(out), "--to", "uniform-padded", "--output", str(stock), "--quiet"]) == 0
    return out, stock


def test_generation_settings_that_transformers_would_not_save_are_kept(llama, tmp_path):
    settings = {"temperature": 0.9, "do_sample": False}
    (llama / "generation_config.json").write_text(json.dumps(settings))
    for folder in prune_and_convert(llama, tmp_path):
        assert json.loads((folder / "generation_config.json").read_text()).items() >= settings.items()
    model = load(llama)
    model.generation_config = GenerationConfig(top_p=0.5, do_sample=False)
    run(model, output_dir=str(tmp_path / "loaded"))
    assert json.loads((tmp_path / "loaded" / "generation_config.json").read_text())["top_p"] == 0.5
    model = load(llama)
    model.generation_config.max_new_tokens = -1
    with pytest.raises(
        ValueError, match=r"generation_config must be one that transformers can save, got: .*max_new_tokens"
    ):
        run(model)


def test_a_loaded_model_is_compared_with_its_configuration(llama):
    model = load(llama)
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ValueError, match="must have the 2 decoder layers that its configuration says, got 1"):
        run(model)
    model = load(llama)
    model.lm_head = nn.Linear(32, 100, bias=False)
    with pytest.raises(ValueError, match=r"lm_head.weight must have the shape \[2048, 32\].*got \[100, 32\]"):
        run(model)


@pytest.mark.parametrize("name", AHEAD)
def test_tensors_that_the_class_does_not_load_are_told(name, llama, tmp_path):
    tensors = load_file(llama / "model.safetensors") | {name: torch.ones(3, 3)}
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    config, key, said = json.loads((llama / "config.json").read_text()), AHEAD[name], []
    (llama / "config.json").write_text(json.dumps(config | ({key: 1} if key else {})))
    handle = logger.add(said.append, level="WARNING", format="{message}")
    try:
        run(llama, output_dir=str(tmp_path / "out"))
    finally:
        logger.remove(handle)
    assert [line for line in said if name in line and "does not load 1 of its tensors" in line]
    assert read_manifest(tmp_path / "out").model.left_out == [name]
    assert name in (tmp_path / "out" / "README.md").read_text()
    if key:
        assert json.loads((tmp_path / "out" / "config.json").read_text())[key] == 0
        if name.startswith(("mtp", "model.layers")):
            run(load(llama), output_dir=str(tmp_path / "loaded"))
            assert read_manifest(tmp_path / "loaded").model.left_out == [name]
            assert json.loads((tmp_path / "loaded" / "config.json").read_text())[key] == 0


def test_files_of_tokenizers_and_processors_are_carried_over(llama, tmp_path):
    for name, content in FILES.items():
        (llama / name).write_text(content)
    for folder in prune_and_convert(llama, tmp_path):
        assert {name: (folder / name).read_text() for name in FILES} == FILES
        assert AutoTokenizer.from_pretrained(folder)("some text") == AutoTokenizer.from_pretrained(llama)("some text")
    run(llama, output_dir=str(tmp_path / "out"), overwrite=True)


def make_chats(count=30):
    texts = read_texts(DEMO_CALIBRATION)[:count]
    parts = [[("user", text[:100]), ("assistant", text[100:400])] for text in texts]
    return [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in parts]


def make_tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("streamed", [False, True])
def test_conversations_are_calibration_data_by_the_chat_template(streamed, llama):
    chats, tokenizer = Dataset.from_list(make_chats()), make_tokenizer(llama)
    dataset = chats.to_iterable_dataset() if streamed else chats
    made = prepare_dataset(str(llama), {"dataset": dataset, "tokenizer": tokenizer, "max_seq_length": 32})["dataset"]
    wanted = tokenizer.apply_chat_template(chats[0]["messages"], return_dict=False)
    assert made[0]["input_ids"] == wanted[:32]
    assert len(made) == len(chats)
    run(llama, dataset=dataset, tokenizer=tokenizer, max_seq_length=32)


def test_a_file_of_conversations_is_calibration_data(llama, tmp_path, capsys):
    file, tokenizer = tmp_path / "chats.jsonl", make_tokenizer(llama)
    file.write_text("\n".join(map(json.dumps, make_chats())))
    first = make_calibration_dataset(file, tokenizer, 2, 16)["input_ids"][0]
    assert first == tokenizer.apply_chat_template(make_chats()[0]["messages"], return_dict=False)[:16]
    options = ["--recipe", "struprune", "--num-samples", "16", "--seq-length", "32", "--set", "allocation=uniform"]
    options += ["--data", str(file), "--output", str(tmp_path / "out"), "--quiet"]
    assert cli.main(["prune", str(llama), *options]) == 2
    assert "must come with a tokenizer that has a chat template" in capsys.readouterr().err
    tokenizer.save_pretrained(llama)
    assert cli.main(["prune", str(llama), *options]) == 0


def test_data_of_other_columns_or_none_are_refused_by_name(llama):
    texts = read_texts(DEMO_CALIBRATION)[:20]
    with pytest.raises(ValueError, match=r"got \['prompt'\]. Name the column of the text \(text_column=…\)"):
        run(llama, dataset=Dataset.from_dict({"prompt": texts}))
    with pytest.raises(ValueError, match="must have rows, got an empty data set"):
        run(llama, dataset=Dataset.from_list([]))
    with pytest.raises(ValueError, match=r"splits: must be one of \['test'\], got 'train'"):
        run(llama, dataset=DatasetDict({"test": Dataset.from_dict({"text": texts})}))
    run(llama, dataset=Dataset.from_dict({"prompt": texts}), text_column="prompt", max_seq_length=32)


def test_a_streamed_data_set_is_taken(llama):
    wanted = run(llama, dataset=make_dataset())
    found = run(llama, dataset=make_dataset().to_iterable_dataset())
    assert all(torch.equal(a, b) for a, b in zip(wanted.parameters(), found.parameters(), strict=True))


def test_weights_that_are_elsewhere_are_refused(llama):
    model = load(llama)
    cpu_offload(model, "cpu")
    with pytest.raises(ValueError, match="must be without accelerate's hooks"):
        run(model)
    config = load(llama).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"must hold weights, got model.embed_tokens.weight on the meta device"):
        run(model)


def test_torch_s_state_around_a_run_changes_nothing(llama):
    data, wanted = make_dataset(), run(llama).state_dict()

    def check(model):
        assert all(torch.equal(weight, wanted[name]) for name, weight in model.state_dict().items())

    with torch.inference_mode():
        check(run(llama, dataset=data))
        check(run(load(llama), dataset=data))
        assert torch.is_inference_mode_enabled()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        check(run(llama, dataset=data))
    with torch.device("meta"):
        check(run(llama, dataset=data))
    torch.set_default_dtype(torch.float64)
    try:
        check(run(llama, dataset=data))
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("adapt", [get_peft_model, lambda model, config: model.add_adapter(config) or model])
def test_a_model_with_adapters_is_refused_with_the_remedy(adapt, llama):
    with pytest.raises(ValueError, match=r"must have its adapters merged, .* Merge them first"):
        run(adapt(load(llama), LoraConfig(target_modules=["q_proj"])))
