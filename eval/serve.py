"""Compare vLLM with transformers: greedy tokens and log-probabilities of dense and pruned models, and tokens per second.

    python -m eval.serve --models MODEL,tiny-llama --forms value_channels,head,uniform --output results/serve

Every model is pruned by the default recipe without its slowest parts, on little text, in each form. vLLM's engine runs the folders
one after the other in one process of its environment, where this package is not installed; per-layer forms load there by
``trust_remote_code``. ``make serve-test`` makes that environment: vLLM cannot be installed beside llm-compressor. Models named
``tiny-TYPE`` have random weights. ``dense-backend`` is the dense model in vLLM's Transformers backend, which runs pruned ones.

*tokens*: greedy tokens of all prompts that transformers chooses, too, near ties among them. *off*: the largest difference of
log-probabilities. *tokens/s*: the best of three rounds of many requests.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from struprune_plugin import oneshot
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_MODEL, make_calibration_dataset
from struprune_plugin.export.outputs import convert_folder
from struprune_plugin.reporting.tables import Table

FORMS = ("dense", "dense-backend", "value_channels", "head", "none", "uniform", "uniform-padded", "dense-w8a8", "w8a8")
_SIZES: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
_SIZES |= {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512, "initializer_range": 0.1}
_SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 128}
_TYPES: dict[str, dict[str, Any]] = {  # heads of a size that the engine's kernels have
    **{name: {"head_dim": 32} for name in ("qwen3", "gemma3_text", "mistral", "glm4")},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 4, "ffn_hidden_size": 1024},
    "qwen3_moe": {"head_dim": 32, **_EXPERTS},
    "gemma3": {},
}
TOLERANCE = 1e-3  # of log-probabilities, in float32
FACTOR = 3.0  # of the dense model's difference, quantised: how far a pruned one may be off where kernels round
CALIBRATION = (32, 128)  # windows, tokens
PROMPTS = [[5, 17, 99, 300, 1200], [40, 41, 42], list(range(100, 140))]
# GiB of cache; threads as OMP_NUM_THREADS
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
WORKER = Path(__file__).parent / "vllm_worker.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=f"{DEMO_MODEL},tiny-llama", help="folders and tiny-TYPE, with commas")
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--forms", default=",".join(FORMS), help="separated by commas; dense comes first")
    parser.add_argument("--python", type=Path, default=Path(".venv-vllm/bin/python"), help="of vLLM's environment")
    parser.add_argument("--requests", type=int, default=32, help="number of requests at the same time")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("results/serve"))
    args = parser.parse_args()
    if not args.python.is_file():
        parser.error(f"--python: must be where vLLM is installed, got {args.python}. Run make serve-test.")
    args.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryFile("w+") as log, start_worker(args.python, log) as worker:
        for model in args.models.split(","):
            for form in dict.fromkeys(("dense", *args.forms.split(","))):
                told = {"model": Path(model).name, "form": form}
                folder = make_form(model, form, args.sparsity, args.output / "forms")
                rows.append({**told, **measure(folder, form, worker, log, args)})
                print(json.dumps(rows[-1]), flush=True)
    table = format_rows(rows)
    print(table)
    (args.output / "serve.md").write_text(table + "\n", encoding="utf-8")
    return int(not all(passes(row, rows) for row in rows))


def passes(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Return whether vLLM says what transformers says of the same folder; quantised, as nearly as it does of the dense model."""
    if "failed" in row:
        return False
    if not row["form"].endswith("w8a8"):
        return row["off"] <= TOLERANCE
    dense = [other for other in rows if (other["model"], other["form"]) == (row["model"], "dense-w8a8")]
    return any("failed" not in other and row["off"] <= FACTOR * other["off"] for other in dense)


def make_form(model: str, form: str, sparsity: float, kept: Path, multiple: int = 8) -> Path:
    """Return the folder of a model in a form, made where it is not there yet.

    :param multiple: of the FFNs' widths
    """
    form = form.removesuffix("-backend")
    if form == "dense" and not model.startswith("tiny-"):
        return Path(model)
    folder = kept / f"{Path(model).name}-{form}-{sparsity}-{multiple}"
    if folder.exists():
        return folder
    if form == "dense":
        return make_tiny(model.removeprefix("tiny-"), folder)
    if form == "uniform-padded":
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        convert_folder(make_form(model, "none", sparsity, kept, multiple), "uniform-padded", partial)
        return partial.rename(folder)
    dense = make_form(model, "dense", sparsity, kept)
    data = make_calibration_dataset(DEMO_CALIBRATION, AutoTokenizer.from_pretrained(dense), *CALIBRATION)
    options: dict[str, Any] = {"num_calibration_samples": len(data), "precision": "float32", "dataset": data}
    oneshot(str(dense), make_recipe(form, sparsity, multiple), folder, **options)
    return folder


def make_tiny(model_type: str, folder: Path) -> Path:
    """Write a model of random weights."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    sizes = {**_SIZES, **_TYPES.get(model_type, {}), "vocab_size": len(tokenizer)}
    if model_type == "gemma3":  # a wrapper around a text decoder
        vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes = {"text_config": {**sizes, "head_dim": 32}, "vision_config": vision}
    config = AutoConfig.for_model(model_type, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_recipe(form: str, sparsity: float, multiple: int) -> str:
    """Return a recipe that prunes to a form, the default but for its slowest parts, and quantises where the form says so."""
    fields: dict[str, Any] = {"sparsity": sparsity, "sensitivity": "none", "dampening_frac": 0.1}
    fields["width_multiple"] = multiple
    uniform = {"output": "uniform", "allocation": "uniform", "attention_unit": "none"}
    fields |= uniform if form in ("uniform", "w8a8") else {"attention_unit": form}
    stages: dict[str, Any] = {}
    if not form.startswith("dense"):
        stages["pruning_stage"] = {"pruning_modifiers": {"StruPruneModifier": fields}}
    if form.endswith("w8a8"):
        quantiser = {"ignore": ["lm_head"], "targets": ["Linear"], "scheme": "W8A8"}
        stages["quantisation_stage"] = {"quantisation_modifiers": {"QuantizationModifier": quantiser}}
    return yaml.safe_dump(stages, sort_keys=False)


def start_worker(python: Path, log: Any) -> subprocess.Popen[str]:
    """Start vLLM's process, which ends when its questions end."""
    command = [str(python), "-P", str(WORKER)]  # -P: the modules beside it are none of its own
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
    return subprocess.Popen(command, env=os.environ | SMALL, text=True, **pipes)


def measure(folder: Path, form: str, worker: Any, log: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Let vLLM run a folder, and compare what it says with transformers."""
    load = [[10 + i, 20 + i, 30 + i] for i in range(args.requests)]
    job = {"folder": str(folder.resolve()), "prompts": PROMPTS, "load": load, "new_tokens": args.new_tokens}
    job["impl"] = "transformers" if form == "dense-backend" else "auto"
    job |= {"rounds": args.rounds, "trust": (folder / "modeling_struprune.py").is_file()}
    job["dtype"] = "bfloat16" if form.endswith("w8a8") else "float32"  # which its kernels do not have
    worker.stdin.write(json.dumps(job) + "\n")
    worker.stdin.flush()
    said = worker.stdout.readline()
    if not said:
        log.seek(0)
        raise RuntimeError(f"vLLM's process died:\n{log.read()[-12000:]}")
    found = json.loads(said)
    if "failed" in found:
        return {"failed": found["failed"].strip()[-160:]}
    model = load_checkpoint(str(folder), "float32")[0]
    pairs = [compare(model, prompt, *answer) for prompt, answer in zip(PROMPTS, found["answers"], strict=True)]
    same, tokens = sum(same for same, _ in pairs), len(PROMPTS) * args.new_tokens
    return {"same": same, "tokens": tokens, "off": max(off for _, off in pairs), "rate": max(found["rates"])}


@torch.no_grad()
def compare(model: Any, prompt: list[int], tokens: list[int], logprobs: list[float]) -> tuple[int, float]:
    """Compare a greedy answer with transformers.

    :return: how many of its tokens are the likeliest there, near ties among them, and how far log-probabilities are off at worst
    """
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1)
    chosen = expected[torch.arange(len(tokens)), torch.tensor(tokens)]
    off = (chosen - torch.tensor(logprobs, dtype=torch.float64)).abs().max()
    behind = expected.max(-1).values - chosen
    return int((behind <= TOLERANCE).sum()), max(off.item(), behind.max().item())


def format_rows(rows: list[dict[str, Any]]) -> str:
    """Return the table; speeds against the dense model of the same name."""
    dense = {row["model"]: row["rate"] for row in rows if row["form"] == "dense" and "rate" in row}
    cells = []
    for row in rows:
        if "failed" in row:
            cells.append([row["model"], row["form"], "failed", row["failed"], "", ""])
            continue
        ratio = f"{row['rate'] / dense[row['model']]:.2f} ×" if row["model"] in dense else ""
        told = [f"{row['same']} of {row['tokens']}", f"{row['off']:.1e}" + " OTHER" * (not passes(row, rows))]
        cells.append([row["model"], row["form"], *told, f"{row['rate']:,.0f}", ratio])
    return str(Table(["model", "form", "tokens", "off", "tokens/s", "of dense"], cells))


if __name__ == "__main__":
    raise SystemExit(main())
