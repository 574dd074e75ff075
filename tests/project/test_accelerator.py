"""The command for a real accelerator, in its reduced form on a CPU."""

import re
import sys
import time

import pytest
import torch
from helpers.models import make_opt

from eval.accelerator.__main__ import AGAIN, ENDS, STARTS, supervise
from eval.accelerator.correct import CASES, measure_difference
from eval.accelerator.memory import CASES as MEMORY
from eval.accelerator.memory import count_paper_seconds
from eval.accelerator.outputs import advise, shrink
from eval.accelerator.pruning import SPEED
from eval.accelerator.report import make_report, write_report
from eval.accelerator.steps import Journal, Place, Step, run_steps
from eval.accelerator.worker import list_steps
from struprune_plugin.model.units import find_groups

CPU = torch.device("cpu")


@pytest.fixture
def place(tmp_path):
    return Place(CPU, True, tmp_path / "work", tmp_path / "nowhere")


def run_all(folder, place, steps, seconds=1e9, began=0.0):
    journal = Journal(folder / "accelerator.json", place, began)
    again = run_steps(journal, steps, place, seconds, lambda: write_report(journal, steps, folder))
    assert not again, "a CPU is never unusable"
    return {step.name: journal.find(step) for step in steps}


def test_the_reduced_form_does_every_kind_of_step_once(tmp_path, place):
    steps = list_steps(reduced=True)
    rows = run_all(tmp_path, place, steps)
    assert not [row.get("error", name) for name, row in rows.items() if "error" in row or row.get("passed") is False]
    case = rows["correct: default, llama"]
    assert case["same_units"] == 1.0
    assert case["weights"] == 0
    speed = rows["speed: tiny"]
    assert speed["model_seconds"] == pytest.approx(2 * speed["stages"]["whole pass"])
    whole = rows["memory: tiny × 2, default"]
    ranked, least = (row for name, row in rows.items() if name.startswith("memory: ") and row is not whole)
    assert least["peak_bytes"] <= least["budget_bytes"] < whole["peak_bytes"]
    assert ranked["peak_bytes"] <= ranked["budget_bytes"]
    text = (tmp_path / "accelerator.md").read_text()
    assert "8 of 8 steps done" in text
    assert re.search(r"stage +seconds +floor +target +ratio +peak, GB", text.replace("|", " "))
    assert "multiple 8" in text
    again = [Step(step.name, step.seconds, lambda _place: pytest.fail("done already"), step.told) for step in steps]
    assert run_all(tmp_path, place, again) == rows


def test_the_whole_form_has_all_that_it_promises():
    names = [step.name for step in list_steps(reduced=False)]
    assert len(names) == len(set(names)) == 2 + len(CASES) + len(SPEED) + len(MEMORY) + 3
    assert names.index("rates") < names.index("the CPU's results") < names.index("speed: LLaMA-2-7B")
    assert all(step.seconds < 500 for step in list_steps(reduced=False)), "each fits a start of the command"
    for shape in ("LLaMA-2-7B", "LLaMA-2-70B"):
        assert {case.budget for case in MEMORY if case.shape.name == shape and case.shape.layers == 4} == {None, 4, 0}


@pytest.mark.parametrize("case", MEMORY, ids=lambda case: case.name)
def test_a_memory_step_fits_its_limit_on_paper(case):
    assert count_paper_seconds(case) < 0.85 * case.seconds


def test_a_step_that_fails_is_told_and_tried_again_by_the_next_start_alone(tmp_path, place):
    runs = []

    def fail(_place):
        runs.append("bad")
        if len(runs) < 2:
            raise ValueError("no such thing\nand more")
        return {"found": 1}

    steps = [Step("bad", 1.0, fail), Step("good", 1.0, lambda _place: {"found": 2})]
    began = time.time()
    rows = run_all(tmp_path, place, steps, began=began)
    assert rows["bad"]["error"].startswith("ValueError: no such thing (test_accelerator.py:")
    assert rows["good"]["found"] == 2
    assert "bad: ValueError" in (tmp_path / "accelerator.md").read_text()
    assert run_all(tmp_path, place, steps, began=began) == rows
    assert run_all(tmp_path, place, steps, began=time.time() + 1)["bad"]["found"] == 1
    assert runs == ["bad", "bad"]


def test_steps_that_do_not_fit_the_time_wait(tmp_path, place):
    steps = [Step("long", 100.0, lambda _place: pytest.fail("too long")), Step("short", 1.0, lambda _place: {})]
    rows = run_all(tmp_path, place, steps, seconds=50.0)
    assert rows["long"] is None
    assert rows["short"] is not None
    assert "## Not done yet\n\n- long" in (tmp_path / "accelerator.md").read_text()


WORKER = f"""
import sys, time
words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
log = open(sys.argv[1], "a")
print(words.get("--lost"), "|", words.get("--why"), file=log, flush=True)
if "--lost" in words:
    sys.exit(1)
print("{STARTS}SECONDS the step", flush=True)
ACTION
"""


@pytest.mark.parametrize(
    ("action", "status", "log"),
    [
        ("time.sleep(60)", 1, ["None | None", "the step | took longer than it may, and was ended"]),
        ("sys.exit(-9)", 1, ["None | None", "the step | its process ended with status 247"]),
        (f"print('{ENDS}the step')", 0, ["None | None"]),
        (f"print('{ENDS}the step', flush=True); sys.exit({AGAIN} if log.tell() < 15 else 0)", 0, ["None | None"] * 2),
    ],
)
def test_a_worker_is_watched_and_replaced(tmp_path, action, status, log):
    script = tmp_path / "worker.py"
    script.write_text(WORKER.replace("SECONDS", "0.5").replace("ACTION", action))
    file = tmp_path / "log"
    assert supervise([sys.executable, str(script), str(file)], 100.0) == status
    assert file.read_text().splitlines() == log


def test_shrink_gives_the_sizes_of_pruning():
    model = shrink(make_opt(), 0.3, 8)
    assert {group.num_units for group in find_groups(model, "none")} == {24}  # of 40, in eights
    assert model(torch.randint(4, 2048, (1, 8))).logits.isfinite().all()
    assert hasattr(model.config, "per_layer_config")


def test_measure_difference_is_relative_and_infinite_for_other_shapes():
    one = {"a": torch.tensor([2.0, -4.0])}
    assert measure_difference(one, {"a": torch.tensor([2.0, -3.0])}) == 0.25
    assert measure_difference(one, {"a": torch.zeros(3)}) == float("inf")


def test_advice_names_the_smallest_multiple_that_is_as_fast():
    def row(model, prefill, decode):
        return {"model": model, "batch": 1, "prefill_speedup": prefill, "decode_speedup": decode}

    rows = [
        row("dense", 1.0, 1.0),
        row("multiple 1", 1.1, 1.2),
        row("multiple 8", 1.3, 1.2),
        row("multiple 64", 1.31, 1.2),
    ]
    assert advise(rows).startswith("multiple 8 is within 3 %")
    assert "prefill, batch 1: multiple 64" in advise([*rows[:2], row("multiple 64", 1.4, 1.0)])


def test_a_report_tells_what_is_not_as_it_should_be():
    row = {"same_units": 0.98, "weights": 0.1, "reloaded": 0.2, "tolerance": 1e-3, "passed": False}
    text = make_report({"correct: default, llama": row}, [], {"device": "cpu"})
    assert "- correct: default, llama: not as it should be" in text
    assert "NO" in text
