"""Inputs that others feed to such tools: each gives the right output, or is refused in one line before work."""

import json
import re
from contextlib import contextmanager, nullcontext
from pathlib import Path

import llmcompressor
import pytest
import torch
from accelerate import cpu_offload
from datasets import Dataset, DatasetDict
from helpers.families import make_model
from helpers.mixtures import make_mixture
from helpers.models import make_dataset, run_oneshot, save_model, save_opt
from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import get_calibration_dataloader
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform import SmoothQuantModifier
from loguru import logger
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
)

from eval.coverage import make_config
from struprune_plugin import StruPruneModifier
from struprune_plugin.cli import main as cli
from struprune_plugin.evaluation.text import (
    DEMO_CALIBRATION,
    DEMO_MODEL,
    check_dataset,
    make_calibration_dataset,
    prepare_dataset,
    read_texts,
)
from struprune_plugin.model.structure.shrinking import shrink_config
from struprune_plugin.model.structure.tiny import build_instance
from struprune_plugin.modifiers.checks import read_batches
from struprune_plugin.pruning.prune_layer import Pruner
from struprune_plugin.storage import checkpoint
from struprune_plugin.storage.manifest import read_manifest
from struprune_plugin.storage.resume_store import digest_tokens

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


OPTIONS = ["--recipe", "struprune", "--num-samples", "16", "--seq-length", "32"]
OPTIONS += ["--set", "allocation=uniform", "--set", "sensitivity=none"]


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
    assert cli.main(["prune", str(folder), *OPTIONS, "--output", str(out)]) == 0
    assert cli.main(["convert", str(out), "--to", "uniform-padded", "--output", str(stock)]) == 0
    return out, stock


def test_generation_settings_that_transformers_would_not_save_are_kept(llama, tmp_path):
    model = load(llama)
    model.generation_config = GenerationConfig(top_p=0.5, do_sample=False)
    run(model, output_dir=str(tmp_path / "loaded"))
    assert json.loads((tmp_path / "loaded" / "generation_config.json").read_text())["top_p"] == 0.5
    model = load(llama)
    model.generation_config.max_new_tokens = -1
    with pytest.raises(ValueError, match=r"generation_config must be one that .* can save, got .*max_new_tokens"):
        run(model)


def lose_settings(model):
    model.generation_config = None


def add_a_head(model):
    model.value_head = nn.Linear(32, 1)


def tie_the_head(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def share_a_layer(model):
    model.model.layers[1].mlp = model.model.layers[0].mlp


CHANGED = {
    lose_settings: "generation_config must be one that transformers can save, got",
    add_a_head: "value_head.bias must have the shape None that LlamaForCausalLM makes of its configuration",
    tie_the_head: "lm_head.weight must have the shape .* got None. .*tie_word_embeddings",
    share_a_layer: "model.layers.1.mlp.down_proj.weight must have the shape .* got None",
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_model_that_was_changed_in_memory_is_refused(change, llama):
    """Its save would fail, or a reload would draw what is not saved."""
    model = load(llama)
    change(model)
    with pytest.raises(ValueError, match=CHANGED[change]):
        run(model)


def test_a_loaded_model_is_compared_with_its_configuration(llama):
    model = load(llama)
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ValueError, match=r"model.layers.1.* must have the shape .*got None"):
        run(model)
    model = load(llama)
    model.lm_head = nn.Linear(32, 100, bias=False)
    with pytest.raises(ValueError, match=r"lm_head.weight must have the shape \[2048, 32\].*got \[100, 32\]"):
        run(model)


@contextmanager
def record_log(level="WARNING"):
    said = []
    handle = logger.add(said.append, level=level, format="{message}")
    try:
        yield said
    finally:
        logger.remove(handle)


def test_tensors_that_the_class_does_not_load_are_told(llama, tmp_path):
    """In the file of the others, and in one of their own."""
    tensors = load_file(llama / "model.safetensors") | {name: torch.ones(3, 3) for name in AHEAD}
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    save_file({"mtp.fc.weight": torch.ones(3, 3)}, llama / "mtp.safetensors", {"format": "pt"})
    names, keys = sorted([*AHEAD, "mtp.fc.weight"]), [key for key in AHEAD.values() if key]
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, 1)))
    for given, out in ((llama, tmp_path / "out"), (load(llama), tmp_path / "loaded")):
        with record_log() as said:
            run(given, output_dir=str(out))
        assert [line for line in said if "does not load 5 of its tensors" in line]
        assert sorted(read_manifest(out).model.left_out) == names
        assert names[0] in (out / "README.md").read_text()
        assert {json.loads((out / "config.json").read_text())[key] for key in keys} == {0}


def save_with_layers_ahead(model_type, folder):
    """A tiny mixture as its makers ship it, with a layer that predicts a token ahead; the layer's tensors."""
    model = make_mixture(model_type, vocab_size=2048)
    save_model(model, folder)
    tensors, last = load_file(folder / "model.safetensors"), model.config.num_hidden_layers
    like, name = f"model.layers.{last - 1}.", "mtp.layers.0." if model_type == "qwen3_next" else f"model.layers.{last}."
    more = {own.replace(like, name): weight.clone() for own, weight in tensors.items() if own.startswith(like)}
    more |= {f"{name}{own}.weight": torch.ones(64) for own in ("eh_proj", "enorm", "hnorm")}
    save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return more


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next"])
def test_mixtures_lose_their_layers_ahead_and_say_so(model_type, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("LLM_COMPRESSOR_LOG_LEVEL", raising=False)
    dense = tmp_path / "dense"
    more = save_with_layers_ahead(model_type, dense)
    out, stock = prune_and_convert(dense, tmp_path)
    assert "num_nextn_predict_layers is set to 0" in capsys.readouterr().err
    for folder in (out, stock):
        left = read_manifest(folder).model.left_out
        assert left
        assert all(any(name.startswith(one.split("experts")[0]) for one in left) for name in more)
        assert left[0] in (folder / "README.md").read_text()
        assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 0
        assert not load_file(folder / "model.safetensors").keys() & more.keys()
        with record_log() as said:
            checkpoint.note_left_out(checkpoint.load_whole(AutoModelForCausalLM, str(folder)), str(folder))
        assert not said


def test_settings_and_files_of_tokenizers_and_processors_are_carried_over(llama, tmp_path):
    settings = {"temperature": 0.9, "do_sample": False}  # which transformers would not save
    for name, content in {**FILES, "generation_config.json": json.dumps(settings)}.items():
        (llama / name).write_text(content)
    for folder in prune_and_convert(llama, tmp_path):
        assert json.loads((folder / "generation_config.json").read_text()).items() >= settings.items()
        assert {name: (folder / name).read_text() for name in FILES} == FILES
        assert AutoTokenizer.from_pretrained(folder)("some text") == AutoTokenizer.from_pretrained(llama)("some text")
    run(llama, output_dir=str(tmp_path / "out"), overwrite=True)


def save_gemma3(folder):
    """A tiny Gemma 3 with images, its processor's files and its chat template as its makers ship them."""
    config = shrink_config(make_config("gemma3", 2))
    config.text_config.vocab_size = 2100
    build_instance(Gemma3ForConditionalGeneration, config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<boi>", "<eoi>"]})
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    told = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>", "processor_class": "Gemma3Processor"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | told))
    images = {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    whole = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def test_a_wrapper_s_processor_loads_from_what_is_written(tmp_path):
    dense = save_gemma3(tmp_path / "dense")
    wanted = AutoProcessor.from_pretrained(dense)
    assert wanted.chat_template == TEMPLATE
    for folder in prune_and_convert(dense, tmp_path):
        processor = AutoProcessor.from_pretrained(folder)
        assert processor.chat_template == TEMPLATE
        assert processor.to_dict() == wanted.to_dict()
        for kept in ("chat_template.json", "preprocessor_config.json", "processor_config.json"):
            assert (folder / kept).read_bytes() == (dense / kept).read_bytes()


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
    options = [*OPTIONS, "--data", str(file), "--output", str(tmp_path / "out"), "--quiet"]
    assert cli.main(["prune", str(llama), *options]) == 2
    assert "must fit the tokenizer's chat template" in capsys.readouterr().err
    (llama / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))  # as processors keep it
    assert cli.main(["prune", str(llama), *options]) == 0


def test_data_of_other_columns_or_none_are_refused_by_name(llama):
    texts = read_texts(DEMO_CALIBRATION)[:20]
    with pytest.raises(
        ValueError, match=r"got \['prompt'\]. Name the column of the text \(--text-column, text_column=…\)"
    ):
        run(llama, dataset=Dataset.from_dict({"prompt": texts}))
    with pytest.raises(ValueError, match=r"must have a column text or messages, got \[\]"):
        run(llama, dataset=Dataset.from_list([]))
    with pytest.raises(ValueError, match="got DatasetDict"):
        run(llama, dataset=DatasetDict({"test": Dataset.from_dict({"text": texts})}))
    both = {"dataset": Dataset.from_dict({"prompt": texts, "text": texts}), "text_column": "prompt"}
    assert prepare_dataset(str(llama), both)["dataset"].column_names == ["text"]
    run(llama, **both, max_seq_length=32)


@pytest.mark.parametrize("count", [0, -5, "64"])
@pytest.mark.parametrize("name", ["max_seq_length", "num_calibration_samples", "batch_size"])
def test_a_number_that_is_none_is_refused(name, count, llama):
    with pytest.raises(ValueError, match=f"{name}: must be a whole number above 0, got {count!r}"):
        run(llama, **{name: count})


def test_rows_are_no_longer_than_the_model_s_positions_where_no_length_is_given(llama):
    texts = read_texts(DEMO_CALIBRATION)[:20]
    assert load(llama).config.max_position_embeddings < AutoTokenizer.from_pretrained(llama).model_max_length
    run(llama, dataset=Dataset.from_dict({"text": texts}))


def test_messages_without_content_and_rows_that_are_no_objects_are_refused(llama, tmp_path):
    empty = {"messages": [{"role": "user", "content": None}]}
    with pytest.raises(
        ValueError, match=r"got \[{'role': 'user', 'content': None}\] in row 1 of the column 'messages'"
    ):
        run(llama, dataset=Dataset.from_list([make_chats(1)[0], empty]), tokenizer=make_tokenizer(llama))
    (tmp_path / "rows.json").write_text('[{"text": "a"}, null]')
    with pytest.raises(ValueError, match=r"line 1: must be a JSON object .*\(a list\)"):
        run(llama, dataset=str(tmp_path / "rows.json"))


def test_too_little_text_is_refused_before_calibration(llama, tmp_path, capsys, monkeypatch):
    few = r"must have at least 45 calibration tokens \(one per input and one for the bias\), got {} in {} sequences"
    ids = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 2})
    monkeypatch.setattr(Pruner, "prune_model", None)
    for data, samples, found in ((str(DEMO_CALIBRATION), 1, (32, 1)), (ids, 8, (6, 2))):
        with pytest.raises(ValueError, match=few.format(*found)):
            run(llama, dataset=data, num_calibration_samples=samples, max_seq_length=32)
    command = ["prune", str(llama), "--recipe", "struprune", "--output", str(tmp_path / "out"), "--quiet"]
    for more, told in (
        (["--seq-length", "32", "--num-samples", "1"], few.format(32, 1)),
        (["--seq-length", "65"], "must be at most 64 tokens long, the model's number of positions, got 65"),
    ):
        assert cli.main([*command, *more]) == 2
        assert re.search(told, capsys.readouterr().err)


ROW = [5, 6, 7, 8] * 8
BATCHES = "every batch must hold input_ids, a tensor of whole numbers from 0 on with sequences as rows"
BROKEN = {
    "an empty row": (lambda: Dataset.from_dict({"input_ids": [[], *[ROW] * 7]}), BATCHES),
    "a negative id": (lambda: Dataset.from_dict({"input_ids": [[-1, *ROW], *[ROW] * 7]}), BATCHES),
    "fractions": (lambda: Dataset.from_dict({"input_ids": [[0.5] * 32] * 8}), BATCHES),
    "tuples": (lambda: DataLoader(TensorDataset(torch.ones(8, 32).long()), batch_size=4), BATCHES),
    "lists": (lambda: DataLoader([{"input_ids": ROW}] * 8, batch_size=None), BATCHES),
    "texts": (lambda: DataLoader(["text"] * 8, batch_size=4), BATCHES),
    "sequences alone": (lambda: DataLoader([{"input_ids": torch.tensor(ROW)}] * 8, batch_size=None), BATCHES),
    "packed": (
        lambda: make_loader([*range(16), *range(16)]),
        "batches must hold no arguments .*, got position_ids, which",
    ),
    "embedded": (lambda: make_loader([*range(32)], inputs_embeds=[0.5]), "batches must .*, got inputs_embeds, which"),
    "one pass": (lambda: make_loader_of_one_pass(), "a loader must give its batches in every pass"),
    "no text": (lambda: Dataset.from_dict({"text": [None, "words"] * 4}), "every row must hold a text .*, got None"),
    "numbers": (lambda: Dataset.from_dict({"text": [1, 2]}), "every row must hold a text .*, got 1"),
    "a row": (
        lambda: Dataset.from_dict({"text": [*["words"] * 600, None]}),
        ".*got None in row 600 of the column 'text'",
    ),
    "a chat": (
        lambda: Dataset.from_dict({"messages": [None, "words"]}),
        ".*got None in row 0 of the column 'messages'",
    ),
    "no rows": (lambda: Dataset.from_dict({"text": []}), "must have at least one row, got none"),
    "no ids": (lambda: make_dataset().filter(lambda row: False), "must have at least one row, got none"),
    "no stream": (lambda: make_dataset().to_iterable_dataset().skip(8), "must have at least one row, got none"),
}


def make_loader(positions, **others):
    rows = Dataset.from_dict({"input_ids": make_dataset()["input_ids"], "position_ids": [positions] * 8})
    rows = rows.add_column("number", [*range(8)])  # is no argument of the model
    for name, value in others.items():
        rows = rows.add_column(name, [value] * 8)
    return DataLoader(rows.with_format("torch"), batch_size=4)


def make_loader_of_one_pass():
    batches = ({"input_ids": row["input_ids"][None]} for row in make_dataset().with_format("torch"))
    stream = type("Stream", (TorchIterableDataset,), {"__iter__": lambda self: batches})
    return DataLoader(stream(), batch_size=None)


@pytest.mark.parametrize("kind", BROKEN)
def test_data_that_cannot_calibrate_are_refused_by_name(kind, llama):
    data, told = BROKEN[kind]
    with pytest.raises(ValueError, match=f"dataset: {told}"):
        run(llama, dataset=data(), max_seq_length=32)


def test_positions_that_are_counted_change_nothing(llama):
    wanted, found = (run(llama, dataset=data) for data in (make_dataset(), make_loader([*range(32)])))
    assert all(torch.equal(a, b) for a, b in zip(wanted.parameters(), found.parameters(), strict=True))


def test_tokens_that_a_batch_s_shortest_row_cuts_are_counted_in_a_warning(llama):
    messages, rows = [], [ROW] * 6 + [ROW[:24], ROW[:30]]
    sink = logger.add(messages.append, level="WARNING")
    run(llama, dataset=Dataset.from_dict({"input_ids": rows}), max_seq_length=31)
    logger.remove(sink)
    assert sum("dataset: 20 tokens are cut off" in line for line in messages) == 1


def test_a_loader_that_shuffles_is_recorded_in_the_order_that_was_used(llama, tmp_path, monkeypatch):
    used, prune = [], Pruner.prune_model
    monkeypatch.setattr(
        Pruner, "prune_model", lambda self, m, batches, *rest: used.append(batches) or prune(self, m, batches, *rest)
    )
    loader = DataLoader(make_dataset().with_format("torch"), batch_size=4, shuffle=True)
    run(llama, dataset=loader, output_dir=str(tmp_path / "out"))
    assert read_manifest(tmp_path / "out").calibration.sha256 == digest_tokens(batch["input_ids"] for batch in used[0])


def test_rows_that_come_longest_first_are_mixed_before_the_last_ones_are_held_out():
    rows = Dataset.from_dict({"input_ids": [ROW[:length] for length in range(1, 33)]})
    args = DatasetArguments(dataset=rows, shuffle_calibration_samples=False)
    lengths = [batch["input_ids"].shape[1] for batch in read_batches(get_calibration_dataloader(args, None))]
    assert sorted(lengths) == [*range(1, 33)]
    assert 8 < sum(lengths[-8:]) / 8 < 25


def test_what_else_a_loader_s_batches_hold_is_passed_over(llama):
    batches = [{"input_ids": torch.tensor(make_dataset()["input_ids"]), "attention_mask": None, "source": 3}]
    run(llama, dataset=DataLoader(batches, batch_size=None))


def test_a_loader_s_batches_are_used_as_they_are_and_that_is_told():
    loader = DataLoader(make_dataset().with_format("torch"), batch_size=4)
    with record_log() as said:
        check_dataset({"dataset": loader, "num_calibration_samples": 4, "max_seq_length": 8})
    assert "used as they are, without num_calibration_samples, max_seq_length" in said[0]


@pytest.mark.parametrize("column", ["messages", "text", "other"])
def test_a_column_of_texts_is_read_whatever_its_name(column, llama):
    words = [" ".join(str(i * j % 97) for j in range(40)) for i in range(8)]
    wanted = run(llama, dataset=Dataset.from_dict({"text": words}), max_seq_length=32)
    more = {"text_column": column} if column == "other" else {}
    found = run(llama, dataset=Dataset.from_dict({column: words, "number": [*range(8)]}), max_seq_length=32, **more)
    assert all(torch.equal(a, b) for a, b in zip(wanted.parameters(), found.parameters(), strict=True))


@pytest.mark.parametrize("form", ["texts", "chats", "file", "made"])
@pytest.mark.parametrize("most", [10**30, 10**20])
def test_a_tokenizer_that_knows_no_length_gives_sequences_of_the_model_s_positions(form, most, llama):
    text = " ".join(str(i) for i in range(400))
    tokenizer = make_tokenizer(llama)
    tokenizer.model_max_length = most
    data = {
        "texts": Dataset.from_dict({"text": [text] * 8}),
        "chats": Dataset.from_dict({"messages": [[{"role": "user", "content": text}]] * 8}),
        "file": str(DEMO_CALIBRATION),
        "made": Dataset.from_dict({"content": [text] * 8}),
    }[form]
    more = {"preprocessing_func": lambda row: {"text": row["content"]}} if form == "made" else {}
    kwargs = prepare_dataset(
        str(llama), {"dataset": data, "tokenizer": tokenizer, "num_calibration_samples": 8, **more}
    )
    if form in ("texts", "made"):
        assert kwargs["max_seq_length"] == 64
    else:
        assert {len(row) for row in kwargs["dataset"]["input_ids"]} == {64}
    run(llama, dataset=data, tokenizer=tokenizer, **more)


@pytest.mark.parametrize(("key", "wanted"), [("return_dict", True), ("output_attentions", False)])
def test_configurations_that_let_models_return_other_things_are_refused(key, wanted, llama, capsys):
    model = load(llama)
    file = llama / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: not wanted}))
    model.set_attn_implementation("eager")  # else transformers refuses attention maps at once
    setattr(model.config, key, not wanted)
    told = f"{key} must be {json.dumps(wanted)} in the configuration, got {json.dumps(not wanted)}, "
    for given in (llama, model):
        with pytest.raises(ValueError, match=f"{told}.* Remove the key"):
            run(given)
    for command in (["plan", str(llama)], ["eval", str(llama)]):
        assert cli.main(command) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("prunes", [False, True])
@pytest.mark.parametrize("mappings", [None, [[["re:.*no_such_proj"], "re:.*input_layernorm"]]])
def test_smoothing_without_mappings_that_fit_is_refused(mappings, prunes, llama, tmp_path):
    folder = save_opt(tmp_path / "opt") if mappings is None else llama
    recipe = [StruPruneModifier(sparsity=0.3, allocation="uniform", sensitivity="none")] if prunes else []
    recipe += [SmoothQuantModifier(mappings=mappings), QuantizationModifier(scheme="W8A8", ignore=["lm_head"])]
    with pytest.raises(ValueError, match=r"SmoothQuantModifier: mappings must name modules of the model, got: .* Give"):
        run_oneshot(str(folder), recipe)


CHATS = {"other names": [{"from": "human", "value": "words"}], "no messages": [], "texts": ["words"]}


@pytest.mark.parametrize("kind", CHATS)
def test_conversations_of_another_form_are_refused(kind, llama, tmp_path):
    tokenizer, file = make_tokenizer(llama), tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": CHATS[kind]}) + "\n")
    for data in (Dataset.from_list([{"messages": CHATS[kind]}] * 8), str(file)):
        with pytest.raises(ValueError, match="a conversation, a list of messages with role and content, got"):
            run(llama, dataset=data, tokenizer=tokenizer, max_seq_length=16)


@pytest.mark.parametrize("recipe", [3, StruPruneModifier, [{"a_stage": {}}]])
def test_recipes_of_another_type_are_refused(recipe, llama):
    with pytest.raises(ValueError, match="recipe: must be a file, a name, a YAML text, a mapping or modifiers, got"):
        run_oneshot(str(llama), recipe)


def test_a_streamed_data_set_is_taken(llama):
    wanted = run(llama, dataset=make_dataset())
    found = run(llama, dataset=make_dataset().to_iterable_dataset())
    assert all(torch.equal(a, b) for a, b in zip(wanted.parameters(), found.parameters(), strict=True))


def test_weights_that_are_elsewhere_are_refused(llama):
    model = load(llama)
    cpu_offload(model, "cpu")
    with pytest.raises(ValueError, match=r"must hold weights, got .* on the meta device"):
        run(model)
    config = load(llama).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"must hold weights, got model.embed_tokens.weight on the meta device"):
        run(model)


@contextmanager
def set_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def set_precision():
    torch.set_float32_matmul_precision("medium")
    try:
        yield
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def change_numbers():
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with torch.inference_mode(), autocast, set_dtype(torch.float64), set_precision():
        yield


STATES = {"numbers": change_numbers, "meta": lambda: torch.device("meta")}


def run_entries(folder, place, state, capsys):
    """Every entry under a state of torch; what each gives. The model's own configuration makes all probes run again."""
    options = ["--recipe", "struprune", "--num-samples", "16", "--seq-length", "32", "--set", "allocation=uniform"]
    host = {
        "dataset": make_dataset(),
        "batch_size": 4,
        "num_calibration_samples": 8,
        "shuffle_calibration_samples": False,
    }
    loaded, shown = load(folder), ["--max-tokens", "512", "--window", "32", "--json"]
    with state():
        assert cli.main(["plan", str(folder), "--json", *options]) == 0
        assert cli.main(["prune", str(folder), *options, "--output", str(place / "out"), "--quiet"]) == 0
        assert (
            cli.main(["convert", str(place / "out"), "--to", "uniform-padded", "--output", str(place / "stock")]) == 0
        )
        assert cli.main(["eval", str(place / "out"), *shown]) == 0
        ours = run(loaded, dataset=host["dataset"])
    with nullcontext() if state is STATES["meta"] else state():  # llm-compressor itself does not run there
        recipe = StruPruneModifier(sparsity=0.3, allocation="uniform")
        hosts = llmcompressor.oneshot(model=str(folder), recipe=recipe, output_dir=str(place / "host"), **host)
    printed = capsys.readouterr().out
    told = [line for line in printed.splitlines() if '"perplexity"' in line or '"parameters"' in line]
    weights = [load_file(place / name / "model.safetensors") for name in ("out", "stock", "host")]
    return told, [*weights, ours.state_dict(), hosts.state_dict()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What every entry gives under torch's defaults, once asked for."""
    return {}


@pytest.mark.parametrize("state", STATES)
def test_torch_s_state_around_any_entry_changes_nothing(state, plain, tmp_path, capsys):
    for name, around in (("plain", nullcontext), (state, STATES[state])):
        if name not in plain:
            model = make_model("llama", max_position_embeddings=64 + len(plain))  # no probe of another state counts
            plain[name] = run_entries(save_model(model, tmp_path / name / "dense"), tmp_path / name, around, capsys)
    (told, weights), (wanted_told, wanted) = plain[state], plain["plain"]
    assert told == wanted_told
    for found, kept in zip(weights, wanted, strict=True):
        assert found.keys() == kept.keys()
        assert all(torch.equal(found[name], kept[name]) for name in kept)
