"""Text that a model writes by itself."""

import pytest
import torch
from helpers.models import CHEAP, make_opt, save_opt

from struprune_plugin import StruPruneModifier, oneshot
from struprune_plugin.evaluation import sampling
from struprune_plugin.evaluation.sampling import sample_windows
from struprune_plugin.evaluation.text import DEMO_MODEL, prepare_dataset
from struprune_plugin.storage.checkpoint import load_tokenizer

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"


@pytest.fixture
def tokenizer():
    return load_tokenizer(DEMO_MODEL)


def sample(tokenizer, count=6, **how):
    return sample_windows(make_opt().eval(), tokenizer, count, 16, **how)


def test_windows_are_full_and_depend_on_the_seed_alone(tokenizer):
    windows = sample(tokenizer)
    assert windows.shape == (6, 16)
    assert torch.equal(windows, sample(tokenizer))
    assert not torch.equal(windows, sample(tokenizer, seed=1))
    assert len({tuple(row.tolist()) for row in windows}) == 6
    torch.manual_seed(3)
    drawn = torch.rand(1)
    model = make_opt().eval()
    torch.manual_seed(3)
    sample_windows(model, tokenizer, 2, 16)
    assert torch.rand(1) == drawn, "nobody else's random numbers are used"


def test_the_distribution_is_the_model_s(tokenizer, monkeypatch):
    """Of the token after one and the same two, over many windows: within five standard errors."""
    model = make_opt().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # far from uniform
        first = torch.tensor([[2, 7]])
        wanted = torch.softmax(model(first).logits[0, -1], -1)
    assert wanted.max() > 0.02
    monkeypatch.setattr(sampling, "_draw_starts", lambda *_: first.expand(3000, -1))
    windows = sample_windows(model, tokenizer, 3000, 3, batch_size=1000)
    found = torch.bincount(windows[:, 2], minlength=len(wanted)) / len(windows)
    top = wanted.topk(5).indices
    error = (wanted[top] * (1 - wanted[top]) / len(windows)).sqrt()
    assert ((found - wanted)[top].abs() < 5 * error).all()


def test_half_of_the_windows_are_conversations_where_there_is_a_chat_template(tokenizer):
    tokenizer.chat_template = CHAT
    turn = tokenizer("<user>", add_special_tokens=False)["input_ids"]
    begins = [row[: len(turn)].tolist() == turn for row in sample(tokenizer, 7)]
    assert begins == [False, True] * 3 + [False]
    how = {"dataset": "self", "tokenizer": tokenizer, "num_calibration_samples": 7, "max_seq_length": 16}
    dataset = prepare_dataset(make_opt().eval(), how)["dataset"]
    assert [row[: len(turn)] == turn for row in dataset["input_ids"]] == [False, True] * 3 + [False]


def test_an_end_of_text_does_not_end_a_window(tokenizer):
    model = make_opt().eval()
    model.generation_config.eos_token_id = list(range(2048))
    windows = sample_windows(model, tokenizer, 4, 12)
    assert windows.shape == (4, 12)
    assert (windows[:, -4:] != 0).any()
    assert model.generation_config.eos_token_id == list(range(2048))


@pytest.mark.parametrize("length", [2, 100_000])
def test_too_short_and_too_long_windows_are_refused(tokenizer, length):
    with pytest.raises(ValueError, match=f"seq_length: must be above the 2 tokens .* positions, got {length}"):
        sample_windows(make_opt(), tokenizer, 1, length)


def test_a_model_is_pruned_without_any_data(tmp_path):
    model = save_opt(tmp_path / "model")
    how = {"num_calibration_samples": 6, "max_seq_length": 24, "shuffle_calibration_samples": False}
    first, second = (
        oneshot(model=str(model), recipe=StruPruneModifier(sparsity=0.3, **CHEAP), dataset="self", **how).state_dict()
        for _ in range(2)
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_model_s_own_settings_of_generation_change_nothing(tokenizer):
    model, plain = make_opt().eval(), sample(tokenizer)
    model.generation_config.update(max_new_tokens=3, repetition_penalty=1.5, top_k=2)
    assert torch.equal(sample_windows(model, tokenizer, 6, 16), plain)
