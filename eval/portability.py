"""Run tests as other machines would: other numbers of threads, kernels and instruction sets, other Pythons.

    python -m eval.portability                            # the tests marked `portability`, in minutes
    python -m eval.portability --all --only "2 threads"   # the whole suite under one setting
    python -m eval.portability --python .venv/bin/python .venv-3.13/bin/python

Prints one row per setting; the exit status is 1 if a test failed. A processor can be made to look older, not newer: the row of the
machine's own kernels names them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from struprune_plugin.reporting.tables import format_table

ROOT = Path(__file__).parents[1]
SETTINGS: dict[str, dict[str, str]] = {  # name -> environment
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "MKL AVX2": {"OMP_NUM_THREADS": "2", "MKL_CBWR": "AVX2"},
    "MKL COMPATIBLE": {"OMP_NUM_THREADS": "2", "MKL_CBWR": "COMPATIBLE"},
    "torch AVX2": {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2"},
    "torch default": {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"},
    "oneDNN AVX2": {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"},  # has no bfloat16 kernels
    "oneDNN SSE4.1": {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "oldest of all": {
        **{"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"},
        **{"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    },
}
TOUCHED = sorted({name for setting in SETTINGS.values() for name in setting})
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")
_DESCRIBE = "import platform, torch; print(platform.python_version(), torch.__version__, torch.backends.cpu.get_cpu_capability())"


def run_tests(python: str, setting: dict[str, str], options: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Run pytest under a setting; return how many tests passed, failed and were skipped, and the lines that name failures."""
    env = {name: value for name, value in os.environ.items() if name not in TOUCHED} | setting
    command = [python, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    counts = {word: int(number) for number, word in _COUNTS.findall(lines[-1] if lines else "")}
    if done.returncode and not counts.get("failed"):
        counts["error"] = max(counts.get("error", 0), 1)
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return counts, failures or (lines[-5:] + done.stderr.splitlines()[-5:] if counts.get("error") else [])


def describe_python(python: str) -> str:
    """Return the versions of an interpreter and its torch, and the instruction set that torch chose."""
    done = subprocess.run([python, "-c", _DESCRIBE], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run the whole suite, not only the marked tests")
    parser.add_argument("--only", action="append", choices=SETTINGS, help="run this setting only; may be repeated")
    parser.add_argument(
        "--python", nargs="+", default=[sys.executable], help="Python interpreters; the first runs all settings"
    )
    parser.add_argument("options", nargs="*", help="options of pytest, after --")
    args = parser.parse_args()
    options = [*([] if args.all else ["-m", "portability"]), *args.options]
    names = args.only or list(SETTINGS)
    rows, failed = [], 0
    for number, python in enumerate(args.python):
        version = describe_python(python)
        for name in names if number == 0 else names[:1]:
            start = time.monotonic()
            counts, failures = run_tests(python, SETTINGS[name], options)
            bad = counts.get("failed", 0) + counts.get("error", 0)
            failed += bad
            seconds = round(time.monotonic() - start)
            rows.append([version, name, counts.get("passed", 0), bad, counts.get("skipped", 0), seconds])
            print(f"{version}, {name}: {counts.get('passed', 0)} passed, {bad} failed in {seconds} s", flush=True)
            print("\n".join(failures), end="\n" if failures else "", flush=True)
    print(format_table(["Python, torch, kernels", "setting", "passed", "failed", "skipped", "seconds"], rows))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
