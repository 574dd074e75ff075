"""What people do with a pruned model in transformers: the tries of ``eval.uses``, on tiny models."""

import os
import pty
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from eval.uses import USES, Work, run_use
from struprune_plugin.data import DEMO_CALIBRATION


@pytest.fixture(scope="module")
def make_work(save_family, prune_once):
    def make(model_type: str) -> Work:
        folder = save_family(model_type)
        return Work(prune_once(folder, "vo")[1], str(folder), str(DEMO_CALIBRATION), new_tokens=6, prompts=2)

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


ASKED = """
import sys
from transformers import AutoTokenizer

folder = sys.argv[1]
print(1, AutoTokenizer.from_pretrained(folder)("one two").input_ids, flush=True)  # the one that asks
print(2, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)("one two").input_ids, flush=True)
import struprune_plugin.serving
from struprune_plugin.export.classes import register_auto_classes

register_auto_classes()
print(3, AutoTokenizer.from_pretrained(folder)("one two").input_ids, flush=True)
assert "transformers_modules" not in sys.modules
"""


def test_at_a_terminal_transformers_asks_once_and_takes_no_for_an_answer(opt, prune_once, tmp_path):
    """Stock transformers reads the model's configuration first. Told not to trust, or knowing our types, it does not ask."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", ASKED, str(prune_once(opt, "vo")[1])],
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        os.write(ours, b"n\n")  # waits in the terminal until it is asked for
        said = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            said += piece
    os.close(ours)
    ids = AutoTokenizer.from_pretrained(opt)("one two").input_ids
    assert process.returncode == 0, said.decode()
    assert [f"{number} {ids}" in said.decode() for number in (1, 2, 3)] == [True] * 3
    assert said.count(b"Do you wish to run the custom code?") == 1
