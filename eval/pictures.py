"""Draw the pictures of the documents by ``struprune report`` and ``struprune sweep`` of the embedded demo model.

    python -m eval.pictures

Writes docs/layers.svg and docs/sweep.svg.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from struprune_plugin.cli import main as cli
from struprune_plugin.evaluation.text import DEMO_MODEL

DOCS = Path(__file__).parents[1] / "docs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DOCS, help="folder for the pictures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out, sweep = f"{scratch}/out", f"{scratch}/sweep"
        page = [f"{scratch}/page.html", "--picture", f"{scratch}/layers.svg"]
        for words in (
            ["prune", str(DEMO_MODEL), "--recipe", "struprune_opt", "--sparsity", "0.3", "--output", out],
            ["report", out, "--no-samples", "--output", *page],
            ["sweep", str(DEMO_MODEL), "--sparsity", "0.1:0.5:0.1", "--methods", "default,uniform", "--output", sweep],
        ):
            if status := cli.main(words):
                return status
        args.output.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(f"{scratch}/layers.svg", args.output / "layers.svg")
        shutil.copyfile(f"{sweep}/perplexity.svg", args.output / "sweep.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
