"""Make the field tables of docs/recipes.md, from the modifiers' fields and their docstrings, and docs/quality.svg.

    python -m eval.make_docs              # writes what stands between the markers of docs/recipes.md, and the plot
    python -m eval.make_docs --check      # says what that would change; status 1 where something
    python -m eval.make_docs --refusals   # prints the key of every refusal that docs/troubleshooting.md does not have

What a field is, its type, default and range come from the code. When to touch it, and what a named value means, is written here.
The plot's figures are those of the tables in docs/results.md.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from llmcompressor.modifiers import Modifier
from pydantic.fields import FieldInfo

from struprune_plugin import LoRARecoveryModifier, RecoveryModifier, SparsityAllocatorModifier, StruPruneModifier

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RECIPES, TROUBLES = DOCS / "recipes.md", DOCS / "troubleshooting.md"
RESULTS, PLOT = DOCS / "results.md", DOCS / "quality.svg"
BEGIN, END = "<!-- fields: begin (python -m eval.make_docs writes what follows) -->", "<!-- fields: end -->"
MODIFIERS: tuple[type[Modifier], ...] = (
    *(StruPruneModifier, SparsityAllocatorModifier, RecoveryModifier, LoRARecoveryModifier),
)

# Titles of the page and the fields under them; a field that is in none goes under "Other".
TOPICS: dict[str, tuple[str, ...]] = {
    "How much, and where": (
        "sparsity",
        "targets",
        "ignore",
        "attention_unit",
        "prune_ffn",
        "channel_multiple",
        "output",
    ),
    "Which units go": ("importance", "sensitivity", "rotate_values", "max_swaps"),
    "How much each layer loses": (
        "allocation",
        "allocation_samples",
        "trial_samples",
        "temperature",
        "search",
        "max_sparsity",
        "rho",
        "gamma",
        "as_printed",
    ),
    "What remains": ("restoration", "target", "damping", "tuning_epochs", "tuning_learning_rate"),
    "ADMM": ("alpha", "beta", "admm_steps", "admm_inner_steps", "admm_learning_rate", "attention_method"),
    "Memory and repetition": ("memory_budget", "measure_memory", "replay"),
    "What is trained": ("method", "memory", "losses", "hidden_distance"),
    "Adapters": (
        *("rank", "LoRARecoveryModifier.alpha", "LoRARecoveryModifier.targets", "dropout"),
        *("RecoveryModifier.alpha", "RecoveryModifier.targets"),
    ),
    "Text": ("data", "text_column", "seq_length", "tokens"),
    "Training": (
        "epochs",
        "max_steps",
        "learning_rate",
        "schedule",
        "warmup_fraction",
        "weight_decay",
        "batch_size",
        "gradient_checkpointing",
        "max_grad_norm",
        "seed",
        "micro_batch_size",
        "clipping",
        "holdout_fraction",
        "holdout_steps",
        "patience",
        "checkpoint_steps",
    ),
    "Precision and place": ("compute", "state_dtype", "state_folder", "RecoveryModifier.memory_budget"),
    "Distillation": ("distill", "distill_weight", "distill_temperature", "distill_top_k", "teacher"),
}

# When to touch a field; by "Modifier.field" where two modifiers mean different things by one name.
WHEN: dict[str, str] = {
    "sparsity": "always",
    "targets": "to prune some layers or one kind of module alone: `['re:.*layers\\.[0-7]\\..*fc2']`",
    "ignore": "to spare layers, the first and the last for instance",
    "attention_unit": "`head` where attention itself is to get faster, `none` where stock classes are to load the output",
    "prune_ffn": "`false` to prune attention alone",
    "channel_multiple": "64 or 128 for tensor cores and tensor parallelism; quantisers that follow need no word of yours",
    "output": "`uniform` where no code of ours may travel with the output, for instance to serve it",
    "importance": "to compare; `wanda` scores without eliminating, and so takes less time",
    "sensitivity": "`none` to save its seconds and its memory, or for the paper's variants",
    "rotate_values": "`false` where kept value channels must be the dense model's own",
    "trial_samples": "0 to save its time; more where calibration text is plentiful",
    "max_swaps": "0 to save its time",
    "allocation": "`uniform` where all layers must shrink alike; `softmax…` and `global_threshold` for the paper's variants",
    "allocation_samples": "raise it where the calibration data are plenty and varied",
    "temperature": "one number to skip the search",
    "search": "`full` where the seconds of one pruning run a temperature do not matter",
    "max_sparsity": "lower it where a layer loses nearly all of its units",
    "rho": "never: it cancels, and is here so that Algorithm 3 is complete",
    "gamma": "1 to leave depth out of Algorithm 3; lower to spare early layers more",
    "as_printed": "to see what the paper's formulas do as they are printed",
    "restoration": "`admm` for the paper's variants; `none` to see what deletion alone does",
    "target": "`local` to save the dense path, whose hidden states wait on the host",
    "damping": "a number, say 0.01, to save the search, or for equal terms with other methods",
    "tuning_epochs": "6 where two to three times the seconds do not matter",
    "tuning_learning_rate": "lower it where the held-out error in the manifest rises from epoch 0 on",
    "alpha": "to weigh ADMM's linear terms against its activation terms",
    "beta": "the same, from the other side",
    "admm_steps": "more where the objective in the manifest still falls at the last step",
    "admm_inner_steps": "the same, for attention",
    "admm_learning_rate": "lower it where attention's objective does not fall",
    "attention_method": "1 to compare with the paper's appendix",
    "memory_budget": "where the device must hold less than it has free",
    "measure_memory": "to know, on a CPU, what an accelerator would hold",
    "replay": "to get the same model again, bit by bit",
    "rank": "higher where training text is plenty",
    "SparsityAllocatorModifier.allocation": "as in a pruning stage; `uniform` needs no stage of its own",
    "LoRARecoveryModifier.alpha": "with the rank, where their ratio is to stay",
    "LoRARecoveryModifier.targets": "to train attention or the FFN alone",
    "RecoveryModifier.alpha": "with the rank, where their ratio is to stay",
    "RecoveryModifier.targets": "to train attention or the FFN alone",
    "RecoveryModifier.learning_rate": "lower where the loss jumps",
    "RecoveryModifier.seed": "to see how much of a difference is chance",
    "RecoveryModifier.memory_budget": "where the device must hold less than it has free",
    "method": "`lora` where training text is scarce, or the host's memory; `full` where text is plenty",
    "memory": "`model` where all of it fits the device: faster",
    "losses": "`cross_entropy` beside `kl` where the text is what the model will be used on; `hidden` where text is scarce",
    "hidden_distance": "to compare",
    "data": "always, but for a short repair: the calibration samples are few",
    "text_column": "where the text has another name",
    "seq_length": "as long as what the model will read",
    "tokens": "with `data`, to bound the time",
    "micro_batch_size": "lower where a micro-batch does not fit the device, higher where it idles",
    "clipping": "`global` for the ordinary loop's numbers; with `method: full` a step takes half as long again",
    "holdout_steps": "lower for a finer curve; each measurement is a pass over the held-out part",
    "patience": "to stop where text repeats itself and nothing more is learnt",
    "checkpoint_steps": "lower where steps are slow",
    "compute": "`bfloat16` for a float32 model on a processor or card that multiplies it faster",
    "state_dtype": "`bfloat16` where the host's memory is short",
    "state_folder": "where the host's memory does not hold the moments",
    "dropout": "above 0 where the held-out loss rises while the training loss falls",
    "epochs": "more where the held-out loss still falls at the last one",
    "max_steps": "to bound the time",
    "learning_rate": "twice as high with `distill: kl`, as the shipped recipe has it; lower where the loss jumps",
    "schedule": "seldom",
    "warmup_fraction": "seldom",
    "weight_decay": "seldom",
    "batch_size": "lower for more steps from few samples",
    "gradient_checkpointing": "where training does not fit the device",
    "max_grad_norm": "seldom",
    "seed": "to see how much of a difference is chance",
    "holdout_fraction": "0 to train on every sample, and to know less",
    "distill": "`kl` where the dense model fits the device by itself",
    "distill_weight": "below 1 where the text is what the model will be used on",
    "distill_temperature": "seldom",
    "distill_top_k": "higher where host memory is plenty",
    "teacher": "where the checkpoint that is pruned was pruned before: name the dense one",
}

# What the named values of a field mean; values that the code does not know are left out.
CHOICES: dict[str, dict[str, str]] = {
    "attention_unit": {
        "head": "whole heads; under grouped queries a key-value head with its query heads",
        "vo": "value channels, the same number from every value head; queries and keys stay",
        "none": "attention stays",
    },
    "importance": {
        "obs": "the exact rise of the re-solved least-squares error, units one by one",
        "wanda": "sum of mean absolute input times absolute weight (paper, Algorithms 2 and 3)",
        "wanda_l2": "norm of the input times norm of the column",
        "magnitude": "sum of the absolute weights of all rows and columns of the unit",
        "fluctuation": "FLAP's: the variance of the input over tokens, weighed by the squared norm of its column",
        "snip": "absolute sum of weight times gradient; needs the whole model's backward pass",
        "l0": "a learned hard-concrete gate a unit",
        "closed_form": "the paper's Lemma 1, after `admm_steps` steps",
    },
    "restoration": {
        "least_squares": "re-solve the consuming linear on the kept inputs",
        "admm": "Algorithm 4, producers too, closed by one least-squares solve",
        "none": "delete only",
    },
    "target": {
        "residual": "what the dense residual stream is after the module: repairs inherited error",
        "block": "the dense module's output",
        "local": "the module's own output on the pruned path's inputs",
    },
    "allocation": {
        "uniform": "every module the same sparsity",
        "error_curve": "the least sum of all modules' errors",
        "softmax": "Algorithm 2",
        "softmax_inverse": "Algorithm 3",
        "global_threshold": "Algorithm 1, with `importance: closed_form`",
        "block_influence": "ShortGPT's one minus the cosine of a layer's input and output, by the softmax rule",
    },
    "search": {"moments": "read off error curves", "full": "one whole pruning run a temperature"},
    "sensitivity": {"fisher": "weigh errors by the Fisher information of the module's output", "none": "all alike"},
    "output": {"per_layer": "every layer its own size", "uniform": "all layers the same size; stock classes load it"},
    "schedule": {"cosine": "half a cosine to zero", "linear": "straight to zero", "constant": "no fall"},
    "method": {
        "lora": "low-rank adapters, merged",
        "full": "all weights of the decoder layers and the norm after them",
        "norms_and_biases": "their vectors",
    },
    "memory": {"layer": "one decoder layer on the device", "model": "all of it, and the graphs of a forward pass"},
    "hidden_distance": {"cosine": "one minus the cosine", "fisher": "squares weighed by the Fisher information"},
    "clipping": {"layer": "each layer's gradient by its own norm", "global": "by the norm of all"},
    "compute": {"model": "the model's dtype; bfloat16 for float16", "float32": "as it says", "bfloat16": "as it says"},
    "distill": {"none": "cross entropy with the text", "kl": "the dense teacher's distribution"},
}
RANGES = {  # of fields that a validator checks, not the field itself
    "sparsity": "in [0, 1)",
    "damping": "at least 0, finite",
    "temperature": "above 0, finite",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--refusals", action="store_true", help="list the refusals without a line in the docs")
    args = parser.parse_args()
    if args.refusals:
        missing = find_missing_refusals()
        print("\n".join(f"{where}: {key}" for key, where in missing.items()) or "every refusal has its line")
        return int(bool(missing))
    stale = {file: text for file, text in make_files().items() if not file.is_file() or file.read_text("utf-8") != text}
    for file, text in stale.items():
        print(f"{file.relative_to(ROOT)} {'is stale: python -m eval.make_docs' if args.check else 'written'}")
        if not args.check:
            file.write_text(text, encoding="utf-8")
    return int(bool(stale) and args.check)


def make_files() -> dict[Path, str]:
    """Return what every file that is made from the code and the tables must hold."""
    return {
        RECIPES: replace_fields(RECIPES.read_text(encoding="utf-8")),
        PLOT: draw_bars(read_quality(RESULTS.read_text(encoding="utf-8"))),
    }


# -- fields ---------------------------------------------------------------------------------------------------------


def replace_fields(page: str) -> str:
    """Return a page with the field tables of today between its markers."""
    head, _, rest = page.partition(BEGIN)
    _, marker, tail = rest.partition(END)
    if not marker:
        raise ValueError(f"{RECIPES.name}: must hold the markers of the field tables, got none. Restore {BEGIN!r}.")
    return f"{head}{BEGIN}\n\n{make_fields()}\n{END}{tail}"


def make_fields() -> str:
    """Return the field tables of every modifier, as Markdown."""
    parts = []
    for modifier in MODIFIERS:
        fields = list_fields(modifier)
        parts.append(f"## {modifier.__name__}\n")
        shared = [name for name in fields if modifier is not StruPruneModifier and is_shared(modifier, name)]
        if shared:
            listed = ", ".join(f"`{name}`" for name in shared)
            parts.append(f"As in `{StruPruneModifier.__name__}`, with the same defaults: {listed}.\n")
            own = [name for name in fields if name not in shared]
            parts.append(f"Its own:\n\n{format_fields(modifier, own)}\n")
            continue
        for title, names in group_fields(modifier, fields):
            parts.append(f"### {title}\n\n{format_fields(modifier, names)}\n")
    return "\n".join(parts)


def list_fields(modifier: type[Modifier]) -> list[str]:
    """Return the recipe fields of a modifier, without the host's own."""
    return [name for name in modifier.model_fields if name not in Modifier.model_fields]


def is_shared(modifier: type[Modifier], name: str) -> bool:
    """Tell whether a field means what it means in StruPruneModifier."""
    ours, theirs = modifier.model_fields[name], StruPruneModifier.model_fields.get(name)
    if theirs is None or find_text(modifier, name) != find_text(StruPruneModifier, name):
        return False
    return (ours.annotation, read_default(ours)) == (theirs.annotation, read_default(theirs))


def group_fields(modifier: type[Modifier], names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Give (title, fields), in the order of the topics; what is in none comes last."""
    left = list(names)
    for title, wanted in TOPICS.items():
        here = [n for w in wanted for n in names if w in (n, f"{modifier.__name__}.{n}") and not is_masked(modifier, w)]
        if here:
            yield title, here
            left = [name for name in left if name not in here]
    if left:
        yield "Other", left


def is_masked(modifier: type[Modifier], wanted: str) -> bool:
    """Tell whether a bare name of a topic is one that this modifier has an entry of its own for."""
    return "." not in wanted and f"{modifier.__name__}.{wanted}" in WHEN


def format_fields(modifier: type[Modifier], names: Sequence[str]) -> str:
    """Return the table of some fields, and a list of the named values that have a meaning."""
    rows = ["| field | type | default | range | what | when to touch it |", "|---|---|---|---|---|---|"]
    values = []
    for name in names:
        field = modifier.model_fields[name]
        cells = (
            f"`{name}`",
            describe_type(field.annotation),
            format_default(read_default(field)),
            describe_range(name, field),
            find_text(modifier, name),
            find_advice(modifier, name),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        meanings = CHOICES.get(name, {})
        known = [f"    - `{value}`: {meanings[value]}" for value in list_choices(field.annotation) if value in meanings]
        if known:
            values += [f"- `{name}`", *known]
    return "\n".join(rows + (["", *values] if values else []))


def find_text(modifier: type[Modifier], name: str) -> str:
    """Return what the classes say of a field, the general ones first."""
    texts = [read_params(cls.__dict__.get("__doc__") or "").get(name) for cls in reversed(modifier.__mro__)]
    return "; ".join(to_markdown(text) for text in texts if text)


def read_params(docstring: str) -> dict[str, str]:
    """Return the ``:param name:`` texts of a docstring."""
    found = re.findall(r"^:param (\w+):(.*?)(?=^:|^\S|\n\n|\Z)", inspect.cleandoc(docstring), re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}


def to_markdown(text: str) -> str:
    """Turn a docstring's reST into Markdown, without what points into the code."""
    text = re.sub(r",? see :(?:func|mod):`[^`]*`", "", text)
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    text = re.sub(r"method\.md section (\d+)", r"[method.md](method.md) section \1", text)
    return re.sub(r"\b(R\d+)\b", r"[\1](paper.md#readings)", text)


def find_advice(modifier: type[Modifier], name: str) -> str:
    return WHEN.get(f"{modifier.__name__}.{name}") or WHEN.get(name, "")


def list_choices(annotation: Any) -> list[str]:
    """Return the strings that a field may be."""
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if isinstance(value, str)]
    return [value for part in get_args(annotation) for value in list_choices(part)]


def describe_type(annotation: Any) -> str:
    """Say in words what a field may be."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(part) for part in parts if part is not type(None))
    if origin is list:
        return f"list of {describe_type(parts[0])}s"
    if origin is dict:
        return f"{describe_type(parts[1])}s by name: {describe_type(parts[0])}"
    return {float: "number", int: "whole number", bool: "`true` or `false`", str: "text"}[annotation]


def read_default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def format_default(value: Any) -> str:
    if value is None:
        return "none"
    return "`" + yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip() + "`"


def describe_range(name: str, field: FieldInfo) -> str:
    """Say what numbers a field takes; empty where any goes."""
    if name in RANGES:
        return RANGES[name]
    low = high = rest = ""
    for bound in field.metadata:
        if isinstance(bound, annotated_types.Ge):
            low = f"[{bound.ge:g}"
        elif isinstance(bound, annotated_types.Gt):
            low = f"({bound.gt:g}"
        elif isinstance(bound, annotated_types.Lt):
            high = f"{bound.lt:g})"
        elif isinstance(bound, annotated_types.Le):
            high = f"{bound.le:g}]"
        elif isinstance(bound, annotated_types.MinLen):
            rest = f"at least {bound.min_length} entry"
    if low and high:
        return f"in {low}, {high}"
    if low:
        return ("at least " if low[0] == "[" else "above ") + low[1:]
    return rest


# -- plot -----------------------------------------------------------------------------------------------------------

_DENSE = 80.39  # opt-mini on WikiText-2, see docs/results.md
_SHOWN = {  # how a row of the tables begins -> its label; a later row of the same beginning takes the place of an earlier one
    "SliceGPT": "SliceGPT",
    "wanda, heads": "wanda, re-solved",
    "FASP": "FASP",
    "OSSCAR": "OSSCAR",
    "commit": "StruPrune, default",
}


def read_quality(page: str) -> dict[str, tuple[float, str]]:
    """Return label -> (perplexity of opt-mini at 30 % on WikiText-2, what the cell adds) from the tables of a page."""
    found = {}
    for line in page.partition("## Quality")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        label = next((label for start, label in _SHOWN.items() if cells[0].startswith(start)), "")
        match = re.match(r"([\d.]+) / [\d.]+(.*)", cells[1]) if label and len(cells) > 1 else None
        if match:
            found[label] = (float(match[1]), match[2].strip())
    return {label: found[label] for label in _SHOWN.values()}


def draw_bars(rows: dict[str, tuple[float, str]]) -> str:
    """Return an SVG of horizontal bars from zero, and a line at the dense model."""
    scale, left, pitch = 3.2, 150, 24  # pixels a point of perplexity; of the labels; of a row
    height, width = pitch * len(rows) + 26, 720
    dense = left + scale * _DENSE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, (label, (value, note)) in enumerate(rows.items()):
        top, color = pitch * index + 4, "#2b6cb0" if label.startswith("StruPrune") else "#a0aec0"
        said = f"{value:.2f} {note}".strip()
        lines += [
            f'<text x="{left - 8}" y="{top + 14}" text-anchor="end">{label}</text>',
            f'<rect x="{left}" y="{top}" width="{scale * value:.1f}" height="{pitch - 6}" fill="{color}"/>',
            f'<text x="{left + scale * value + 6:.1f}" y="{top + 14}">{said}</text>',
        ]
    lines += [
        f'<line x1="{dense:.1f}" y1="0" x2="{dense:.1f}" y2="{height - 20}" stroke="black" stroke-dasharray="3 3"/>',
        f'<text x="{dense:.1f}" y="{height - 6}" text-anchor="middle">dense {_DENSE}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


# -- refusals -------------------------------------------------------------------------------------------------------

# no reader meets these: Python's own protocols ask for them, or a ValueError tells on what they say
_PASSED_OVER = {"AttributeError", "KeyError", "AssertionError", "TypeError", "YAMLError"}

_TELLING = 25  # characters of a key that is not so general that it could stand for another


def list_refusals() -> dict[str, str]:
    """Return key phrase -> file of every message that the package raises with.

    A key is what comes before ``, got`` or the end of the first sentence, with ``…`` for what the code fills in.
    """
    found = {}
    for file in sorted((ROOT / "struprune_plugin").rglob("*.py")):
        if file.stem.startswith("modeling_"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func).split(".")[-1]
            if name.endswith("Error") and name not in _PASSED_OVER:  # most are raised at once, some a line later
                for template in read_templates(node.args[0]):
                    found[make_key(template)] = str(file.relative_to(ROOT))
    return {key: where for key, where in found.items() if key.strip("… ")}


def read_templates(node: ast.expr) -> list[str]:
    """Return the texts that an expression may give, with ``…`` for what only a run knows."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)]
    if isinstance(node, ast.IfExp):
        return read_templates(node.body) + read_templates(node.orelse)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in read_templates(node.left) for right in read_templates(node.right)]
    return ["…"]


def make_key(template: str) -> str:
    """Cut a message to what a reader recognises it by."""
    text = re.sub(r"…(?: ?…)*", "…", " ".join(template.split()))
    return re.split(r",? got:? |(?<=[\w…)])\. (?=[A-Z])", text)[0].strip(" .")


def find_missing_refusals() -> dict[str, str]:
    """Return key phrase -> file of the refusals that docs/troubleshooting.md does not name."""
    lines = read_lines()
    return {key: where for key, where in list_refusals().items() if not any(names(key, line) for line in lines)}


def find_stale_lines() -> list[str]:
    """Return the messages that docs/troubleshooting.md explains and no refusal gives."""
    keys = list_refusals()
    return [line for line in read_lines() if not any(names(key, line) for key in keys)]


def read_lines() -> list[str]:
    """Return the messages that the tables of docs/troubleshooting.md explain, warnings left out."""
    page = TROUBLES.read_text(encoding="utf-8").partition("## Warnings")[0]
    return re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)


def names(key: str, line: str) -> bool:
    """Tell whether a line is about a refusal: its key, or one with a word where the code fills something in."""
    if key == line:
        return True
    pattern = ".+".join(re.escape(part) for part in key.split("…"))
    return len(key) > _TELLING and re.fullmatch(pattern, line) is not None


if __name__ == "__main__":
    sys.exit(main())
