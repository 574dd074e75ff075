import math

import pytest
import torch
from helpers.families import make_model
from helpers.models import ROOT, make_opt, save_model

from struprune_plugin.cli import main as cli
from struprune_plugin.evaluation import scoring
from struprune_plugin.evaluation.scoring import (
    check_tasks,
    cut_pieces,
    cut_texts,
    load_checkpoint,
    measure_bits,
    measure_perplexity,
    run_tasks,
)
from struprune_plugin.evaluation.text import DEMO_MODEL, DEMO_TEST, read_texts


def _naive_perplexity(model, tokens, window):
    """Every token but the first of its window, given what the window holds before it."""
    losses = []
    for start in range(0, len(tokens) - window + 1, window):
        piece = tokens[start : start + window]
        log_probabilities = torch.log_softmax(model(piece[None]).logits[0].double(), -1)
        losses += [-log_probabilities[t - start - 1, tokens[t]].item() for t in range(start + 1, start + window)]
    return math.exp(sum(losses) / len(losses))


@torch.no_grad()
def test_measure_perplexity_equals_naive_loop():
    model = make_opt()
    tokens = torch.randint(4, 2048, (70,), generator=torch.Generator().manual_seed(0))
    ours = measure_perplexity(model, tokens, window=16, batch_size=3)
    assert ours == pytest.approx(_naive_perplexity(model, tokens, 16), rel=1e-4)


def test_the_logits_of_long_windows_are_computed_a_few_at_a_time(monkeypatch):
    model, seen = make_opt(), list[torch.Size]()
    model.register_forward_pre_hook(lambda *call: seen.append(call[2]["input_ids"].shape), with_kwargs=True)
    measure_perplexity(model, torch.arange(4, 4 + 9 * 32), window=32)
    assert seen == [(8, 32), (1, 32)]
    monkeypatch.setattr(scoring, "_SCORED", 80)
    measure_perplexity(model, torch.arange(4, 4 + 3 * 32), window=32)
    assert seen[2:] == [(2, 32), (1, 32)]


def test_measure_perplexity_uniform_model_gives_the_vocabulary():
    model = make_opt()
    model.model.decoder.embed_tokens.weight.data.zero_()
    assert measure_perplexity(model, torch.arange(4, 68), window=16) == pytest.approx(2048, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "at least one window of 256 tokens, got 6"),
        (["--window", "512"], "--window: must be at most the model's 256 positions, got 512"),
    ],
)
def test_text_that_gives_no_window_is_refused_before_a_model_is_loaded(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scoring, "load_whole", None)
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "Once upon a"}')
    assert cli.main(["eval", str(DEMO_MODEL), "--text", str(file), *options]) == 2
    assert message in capsys.readouterr().err


@torch.no_grad()
def test_a_model_with_a_soft_cap_is_scored_with_it(tmp_path):
    """transformers loads it with fused attention, which leaves the cap out."""
    model, tokens = make_model("gemma2", attn_logit_softcapping=2.0), torch.arange(4, 36)[None]
    save_model(model, tmp_path)
    torch.testing.assert_close(load_checkpoint(str(tmp_path))[0](tokens).logits, model(tokens).logits)


def test_run_tasks_scores_what_the_harness_scores(monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model, tokenizer = load_checkpoint(str(DEMO_MODEL))
    tasks, include = ["struprune_demo_text", "struprune_demo_word_order"], str(ROOT / "eval" / "tasks")
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)  # of the stock run below
    ours = run_tasks(model, tokenizer, tasks, check_tasks(tasks, include), batch_size=4, limit=2)
    stock = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, backend="causal"),
        tasks=tasks,
        task_manager=TaskManager(include_path=include),
        limit=2,
        log_samples=False,
        bootstrap_iters=100,
    )["results"]
    for task in tasks:
        assert ours[task].items() <= stock[task].items()
        assert all("," in name for name in ours[task]), "numbers that are no metrics are left out"


# -- bits per byte --------------------------------------------------------------------------------------------------


def test_bits_per_byte_are_those_of_every_piece_alone():
    model, tokenizer = load_checkpoint(str(DEMO_MODEL))
    texts = [text[:700] for text in read_texts(DEMO_TEST)[:3]]
    nats = 0.0
    for piece in (piece for text in texts for piece in cut_pieces(text, 4 * 16)):
        ids = torch.tensor([tokenizer.bos_token_id, *tokenizer(piece, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            chances = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
        nats -= chances[torch.arange(len(ids) - 1), ids[1:]].sum().item()
    size = sum(len(text.encode()) for text in texts)
    assert measure_bits(model, tokenizer, texts, 16, 3) == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    with pytest.raises(ValueError, match="at least one character"):
        measure_bits(model, tokenizer, [""], 16)


def test_pieces_end_before_white_space_and_make_up_the_text():
    text = "one two  three\n👩‍👩‍👧 five" + "x" * 40
    pieces = list(cut_pieces(text, 6))
    assert "".join(pieces) == text
    assert all(piece[0].isspace() for piece in pieces[1:])
    assert cut_texts([text, "b", "c"], 2) == [text[:8]]
    assert cut_texts([text], None) == [text]
