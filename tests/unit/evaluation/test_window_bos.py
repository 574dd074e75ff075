"""The beginning-of-text token: where the tokenizer adds one, every window begins with it and none stands inside."""

import json
from itertools import chain

import pytest
import torch
from datasets import Dataset
from helpers.models import make_dataset
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from struprune_plugin.cli import main as cli
from struprune_plugin.evaluation.scoring import load_checkpoint, measure_perplexity
from struprune_plugin.evaluation.text import (
    DEMO_MODEL,
    check_dataset,
    find_special_tokens,
    make_calibration_dataset,
    prepare_dataset,
    tokenize_texts,
)

TEXTS = [f"The {word} was calm that day, and nobody spoke of it." for word in ("sea", "wind", "town", "sky", "wood")]
# what a tokenizer writes around a text ($A) -> its tokens before and after it
TEMPLATES = {
    "one before": ("</s> $A", ["</s>"], []),
    "two before": ("<pad> </s> $A", ["<pad>", "</s>"], []),
    "one on either side": ("<pad> $A </s>", ["<pad>"], ["</s>"]),
    "the same on both sides": ("</s> $A </s>", ["</s>"], ["</s>"]),
    "one after": ("$A </s>", [], ["</s>"]),
    "none": ("$A", [], []),
}


def make_tokenizer(template):
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<pad>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


def cut_naively(tokenizer, texts, window, before, after):
    """Windows of the texts' own tokens, each text with the tokens after it unless these begin a text, too."""
    ids = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False)["input_ids"] + ([] if after == before else after)
    size = window - len(before)
    return [before + ids[start : start + size] for start in range(0, len(ids), size)]


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("window", [3, 8, 17])
def test_every_window_begins_with_what_the_tokenizer_puts_before_a_text(kind, window):
    template, *names = TEMPLATES[kind]
    tokenizer = make_tokenizer(template)
    before, after = (tokenizer.convert_tokens_to_ids(part) for part in names)
    assert find_special_tokens(tokenizer) == (before, after)
    tokens = tokenize_texts(tokenizer, TEXTS, window=window)
    wanted = cut_naively(tokenizer, TEXTS, window, before, after)
    assert tokens.tolist() == [*chain(*wanted)]
    windows = tokens.unfold(0, window, window)
    if before:
        assert not torch.isin(windows[:, len(before) :], torch.tensor(before)).any()
    else:
        assert tokens.tolist() == tokenize_texts(tokenizer, TEXTS).tolist()
    assert tokenize_texts(tokenizer, TEXTS, 2 * window, window).tolist() == tokens[: 2 * window].tolist()


def test_a_beginning_that_a_text_has_written_out_is_no_second_one():
    tokenizer = make_tokenizer("</s> $A")
    tokens = tokenize_texts(tokenizer, ["</s>one two", "three"], window=64)
    assert tokens.tolist() == tokenize_texts(tokenizer, ["one two", "three"], window=64).tolist()


def test_windows_without_room_for_text_are_refused():
    with pytest.raises(ValueError, match=r"windows: must have more tokens than the 2 that .* got 2. Take"):
        tokenize_texts(make_tokenizer("<pad> </s> $A"), TEXTS, window=2)


def test_a_window_that_begins_inside_a_chat_begins_with_the_token_too(tmp_path):
    tokenizer, file = make_tokenizer("</s> $A"), tmp_path / "chats.jsonl"
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    file.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    found = make_calibration_dataset(file, tokenizer, 4, 16)["input_ids"]
    assert found == cut_naively(tokenizer, [f"<user>{text}" for text in TEXTS], 16, [2], [])[:4]


@pytest.mark.parametrize("rows", ["texts", "conversations"])
def test_rows_that_are_concatenated_are_cut_as_a_file_s(rows):
    tokenizer = make_tokenizer("</s> $A")
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    dataset = Dataset.from_dict({"text": TEXTS} if rows == "texts" else {"messages": chats})
    asked = {"dataset": dataset, "tokenizer": tokenizer, "max_seq_length": 16, "concatenate_data": True}
    found = prepare_dataset(str(DEMO_MODEL), asked)
    wanted = cut_naively(tokenizer, TEXTS, 16, [2], [])
    assert found["dataset"]["input_ids"] == wanted[: len(wanted) - (len(wanted[-1]) < 16)]
    assert not found["concatenate_data"]
    with pytest.raises(ValueError, match=r"must hold a window of 400 tokens, got \d+. Lower max_seq_length"):
        prepare_dataset(str(DEMO_MODEL), asked | {"max_seq_length": 400})
    for data in (dataset, dataset.to_iterable_dataset()):  # of more rows than windows
        few = asked | {"dataset": data, "num_calibration_samples": 2}
        assert prepare_dataset(str(DEMO_MODEL), few)["dataset"]["input_ids"] == wanted[:2]
        stream = [token for text in TEXTS for token in tokenizer(text)["input_ids"]]
        assert prepare_dataset(str(DEMO_MODEL), few, window_bos=False)["dataset"]["input_ids"] == [
            stream[:16],
            stream[16:32],
        ]


def test_token_ids_stay_and_the_field_is_refused_where_nothing_is_cut():
    ids = make_dataset()
    assert prepare_dataset(str(DEMO_MODEL), {"dataset": ids})["dataset"]["input_ids"] == ids["input_ids"]
    check_dataset({"dataset": "c4"}, window_bos=False)
    with pytest.raises(ValueError, match="window_bos: has no effect on this dataset"):
        check_dataset({"dataset": ids}, window_bos=False)
    for data in ("c4", ids):
        with pytest.raises(ValueError, match="preprocessing_func: has no effect on this dataset"):
            check_dataset({"dataset": data, "preprocessing_func": print})


def test_rows_without_text_are_left_out():
    rows = {"dataset": Dataset.from_dict({"text": ["", "words", " \n", "more"]})}
    assert prepare_dataset(str(DEMO_MODEL), rows)["dataset"]["text"] == ["words", "more"]
    with pytest.raises(ValueError, match="must have a row with text in the column 'text', got none"):
        prepare_dataset(str(DEMO_MODEL), {"dataset": Dataset.from_dict({"text": ["", " "]})})


@pytest.mark.parametrize("more", [[], ["--no-window-bos"]])
def test_commands_cut_their_windows_so(more, monkeypatch, tmp_path, capsys):
    seen = []
    monkeypatch.setattr("struprune_plugin.entrypoint.oneshot", lambda *args, **run: seen.append(run["window_bos"]))
    monkeypatch.setattr("struprune_plugin.reporting.tables.summarize_output", lambda _: [])
    cli.main(["prune", str(DEMO_MODEL), "--output", str(tmp_path / "out"), "--quiet", *more])
    assert seen == [not more]
    capsys.readouterr()
    file = tmp_path / "test.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    assert cli.main(["eval", str(DEMO_MODEL), "--text", str(file), "--window", "16", "--json", "--quiet", *more]) == 0
    found = json.loads(capsys.readouterr().out)["scores"][str(DEMO_MODEL)]["perplexity"]
    model, tokenizer = load_checkpoint(str(DEMO_MODEL))
    pieces = (
        cut_naively(tokenizer, TEXTS, 16, [2], []) if not more else [tokenizer(text)["input_ids"] for text in TEXTS]
    )
    ids = [*chain(*pieces)]
    assert found == pytest.approx(measure_perplexity(model, torch.tensor(ids), 16), rel=1e-6)
