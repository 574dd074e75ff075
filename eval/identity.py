"""Compare the outputs of two commits for the same models and recipes, byte by byte: refactoring changes no output.

    python -m eval.identity --against COMMIT

Runs the recipes below on tiny random models and the embedded demo model, once with this working tree and once, in a separate
process, with another commit; prints one row per run. Weights are compared as the bytes of
``model.safetensors``, manifests as JSON without seconds, bytes and versions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "opt": {"num_attention_heads": 4, "ffn_dim": 44, "word_embed_proj_dim": 32},
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 44},
    "gemma3_text": {
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 44, "head_dim": 8},
        **{"query_pre_attn_scalar": 8, "sliding_window": 8},
    },
    "phi3": {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 44, "sliding_window": None},
    "gpt_neox": {"num_attention_heads": 4, "intermediate_size": 44},
}
SIZES = {"vocab_size": 2048, "hidden_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2}
ADMM = {"method": "admm", "steps": 2, "inner_steps": 2}
FFN_ADMM = {"method": "admm", "steps": 2}  # where positions rotate queries and keys
ROTARY = ("llama", "gemma3_text", "phi3", "gpt_neox")
PRUNE = "StruPruneModifier"
_LORA = {"adapters": {"rank": 2}, "schedule": {"epochs": 1}}
EVERYWHERE: dict[str, list[dict[str, Any]]] = {  # stages of a recipe: modifier -> fields
    "default": [{PRUNE: {"sparsity": 0.3}}],
    "head": [{PRUNE: {"sparsity": 0.3, "attention_unit": "head"}}],
    "uniform": [{PRUNE: {"sparsity": 0.3, "allocation": "uniform"}}],
    "softmax": [{"SparsityAllocatorModifier": {"sparsity": 0.3, "allocation": "softmax"}}, {PRUNE: {}}],
    "admm": [{PRUNE: {"sparsity": 0.3, "weight_update": ADMM}}],
}
MORE: dict[str, list[dict[str, Any]]] = {  # on OPT and LLaMA alone
    **{
        name: [{PRUNE: {"sparsity": 0.3, "importance": name, "allocation": "softmax", "attention_unit": "head"}}]
        for name in ("wanda", "magnitude", "snip", "l0")
    },
    "closed_form": [
        {
            PRUNE: {
                **{"sparsity": 0.3, "allocation": "global_threshold", "weight_update": ADMM},
                "importance": {**ADMM, "method": "closed_form"},
            }
        }
    ],
    "closed_form, FFN": [{PRUNE: {"sparsity": 0.1, "importance": "closed_form", "attention_unit": "none"}}],
    "inverse, as printed": [{PRUNE: {"sparsity": 0.2, "allocation": {"rule": "softmax_inverse", "as_printed": True}}}],
    "search": [{PRUNE: {"sparsity": 0.3, "allocation": {"rule": "softmax", "temperature": [1.0, 4.0]}}}],
    "block": [{PRUNE: {"sparsity": 0.3, "reconstruct": "block", "rotate_values": False}}],
    "residual": [{PRUNE: {"sparsity": 0.3, "reconstruct": "residual"}}],
    "local": [{PRUNE: {"sparsity": 0.3, "reconstruct": "local", "sensitivity": "none", "dampening_frac": 0.01}}],
    "deletion": [{PRUNE: {"sparsity": 0.3, "weight_update": "none", "importance": "wanda"}}],
    "deletion, obs": [{PRUNE: {"sparsity": 0.3, "weight_update": "none"}}],
    "uniform output": [{PRUNE: {"sparsity": 0.3, "output": "uniform", "attention_unit": "none"}}],
    "offload": [{PRUNE: {"sparsity": 0.3, "offload": True}}],
    "multiple": [{PRUNE: {"sparsity": 0.3, "width_multiple": 4, "ignore": ["re:.*1.*"]}}],
    "admm, method 1": [
        {PRUNE: {"sparsity": 0.3, "attention_unit": "head", "weight_update": {**ADMM, "attention_method": 1}}}
    ],
    "lora": [{PRUNE: {"sparsity": 0.3}}, {"LoRARecoveryModifier": _LORA}],
    "w8a8": [{PRUNE: {"sparsity": 0.3}}, {"QuantizationModifier": {"scheme": "W8A8", "ignore": ["lm_head"]}}],
}
VOLATILE = (
    "seconds",
    "peak_bytes",
    "versions",
    "base",
    "settings",
    "memory_measure",
    "cache_bytes",  # which counts the headers of files
    "weights_sha256",  # whose definition changed
)  # and the manifest's digest, which is of these too


def save_model(model_type: str, folder: Path) -> None:
    """Save a tiny random model, weights large enough to matter, with the demo's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from struprune_plugin.evaluation.text import DEMO_MODEL

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **MODELS[model_type])
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            parameter.data = 0.3 * noise
        elif parameter.dim() == 1:
            parameter.data = parameter.data + 0.1 * noise
        elif "embed" not in name:
            parameter.data = noise / parameter.shape[1] ** 0.5
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)


def run_all(output: Path, only: str) -> dict[str, dict[str, str]]:
    """Run every recipe on every model; return digests, or the refusal, by run."""
    from struprune_plugin.evaluation.text import DEMO_MODEL

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folders = {"demo": Path(DEMO_MODEL)}
        for model_type in MODELS:
            folders[model_type] = work / model_type
            save_model(model_type, folders[model_type])
        found: dict[str, dict[str, str]] = {}
        for name, folder in folders.items():
            recipes = EVERYWHERE | (MORE if name in ("opt", "llama") else {})
            recipes = adapt_to_rotary(recipes) if name in ROTARY else recipes
            for recipe, stages in recipes.items():
                if only in f"{name}: {recipe}" or recipe == "default":
                    found[f"{name}: {recipe}"] = run_one(folder, stages, work / f"{name}-{recipe}", work)
                    output.write_text(json.dumps(found, indent=1))
    return found


def adapt_to_rotary(recipes: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return recipes for models with rotary positions, without the fields of ADMM on attention that these refuse."""
    return {
        recipe: [
            {
                modifier: {**fields, "weight_update": FFN_ADMM}
                if isinstance(fields.get("weight_update"), dict) and "importance" not in fields
                else fields
                for modifier, fields in stage.items()
            }
            for stage in stages
        ]
        for recipe, stages in recipes.items()
    }


def run_one(folder: Path, stages: list[dict[str, Any]], output: Path, work: Path) -> dict[str, str]:
    """Run one recipe; return the digests of its weights and of its manifest, or its refusal."""
    import torch
    import yaml
    from datasets import Dataset

    from struprune_plugin import oneshot

    stages = json.loads(json.dumps(stages))
    recipe = {f"s{i}_stage": {"s_modifiers": stage} for i, stage in enumerate(stages)}
    ids = torch.randint(4, 2000, (32, 32), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[::5, :3] = 0  # some sequences are padded
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": mask.tolist()})
    torch.manual_seed(0)
    try:
        oneshot(
            model=str(folder),
            recipe=yaml.safe_dump(recipe),
            output_dir=str(output),
            dataset=data,
            batch_size=4,
            num_calibration_samples=32,
            shuffle_calibration_samples=False,
        )
    except ValueError as error:
        return {"refused": str(error).replace(str(work), "")}
    manifest = strip(json.loads((output / "struprune.json").read_text()))
    manifest.pop("sha256", None)
    told = json.dumps(manifest, sort_keys=True).replace(str(work), "")
    return {
        "weights": hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest(),
        "config": hashlib.sha256((output / "config.json").read_bytes()).hexdigest(),
        "manifest": told,
    }


def strip(value: Any) -> Any:
    """Return a manifest without what differs from run to run."""
    if isinstance(value, dict):
        return {name: strip(part) for name, part in value.items() if name not in VOLATILE}
    return [strip(part) for part in value] if isinstance(value, list) else value


def run_commit(commit: str, output: Path, only: str) -> None:
    """Run everything with the package and the recipes' spelling of another commit, in a process of its own."""
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as temporary:
        archive = subprocess.run(
            ["git", "archive", commit, "struprune_plugin", "eval"], cwd=root, check=True, capture_output=True
        )
        subprocess.run(["tar", "x", "-C", temporary], input=archive.stdout, check=True)
        command = [sys.executable, "-P", "eval/identity.py", "--write", str(output), "--only", only]
        subprocess.run(command, cwd=temporary, env={**os.environ, "PYTHONPATH": temporary}, check=True)


def _normalise(told: str) -> str:
    """Return a manifest, or a refusal, without what is volatile, in today's words for units; other texts as they are."""
    if not told.startswith("{"):
        return told
    return json.dumps(strip(json.loads(told)), sort_keys=True).replace('"vo"', '"value_channels"')


def describe(before: dict[str, str] | None, now: dict[str, str]) -> str:
    """Say in a word or two whether a run gave the same."""
    if before is None:
        return "new"
    before = {name: _normalise(part) for name, part in before.items()}
    now = {name: _normalise(part) for name, part in now.items()}
    parts = [part for part in {**before, **now} if before.get(part) != now.get(part)]
    return "same refusal" if not parts and "refused" in now else "same" if not parts else f"OTHER {', '.join(parts)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="commit to compare this working tree with")
    parser.add_argument(
        "--reference",
        metavar="FILE",
        type=Path,
        help="file of digests of that commit, as --write makes it; made if absent",
    )
    parser.add_argument("--write", metavar="FILE", type=Path, help="only run, and write the digests to this file")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="runs whose name contains this, e.g. 'llama: ' or default"
    )
    args = parser.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")
    if args.write:
        run_all(args.write, args.only)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        reference = args.reference or Path(temporary) / "before.json"
        if not reference.exists():
            run_commit(args.against, reference, args.only)
        before = json.loads(reference.read_text())
        now = run_all(Path(temporary) / "now.json", args.only)
    rows = {name: describe(before.get(name), result) for name, result in now.items()}
    for name, word in rows.items():
        print(f"{name:32} {word}")
        if word.startswith("OTHER"):
            for part in ("refused", "manifest"):
                old, new = (_normalise(run[name].get(part, "")) for run in (before, now))
                if old != new:
                    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
                    span = slice(max(at - 80, 0), at + 160)
                    print(f"    {part} before: …{old[span]}\n    {part} now:    …{new[span]}")
    same = sum(word.startswith("same") for word in rows.values())
    print(f"{same} of {len(rows)} runs the same")
    return 0 if same == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
