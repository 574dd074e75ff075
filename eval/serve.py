"""Pruned models in a real vLLM server: the same tokens as transformers, and tokens a second under load.

python -m eval.serve --dense MODEL --forms per_layer-vo,per_layer-head --output results/serve

A process of ``vllm serve`` on 127.0.0.1 for the dense model and for each form of it, pruned here, fast: sizes matter, not
weights. ``make serve-test`` makes vLLM's environment, where llm-compressor cannot live, and runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from struprune_plugin import StruPruneModifier, oneshot
from struprune_plugin.data import DEMO_CALIBRATION, DEMO_MODEL, make_calibration_dataset
from struprune_plugin.evaluation import load_checkpoint
from struprune_plugin.export.forms import convert_folder
from struprune_plugin.report import format_table

FORMS = ("uniform", "uniform-padded", "masked", "per_layer-none", "per_layer-vo", "per_layer-head", "block_configs")
TOLERANCE = 1e-3  # of log-probabilities, in float32
PROMPTS = [[5, 17, 99, 300, 1200], [40, 41, 42], list(range(100, 140))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", default=str(DEMO_MODEL))
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--forms", default="per_layer-none,per_layer-vo,per_layer-head")
    parser.add_argument("--vllm", default=".venv-vllm/bin/vllm")
    parser.add_argument("--requests", type=int, default=32, help="at the same time")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--patience", type=int, default=400, help="seconds that a server may take to start")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    unknown = set(args.forms.split(",")) - set(FORMS)
    if unknown:
        parser.error(f"--forms: must be of {', '.join(FORMS)}, got {', '.join(sorted(unknown))}.")
    with tempfile.TemporaryDirectory() as scratch:
        rows = []
        for form in ("dense", *args.forms.split(",")):
            folder = Path(args.dense) if form == "dense" else make_form(args, form, Path(scratch))
            rows.append(measure_form(form, folder, args))
            print(json.dumps(rows[-1]), flush=True)
    cells = [[row["form"], row["same"], f"{row['worst']:.1e}", f"{row['rate']:,.0f}"] for row in rows]
    for row, cell in zip(rows, cells, strict=True):
        cell.append(f"{row['rate'] / rows[0]['rate']:.2f} ×")
    table = format_table(["form", "tokens", "log-probabilities", "tokens/s", "of dense"], cells)
    print(f"{args.dense}, {args.sparsity:.0%} removed, {args.requests} requests at a time, float32", table, sep="\n")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "serve.md").write_text(table + "\n", encoding="utf-8")
        (args.output / "serve.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any(row["same"] != "same" for row in rows))


def make_form(args: argparse.Namespace, form: str, scratch: Path) -> Path:
    """Prune and convert; return the folder."""
    kind, _, unit = form.partition("-") if form.startswith("per_layer") else ("per_layer", "", "none")
    output = "uniform" if form == "uniform" else "per_layer"
    out = scratch / f"pruned-{unit}-{output}"
    if not out.exists():
        recipe = StruPruneModifier(
            sparsity=args.sparsity,
            attention_unit=unit,
            output=output,
            importance="magnitude",
            restoration="none",
            sensitivity="none",
            **({"allocation": "uniform"} if output == "uniform" else {}),
        )
        data = make_calibration_dataset(DEMO_CALIBRATION, AutoTokenizer.from_pretrained(args.dense), 4, 64)
        oneshot(model=args.dense, dataset=data, recipe=recipe, output_dir=str(out), num_calibration_samples=4)
    if form == "uniform" or form.startswith(kind + "-"):
        return out
    convert_folder(out, form, scratch / form)  # type: ignore[arg-type]
    return scratch / form


def measure_form(form: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Serve a folder, compare what it says with transformers, and load it."""
    with serve(folder, args) as ask:
        answers = [ask(prompt, args.new_tokens) for prompt in PROMPTS]
        start = time.perf_counter()
        with ThreadPoolExecutor(args.requests) as pool:
            jobs = [pool.submit(ask, [10 + i, 20 + i, 30 + i], args.new_tokens) for i in range(args.requests)]
            made = sum(len(job.result()[0]) for job in jobs)
        seconds = time.perf_counter() - start
    worst = max(compare(folder, prompt, *answer) for prompt, answer in zip(PROMPTS, answers, strict=True))
    return {"form": form, "same": "same" if worst <= TOLERANCE else "OTHER", "worst": worst, "rate": made / seconds}


@torch.no_grad()
def compare(folder: Path, prompt: list[int], tokens: list[int], logprobs: list[float]) -> float:
    """Return how far a greedy answer is from transformers' at worst: its log-probabilities, and those of the best tokens."""
    model, _ = load_checkpoint(str(folder), "float32")
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1)
    chosen = expected[torch.arange(len(tokens)), torch.tensor(tokens)]
    off = (chosen - torch.tensor(logprobs, dtype=torch.float64)).abs().max()
    return max(off.item(), (expected.max(-1).values - chosen).max().item())


@contextmanager
def serve(folder: Path, args: argparse.Namespace) -> Iterator[Any]:
    """Run a server while the block lasts, and give a function that asks it for greedy tokens and their log-probabilities."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [args.vllm, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", str(args.requests)]
    if list(folder.glob("modeling_block_configs.py")):
        command.append("--trust-remote-code")
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=os.environ | quiet | small, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, args.patience, log)

            def ask(prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
                body = {"model": str(folder), "prompt": prompt, "max_tokens": new_tokens, "temperature": 0}
                body |= {"logprobs": 1, "ignore_eos": True, "return_token_ids": True}
                choice = post(f"http://127.0.0.1:{port}/v1/completions", body)["choices"][0]
                return choice["token_ids"], choice["logprobs"]["token_logprobs"]

            yield ask
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(url: str, process: subprocess.Popen, patience: int, log: Any) -> None:
    """Wait until a server answers.

    :raises RuntimeError: it has ended or takes too long; the end of its log follows
    """
    end = time.monotonic() + patience
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    log.seek(0)
    raise RuntimeError(f"the server did not start:\n{log.read()[-4000:]}")


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the JSON answer to a JSON question."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


if __name__ == "__main__":
    raise SystemExit(main())
