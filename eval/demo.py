"""Prune the embedded demo model, score the dense and the pruned model with lm-eval, and print one table.

python -m eval.demo --output out/demo
"""

import argparse
from functools import partial
from pathlib import Path

import torch

from eval.measure import measure_peak_bytes, time_turns
from struprune_plugin.cli import main as cli
from struprune_plugin.evaluation.scoring import check_tasks, load_checkpoint, measure_perplexity, run_tasks
from struprune_plugin.evaluation.text import DEMO_MODEL, DEMO_TEST, read_texts, tokenize_texts
from struprune_plugin.reporting.tables import Table
from struprune_plugin.storage.files import format_bytes, measure_weight_bytes

TASKS = ("struprune_demo_text", "struprune_demo_word_order")
NEW_TOKENS, TURNS = 16, 12  # of what is timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/demo"))
    parser.add_argument("--sparsity", default="0.2")
    args = parser.parse_args()

    argv = ["prune", str(DEMO_MODEL), "--sparsity", args.sparsity]
    status = cli.main([*argv, "--output", str(args.output), "--overwrite"])
    if status:
        return status
    folders = {"dense": DEMO_MODEL, "pruned": args.output}
    loaded = {name: load_checkpoint(str(folder)) for name, folder in folders.items()}
    texts = read_texts(DEMO_TEST)
    tokens = {name: tokenize_texts(tokenizer, texts, None, 256) for name, (_, tokenizer) in loaded.items()}
    batch = {name: tokens[name][: 8 * 256].view(8, 256).to(model.device) for name, (model, _) in loaded.items()}
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 1}
    forward = {name: partial(model, batch[name]) for name, (model, _) in loaded.items()}
    generate = {name: partial(model.generate, batch[name][:, :32], **options) for name, (model, _) in loaded.items()}
    with torch.no_grad():
        timed = [time_turns(runs, TURNS) for runs in (forward, generate)]
        # the fastest turns: others may share the machine
        prefill, decode = ({name: min(seconds) for name, seconds in turns.items()} for turns in timed)
        peak = {name: measure_peak_bytes(model, forward[name]) for name, (model, _) in loaded.items()}
    manager = check_tasks(TASKS, "eval/tasks", include_defaults=False)
    scores = {name: run_tasks(model, tok, TASKS, manager) for name, (model, tok) in loaded.items()}
    columns = {
        name: [
            f"{model.num_parameters():,}",
            format_bytes(measure_weight_bytes(folders[name])),
            f"{measure_perplexity(model, tokens[name], window=256):.2f}",
            f"{scores[name]['struprune_demo_text']['word_perplexity,none']:.1f}",
            f"{scores[name]['struprune_demo_word_order']['acc,none']:.1%}",
            f"{batch[name].numel() / prefill[name]:,.0f}",
            f"{8 * NEW_TOKENS / decode[name]:,.0f}",
            format_bytes(peak[name]),
        ]
        for name, (model, _) in loaded.items()
    }
    names = [
        "parameters",
        "weights on disk",
        "token perplexity (window 256)",
        "word perplexity (lm-eval)",
        "zero-shot accuracy, word order (lm-eval)",
        "tokens/s, prefill 8 × 256",
        "tokens/s, decode batch 8",
        "peak memory, prefill in float32",
    ]
    print("\n" + str(Table(["", "dense", "pruned"], [list(row) for row in zip(names, *columns.values(), strict=True)])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
