"""Comparison of the card with the CPU: the same units, the same weights, outputs that load again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

from eval import identity
from eval.accelerator.steps import Place, Step
from struprune_plugin import oneshot
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_MODEL
from struprune_plugin.storage.manifest import read_manifest

TOLERANCE = 1e-3
_PRUNED: dict[str, Any] = {identity.PRUNE: {"sparsity": 0.3}}
_LAB = "opt-lab"


@dataclass(frozen=True)
class Case:
    """A model and a recipe.

    :param model: a type's tiny model, or :data:`_LAB`
    :param stages: of the recipe
    :param tolerance: of weights, relative to the largest of their tensor; and of the logits
    :param share: of the kept units that must be the same; below 1, the weights are not compared
    """

    model: str
    stages: list[dict[str, Any]]
    tolerance: float = TOLERANCE
    share: float = 1.0


CASES: dict[str, Case] = {
    "default, opt": Case("opt", [_PRUNED]),
    "default, llama": Case("llama", [_PRUNED]),
    "default, phi3": Case("phi3", [_PRUNED]),
    "default, gpt_neox": Case("gpt_neox", [_PRUNED]),
    "ADMM, opt": Case("opt", identity.EVERYWHERE["admm"]),
    "budget, llama": Case("llama", identity.MORE["budget"]),
    # Adam's first steps are signs of gradients, and quantised weights are steps: rounding is not all that may differ
    "LoRA, opt": Case("opt", identity.MORE["lora"], 2e-2),
    "GPTQ, opt": Case("opt", [_PRUNED, {"GPTQModifier": {"scheme": "W8A8", "ignore": ["lm_head"]}}], 2e-2),
    # units of a trained FFN come close to each other in cost, and float32 decides
    f"default, {_LAB}": Case(_LAB, [_PRUNED], 5e-2, share=0.95),
}
REDUCED = ("default, llama",)


def list_correct_steps(reduced: bool) -> list[Step]:
    """Return the CPU's results, and a comparison a case."""
    names = REDUCED if reduced else tuple(CASES)
    steps = [Step("the CPU's results", 200.0, _make_references)]
    return steps + [Step(f"correct: {name}", 120.0 if reduced else 40.0, partial(_compare, name)) for name in names]


def write_references(place: Place) -> None:
    """Save the models, and prune them where this process computes."""
    cases = {name: CASES[name] for name in (REDUCED if place.reduced else CASES)}
    for model in {case.model for case in cases.values()}:
        _save_model(model, place)
    for name, case in cases.items():
        prune_case(case, place, _find_output(place, "reference", name))


def _make_references(place: Place) -> dict[str, Any]:
    if place.device.type == "cpu":
        write_references(place)
        return {}
    words = ["--reference", "--output", str(place.work.parent), "--model", str(place.model)]
    words += ["--reduced"] if place.reduced else []
    command = [sys.executable, "-m", "eval.accelerator.worker", *words]
    done = subprocess.run(
        command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no word"])[-1])
    return {}


def _find_output(place: Place, side: str, name: str) -> Path:
    return place.work / side / name.replace(", ", "-").replace(" ", "-")


def _save_model(model: str, place: Place) -> None:
    """Save a tiny random model; opt-lab as it lies where it is there, else random weights of its sizes."""
    folder = place.work / "models" / model
    if folder.exists():
        return
    if model != _LAB:
        identity.save_model(model, folder)
        return
    if place.model.is_dir():
        shutil.copytree(place.model, folder)
        return
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 1024, "num_hidden_layers": 8}
    config = OPTConfig(**sizes, num_attention_heads=8, vocab_size=2048, max_position_embeddings=256, init_std=0.1)
    OPTForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)


def prune_case(case: Case, place: Place, output: Path) -> None:
    """Prune a case's model into a folder, anew."""
    if output.exists():
        shutil.rmtree(output)
    folder = place.work / "models" / case.model
    if case.model != _LAB:
        told = identity.run_one(folder, case.stages, output, place.work)
        if "refused" in told:
            raise ValueError(told["refused"])
        return
    oneshot(
        model=str(folder),
        recipe=yaml.safe_dump({f"s{i}_stage": {"s_modifiers": stage} for i, stage in enumerate(case.stages)}),
        output_dir=output,
        dataset=str(DEMO_CALIBRATION),
        max_seq_length=256,
        num_calibration_samples=64,
        batch_size=4,
        shuffle_calibration_samples=False,
    )


def _compare(name: str, place: Place) -> dict[str, Any]:
    """Prune here, and compare with what the CPU gave."""
    case, expected, found = CASES[name], _find_output(place, "reference", name), _find_output(place, "here", name)
    prune_case(case, place, found)
    theirs, ours = (read_manifest(folder).groups for folder in (expected, found))
    pairs = [(set(a.keep), set(b.keep)) for a, b in zip(theirs, ours, strict=True)]
    share = sum(len(a & b) for a, b in pairs) / sum(len(a | b) for a, b in pairs)
    weights = measure_difference(load_file(expected / "model.safetensors"), load_file(found / "model.safetensors"))
    ids = torch.randint(4, 2000, (2, 32), generator=torch.Generator().manual_seed(3))
    logits = []
    for folder in (expected, found):
        model, _ = load_checkpoint(str(folder))
        with torch.no_grad():
            logits.append({"logits": model(ids.to(model.device)).logits.float().cpu()})
    reloaded = measure_difference(*logits)
    return {
        "same_units": share,
        "weights": weights,
        "reloaded": reloaded,
        "tolerance": case.tolerance,
        "passed": share >= case.share and reloaded <= case.tolerance and (case.share < 1 or weights <= case.tolerance),
    }


def measure_difference(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of any tensor, relative to the largest number in it; infinite where shapes differ."""
    if expected.keys() != found.keys() or any(expected[name].shape != found[name].shape for name in expected):
        return float("inf")
    pairs = ((expected[name].double(), found[name].double()) for name in expected)
    return max(float((a - b).abs().max()) / max(float(a.abs().max()), 1e-30) for a, b in pairs if a.numel())
