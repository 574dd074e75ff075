"""The rows that comparisons are made of: ours, the paper's methods, and peers."""

from typing import Any

from eval.rows import Row

_BASE: dict[str, Any] = {  # spelled, so that a row stays what its name says when a default changes
    **{"attention_unit": "head", "importance": "obs", "weight_update": "least_squares", "reconstruct": "residual"},
    **{"allocation": "uniform", "sensitivity": "none", "dampening_frac": 0.01, "rotate_values": False},
}
_ADMM: dict[str, Any] = {"method": "admm", "steps": 4, "inner_steps": 8, "learning_rate": 0.05, "attention_method": 2}
_METHOD_1 = {**_ADMM, "attention_method": 1}


def spell(**changes: Any) -> dict[str, Any]:
    """Return the fields of a row: those of the plainest one, and what is changed."""
    return {**_BASE, **changes}


DEFAULT = Row()  # whatever the modifier's defaults are
OURS = "StruPrune"
FASP = Row(peer="eval.peers.fasp:prune_fasp")
FASP_RECIPE: dict[str, Any] = {"importance": "wanda", "reconstruct": "local", "dampening_frac": 0.01}  # in our engine
FASP_RECIPE |= {"allocation": "uniform", "sensitivity": "none"}
SLICEGPT = Row(peer="eval.peers.slicegpt:prune_slicegpt")
PEERS: dict[str, Row] = {
    "FASP": FASP,
    "SliceGPT": SLICEGPT,
    "MoDeGPT": Row(peer="eval.peers.modegpt:prune_modegpt"),
    "MoDeGPT without Q and K": Row(peer="eval.peers.modegpt:prune_without_query_key"),
    "OSSCAR": Row(peer="eval.peers.osscar:prune_osscar"),
    "FLAP": Row(peer="eval.peers.flap:prune_flap"),
    "LLM-Pruner": Row(peer="eval.peers.llm_pruner:prune_llm_pruner"),
    "COMPACT": Row(peer="eval.peers.compact:prune_compact"),
}
PAPERS_PEERS: dict[str, Row] = {"sliceGPT": SLICEGPT, "FASP": FASP}
ALGORITHMS: dict[str, Row] = {  # the paper's own, by its names
    "Closed form (Algorithm 1)": Row(
        spell(
            weight_update=_ADMM, importance={**_ADMM, "method": "closed_form"}, allocation={"rule": "global_threshold"}
        )
    ),
    "Asymptotics (Algorithm 2)": Row(
        spell(weight_update=_ADMM, importance="wanda", allocation={"rule": "softmax"}, experts="channels")
    ),
    "Asymptotics (Algorithm 3)": Row(
        spell(weight_update=_ADMM, importance="wanda", allocation={"rule": "softmax_inverse"}, experts="channels")
    ),
}
OTHERS: dict[str, Row] = {  # the paper's table of other structured methods
    name + suffix: Row(spell(importance=importance, reconstruct="local", weight_update=update, experts="channels"))
    for name, importance in (("SNIP", "snip"), ("L0", "l0"), ("Magnitude", "magnitude"))
    for suffix, update in (("", "none"), (" (w/ correction)", "least_squares"))
}


def _print(row: Row) -> Row:
    """Return a row of the paper's as the paper prints its algorithm (R4, R6, R7)."""
    fields = dict(row.fields)
    for name in ("importance", "allocation"):
        if isinstance(fields[name], dict) and fields[name] != {"rule": "global_threshold"}:
            fields[name] = {**fields[name], "as_printed": True}
    return Row(fields)


_RECOVERY: dict[str, Any] = {"adapters": {"rank": 8, "alpha": 16.0}, "batch_size": 4, "holdout": {"fraction": 0.05}}
_RECOVERY |= {"schedule": {"epochs": 1, "learning_rate": 1e-3}}  # as recipes/struprune_lora.yaml
PARTS: dict[str, Row] = {  # the default without one of its parts
    "default": DEFAULT,
    "uniform allocation": Row({"allocation": "uniform"}),
    "no trials": Row({"allocation": {"rule": "error_curve", "trial_samples": 0}}),
    "no rotation": Row({"rotate_values": False}),
    "no sensitivity": Row({"sensitivity": "none"}),
    "heads for value channels": Row({"attention_unit": "head"}),
    "FFN alone": Row({"attention_unit": "none"}),
    "local targets": Row({"reconstruct": "local"}),
    "residual targets": Row({"reconstruct": "residual"}),
    "dampening 0.01": Row({"dampening_frac": 0.01}),
    "ADMM": Row({"weight_update": "admm"}),
}
_FFN = {"importance": "wanda", "attention_unit": "none"}
_ONLY = {"attention_unit": "none", "prune_ffn": False}
SETS: dict[str, dict[str, Row]] = {
    "peers": {**PEERS, "StruPrune after COMPACT's rows": Row(peer="eval.rows_first:prune_rows_first"), OURS: DEFAULT},
    "parts": PARTS,
    "efforts": {
        **{"FASP": FASP, "uniform allocation": Row({"allocation": "uniform"}), "effort: fast": Row({"effort": "fast"})},
        **{"effort: default": DEFAULT, "effort: best": Row({"effort": "best"}, text=4)},
    },
    "paper": {**PAPERS_PEERS, **OTHERS, **ALGORITHMS, OURS: DEFAULT},
    "printed": {**ALGORITHMS, **{f"{name} as printed": _print(row) for name, row in ALGORITHMS.items()}},
    "admm": {
        "FFN by wanda: least squares": Row(spell(**_FFN)),
        "FFN by wanda: ADMM": Row(spell(**_FFN, weight_update=_ADMM)),
        "FFN and heads by wanda: least squares": Row(spell(importance="wanda")),
        "FFN and heads by wanda: ADMM method 2": Row(spell(importance="wanda", weight_update=_ADMM)),
        "FFN and heads by wanda: ADMM method 1": Row(spell(importance="wanda", weight_update=_METHOD_1)),
        "FFN and heads by obs: least squares": Row(spell()),
        "FFN and heads by obs: ADMM method 2": Row(spell(weight_update=_ADMM)),
        "FFN and heads by obs: ADMM method 1": Row(spell(weight_update=_METHOD_1)),
    },
    "families": {  # what the default must be ahead of on every family of models
        **{"FASP's recipe": Row(FASP_RECIPE), "uniform allocation": PARTS["uniform allocation"], OURS: DEFAULT},
    },
    "recovery": {
        **{"FASP's recipe": Row(FASP_RECIPE), "FASP's recipe + LoRA": Row(FASP_RECIPE, _RECOVERY)},
        **{"default": DEFAULT, "default + LoRA": Row({}, _RECOVERY)},
    },
    "experts": {  # channels of the experts of a mixture, or whole experts, and nothing else
        "REAP": Row(peer="eval.peers.reap:prune_reap", of_experts=True),
        "channels": Row({**_ONLY, "experts": "channels"}, of_experts=True),
        "channels per layer": Row({**_ONLY, "experts": {"widths": "per_layer"}}, of_experts=True),
        "whole by REAP's score": Row({**_ONLY, "experts": "whole"}, of_experts=True),
    },
}
