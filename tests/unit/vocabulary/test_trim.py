"""A trimmed folder: the same text comes back, texts of kept tokens are cut the same, logits of kept rows are equal to the bit."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from helpers.models import run_oneshot
from helpers.tokenizers import FORMS, fuzz_texts, load_logits, make_tokenizer, save_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from struprune_plugin import oneshot, trim_vocabulary
from struprune_plugin.cli import main as cli
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_TEST, read_texts
from struprune_plugin.storage.manifest import read_manifest
from struprune_plugin.storage.vocabulary_record import VOCABULARY_NAME, read_record
from struprune_plugin.vocabulary.order import grow_counts, order_tokens
from struprune_plugin.vocabulary.ranking_text import count_ranks, split_texts
from struprune_plugin.vocabulary.tokenizer_json import TokenizerJson
from struprune_plugin.vocabulary.trim import draw_curve, trim_first


@pytest.fixture(scope="module", params=FORMS)
def trimmed(request, tmp_path_factory):
    """A folder with a tokenizer of each form, and its trimmed one."""
    folder = tmp_path_factory.mktemp("models")
    untied = request.param in ("byte_level", "unigram_bytes")
    whole = save_model(folder / "whole", make_tokenizer(request.param), tie_word_embeddings=not untied)
    record = trim_vocabulary(whole, folder / "small", DEMO_CALIBRATION, vocabulary=0.65, reserved="drop")
    return whole, folder / "small", record


def test_the_same_text_comes_back(trimmed):
    whole, small, _ = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (*trimmed[:2], trimmed[0]))
    texts = [text for text in fuzz_texts(3000) if "<unused" not in text]
    for text, old, new in zip(texts, whole.encode_batch(texts), small.encode_batch(texts), strict=True):
        assert whole.decode(old.ids, skip_special_tokens=False) == small.decode(new.ids, skip_special_tokens=False), (
            text
        )


def test_texts_of_kept_tokens_are_cut_the_same(trimmed):
    whole, small, record = trimmed
    tokenizers = [Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (whole, small)]
    new_ids, same = {old: new for new, old in enumerate(record.kept)}, 0
    words = [f" {word}" for text in read_texts(DEMO_TEST)[:20] for word in text.split()]
    for text in [*words[:3000], *(a + b for a, b in pairwise(words[:2000])), *fuzz_texts(500, seed=1)]:
        old, new = (tokenizer.encode(text).ids for tokenizer in tokenizers)
        if all(number in new_ids for number in old):
            same += 1
            assert new == [new_ids[number] for number in old], text
    assert same > 1000


def test_logits_of_kept_rows_are_equal_to_the_bit(trimmed):
    whole, small, record = trimmed
    new_ids = {old: new for new, old in enumerate(record.kept)}
    text = next(t for t in fuzz_texts(200) if {*AutoTokenizer.from_pretrained(whole)(t).input_ids} <= new_ids.keys())
    ids = AutoTokenizer.from_pretrained(whole)(text).input_ids[:40]
    old, new = load_logits(whole, ids), load_logits(small, [new_ids[number] for number in ids])
    torch.testing.assert_close(new, old[:, record.kept], rtol=0, atol=0)


def test_every_file_agrees(trimmed):
    whole, small, record = trimmed
    config, generation = (json.loads((small / name).read_text()) for name in ("config.json", "generation_config.json"))
    assert config["vocab_size"] == record.rows_after == len(record.kept)
    assert config["vocab_size"] % 64 == 0
    old, new = AutoTokenizer.from_pretrained(whole), AutoTokenizer.from_pretrained(small)
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(new, name) == getattr(old, name)
        assert record.kept[getattr(new, f"{name}_id")] == getattr(old, f"{name}_id")
    assert [record.kept[number] for number in generation["eos_token_id"]] == [2, 1]
    assert new("a").input_ids[0] == config["bos_token_id"]
    assert "<unused0>" not in new.get_vocab()
    assert read_record(small) == record
    before, after = (sum(t.numel() for t in load_file(f / "model.safetensors").values()) for f in (whole, small))
    assert (record.parameters_before, record.parameters_after) == (before, after)
    assert "smaller vocabulary" in (small / "README.md").read_text()


def test_a_pruned_folder_follows_and_leads(trimmed, tmp_path):
    """Trimmed, pruned and trimmed again: the new ids lead to those of the first model."""
    _, small, record = trimmed
    if "characters" not in str(AutoTokenizer.from_pretrained(small).backend_tokenizer.model):
        oneshot(
            small,
            "struprune_uniform",
            tmp_path / "pruned",
            dataset=DEMO_CALIBRATION,
            num_calibration_samples=4,
            max_seq_length=32,
        )
        again = trim_vocabulary(tmp_path / "pruned", tmp_path / "again", DEMO_CALIBRATION, vocabulary=0.9)
        assert (tmp_path / "pruned" / VOCABULARY_NAME).is_file()
        assert "vocabulary" in (tmp_path / "pruned" / "README.md").read_text()
        assert set(again.kept) < set(record.kept)
        first = {"base", "rows_before", "parameters_before"}
        assert again.model_dump(include=first) == record.model_dump(include=first)
        assert again.scripts.keys() == record.scripts.keys()
        width, other = (
            (each.parameters_before - each.parameters_after) / (each.rows_before - each.rows_after)
            for each in (record, again)
        )
        assert width == other, "rows alone count, no units"
        assert again.curve[-1].parameters <= again.parameters_after
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert len(model.get_input_embeddings().weight) == again.rows_after
        assert read_manifest(tmp_path / "again").model.parameters_after == model.num_parameters()


# -- other checkpoints ----------------------------------------------------------------------------------------------


def test_shards_bias_and_row_less_tokens(tmp_path):
    """A head with a bias, three shards, and special tokens beyond the rows, as Gemma 3's image token."""
    tokenizer = make_tokenizer("byte_level", 600)
    tokenizer.add_special_tokens(["<image>"])
    whole = save_model(tmp_path / "whole", tokenizer, "phi", extra=-1)
    model = AutoModelForCausalLM.from_pretrained(whole)
    shutil.rmtree(whole / "model.safetensors", ignore_errors=True)
    (whole / "model.safetensors").unlink()
    model.save_pretrained(whole, max_shard_size="40KB")
    record = trim_vocabulary(whole, tmp_path / "small", DEMO_CALIBRATION, vocabulary=448)
    assert len(list((tmp_path / "small").glob("model-*.safetensors"))) > 2
    small = AutoTokenizer.from_pretrained(tmp_path / "small")
    assert small.convert_tokens_to_ids("<image>") == record.rows_after == 448 == len(record.kept) - 1
    ids = [5, 1, 7]
    old, new = load_logits(whole, [record.kept[number] for number in ids]), load_logits(tmp_path / "small", ids)
    torch.testing.assert_close(new, old[:, record.kept[:-1]], rtol=0, atol=0)


def test_a_token_that_the_tokenizer_s_settings_alone_name_stays(tmp_path):
    whole = save_model(tmp_path / "whole", make_tokenizer("byte_level", 600))
    file = whole / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": "[PAD]"}))
    record = trim_vocabulary(whole, tmp_path / "small", DEMO_CALIBRATION, vocabulary=448)
    small = AutoTokenizer.from_pretrained(tmp_path / "small")
    assert (small.pad_token, record.kept[small.pad_token_id]) == ("[PAD]", 600)
    assert len(small) == 448
    new = load_logits(tmp_path / "small", [5, small.pad_token_id])
    torch.testing.assert_close(new, load_logits(whole, [record.kept[5], 600])[:, record.kept], rtol=0, atol=0)


def test_a_tied_head_that_is_stored_twice_counts_once(tmp_path):
    tokenizer = make_tokenizer("byte_level", 600)
    once = save_model(tmp_path / "once", tokenizer, tie_word_embeddings=True)
    twice = shutil.copytree(once, tmp_path / "twice")
    tensors = load_file(once / "model.safetensors")
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file({**tensors, **copy}, twice / "model.safetensors", {"format": "pt"})
    records = [trim_vocabulary(whole, f"{whole}_small", DEMO_CALIBRATION, vocabulary=448) for whole in (once, twice)]
    sizes = [record.model_dump(exclude={"base"}) for record in records]
    assert sizes[0] == sizes[1]
    small = AutoModelForCausalLM.from_pretrained(f"{twice}_small")
    assert small.num_parameters() == records[1].parameters_after
    written = load_file(f"{twice}_small/model.safetensors")
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])


def test_one_file_counts_before_shards_that_an_earlier_model_has_left(plain, tmp_path):
    whole = shutil.copytree(plain, tmp_path / "whole")
    weights = {name: torch.zeros_like(value) for name, value in load_file(whole / "model.safetensors").items()}
    save_file(weights, whole / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    record = trim_vocabulary(whole, tmp_path / "small", DEMO_CALIBRATION, vocabulary=0.8)
    old = load_logits(whole, [record.kept[number] for number in (5, 1, 7)])[:, record.kept]
    assert torch.equal(load_logits(tmp_path / "small", [5, 1, 7]), old)
    assert [file.name for file in (tmp_path / "small").glob("*.safetensors*")] == ["model.safetensors"]


def trim_model(model, tokenizer, tmp_path):
    """Return the folder of a model, the record of its trimmed vocabulary, and the configuration that was written."""
    whole = save_model(tmp_path / "whole", tokenizer)
    model.eval().save_pretrained(whole)
    record = trim_vocabulary(whole, tmp_path / "small", DEMO_CALIBRATION, vocabulary=0.8)
    return whole, record, json.loads((tmp_path / "small" / "config.json").read_text())


def test_the_text_part_of_a_multimodal_configuration(tmp_path):
    """Sizes and ids are in ``text_config`` and beside it; the image tower's stay."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    tokenizer = make_tokenizer("byte_fallback", 500)
    tokenizer.add_special_tokens(["<image>"])
    size = tokenizer.get_vocab_size()
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    text |= {"num_key_value_heads": 2, "vocab_size": size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text,
        vision_config=vision | {"image_size": 28, "patch_size": 14, "vocab_size": size},
        image_token_index=size - 1,
        boi_token_index=7,
        eoi_token_index=8,
        mm_tokens_per_image=4,
    )
    whole, record, saved = trim_model(Gemma3ForConditionalGeneration(config), tokenizer, tmp_path)
    assert saved["text_config"]["vocab_size"] == record.rows_after < size
    assert record.kept[saved["image_token_index"]] == size - 1
    assert [record.kept[saved["text_config"][f"{name}_token_id"]] for name in ("pad", "bos", "eos")] == [0, 1, 2]
    ids = [5, 1, 7, 300]
    old, new = (
        Gemma3ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
        .eval()(torch.tensor([numbers]))
        .logits[0]
        for folder, numbers in ((whole, [record.kept[number] for number in ids]), (tmp_path / "small", ids))
    )
    torch.testing.assert_close(new, old[:, record.kept], rtol=0, atol=0)
    tower = [load_file(f / "model.safetensors") for f in (whole, tmp_path / "small")]
    assert all(torch.equal(tower[0][name], tower[1][name]) for name in tower[0] if "vision" in name)


def test_lengths_that_a_tokenizer_was_saved_with_change_no_count(plain, tmp_path):
    """A tokenizer that has cut and padded texts, for a training, writes so into its file."""
    other = shutil.copytree(plain, tmp_path / "other")
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding(length=80)
    tokenizer.save(str(other / "tokenizer.json"))
    first, second = (trim_vocabulary(folder, None, DEMO_CALIBRATION, vocabulary=0.8) for folder in (plain, other))
    assert first.model_dump(exclude={"base"}) == second.model_dump(exclude={"base"})


def test_per_layer_embeddings(tmp_path):
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    tokenizer = make_tokenizer("byte_fallback", 500)
    size = tokenizer.get_vocab_size()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    config = Gemma3nTextConfig(
        **sizes,
        vocab_size=size,
        vocab_size_per_layer_input=size - 20,
        hidden_size_per_layer_input=8,
        num_key_value_heads=2,
        num_kv_shared_layers=0,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
        layer_types=["full_attention"] * 4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    whole, record, saved = trim_model(Gemma3nForCausalLM(config), tokenizer, tmp_path)
    assert saved["vocab_size_per_layer_input"] == sum(number < size - 20 for number in record.kept)
    ids = [5, 1, 7, 300]
    old, new = load_logits(whole, [record.kept[number] for number in ids]), load_logits(tmp_path / "small", ids)
    torch.testing.assert_close(new, old[:, record.kept], rtol=0, atol=0)


# -- order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_every_size_is_closed_and_growth_is_a_bound(form):
    backend = make_tokenizer(form, 700)
    tokenizer = TokenizerJson(json.loads(backend.to_str()), backend.to_str())
    parts, texts = tokenizer.find_parts(), read_texts(DEMO_TEST)[:5]
    counts = tokenizer.count(texts)
    order = order_tokens(parts, counts, tokenizer.list_fixed())
    growth, gone = grow_counts(order, parts, counts), set()
    for token in order:
        gone.add(token)
        assert not any(token in (parts[other] or ()) for other in parts if other not in gone)
    kept = sorted(tokenizer.tokens.keys() - {*order[: len(order) // 2]})
    smaller = Tokenizer.from_str(tokenizer.make_smaller({old: new for new, old in enumerate(kept)}))
    taken = sum(len(smaller.encode(text, add_special_tokens=False).ids) for text in texts)
    assert counts.total() <= taken <= counts.total() + growth[len(order) // 2 - 1]


def test_low_ids_have_a_twentieth_of_the_texts_count():
    counts = count_ranks([5, 7, 4000], 1000)
    assert sum(counts.values()) == pytest.approx(50)
    assert counts[5] > counts[7] > counts[4000] > 0


# -- refusals -------------------------------------------------------------------------------------------------------


def edit(folder, change):
    """Change the model's part of a folder's tokenizer."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def quantise(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")


def add_strange(folder):
    tensors = load_file(folder / "model.safetensors")
    rows = len(tensors["model.embed_tokens.weight"])
    save_file({**tensors, "model.mtp.hash_table": torch.zeros(rows, 3)}, folder / "model.safetensors")


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def break_index(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")


REFUSED = {
    "no tokenizer.json": (lambda f: (f / "tokenizer.json").unlink(), {}, "must hold a tokenizer.json"),
    "wordpiece": (lambda f: edit(f, lambda c: c.update(model=WORDPIECE)), {}, "must be BPE or Unigram"),
    "prefix": (
        lambda f: edit(f, lambda c: c["model"].update(continuing_subword_prefix="##")),
        {},
        "must have no continuing",
    ),
    "dropout": (lambda f: edit(f, lambda c: c["model"].update(dropout=0.1)), {}, "must have no dropout"),
    "quantised": (quantise, {}, "must not be quantised"),
    "strange": (add_strange, {}, "got model.mtp.hash_table"),
    "cut": (cut, {}, "whole safetensors file"),
    "broken settings": (
        lambda f: (f / "generation_config.json").write_text("{"),
        {},
        "generation_config.json: must be valid",
    ),
    "broken index": (break_index, {}, "model.safetensors.index.json: must have a weight_map"),
    "too small": (None, {"vocabulary": 10}, "must be at least"),
    "too large": (None, {"vocabulary": 100_000}, "must be below"),
    "a share of none": (None, {"vocabulary": 0}, "must be auto, a share"),
    "no number of rows": (None, {"vocabulary": float("inf")}, "must be auto, a share"),
    "limit": (None, {"limit": 2}, "limit: must be in"),
    "language": (None, {"language": "xx-none"}, "language: "),
    "vocab_offset": (lambda f: edit_config(f, vocab_offset=5), {}, "vocab_offset must be a size"),
    "an id without a token": (lambda f: edit_config(f, eos_token_id=565), {}, "must be tokens of the tokenizer"),
}
WORDPIECE = {
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 100,
}
WORDPIECE |= {"vocab": {"[UNK]": 0, "a": 1}}


def edit_config(folder, **changes):
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("plain") / "whole", make_tokenizer("byte_level", 560))


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_any_work(case, plain, tmp_path):
    change, settings, told = REFUSED[case]
    folder = shutil.copytree(plain, tmp_path / "model")
    if change:
        change(folder)
    with pytest.raises(ValueError, match=told) as refusal:
        trim_vocabulary(folder, tmp_path / "out", DEMO_CALIBRATION, **settings)
    assert "\n" not in str(refusal.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_empty_text_and_taken_folders_are_refused(plain, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="must hold tokens"):
        trim_vocabulary(plain, tmp_path / "out", tmp_path / "empty.jsonl")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="output_dir"):
            trim_vocabulary(plain, tmp_path / "out", DEMO_CALIBRATION, overwrite)


def test_an_interrupted_run_leaves_nothing(plain, tmp_path, monkeypatch):
    from struprune_plugin.vocabulary import trim

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(trim, "copy_tensors", stop)
    with pytest.raises(KeyboardInterrupt):
        trim_vocabulary(plain, tmp_path / "out", DEMO_CALIBRATION, vocabulary=0.9)
    assert not any(tmp_path.iterdir())


def test_the_command_shows_a_plan_and_writes(plain, tmp_path, capsys):
    command = ["trim", str(plain), "--text", str(DEMO_CALIBRATION), "--vocabulary", "512"]
    assert cli.main(command) == 0
    assert "held-out tokens" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())
    words = tmp_path / "words.txt"
    words.write_text("the 10\nof 5\nship\n")
    assert cli.main([*command, "--output", str(tmp_path / "out"), "--words", str(words), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows_after"] == 512
    assert cli.main([*command, "--output", str(tmp_path / "out"), "--overwrite"]) == 0
    assert cli.main([*command, "--output", str(tmp_path / "out")]) == 2


def test_prune_trims_first(plain, tmp_path, capsys):
    """The output names the whole model, and its parameters are those of the whole."""
    text = [
        "--data",
        str(DEMO_CALIBRATION),
        "--num-samples",
        "4",
        "--seq-length",
        "32",
        "--recipe",
        "struprune_uniform",
    ]
    command = ["prune", str(plain), *text, "--output", str(tmp_path / "out")]
    assert cli.main([*command, "--vocabulary", "0.9"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    manifest, record = read_manifest(tmp_path / "out"), read_record(tmp_path / "out")
    assert manifest.model.base == record.base == str(plain)
    assert manifest.model.parameters_before == record.parameters_before > record.parameters_after
    assert record.rows_after == len(
        AutoModelForCausalLM.from_pretrained(tmp_path / "out").get_input_embeddings().weight
    )
    assert "vocabulary" in capsys.readouterr().out
    assert cli.main([*command, "--vocabulary", "0.9"]) == 2
    assert cli.main([*command, "--language", "en", "--overwrite"]) == 2
    assert cli.main([*command, "--vocabulary", "10", "--overwrite"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rows_of_tensors_that_the_class_does_not_load_are_no_part_of_the_whole(plain, tmp_path):
    """Layers that predict several tokens ahead have embeddings of their own."""
    folder = shutil.copytree(plain, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    ahead = {"model.layers.2.embed_tokens.weight": tensors["model.embed_tokens.weight"] + 1}
    save_file({**tensors, **ahead}, folder / "model.safetensors", {"format": "pt"})
    small = ["--data", str(DEMO_CALIBRATION), "--num-samples", "4", "--seq-length", "32", "--vocabulary", "0.9"]
    command = ["prune", str(folder), *small, "--recipe", "struprune_uniform", "--output", str(tmp_path / "out")]
    assert cli.main(command) == 0
    model = read_manifest(tmp_path / "out").model
    assert model.left_out == [*ahead]
    assert model.parameters_before == AutoModelForCausalLM.from_pretrained(plain).num_parameters()


LORA = "adapters_stage: {adapters_modifiers: {LoRARecoveryModifier: {adapters: {rank: 2}, schedule: {epochs: 1}}}}\n"


def test_a_recipe_that_prunes_nothing_may_follow(plain, tmp_path):
    small = ["--data", str(DEMO_CALIBRATION), "--num-samples", "4", "--seq-length", "32"]
    first = ["--vocabulary", "0.9", *small, "--output", str(tmp_path / "dense")]
    assert cli.main(["prune", str(plain), *first, "--recipe", LORA]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]
    assert not (tmp_path / "dense" / "struprune.json").exists()
    data = {"dataset": str(DEMO_CALIBRATION), "max_seq_length": 32}
    pruned = run_oneshot(str(plain), sparsity=0.3, output_dir=str(tmp_path / "pruned"), **data)
    second = ["--vocabulary", "0.9", *small, "--output", str(tmp_path / "both")]
    assert cli.main(["prune", str(tmp_path / "pruned"), *second, "--recipe", LORA]) == 0
    model, before = (read_manifest(tmp_path / name).model for name in ("both", "pruned"))
    assert (model.base, model.parameters_before) == (before.base, before.parameters_before)
    assert model.parameters_after < pruned.num_parameters()
    assert model.removed_share == 1 - model.parameters_after / model.parameters_before


def test_a_second_run_leaves_the_copy_of_the_first(plain, tmp_path, capsys):
    ranking = {"text": DEMO_CALIBRATION, "words": None}
    (tmp_path / ".out.partial" / "trimmed").mkdir(parents=True)  # of a killed run
    with trim_first(str(plain), tmp_path / "out", False, False, [], **ranking) as (copy, _):
        assert read_record(copy).rows_after < 560
        command = ["prune", str(plain), "--data", str(DEMO_CALIBRATION), "--vocabulary", "0.9"]
        assert cli.main([*command, "--output", str(tmp_path / "out")]) == 2
        assert "must not be written by another run" in capsys.readouterr().err
        assert read_record(copy).rows_after < 560
    assert not Path(copy).exists()


def test_an_output_appears_once_it_names_the_whole_model(plain, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("struprune_plugin.vocabulary.trim._name_whole", interrupt)
    small = ["--data", str(DEMO_CALIBRATION), "--num-samples", "4", "--seq-length", "32", "--vocabulary", "0.9"]
    command = ["prune", str(plain), *small, "--recipe", "struprune_uniform", "--output", str(tmp_path / "out")]
    assert cli.main(command) == 130
    assert [*tmp_path.iterdir()] == []


def test_a_budget_counts_rows_and_units(plain, tmp_path, capsys):
    """A share of all parameters: rows first, units for the rest, as the plan says before."""
    small = ["--num-samples", "4", "--seq-length", "32", "--vocabulary", "0.9", "--data", str(DEMO_CALIBRATION)]
    command = [str(plain), "--recipe", "struprune_uniform", *small, "--budget", "{parameters: 0.8}"]
    assert cli.main(["plan", *command]) == 0
    printed = capsys.readouterr().out
    assert "(rows of the vocabulary included)" in printed
    assert "→ 512 tokens" in printed
    assert cli.main(["plan", *command, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert cli.main(["prune", *command, "--output", str(tmp_path / "out")]) == 0
    model = read_manifest(tmp_path / "out").model
    assert planned["parameters"] == [model.parameters_before, model.parameters_after]
    assert planned["vocabulary"]["rows_after"] == 512
    assert model.parameters_after == pytest.approx(0.8 * model.parameters_before, rel=0.03)
    assert model.removed_share == 1 - model.parameters_after / model.parameters_before
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    (fields,) = (fields for stage in recipe.values() for each in stage.values() for fields in each.values())
    assert fields["budget"]["parameters"] == int(0.8 * model.parameters_before)
    capsys.readouterr()
    for words, told in (
        (["--budget", "{parameters: 0.99}"], "use `struprune trim`"),
        (["--budget", "{parameters: 0.1}"], "budget.parameters: must be at least"),
        (["--budget", "{parameters: 0.0000001}"], "budget.parameters: must be at least"),
    ):
        for name in ("plan", "prune"):
            out = ["--output", str(tmp_path / "other")] if name == "prune" else []
            assert cli.main([name, *command[:-2], *words, *out]) == 2
            assert told in capsys.readouterr().err
    assert cli.main(["plan", str(plain), "--vocabulary", "0.9"]) == 2
    assert "must come with --data" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("count", "held_out"), [(0, []), (1, [0]), (3, [2]), (10, [9]), (25, [9, 19])])
def test_pieces_that_are_held_out_are_not_ranked_on(count, held_out):
    pieces = [f"piece {number}" for number in range(count)]
    ranked, held = split_texts(pieces)
    assert held == [pieces[number] for number in held_out]
    assert ranked == [piece for piece in pieces if piece not in held or count == 1]


def test_the_curve_can_be_drawn(plain, tmp_path):
    pytest.importorskip("matplotlib")
    draw_curve(trim_vocabulary(plain, None, DEMO_CALIBRATION, vocabulary=0.9), tmp_path / "curve.svg")
    assert "svg" in (tmp_path / "curve.svg").read_text()
