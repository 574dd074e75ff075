"""What people do with a pruned model in transformers: the tries of ``eval.uses``, on tiny models."""

import pytest

from eval.uses import USES, Work, run_use
from struprune_plugin.evaluation.text import DEMO_CALIBRATION


@pytest.fixture(scope="module")
def make_work(save_family, prune_once):
    def make(model_type: str) -> Work:
        folder = save_family(model_type)
        return Work(
            prune_once(folder, "value_channels")[1], str(folder), str(DEMO_CALIBRATION), new_tokens=6, prompts=2
        )

    return make


@pytest.fixture(scope="module", params=["opt", "llama"])
def work(request, make_work) -> Work:
    return make_work(request.param)


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ("pipeline", "the text of generate"),
        ("static cache", "12 of 12 tokens the same"),
        ("adapters", "learns; loaded and merged, the same logits"),
    ],
)
def test_uses_that_run(work, use, told):
    assert run_use(use, work)["told"] == told


def test_a_pruned_model_drafts_for_its_parent(work):
    """The parent decides: its tokens come out, whatever the draft says."""
    assert run_use("assisted", work)["told"].startswith("12 of 12 tokens the same; ")


def test_transformers_alone_reads_what_the_hub_gives(make_work):
    assert run_use("hub", make_work("opt"))["told"] == "the same logits by transformers alone, trusted"


def test_a_use_that_fails_is_told(make_work, monkeypatch):
    monkeypatch.setitem(USES, "pipeline", lambda work: 1 / 0)
    assert run_use("pipeline", make_work("opt"))["told"] == "failed: ZeroDivisionError: division by zero"
