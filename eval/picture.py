"""The picture of sizes: quality against the share of the whole model that is gone, from the rows of ``eval.quality``.

    python -m eval.picture --rows results/quality/rows.json --only FASP,MoDeGPT,SliceGPT,StruPrune --file docs/sizes.svg

Nothing is computed: rows come as they are in the file, at every sparsity that is there, with a table of what is drawn below.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.ledger import read_names
from eval.methods import OURS
from eval.quality import plot_quality
from struprune_plugin.reporting.tables import Table


def read_rows(file: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a file of ``eval.quality`` that can be drawn, by ``<sparsity> | <method>``, and ``dense``.

    :raises SystemExit: no such file, no dense row, or rows of an older version, which do not tell the whole model's share
    """
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    rows = {key: row for key, row in found.items() if "refused" not in row}
    old = sorted(key for key, row in rows.items() if "removed_of_model" not in row)
    if "dense" not in rows or old:
        what = f"the older rows {', '.join(old)}" if old else "none"
        raise SystemExit(
            f"--rows: {file} must hold rows of eval.quality and the dense one, got {what}. Run eval.quality with --output."
        )
    return rows


def format_points(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what is drawn as a table, by method and rising size."""
    texts = list(rows["dense"]["perplexity"])
    ordered = sorted(rows.items(), key=lambda pair: (pair[0].split(" | ")[-1], pair[1]["removed_of_model"]))
    table = [
        [key.split(" | ")[-1], *(f"{row[share]:.1%}" for share in ("removed", "removed_of_model"))]
        + [f"{row['perplexity'][text]:.4g}" for text in texts]
        for key, row in ordered
    ]
    return str(Table(["method", "removed of the decoder's linears", "of the whole model", *texts], table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="rows.json of eval.quality")
    parser.add_argument("--only", help=f"methods to draw, comma-separated; all that are there, {OURS} among them")
    parser.add_argument("--title", help="of the picture; the model's name if left out")
    parser.add_argument("--file", type=Path, required=True, help="SVG or PNG file to write")
    args = parser.parse_args()
    rows = read_rows(args.rows)
    there = list(dict.fromkeys(key.split(" | ")[-1] for key in rows if key != "dense"))
    chosen = read_names(parser, "--only", args.only, there) if args.only else there
    kept = {key: rows[key] for name in chosen for key in rows if key.endswith(f" | {name}")}
    kept = {"dense": rows["dense"], **kept}
    args.file.parent.mkdir(parents=True, exist_ok=True)
    plot_quality(kept, args.title or str(rows["dense"]["how"]["model"][0]), args.file)
    print(format_points(kept))


if __name__ == "__main__":
    main()
