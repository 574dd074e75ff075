"""Forward and generation speed of pruned models against the dense one, measured in one run.

python -m eval.speed --dense ../shared/testbed/opt-lab --pruned out/opt-lab-10 out/opt-lab-30 out/opt-lab-50
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial

import torch

from eval.measure import time_side_by_side
from struprune_plugin.evaluation import load_checkpoint
from struprune_plugin.report import format_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", required=True)
    parser.add_argument("--pruned", nargs="+", required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")

    models = {path: load_checkpoint(path)[0] for path in (args.dense, *args.pruned)}
    dense = models[args.dense]
    ids = torch.randint(4, dense.config.vocab_size, (args.batch, args.length)).to(dense.device)
    options = {
        "max_new_tokens": args.new_tokens,
        "min_new_tokens": args.new_tokens,
        "do_sample": False,
        "pad_token_id": 1,
    }
    with torch.no_grad():
        forward = time_side_by_side({path: partial(m, ids) for path, m in models.items()}, args.repeats)
        generate = time_side_by_side(
            {path: partial(m.generate, ids[:, :32], **options) for path, m in models.items()}, max(3, args.repeats // 3)
        )
    rows = [
        [
            path,
            f"{model.num_parameters() / dense.num_parameters():.3f}",
            f"{1000 * forward[path]:.1f}",
            f"{forward[args.dense] / forward[path]:.2f} ×",
            f"{1000 * generate[path] / args.new_tokens:.1f}",
            f"{generate[args.dense] / generate[path]:.2f} ×",
        ]
        for path, model in models.items()
    ]
    header = ["model", "parameters", "forward ms", "speed-up", "ms a new token", "speed-up"]
    print(f"batch {args.batch}, {args.length} tokens, {torch.get_num_threads()} threads, {dense.device}")
    print(format_table(header, rows))


if __name__ == "__main__":
    main()
