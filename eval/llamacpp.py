"""Run pruned models in llama.cpp: tokens against transformers, its own quantiser, and tokens per second against dense.

    python -m eval.llamacpp --models MODEL,tiny-llama --output results/llamacpp --seconds 300

Models are pruned as in :mod:`eval.serve`, written as ``struprune convert --to gguf`` does (in float32, so that tokens can be
compared), and quantised by llama.cpp, whose blocks need widths that are multiples of 32. ``make llama-test`` installs llama.cpp and
runs this; finished rows are kept. *tokens* and *log-probabilities* compare with transformers in float32, for the same pruned model
before quantisation. llama.cpp rounds differently for dense models, too: a pruned file may differ by at most three times the
difference of the dense file of the same type.
"""

import argparse
import json
import math
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from eval.ledger import EVAL, PACKAGE, Ledger, Turn, digest_sources, digest_text, identify_model, read_names
from eval.serve import FACTOR, PROMPTS, TOLERANCE, compare, make_form
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.export.llama_cpp_gguf import FILE_NAME, check_gguf, write_gguf
from struprune_plugin.export.outputs import convert_folder
from struprune_plugin.reporting.tables import Table

TINY = "tiny-llama"
FORMS = ("dense", "none", "value_channels", "head")
TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K_M")
MULTIPLE = 32  # of channels, for blocks of quantised numbers
DENSE_OFF = 0.05  # of log-probabilities, of a dense file that is not quantised


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=TINY, help="LLaMA folders, separated by commas")
    parser.add_argument("--sparsity", default="0.3", help="sparsities, separated by commas")
    parser.add_argument("--types", default="F32,Q8_0,Q4_K_M", help="llama.cpp's, separated by commas")
    parser.add_argument("--python", type=Path, default=Path(".venv-llama/bin/python"))
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="tokens of the timed prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further row after so many")
    parser.add_argument("--output", type=Path, default=Path("results/llamacpp"))
    args = parser.parse_args()
    read_names(parser, "--types", args.types, TYPES)
    if not args.python.is_file():
        parser.error(f"--python: must have llama.cpp, got {args.python}. Run make llama-test, which installs it.")
    turn, rows = Turn(args.seconds), []
    ledger = Ledger(args.output / "rows.json")
    for model, form, sparsity, kind in list_rows(args):
        key, how = f"{Path(model).name} | {form} {sparsity} | {kind}", describe_row(model, form, sparsity, kind, args)
        if turn.takes(ledger.find(key, how)):
            rows.append(ledger.finish(key, how, lambda m=model, f=form, s=sparsity, k=kind: measure(m, f, s, k, args)))  # type: ignore[misc]
    table = format_rows(rows)
    print(f"{args.length} tokens of prompt, one thread, {json.dumps(read_versions(args.python))}", table, sep="\n")
    (args.output / "llamacpp.md").write_text(table + "\n", encoding="utf-8")
    turn.tell()
    return int(turn.left > 0 or not all(passes(row, rows) for row in rows))


def passes(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether a file is as near to transformers as the dense one of the same model and type, which must itself be near."""
    if row["form"] == "dense":
        return row["kind"] != "F32" or row["worst"] <= DENSE_OFF
    same = [other for other in rows if (other["model"], other["kind"]) == (row["model"], row["kind"])]
    dense = [other["worst"] for other in same if other["form"] == "dense"]
    return bool(dense) and row["worst"] <= max(TOLERANCE, FACTOR * dense[0])


def list_rows(args: argparse.Namespace) -> list[tuple[str, str, float, str]]:
    """Return model, form, sparsity and type of every row."""
    rows = []
    for model in args.models.split(","):
        for form in FORMS:
            for sparsity in [0.0] if form == "dense" else map(float, args.sparsity.split(",")):
                rows += [(model, form, sparsity, kind) for kind in args.types.split(",")]
    return rows


@cache
def read_versions(python: Path) -> dict[str, str]:
    """Return the version of what runs."""
    script = "import json; from importlib.metadata import distributions as d\n"
    script += "print(json.dumps({p.name: p.version for p in d() if p.name in ('xllamacpp', 'llama_cpp_python')}))"
    return json.loads(subprocess.check_output([python, "-c", script], text=True))


def describe_row(model: str, form: str, sparsity: float, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what a row depends on; of the package all, since it prunes and writes the file."""
    sources = (PACKAGE, EVAL / "llamacpp.py", EVAL / "llama_worker.py", EVAL / "serve.py")
    return {
        "model": model if model == TINY else identify_model(model),
        "row": [form, sparsity, kind, args.new_tokens, args.length, args.rounds, MULTIPLE],
        "sources": digest_text("".join(map(digest_sources, sources))),
        "versions": read_versions(args.python),
    }


def measure(model: str, form: str, sparsity: float, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one file in llama.cpp, and compare what it says with transformers."""
    folder = make_form(model, form, sparsity or 0.3, args.output / "forms", MULTIPLE)
    peer = load_checkpoint(str(folder), "float32")[0]
    file = make_file(folder, kind, args)
    job = {"prompts": PROMPTS, "new_tokens": args.new_tokens, "length": args.length, "rounds": args.rounds}
    found = ask_worker(args.python, {"file": str(file), **job})
    answers = list(zip(PROMPTS, found.pop("answers"), strict=True))
    count = sum(len(said["tokens"]) for _, said in answers)
    pairs = [compare(peer, prompt, said["tokens"], said["logprobs"]) for prompt, said in answers if said["tokens"]]
    same, worst = sum(same for same, _ in pairs), max((worst for _, worst in pairs), default=math.inf)
    told = {"model": Path(model).name, "form": form, "sparsity": sparsity, "kind": kind, "bytes": file.stat().st_size}
    return {**told, "same": same, "tokens": count, "worst": worst, **found}


def make_file(folder: Path, kind: str, args: argparse.Namespace) -> Path:
    """Return the GGUF file of a folder in a type of llama.cpp's, made where it is not there."""
    home = args.output / "files" / folder.name
    plain = home / FILE_NAME
    if not plain.exists():
        home.mkdir(parents=True, exist_ok=True)
        write_plain(folder, home)
    if kind == "F32":
        return plain
    file = home / f"{kind}.gguf"
    if not file.exists():
        partial = file.with_suffix(".partial")
        ask_worker(args.python, {"file": str(plain), "quantised": str(partial), "type": kind})
        partial.rename(file)
    return file


def write_plain(folder: Path, home: Path) -> None:
    """Convert a pruned folder; write a dense one, which nobody needs to convert, in the same way."""
    if (folder / "struprune.json").is_file():
        convert_folder(folder, "gguf", home)
        return
    model = load_checkpoint(str(folder), "float32")[0]
    check_gguf(model.config, folder / "tokenizer.json")
    write_gguf(model, model.config, folder, home / FILE_NAME)


def ask_worker(python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job where llama.cpp is.

    :raises RuntimeError: it failed; the end of what it said follows
    """
    command = [str(python), "-P", str(EVAL / "llama_worker.py")]  # -P: the modules beside it are none of its own
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"llama.cpp failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table; speeds against the dense model's file of the same type."""
    dense = {(row["model"], row["kind"]): row for row in rows if row["form"] == "dense"}
    cells = []
    for row in rows:
        base = dense.get((row["model"], row["kind"]), row)
        ratios = [f"{row[name]:,.0f} ({row[name] / base[name]:.2f} ×)" for name in ("prefill", "decode")]
        form = row["form"] + (f" {row['sparsity']:.0%}" if row["sparsity"] else "")
        off = f"{row['worst']:.1e}" + " OTHER" * (not passes(row, rows))
        size = f"{row['bytes'] / 1e6:,.1f} MB"
        cells.append([row["model"], form, row["kind"], size, f"{row['same']} of {row['tokens']}", off, *ratios])
    header = ["model", "form", "type", "file", "tokens", "log-probabilities", "prompt tok/s", "new tok/s"]
    return str(Table(header, cells))


if __name__ == "__main__":
    raise SystemExit(main())
