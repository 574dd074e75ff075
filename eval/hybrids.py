"""Perplexity of hybrids with and without their recurrent heads and convolution channels, and bytes of state in the cache.

    python -m eval.hybrids --model MODEL --data DATA --calibration books_calibration.jsonl --max-tokens 24000 --output OUT

Rows: 30 % of the whole model, of FFNs and attention alone and with the mixers' units; and 25 and 50 % of these units alone, by
magnitude, as the default ranks them without a repair, and repaired. Finished rows are read back, not computed again.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.ledger import Ledger
from eval.rows import ITEMS, Row, Workload, make_parser, parse_quietly, read_workload, run_row, score_all, score_dense
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.model.groups import list_groups
from struprune_plugin.model.layers import count_parameters, count_prunable_parameters
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.tiny import draw_tokens
from struprune_plugin.model.unit_kind import list_kinds
from struprune_plugin.reporting.tables import Table

WHOLE, PARTS = 0.3, (0.25, 0.5)
_PLAIN: dict[str, Any] = {"allocation": "uniform", "sensitivity": "none"}
_DELETED = {"weight_update": "none"}
_WAYS = {"magnitude": {"importance": "magnitude", **_DELETED}, "not repaired": _DELETED, "repaired": {}}


@torch.no_grad()
def count_state(model: PreTrainedModel) -> int:
    """Return the bytes of recurrent and convolutional state that a sequence has in the cache."""
    cache = model(input_ids=draw_tokens(model.config, 1, 8).to(model.device), use_cache=True).past_key_values
    states = [vars(layer) for layer in getattr(cache, "layers", [])]
    held = [value for each in states for name, value in each.items() if name.endswith("_states")]
    parts = [part for one in held for part in (one.values() if isinstance(one, dict) else [one])]
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def list_rows(model: str) -> dict[str, tuple[Row, float]]:
    """Return the rows for a model, each with its sparsity."""
    loaded, _ = load_checkpoint(model)
    units = find_structure(loaded).list_units()
    mixers = dict.fromkeys(unit.kind for unit in units if unit.by_name)
    others = dict.fromkeys(unit.kind for unit in units if not unit.by_name)
    if not mixers:
        raise SystemExit(f"--model: must have recurrent heads or convolution channels, got {model}.")
    total, held = count_parameters(loaded), count_prunable_parameters(loaded, named=[*mixers])
    groups = list_groups(loaded, [kind for kind in list_kinds() if kind.kind in mixers])
    share = sum(group.num_units * group.unit_cost for group in groups) / held
    label, without = " and ".join(mixers), WHOLE * total / count_prunable_parameters(loaded)
    rows = {
        f"{WHOLE:.0%}, without {label}": (Row({"units": [*others]}), without),
        f"{WHOLE:.0%}, with {label}": (Row({"units": [*others, *mixers]}), WHOLE * total / held),
    }
    for part in PARTS:
        for name, fields in _WAYS.items():
            rows[f"{part:.0%} of {label}, {name}"] = Row({"units": [*mixers], **_PLAIN, **fields}), part * share
    return rows


def _score(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, work: Workload) -> dict[str, Any]:
    return {**score_all(model, tokenizer, work), "state": count_state(model)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="rows whose names hold this text")
    args = parse_quietly(parser)
    work = read_workload(args)
    work = replace(work, texts={name: source for name, source in work.texts.items() if source != ITEMS})
    ledger = Ledger(args.output / "rows.json")
    done = {"dense": ledger.finish("dense", work.identify_row(), lambda: score_dense(work, _score))}
    for name, (row, sparsity) in list_rows(work.model).items():
        if args.only in name:
            how = work.identify_row(row, sparsity)
            done[name] = ledger.finish(name, how, lambda r=row, s=sparsity: run_row(r, s, work, _score))  # type: ignore[misc]
    lines = []
    for name, scored in done.items():
        cells = [f"{value:.1f}" for value in scored["perplexity"].values()]
        lines.append(
            [name, *cells, f"{scored['removed_of_model']:.1%}", f"{scored['state']:,}", f"{scored['seconds']:.0f}"]
        )
    print(Table([Path(work.model).name, *work.texts, "of the model", "bytes of state", "seconds"], lines))


if __name__ == "__main__":
    main()
