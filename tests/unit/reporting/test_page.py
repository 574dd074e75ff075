"""What goes with an output: its card, its results, its report."""

import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from helpers.models import ROOT, run_oneshot
from huggingface_hub import ModelCard

from struprune_plugin import LoRARecoveryModifier, read_manifest
from struprune_plugin.cli import main as cli
from struprune_plugin.evaluation import scores
from struprune_plugin.reporting.pages import keep_results, make_page, write_card
from struprune_plugin.storage.manifest import EntriesRecord, ResultRecord
from struprune_plugin.storage.vocabulary_record import VocabularyRecord, write_record

EVAL = ["--window", "32", "--max-tokens", "512", "--quiet"]


@pytest.fixture
def made(opt, prune_once):
    """A pruned tiny model, to be read only."""
    return prune_once(opt, "value_channels")[1]


@pytest.fixture
def out(made, tmp_path):
    return shutil.copytree(made, tmp_path / "out")


# -- card -----------------------------------------------------------------------------------------------------------


def test_every_output_has_a_card_that_the_hub_reads(made):
    card = ModelCard.load(made / "README.md")
    assert card.data.library_name == "transformers"
    assert "structured-pruning" in card.data.tags
    assert card.data.base_model is None  # nobody else could find a local folder
    assert "/tmp" not in card.text  # of a local model its name alone


def test_the_licence_is_carried_over(opt, tmp_path):
    base = shutil.copytree(opt, tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# Base\n")
    (base / "LICENSE").write_text("the terms")
    out = tmp_path / "out"
    run_oneshot(str(base), sparsity=0.3, output_dir=str(out))
    card = ModelCard.load(out / "README.md")
    assert (card.data.license, card.data.language) == ("apache-2.0", "en")
    assert (out / "LICENSE").read_text() == "the terms"
    (base / "README.md").write_text("---\nlicense: [\n---\n")
    write_card(out)  # a broken card has no say
    assert ModelCard.load(out / "README.md").data.license is None


# -- results --------------------------------------------------------------------------------------------------------


def test_results_go_with_the_output(out, opt, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    tasks = ["--tasks", "struprune_demo_word_order", "--include-path", "eval/tasks", "--limit", "10"]
    text = ["--text", "struprune_plugin/demo/test.jsonl"]
    assert cli.main(["eval", str(opt), str(out), *EVAL, *text, *tasks, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    evaluation = read_manifest(out).evaluation
    perplexity, bits, task = evaluation
    assert perplexity.name == "perplexity, test.jsonl, windows of 32, first 512 tokens"
    assert perplexity.value == scores[str(out)]["perplexity"]
    assert perplexity.dense == scores[str(opt)]["perplexity"]
    assert bits.name == "bits per byte, test.jsonl, windows of 32, first 2,048 bytes"
    assert bits.value == scores[str(out)]["bits per byte"]
    assert task.name == "struprune_demo_word_order, acc, 10 examples"
    assert 0 < task.stderr < 0.5
    assert task.dense == scores[str(opt)]["struprune_demo_word_order acc"]
    card = ModelCard.load(out / "README.md").text
    assert all(result.name in card for result in evaluation)
    assert cli.main(["eval", str(out), *EVAL, *text]) == 0  # again: one entry, not two
    assert len(read_manifest(out).evaluation) == 3
    assert cli.main(["eval", str(out), "--window", "16", "--max-tokens", "256", *text]) == 0
    assert read_manifest(out).evaluation[-2].name == "perplexity, test.jsonl, windows of 16, first 256 tokens"


def test_results_do_not_follow_into_what_is_made_from_an_output(out, tmp_path):
    assert cli.main(["eval", str(out), *EVAL]) == 0
    assert read_manifest(out).evaluation
    recovered = tmp_path / "recovered"
    run_oneshot(
        str(out),
        recipe=[LoRARecoveryModifier(adapters={"rank": 2}, schedule={"max_steps": 1})],
        output_dir=str(recovered),
    )
    assert not read_manifest(recovered).evaluation


# -- report ---------------------------------------------------------------------------------------------------------


class _Reader(HTMLParser):
    """Sees that tags close, and keeps them."""

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br", "rect", "circle", "line", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_report_is_one_page_that_needs_nothing_else(made):
    manifest = read_manifest(made)
    named = manifest.model_copy(update={"model": replace(manifest.model, base="<b>&<script>")})
    page = make_page(made, named)
    reader = _Reader()
    reader.feed(page)
    assert not reader.open
    tags = [tag for tag, _ in reader.tags]
    assert "script" not in tags
    assert "link" not in tags
    assert not [name for _, attributes in reader.tags for name in attributes if name in ("src", "href")]
    assert not [name for _, attributes in reader.tags for name in attributes if name.startswith("on")]
    policy = next(a["content"] for tag, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert ("html", {"lang": "en"}) in reader.tags
    for tag, attributes in reader.tags:  # what a screen reader asks for
        assert tag != "th" or attributes["scope"] in ("row", "col")
        assert tag != "table" or f'id="{attributes["aria-describedby"]}"' in page
    for group in manifest.groups:
        assert group.name in page
        assert f'style="width:{100 * group.kept / group.num_units:.1f}%"' in page
    assert "&lt;b&gt;&amp;&lt;script&gt;" in page


def test_the_report_shows_results_and_entries_that_stay(made):
    manifest = read_manifest(made)
    record = ResultRecord("perplexity of a.jsonl", 12.345, 10.5)
    found = {"evaluation": [record], "experts": [EntriesRecord("experts", 2, 3, [0, 2], 1)]}
    page = make_page(made, manifest.model_copy(update=found))
    assert "<td>10.5</td><td>12.35</td>" in page or "<td>10.5</td><td>12.34</td>" in page
    assert "layer 2: 2 of 3." in page


def test_a_dense_result_stays_only_beside_one_on_the_same_text(out, opt, tmp_path):
    folder, texts = out, [tmp_path / "a" / "t.jsonl", tmp_path / "b" / "t.jsonl"]
    for text, base in ((texts[0], str(opt)), (texts[0], ""), (texts[1], "")):
        text.parent.mkdir(exist_ok=True)
        text.write_text(str(text))
        values = {str(folder): {"perplexity": 3.0}, str(opt): {"perplexity": 2.0}}
        keep_results(folder, scores.list_results(scores.Scoring(text), values, str(folder), base))
        (record,) = read_manifest(folder).evaluation
        assert record.dense == (2.0 if text == texts[0] else None)


def test_the_command_writes_a_page_beside_the_output(out, tmp_path, capsys):
    argv = ["report", str(out), "--quiet"]
    assert cli.main(argv) == 0
    assert "Not measured yet" in (tmp_path / "out.html").read_text()
    assert cli.main(argv) == 2
    assert "exists. Choose another path, or pass --overwrite" in capsys.readouterr().err
    assert cli.main([*argv, "--overwrite"]) == 0
    assert cli.main(["report", str(out), "--output", str(tmp_path / "no" / "x.html")]) == 0


def test_a_dense_model_is_found_by_its_hub_name(out, opt, tmp_path, monkeypatch, capsys):
    base = tmp_path / "cache" / "snapshot"
    shutil.copytree(opt, base)
    manifest = read_manifest(out)
    named = manifest.model_copy(update={"model": replace(manifest.model, base="me/demo")})
    find = scores.find_checkpoint
    monkeypatch.setattr(scores, "find_checkpoint", lambda name: base if name == "me/demo" else find(name))
    monkeypatch.setattr(scores, "read_manifest", lambda _path: named)
    assert scores.find_dense([str(out)]) == {str(out): ""}
    assert scores.find_dense(["me/demo", str(out)]) == {str(out): "me/demo"}
    assert scores.find_dense([str(base), str(out)]) == {str(out): str(base)}


def test_no_perplexity_is_recorded_beside_that_of_a_larger_vocabulary(out, opt):
    sizes = {name: 1 for name in VocabularyRecord.model_fields if name not in ("base", "scripts", "curve", "kept")}
    write_record(VocabularyRecord(base=str(opt), scripts={}, curve=[], kept=[*range(2048)], **sizes), out)
    assert cli.main(["eval", str(opt), str(out), *EVAL]) == 0
    perplexity, bits = read_manifest(out).evaluation
    assert (perplexity.name[:10], bits.name[:4]) == ("perplexity", "bits")
    assert perplexity.dense is None
    assert bits.dense is not None


def test_results_leave_an_edited_card_alone(out):
    (out / "README.md").write_bytes(b"mine \xff")
    assert cli.main(["eval", str(out), *EVAL]) == 0
    assert (out / "README.md").read_bytes() == b"mine \xff"
    assert read_manifest(out).evaluation[0].dense is None
