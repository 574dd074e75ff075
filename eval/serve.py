"""Serve pruned models with vLLM: tokens against transformers, and tokens per second under load.

    python -m eval.serve --models MODEL,tiny-llama --output results/serve --seconds 300

vLLM's server runs on 127.0.0.1 for every dense model and for each form of the model pruned by the default recipe, without its
slowest parts, on little text. ``tiny-llama``, ``tiny-qwen3-moe`` and ``tiny-olmoe`` have random weights. Finished rows are read
back: repeat the command after ``--seconds`` ended it. ``make serve-test`` makes an environment for vLLM, which cannot be installed
beside llm-compressor, and runs this to the end. A server takes a minute or two to start; ``--engine process`` uses the same engine
without a server, in one process for all rows.

*tokens*: greedy tokens of all prompts that transformers chooses, too. *log-probabilities*: the largest difference from
transformers; *grouped kernels*: the largest difference between transformers' kernels for all experts at once and its loop over
experts. *tokens/s*: the best of three rounds; all requests of a round run at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from eval.ledger import EVAL, PACKAGE, Ledger, Turn, digest_sources, digest_text, identify_model, read_names
from struprune_plugin import oneshot
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_MODEL, make_calibration_dataset
from struprune_plugin.export.forms import convert_folder
from struprune_plugin.reporting.tables import format_table

PRUNED = ("uniform", "per_layer-none", "per_layer-vo", "per_layer-head")
CONVERTED = ("uniform-padded", "masked", "block_configs", "static")  # from per_layer-none
_FOUR_BITS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 64,
}  # 64: divides more widths
QUANTISED: dict[str, dict[str, Any]] = {  # with uniform: its kernels for CPUs take vLLM's own classes' shapes alone
    "w8a8": {"targets": ["Linear"], "scheme": "W8A8"},
    "w4a16": {"config_groups": {"all": {"targets": ["Linear"], "weights": _FOUR_BITS}}},
}
DTYPES = {"w8a8": "bfloat16", "w4a16": "bfloat16"}  # else float32, which their kernels have not
DENSE = "dense-"  # before the name of a quantised form: the dense model, quantised in the same way
FORMS = (*PRUNED, *CONVERTED, *QUANTISED)
TINY = "tiny-llama"
_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_SIZES |= {"max_position_embeddings": 512, "initializer_range": 0.1}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
TINIES: dict[str, dict[str, Any]] = {  # heads of a size that the engine's kernels have
    TINY: {"model_type": "llama", "intermediate_size": 512, **_SIZES},
    "tiny-qwen3-moe": {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 128,
        "head_dim": 32,
        **_SIZES,
        **_EXPERTS,
        "norm_topk_prob": True,
    },
    "tiny-olmoe": {"model_type": "olmoe", "intermediate_size": 128, **_SIZES, **_EXPERTS},
}
TOLERANCE = 1e-3  # of log-probabilities, in float32
FACTOR = 3.0  # of the dense model's difference, of the same kind: how far a pruned one may be off where kernels round
CALIBRATION = (32, 128)  # windows, tokens: enough that rounding does not break what pruning left
PROMPTS = [[5, 17, 99, 300, 1200], [40, 41, 42], list(range(100, 140))]
ROUNDS = 3
SMALL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # GiB of cache, threads as OMP_NUM_THREADS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=f"{DEMO_MODEL},{TINY}", help="model folders, separated by commas")
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument(
        "--python", type=Path, default=Path(".venv-vllm/bin/python"), help="Python of vLLM's environment"
    )
    parser.add_argument("--engine", choices=("server", "process"), default="server")
    parser.add_argument("--requests", type=int, default=32, help="number of requests at the same time")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--patience", type=int, default=400, help="seconds to wait for a server to start")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no further row after this number of seconds"
    )
    parser.add_argument("--output", type=Path, default=Path("results/serve"))
    args = parser.parse_args()
    forms = read_names(parser, "--forms", args.forms, FORMS)
    if not args.python.is_file():
        parser.error(
            f"--python: must be where vLLM is installed, got {args.python}. Run make serve-test, which does it."
        )
    signal.signal(signal.SIGTERM, lambda *_: exit(143))  # so that servers end with this process
    turn, rows = Turn(args.seconds), []
    for model in args.models.split(","):
        asked = [form for form in forms if suits(form, model)]
        for form in ("dense", *(DENSE + form for form in asked if form in QUANTISED), *asked):
            how = describe_row(model, form, args)
            row = open_ledger(args).find(name_row(model, form, args.engine), how)
            if turn.takes(row):
                rows.append(row or make_row(model, form, how, args))
    table = format_rows(rows)
    print(
        f"{args.sparsity:.0%} removed, {args.requests} requests at a time, {json.dumps(read_versions(args.python))}",
        table,
        sep="\n",
    )
    (args.output / "serve.md").write_text(table + "\n", encoding="utf-8")
    turn.tell()
    return int(turn.left > 0 or not all(passes(row, rows) for row in rows))


def passes(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether vLLM says what transformers says of the same folder; quantised, as nearly as it does of the dense model."""
    if "failed" in row:
        return False
    if row["form"].startswith(DENSE):
        return True  # what the others are measured by
    if row["form"] not in QUANTISED:
        return row["worst"] <= TOLERANCE
    dense = [other for other in rows if (other["model"], other["form"]) == (row["model"], DENSE + row["form"])]
    return any("failed" not in other and row["worst"] <= FACTOR * other["worst"] for other in dense)


def name_row(model: str, form: str, engine: str) -> str:
    return f"{Path(model).name} | {form} | {engine}"


def suits(form: str, model: str) -> bool:
    """Return whether a model can take a form: the schema of block_configs describes LLaMA's layers."""
    if form != "block_configs":
        return True
    kind = TINIES[model]["model_type"] if model in TINIES else AutoConfig.from_pretrained(model).model_type
    return kind == "llama"


def open_ledger(args: argparse.Namespace) -> Ledger:
    return Ledger(args.output / "rows.json")


@cache
def read_versions(python: Path) -> dict[str, str]:
    """Return the versions of what serves."""
    script = "import json; from importlib.metadata import version as v\n"
    script += "print(json.dumps({n: v(n) for n in ('vllm-cpu', 'torch', 'transformers')}))"
    return json.loads(subprocess.check_output([python, "-c", script], text=True))


def describe_row(model: str, form: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what a row depends on; of the package all, since it prunes and loads."""
    return {
        "model": TINIES[model] if model in TINIES else identify_model(model),
        "form": form,
        "engine": args.engine,
        "new_tokens": args.new_tokens,
        "sources": digest_text("".join(map(digest_sources, (PACKAGE, EVAL / "vllm_worker.py")))),
        "recipe": None if form == "dense" or form in CONVERTED else make_recipe(form, args.sparsity),
        "asked": [PROMPTS, CALIBRATION, ROUNDS, args.sparsity, args.requests, DTYPES.get(form.removeprefix(DENSE))],
        "versions": read_versions(args.python),
    }


def make_row(model: str, form: str, how: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Serve one form; where the server fails, say how, and write nothing: it may have been the machine."""
    key = name_row(model, form, args.engine)
    told = {"model": Path(model).name, "form": form}
    try:
        folder = make_form(model, form, args.sparsity, args.output / "forms")
        return open_ledger(args).finish(key, how, lambda: {**told, **measure_form(folder, form, args)})
    except RuntimeError as error:
        print(f"{key}: {error}", flush=True)
        return {**told, "failed": find_reason(str(error))}


def find_reason(log: str) -> str:
    """Return the line of a log that says why."""
    lines = [line for line in log.splitlines() if "Error" in line]
    return lines[-1].strip()[-120:] if lines else log[-120:]


def make_form(model: str, form: str, sparsity: float, kept: Path, multiple: int | None = None) -> Path:
    """Return the folder of a model, in float32: dense, or pruned and converted where it is not there already.

    :param multiple: of what channels are left
    """
    if form == "dense":
        return make_tiny(model, kept) if model in TINIES else Path(model)
    dense = make_form(model, "dense", sparsity, kept)
    recipe = "" if form in CONVERTED else make_recipe(form, sparsity, multiple)
    what = [identify_model(str(dense)), sparsity, recipe, CALIBRATION, digest_sources(PACKAGE)]
    folder = kept / f"{Path(model).name}-{form}-{digest_text(json.dumps(what))}"
    if folder.exists():
        return folder
    if form in CONVERTED:
        partial_folder = folder.with_suffix(".partial")
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir(parents=True)
        convert_folder(make_form(model, "per_layer-none", sparsity, kept), form, partial_folder)  # type: ignore[arg-type]
        partial_folder.rename(folder)
        return folder
    data = make_calibration_dataset(DEMO_CALIBRATION, AutoTokenizer.from_pretrained(dense), *CALIBRATION)
    oneshot(
        model=str(dense),
        dataset=data,
        recipe=recipe,
        output_dir=str(folder),
        num_calibration_samples=len(data),
        precision="float32",
    )
    return folder


def make_tiny(name: str, kept: Path) -> Path:
    """Return the folder of a model of random weights."""
    folder = kept / f"{name}-{digest_text(json.dumps(TINIES[name]))}"
    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
        config = AutoConfig.for_model(**TINIES[name], vocab_size=len(tokenizer))
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def make_recipe(form: str, sparsity: float, multiple: int | None = None) -> str:
    """Return a recipe that prunes to a form, the default but for its slowest parts, and quantises where it says so."""
    fields: dict[str, Any] = {"sparsity": sparsity, "sensitivity": "none", "dampening_frac": 0.1}
    if multiple is not None:
        fields["width_multiple"] = multiple
    if form == "uniform" or form in QUANTISED:
        fields |= {"output": "uniform", "allocation": "uniform", "attention_unit": "none"}
    else:
        fields["attention_unit"] = form.removeprefix("per_layer-")
    stages: dict[str, Any] = {}
    if not form.startswith(DENSE):
        stages["pruning_stage"] = {"pruning_modifiers": {"StruPruneModifier": fields}}
    if form.removeprefix(DENSE) in QUANTISED:
        quantiser = {"ignore": ["lm_head"], **QUANTISED[form.removeprefix(DENSE)]}
        stages["quantisation_stage"] = {"quantisation_modifiers": {"QuantizationModifier": quantiser}}
    return yaml.safe_dump(stages, sort_keys=False)


def measure_form(folder: Path, form: str, args: argparse.Namespace) -> dict[str, Any]:
    """Let vLLM run a folder, and compare what it says with transformers."""
    load = [[10 + i, 20 + i, 30 + i] for i in range(args.requests)]
    ask = ask_process if args.engine == "process" else ask_server
    found = ask(folder, DTYPES.get(form.removeprefix(DENSE), "float32"), load, args)
    pairs = [compare(folder, prompt, *answer) for prompt, answer in zip(PROMPTS, found["answers"], strict=True)]
    same, worst = sum(same for same, _ in pairs), max(worst for _, worst in pairs)
    count = len(PROMPTS) * args.new_tokens
    told = {"same": same, "tokens": count, "worst": worst, "grouped": compare_grouped(folder)}
    return {**told, "rate": max(found["rates"]), "seconds_to_start": found["seconds_to_start"]}


def ask_server(folder: Path, dtype: str, load: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Return a server's answers, and its tokens a second in rounds of requests at the same time."""
    begin = time.monotonic()
    with serve(folder, dtype, args) as ask:
        seconds = time.monotonic() - begin
        answers = [ask(prompt, args.new_tokens) for prompt in PROMPTS]
        rates = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            with ThreadPoolExecutor(len(load)) as pool:
                made = sum(len(tokens) for tokens, _ in pool.map(partial(ask, new_tokens=args.new_tokens), load))
            rates.append(made / (time.perf_counter() - start))
    return {"answers": answers, "rates": rates, "seconds_to_start": seconds}


def ask_process(folder: Path, dtype: str, load: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Return what :mod:`eval.vllm_worker` says of a folder.

    :raises RuntimeError: vLLM could not run it
    """
    worker, log = start_worker(args.python)
    job = {
        "folder": str(folder.resolve()),
        "prompts": PROMPTS,
        "load": load,
        "new_tokens": args.new_tokens,
        "rounds": ROUNDS,
    }
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps({**job, "dtype": dtype, "trust": has_own_code(folder)}) + "\n")
    worker.stdin.flush()
    said = worker.stdout.readline()
    if not said:
        start_worker.cache_clear()
        log.seek(0)
        raise RuntimeError(f"vLLM's process died:\n{log.read()[-12000:]}")
    found = json.loads(said)
    if "failed" in found:
        raise RuntimeError(found["failed"])
    return found


@cache
def start_worker(python: Path) -> tuple[subprocess.Popen, Any]:
    """Start vLLM's process, which ends with this one, when its questions end; return its log, too."""
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115, it lasts as long as the process
    process = subprocess.Popen(
        [str(python), "-P", str(EVAL / "vllm_worker.py")],  # -P: the modules beside it are none of its own
        env=os.environ | SMALL,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    return process, log


@lru_cache(maxsize=1)
def load_peer(folder: Path) -> Any:
    """Return transformers' model of a folder."""
    if has_own_code(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", trust_remote_code=True).eval()
    return load_checkpoint(str(folder), "float32")[0]


def has_own_code(folder: Path) -> bool:
    """Return whether a folder's code must be trusted where our package is installed, too."""
    return (folder / "modeling_block_configs.py").is_file()


@torch.no_grad()
def compare(folder: Path, prompt: list[int], tokens: list[int], logprobs: list[float]) -> tuple[int, float]:
    """Compare a greedy answer with transformers.

    :return: how many of its tokens are the likeliest there, near ties among them, and how far log-probabilities are off at worst
    """
    logits = load_peer(folder)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1)
    chosen = expected[torch.arange(len(tokens)), torch.tensor(tokens)]
    off = (chosen - torch.tensor(logprobs, dtype=torch.float64)).abs().max()
    behind = expected.max(-1).values - chosen
    return int((behind <= TOLERANCE).sum()), max(off.item(), behind.max().item())


@torch.no_grad()
def compare_grouped(folder: Path) -> dict[str, float] | None:
    """Return, by dtype, how far log-probabilities by transformers' grouped kernels are from those of its loop over the experts, at
    worst; None where there are no experts."""
    if getattr(AutoConfig.from_pretrained(folder), "num_experts_per_tok", None) is None:
        return None
    found = {}
    for dtype in ("float32", "bfloat16"):
        said = []
        for kernels in ("eager", "grouped_mm"):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation=kernels).eval()
            said.append([torch.log_softmax(model(torch.tensor([prompt])).logits.double(), -1) for prompt in PROMPTS])
        found[dtype] = max((one - other).abs().max().item() for one, other in zip(*said, strict=True))
    return found


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table; speeds against the dense model of the same name."""
    dense = {row["model"]: row["rate"] for row in rows if row["form"] == "dense" and "rate" in row}
    cells = []
    for row in rows:
        if "failed" in row:
            cells.append([row["model"], row["form"], "failed", row["failed"], "", "", ""])
            continue
        ratio = f"{row['rate'] / dense[row['model']]:.2f} ×" if row["model"] in dense else ""
        told = [f"{row['same']} of {row['tokens']}", f"{row['worst']:.1e}" + " OTHER" * (not passes(row, rows))]
        grouped = ", ".join(f"{off:.1e} {dtype}" for dtype, off in (row["grouped"] or {}).items())
        cells.append([row["model"], row["form"], *told, f"{row['rate']:,.0f}", ratio, grouped])
    return format_table(
        ["model", "form", "tokens", "log-probabilities", "tokens/s", "of dense", "grouped kernels"], cells
    )


@contextmanager
def serve(folder: Path, dtype: str, args: argparse.Namespace) -> Iterator[Any]:
    """Run a server while the block lasts, and give a function that asks it for greedy tokens and their log-probabilities."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # what the program vllm runs; that program itself asks for the version of a package vllm, where vllm-cpu is none
    command = [str(args.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    command += ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", str(args.requests)]
    if has_own_code(folder):
        command.append("--trust-remote-code")
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | quiet | SMALL,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, args.patience, log)
            yield partial(ask_for_tokens, f"http://127.0.0.1:{port}/v1/completions", str(folder))
        except OSError as error:  # it died of a question
            log.seek(0)
            raise RuntimeError(f"the server gave no answer: {error}\n{log.read()[-12000:]}") from None
        finally:
            end_server(process)


def ask_for_tokens(url: str, model: str, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Return the greedy tokens after a prompt, and their log-probabilities, as OpenAI's protocol gives them."""
    body = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0}
    body |= {"logprobs": 1, "ignore_eos": True, "return_token_ids": True}
    choice = post(url, body)["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def end_server(process: subprocess.Popen) -> None:
    """End a server and the processes that it began."""
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
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
    raise RuntimeError(f"the server did not start:\n{log.read()[-12000:]}")


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the JSON answer to a JSON question."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


if __name__ == "__main__":
    raise SystemExit(main())
