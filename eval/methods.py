"""Compare the perplexity of pruning methods, and the share that they really remove.

    python -m eval.methods --model MODEL --data DATA \
        --sparsity 0.1,0.2,0.3,0.5 --output results/methods-opt-mini

DATA has books_calibration.jsonl and the texts to score. Finished rows are read back, not computed again; an output folder may
hold several sets of rows.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from eval.rows import Ledger, Row, add_workload_arguments, format_rows, read_workload, run_rows

# Every field that a row depends on, so that a row stays what its name says when a default changes.
_ADMM_STEPS: dict[str, Any] = {
    **{"alpha": 1.0, "beta": 1.0, "steps": 4, "inner_steps": 8, "learning_rate": 0.05, "attention_method": 2},
}
_SOFTMAX: dict[str, Any] = {
    **{"temperature": [0.5, 1.0, 2.0, 4.0, 8.0, 16.0], "max_sparsity": 0.95, "as_printed": False},
}
_METHODS: dict[str, dict[str, dict[str, Any]]] = {  # field -> name -> that method's own fields
    "importance": {
        "closed_form": {"method": "closed_form", "max_sparsity": 0.95, "as_printed": False, **_ADMM_STEPS},
    },
    "weight_update": {"admm": {"method": "admm", **_ADMM_STEPS}},
    "allocation": {
        "error_curve": {"rule": "error_curve", "samples": 16, "trial_samples": 4, "max_sparsity": 0.95},
        "softmax": {"rule": "softmax", **_SOFTMAX},
        "softmax_inverse": {"rule": "softmax_inverse", "rho": 1.0, "gamma": 0.9, **_SOFTMAX},
    },
    "sensitivity": {"fisher": {"method": "fisher", "samples": 16}},
}
_SPELLED: dict[str, Any] = {
    **{
        "attention_unit": "head",
        "prune_ffn": True,
        "experts": "channels",
        "sublayers": "none",
        "width_multiple": "auto",
        "output": "per_layer",
    },
    **{"importance": "obs", "weight_update": "least_squares", "reconstruct": "residual", "dampening_frac": 0.01},
    **{"allocation": "uniform", "sensitivity": "none", "rotate_values": False, "ffn_tuning": None, "effort": "default"},
}


def spell(**changes: Any) -> dict[str, Any]:
    """Return all fields of a row, those of its methods, too."""
    assert changes.keys() <= _SPELLED.keys()
    fields = _SPELLED | changes
    for name, methods in _METHODS.items():
        fields[name] = methods.get(fields[name], fields[name]) if isinstance(fields[name], str) else fields[name]
    return fields


DEFAULT = Row()  # whatever the modifier's defaults are
FASP = Row(peer="eval.peers.fasp:prune_fasp")
SLICEGPT = Row(peer="eval.peers.slicegpt:prune_slicegpt")
OSSCAR = Row(peer="eval.peers.osscar:prune_osscar")
FLAP = Row(peer="eval.peers.flap:prune_flap")
LLM_PRUNER = Row(peer="eval.peers.llm_pruner:prune_llm_pruner")

_OURS: dict[str, Row] = {
    "magnitude, head, deletion": Row(spell(importance="magnitude", weight_update="none")),
    "wanda, head, deletion": Row(spell(importance="wanda", weight_update="none")),
    "wanda, head, least squares": Row(spell(importance="wanda", reconstruct="local")),
    "obs, head, local": Row(spell(reconstruct="local")),
    "obs, head, residual": Row(spell()),
    "obs, vo, residual": Row(spell(attention_unit="value_channels")),
    "StruPrune, default": DEFAULT,
}
ALGORITHMS: dict[str, Row] = {  # the paper's own, by its names
    "Closed form (Algorithm 1)": Row(
        spell(weight_update="admm", importance="closed_form", allocation="global_threshold")
    ),
    "Asymptotics (Algorithm 2)": Row(spell(weight_update="admm", importance="wanda", allocation="softmax")),
    "Asymptotics (Algorithm 3)": Row(spell(weight_update="admm", importance="wanda", allocation="softmax_inverse")),
}
OTHERS: dict[str, Row] = {  # the paper's table of other structured methods
    name + suffix: Row(spell(importance=importance, reconstruct="local", weight_update=update))
    for name, importance in (("SNIP", "snip"), ("L0", "l0"), ("Magnitude", "magnitude"))
    for suffix, update in (("", "none"), (" (w/ correction)", "least_squares"))
}
PEERS: dict[str, Row] = {"sliceGPT": SLICEGPT, "FASP": FASP}  # the paper's
MORE_PEERS: dict[str, Row] = {"OSSCAR": OSSCAR, "FLAP": FLAP, "LLM-Pruner": LLM_PRUNER}

_METHOD_1 = {"method": "admm", **_ADMM_STEPS, "attention_method": 1}
_WANDA_FFN = {"importance": "wanda", "attention_unit": "none"}
_ADMM: dict[str, Row] = {
    "FFN, wanda, least squares": Row(spell(**_WANDA_FFN)),
    "FFN, wanda, ADMM": Row(spell(**_WANDA_FFN, weight_update="admm")),
    "FFN, obs, least squares": Row(spell(attention_unit="none")),
    "FFN, obs, ADMM": Row(spell(attention_unit="none", weight_update="admm")),
    "FFN and heads, wanda, least squares": Row(spell(importance="wanda")),
    "FFN and heads, wanda, ADMM method 2": Row(spell(importance="wanda", weight_update="admm")),
    "FFN and heads, wanda, ADMM method 1": Row(spell(importance="wanda", weight_update=_METHOD_1)),
    "FFN and heads, obs, least squares": Row(spell()),
    "FFN and heads, obs, ADMM method 2": Row(spell(weight_update="admm")),
    "FFN and heads, obs, ADMM method 1": Row(spell(weight_update=_METHOD_1)),
}
_PRINTED: dict[str, Row] = {  # as the paper prints its algorithms (R4, R6, R7)
    f"{name}, as printed": Row(
        {
            **row.fields,
            **{
                field: {**row.fields[field], "as_printed": True}
                for field in ("importance", "allocation")
                if "as_printed" in row.fields[field]
            },
        }
    )
    for name, row in ALGORITHMS.items()
}
_FIRST = (
    "Closed form (Algorithm 1), as printed"  # leaves the last layers one unit each, on which ADMM may find no solution
)
_PRINTED[f"{_FIRST}, least squares"] = Row({**_PRINTED[_FIRST].fields, "weight_update": "least_squares"})
RECOVERY_STEPS = 100


def _spell_lora(loss: dict[str, Any], learning_rate: float) -> dict[str, Any]:
    schedule = {"epochs": 4, "max_steps": RECOVERY_STEPS, "learning_rate": learning_rate}
    return {
        "adapters": {"rank": 8, "alpha": 16.0, "dropout": 0.0},
        "loss": loss,
        "schedule": schedule | {"decay": "cosine", "warmup_fraction": 0.1},
        "optimizer": {"weight_decay": 0.0, "max_grad_norm": 1.0},
        "holdout": {"fraction": 0.1},
        "batch_size": 8,
        "seed": 0,
    }


DISTILL = _spell_lora({"kl": {"weight": 1.0, "temperature": 1.0, "top_k": 64}}, 1e-3)
_RECOVERY: dict[str, Row] = {
    "obs, vo, residual": _OURS["obs, vo, residual"],
    f"obs, vo, residual, LoRA with KL, {RECOVERY_STEPS} steps": Row(spell(attention_unit="value_channels"), DISTILL),
    f"obs, vo, residual, LoRA with cross entropy, {RECOVERY_STEPS} steps": Row(
        spell(attention_unit="value_channels"), _spell_lora({"cross_entropy": 1.0}, 5e-4)
    ),
}
SETS: dict[str, dict[str, Row]] = {
    "ours": _OURS,
    "paper": {**PEERS, **OTHERS, **ALGORITHMS, "StruPrune, default": DEFAULT},
    "peers": {**PEERS, **MORE_PEERS, "StruPrune, default": DEFAULT},
    "admm": _ADMM,
    "printed": {**ALGORITHMS, **_PRINTED},
    "recovery": _RECOVERY,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    parser.add_argument("--sparsity", default="0.1,0.2,0.3,0.5")
    parser.add_argument(
        "--rows",
        choices=SETS,
        default="ours",
        help="ours: our ladder; paper: both of the paper's perplexity tables; peers; admm: against the least squares alone, "
        "and attention's two methods; printed: the paper's algorithms as printed and as corrected; recovery: LoRA",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for rows.json and methods-<rows>.md")
    args = parser.parse_args()
    logger.remove()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)

    work = read_workload(args)
    ledger = Ledger(args.output / "rows.json", work.describe())
    text = format_rows(run_rows(ledger, work, SETS[args.rows], map(float, args.sparsity.split(","))))
    name = Path(args.model).name
    (args.output / f"methods-{args.rows}.md").write_text(f"# {name}\n\n```\n{text}\n```\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
