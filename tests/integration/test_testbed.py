"""On a trained model: what is claimed of the method holds. Skips where the testbed is absent."""

import pytest
from helpers.models import run_oneshot
from transformers import AutoTokenizer

from struprune_plugin.evaluation.scoring import load_checkpoint, measure_perplexity
from struprune_plugin.evaluation.text import make_calibration_dataset, read_texts, tokenize_texts


@pytest.mark.slow
def test_methods_rank_as_they_should_on_a_trained_model(testbed):
    """Deletion is worst, a solve helps it, exact elimination helps that, repairing inherited error helps again."""
    folder = str(testbed / "opt-mini")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenize_texts(tokenizer, read_texts(testbed / "data" / "wikitext2_test.jsonl"), 3_200, 256)
    data = make_calibration_dataset(testbed / "data" / "books_calibration.jsonl", tokenizer, 32, 128)
    options = {
        "dataset": data,
        "batch_size": 8,
        "num_calibration_samples": 32,
        "attention_unit": "head",
        "sparsity": 0.3,
        "sensitivity": "fisher",
        "precision": "float32",  # some processors take ten times as long in bfloat16
    }
    steps = [
        {"importance": "wanda", "weight_update": "none"},
        {"importance": "wanda", "reconstruct": "local"},
        {"importance": "obs", "reconstruct": "local"},
        {"importance": "obs", "reconstruct": "residual"},
        {"importance": "obs", "reconstruct": "residual", "attention_unit": "value_channels"},
    ]
    scores = [measure_perplexity(run_oneshot(folder, **(options | step)), text, 256) for step in steps]
    dense = measure_perplexity(load_checkpoint(folder)[0], text, 256)
    assert scores == sorted(scores, reverse=True), scores
    assert dense < scores[-1] < 1.2 * dense
