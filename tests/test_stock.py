"""Outputs in a process that never imports the plugin: stock transformers loads them, stock lm-eval scores them.

One process for all: its start is what takes time.
"""

import json
import os
import subprocess
import sys

import lm_eval.tasks.manager
import pytest
import torch
from conftest import ROOT, SHAPES, WIDE_MODELS, make_dataset, run_oneshot
from families import MODEL_TYPES
from transformers import AutoModelForCausalLM

PROMPTS = torch.randint(4, 2048, (2, 12), generator=torch.Generator().manual_seed(7))
SCRIPT = """
import json, sys, torch
from lm_eval import simple_evaluate
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager, manager
from transformers import AutoModelForCausalLM

job = json.loads(sys.argv[1])
manager.__file__ = job["tasks"]
prompts, logits, accuracy = torch.load(job["prompts"]), {}, {}
for name, out in job["folders"].items():
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    logits[name] = model(prompts).logits.detach()
options = {"tasks": ["struprune_demo_word_order"], "device": "cpu", "limit": 4, "bootstrap_iters": 0}
options["task_manager"] = TaskManager(include_path="eval/tasks", include_defaults=False)
for name in job["scored"]:
    args = f"pretrained={job['folders'][name]},trust_remote_code=True"
    results = simple_evaluate(model="hf", model_args=args, **options)["results"]
    accuracy[name] = results["struprune_demo_word_order"]["acc,none"]
torch.save({"logits": logits, "accuracy": accuracy}, job["results"])
sys.argv = ["lm_eval", *job["command"]]  # the README's line
cli_evaluate()
assert "struprune_plugin" not in sys.modules
"""
PRUNED = [f"{model_type}-vo" for model_type in MODEL_TYPES] + [f"{s}-{unit}" for s in SHAPES for unit in ("head", "vo")]
QUANTISED = [f"quantised-{name}" for name in WIDE_MODELS]
SCORED = ["llama-vo", *QUANTISED]


@pytest.fixture(scope="module")
def folders(save_family, save_shape, prune_once, tmp_path_factory):
    """name -> an output folder: every family, every shape of OPT, and what a shipped recipe prunes and quantises."""
    found = {f"{name}-vo": prune_once(save_family(name), "vo")[1] for name in MODEL_TYPES}
    found |= {f"{s}-{unit}": prune_once(save_shape(s), unit, 0.4)[1] for s in SHAPES for unit in ("head", "vo")}
    recipe = str(ROOT / "recipes" / "struprune_w4a16_gptq.yaml")
    options = {"dataset": make_dataset(16), "num_calibration_samples": 16}
    for name, save in WIDE_MODELS.items():
        found[f"quantised-{name}"] = tmp_path_factory.mktemp(name) / "out"
        dense = save(tmp_path_factory.mktemp(f"wide_{name}"))
        run_oneshot(str(dense), recipe, output_dir=str(found[f"quantised-{name}"]), **options)
    return found


@pytest.fixture(scope="module")
def stock(folders, tmp_path_factory):
    """Logits by name of folder, accuracy by name, from the process without the plugin."""
    place = tmp_path_factory.mktemp("stock")
    torch.save(PROMPTS, place / "prompts.pt")
    job = {"folders": folders, "scored": SCORED, "prompts": place / "prompts.pt", "results": place / "results.pt"}
    command = f"--model hf --model_args pretrained={folders['llama-vo']},trust_remote_code=True --device cpu --limit 4"
    told = f"--tasks struprune_demo_word_order --include_path eval/tasks --output_path {place}"
    job["tasks"] = lm_eval.tasks.manager.__file__
    job["command"] = [*command.split(), *told.split()]
    environment = os.environ | {"HF_MODULES_CACHE": str(place / "modules")}
    command = [sys.executable, "-c", SCRIPT, json.dumps(job, default=str)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (scores,) = place.rglob("results_*.json")
    told = json.loads(scores.read_text())["results"]["struprune_demo_word_order"]["acc,none"]
    return {**torch.load(place / "results.pt"), "told": told}


@pytest.mark.parametrize("name", PRUNED + QUANTISED)
def test_stock_transformers_loads_with_trust_and_gives_the_same_logits(stock, folders, name):
    config = json.loads((folders[name] / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"].startswith("modeling_struprune.StruPrune")
    ours = AutoModelForCausalLM.from_pretrained(folders[name]).eval()
    assert torch.equal(stock["logits"][name], ours(PROMPTS).logits)


@pytest.mark.parametrize("name", SCORED)
def test_stock_lm_eval_scores_the_output(stock, name):
    assert 0 <= stock["accuracy"][name] <= 1


def test_the_stock_command_scores_the_output_the_same(stock):
    assert stock["told"] == stock["accuracy"]["llama-vo"]
