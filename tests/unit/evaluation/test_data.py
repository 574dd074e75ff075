import json

import pytest
import torch
from transformers import AutoTokenizer

from struprune_plugin.evaluation.text import (
    DEMO,
    DEMO_CALIBRATION,
    DEMO_MODEL,
    DEMO_TEST,
    make_calibration_dataset,
    read_texts,
    stream_texts,
    tokenize_texts,
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def test_tokenize_texts_every_text_starts_with_the_special_token(tokenizer):
    tokens = tokenize_texts(tokenizer, ["one two", "three"])
    expected = tokenizer("one two")["input_ids"] + tokenizer("three")["input_ids"]
    assert tokens.tolist() == expected
    assert (tokens == tokenizer.bos_token_id).sum() == 2
    assert tokenize_texts(tokenizer, ["one two", "three"], 2).tolist() == expected[:2]


def test_make_calibration_dataset_cuts_windows_in_order(tokenizer):
    dataset = make_calibration_dataset(DEMO_CALIBRATION, tokenizer, 3, 16)
    assert torch.tensor(dataset["input_ids"]).shape == (3, 16)
    flat = tokenize_texts(tokenizer, read_texts(DEMO_CALIBRATION), 48, 16)
    assert torch.tensor(dataset["input_ids"]).flatten().tolist() == flat.tolist()
    stream = make_calibration_dataset(DEMO_CALIBRATION, tokenizer, 3, 16, window_bos=False)["input_ids"]
    flat = tokenize_texts(tokenizer, read_texts(DEMO_CALIBRATION), 48)
    assert torch.tensor(stream).flatten().tolist() == flat.tolist()


def test_make_calibration_dataset_too_little_text_says_how_much_there_is(tokenizer, tmp_path):
    file = tmp_path / "short.jsonl"
    file.write_text(json.dumps({"text": "a few words only"}) + "\n")
    with pytest.raises(ValueError, match=r"must hold 4 windows of 8 tokens, got 5 tokens. Shorten them, or give more"):
        make_calibration_dataset(file, tokenizer, 4, 8)


def test_read_texts_keeps_unusual_line_breaks_inside_a_text(tmp_path):
    file = tmp_path / "text.jsonl"
    text = "one\u2028two\u0085three"
    file.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_texts(file) == [text]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must hold at least one text"),
        ("not json\n", "line 1: must be a JSON object in UTF-8 with a text in the column 'text', got 'not json'"),
        (
            '{"text": "fine"}\n{"other": 1}\n',
            r'line 2: .*got .{"other": 1}. \(neither text nor messages\). Write one {"text": "…"} per line',
        ),
        ('{"text": 5}\n', "line 1: every row must hold a text or a conversation"),
        ('["list"]\n', r"line 1: must be a JSON object .* got ...list... \(a list\)"),
        ('{"text": "half \ud83d"}\n', r"line 1: must be a JSON object in UTF-8 .* \(not UTF-8\)"),
    ],
)
def test_read_texts_names_file_line_and_contract(content, message, tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text(content, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ValueError, match=message):
        read_texts(file)


def test_stream_texts_unreachable_hub_name_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wikitext2").mkdir()  # no text, whatever its name
    with pytest.raises(ValueError, match=r"'wikitext2' must be a JSON-lines file or a hub data set .* give a local"):
        stream_texts("wikitext2")


def test_demo_ships_what_the_readme_says():
    sizes = {path.name: path.stat().st_size for path in (DEMO_CALIBRATION, DEMO_TEST)}
    assert 250_000 < sizes["calibration.jsonl"] < 350_000
    assert 80_000 < sizes["test.jsonl"] < 150_000
    assert sum(file.stat().st_size for file in DEMO_MODEL.iterdir()) <= 6_000_000
    pairs = [json.loads(line) for line in (DEMO / "word_order.jsonl").read_text().splitlines()]
    assert len(pairs) == 300
    for pair in pairs:
        assert sorted(pair["sentence_good"].split()) == sorted(pair["sentence_bad"].split())
        assert pair["sentence_good"] != pair["sentence_bad"]


def test_read_texts_takes_a_json_array_of_objects(tmp_path):
    file, rows = tmp_path / "text.json", [{"text": "one\ntwo"}, {"text": "drei, ä"}]
    for indent, ascii_only in ((None, True), (2, False)):
        file.write_text(json.dumps(rows, indent=indent, ensure_ascii=ascii_only), encoding="utf-8-sig")
        assert read_texts(file) == ["one\ntwo", "drei, ä"]
    for content, told in (
        ('[{"text": "a"}, {"text": null}]', "item 2: every row must"),
        ('[{"text": "a"}', "line 1: "),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=told):
            read_texts(file)
