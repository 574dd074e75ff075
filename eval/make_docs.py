"""Generator of the field tables in docs/recipes.md, from the modifiers' fields and their docstrings, and of docs/quality.svg.

    python -m eval.make_docs              # writes the text between the markers of docs/recipes.md, and the plot
    python -m eval.make_docs --check      # writes nothing; exit status 1 if a file is stale

A field's meaning, type, default and range come from the code. When to change it, and the meaning of named values, are in this file.
The plot's figures are those of the tables in docs/results.md.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from llmcompressor.modifiers import Modifier
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from struprune_plugin import LoRARecoveryModifier, RecoveryModifier, SparsityAllocatorModifier, StruPruneModifier
from struprune_plugin.allocation.rules import RULES, AllocationRule
from struprune_plugin.pruning.importance import IMPORTANCES, Importance
from struprune_plugin.pruning.weight_update import WEIGHT_UPDATES, WeightUpdate
from struprune_plugin.storage.registry import Registry

REGISTRIES: dict[Any, Registry[Any]] = {Importance: IMPORTANCES, WeightUpdate: WEIGHT_UPDATES, AllocationRule: RULES}
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RECIPES = DOCS / "recipes.md"
RESULTS, PLOT = DOCS / "results.md", DOCS / "quality.svg"
BEGIN, END = "<!-- fields: begin (python -m eval.make_docs writes what follows) -->", "<!-- fields: end -->"
MODIFIERS: tuple[type[Modifier], ...] = (
    *(StruPruneModifier, SparsityAllocatorModifier, RecoveryModifier, LoRARecoveryModifier),
)

_STEPS = ("alpha", "beta", "steps", "inner_steps", "learning_rate", "attention_method")  # of ADMM

# Titles of the page and the fields under them; a field that is in none goes under "Other".
TOPICS: dict[str, tuple[str, ...]] = {
    "How much, and where": (
        *(
            "sparsity",
            *("budget", "budget.parameters", "budget.bytes", "budget.cache", "budget.speedup"),
            *("budget.phase", "budget.batch", "budget.length", "budget.engine"),
            "targets",
            "ignore",
            "attention_unit",
            "prune_ffn",
            "experts",
            "experts.units",
            "experts.criterion",
            "sublayers",
            "experts.widths",
            "experts.calibrate_all_experts",
            "width_multiple",
            "output",
        ),
    ),
    "Which units go": (
        *("importance", "importance.max_sparsity", "importance.as_printed"),
        *(f"importance.{name}" for name in _STEPS),
        *("sensitivity", "sensitivity.samples", "rotate_values", "effort"),
    ),
    "How much each layer loses": (
        *("allocation", "allocation.samples", "allocation.trial_samples", "allocation.max_sparsity"),
        *("allocation.temperature", "allocation.as_printed", "allocation.rho", "allocation.gamma"),
        *("allocation.threshold", "allocation.spread"),
    ),
    "What remains": (
        *("weight_update", *(f"weight_update.{name}" for name in _STEPS), "reconstruct", "dampening_frac"),
        *("ffn_tuning", "ffn_tuning.epochs", "ffn_tuning.learning_rate"),
    ),
    "Memory and repetition": ("memory_budget", "replay"),
    "What is trained": (
        "weights",
        *("adapters", "adapters.rank", "adapters.alpha", "adapters.targets", "adapters.dropout"),
    ),
    "Towards what": (
        *("loss", "loss.cross_entropy", "loss.kl", "loss.kl.weight", "loss.kl.temperature", "loss.kl.top_k"),
        *("loss.hidden", "loss.teacher"),
    ),
    "Text": (
        *("data", "data.files", "data.column", "data.window", "data.tokens"),
        *("holdout", "holdout.fraction", "holdout.steps", "holdout.patience"),
    ),
    "Steps": (
        *("schedule", "schedule.epochs", "schedule.max_steps", "schedule.learning_rate", "schedule.decay"),
        *("schedule.warmup_fraction", "batch_size", "micro_batch_size", "checkpoint_steps", "seed"),
        *("optimizer", "optimizer.weight_decay", "optimizer.max_grad_norm", "optimizer.clipping"),
        *("optimizer.state_dtype", "optimizer.state_folder"),
    ),
    "Precision and place": ("compute", "memory", "RecoveryModifier.memory_budget"),
}

# When to touch a field; by "Modifier.field" where two modifiers mean different things by one name.
WHEN: dict[str, str] = {
    "sparsity": "always, unless a budget sets the size",
    "budget": "to limit bytes, cache or time in place of parameters",
    "budget.parameters": "beside other limits; alone, use `sparsity`",
    "budget.bytes": "if the model must fit a disk, a download or a memory",
    "budget.cache": "for long contexts or many concurrent users; `attention_unit: head` saves keys too",
    "budget.speedup": "if latency counts",
    "budget.phase": "`prompt` for long prompts and short answers",
    "budget.batch": "the batch size of serving",
    "budget.length": "the typical length in serving",
    "budget.engine": "a file of `struprune costs` if another machine or engine serves",
    "targets": "to prune some layers or one kind of module: `['re:.*layers\\.[0-7]\\..*fc2']`",
    "ignore": "to spare layers, for instance the first and the last",
    "attention_unit": "`head` for faster attention; `none` if stock classes must load the output",
    "prune_ffn": "`false` to prune attention only",
    "experts": "`none` to leave experts as they are",
    "experts.units": "`whole` for fewer experts of full width; `both` to let the budget decide",
    "experts.criterion": "`reap` to drop the experts that llm-compressor's REAPPruningModifier drops",
    "sublayers": "`both` for deep models, or if latency counts",
    "experts.widths": "`per_layer` if only transformers, with our file, runs the output",
    "experts.calibrate_all_experts": "if the manifest says `scale` for many experts: little text, or a router that skips some",
    "width_multiple": "1 if every channel must count; more for tensor parallelism; later quantisers are handled automatically",
    "output": "`uniform` if stock classes must load the output, for instance to serve it",
    "importance": "to compare methods; `wanda` is faster, because it does not eliminate",
    "importance.max_sparsity": "together with that of the allocation",
    "importance.as_printed": "to see the effect of the paper's formula as printed",
    "sensitivity": "`none` to save its time and memory, or for the paper's variants",
    "sensitivity.samples": "higher with plenty of varied calibration text",
    "effort": "first: no other field needs to be known",
    "rotate_values": "`false` to keep the dense model's own value channels",
    "allocation": "`uniform` if all layers must shrink alike; `softmax…` and `global_threshold` for the paper's variants",
    "allocation.samples": "higher with plenty of varied calibration text",
    "allocation.trial_samples": "0 to save its time; higher with plenty of calibration text",
    "allocation.temperature": "one number to skip the search",
    "allocation.max_sparsity": "lower if a layer loses nearly all its units",
    "allocation.rho": "never: it cancels, and exists so that Algorithm 3 is complete",
    "allocation.gamma": "1 to ignore depth in Algorithm 3; lower to spare early layers more",
    "allocation.as_printed": "to see the effect of the paper's formulas as printed",
    "allocation.threshold": "to compare",
    "allocation.spread": "higher to let layers differ more",
    "weight_update": "`admm` for the paper's variants; `none` to see the effect of deletion alone",
    "alpha": "to weigh ADMM's linear terms against its activation terms",
    "beta": "the same, from the other side",
    "steps": "higher if the objective in the manifest still falls at the last step",
    "inner_steps": "the same, for attention",
    "importance.learning_rate": "lower if attention's objective does not fall",
    "weight_update.learning_rate": "lower if attention's objective does not fall",
    "attention_method": "1 to compare with the paper's appendix",
    "reconstruct": "`local` to save the dense path, whose hidden states wait on the host",
    "dampening_frac": "a number, for instance 0.01, to save the search or to compare methods on equal terms",
    "ffn_tuning": "`{epochs: 6}` for better quality at two to five times the time",
    "ffn_tuning.epochs": "6 for better quality at two to five times the time",
    "ffn_tuning.learning_rate": "lower if the held-out error in the manifest rises from epoch 0 on",
    "memory_budget": "if the device must hold less than its free memory",
    "replay": "to reproduce a model bit by bit",
    "SparsityAllocatorModifier.allocation": "as in a pruning stage; `uniform` needs no allocator stage",
    "weights": "`norms_and_biases` to change as little as possible",
    "adapters": "if training text or host memory is scarce",
    "adapters.rank": "higher with plenty of training text",
    "adapters.alpha": "with the rank, to keep their ratio",
    "adapters.targets": "to train only attention or only FFNs",
    "adapters.dropout": "above 0 if the held-out loss rises while the training loss falls",
    "loss": "always: it sets the goal of the training",
    "loss.cross_entropy": "beside `kl` if the text resembles the model's use",
    "loss.kl": "if the dense model is available",
    "loss.kl.weight": "beside another loss",
    "loss.kl.temperature": "seldom",
    "loss.kl.top_k": "higher with plenty of disk space",
    "loss.hidden": "if text is scarce",
    "loss.teacher": "if the pruned checkpoint had been pruned before: name the dense model",
    "data": "always, except for a short repair: the calibration samples are few",
    "data.files": "always",
    "data.column": "if the field has another name",
    "data.window": "the typical length in use",
    "data.tokens": "to limit the time",
    "holdout": "`null` to train on every sample, without a measure of overfitting",
    "holdout.fraction": "lower if text is scarce",
    "holdout.steps": "lower for a finer curve; each measurement is a pass over the held-out part",
    "holdout.patience": "to stop when the held-out loss no longer falls",
    "schedule": "always",
    "schedule.epochs": "higher if the held-out loss still falls at the end",
    "schedule.max_steps": "to limit the time",
    "schedule.learning_rate": "lower if the loss jumps; adapters bear twice as much with `loss: {kl: 1.0}`",
    "schedule.decay": "seldom",
    "schedule.warmup_fraction": "seldom",
    "batch_size": "lower for more steps from few samples",
    "micro_batch_size": "lower if a micro-batch does not fit the device, higher if the device idles",
    "checkpoint_steps": "lower if steps are slow",
    "seed": "to see how much of a difference is chance",
    "optimizer": "seldom",
    "optimizer.weight_decay": "seldom",
    "optimizer.max_grad_norm": "seldom",
    "optimizer.clipping": "`global` to reproduce the ordinary loop, if the host holds all gradients",
    "optimizer.state_dtype": "`bfloat16` if host memory is short",
    "optimizer.state_folder": "if the host's memory does not hold the moments",
    "compute": "`bfloat16` for a float32 model on hardware that multiplies it faster",
    "memory": "`model` if the whole model fits the device",
    "RecoveryModifier.memory_budget": "if the device must hold less than its free memory",
}

# What the named values of a field mean; values that the code does not know are left out.
CHOICES: dict[str, dict[str, str]] = {
    "attention_unit": {
        "head": "whole heads; under grouped queries, a key-value head with its query heads",
        "value_channels": "value channels, the same number per value head; queries and keys stay",
        "none": "attention stays whole",
    },
    "reconstruct": {
        "half_residual": "halfway from `local` to `residual`: repairs half of the inherited errors",
        "residual": "the dense residual stream after the module minus the pruned one before it: repairs inherited errors",
        "block": "the dense module's output",
        "local": "the module's own output on the pruned inputs",
    },
    "output": {
        "per_layer": "each layer has its own size",
        "uniform": "all layers have the same size; stock classes load it",
    },
    "weights": {
        "all": "all weights of the decoder layers and the final norm",
        "norms_and_biases": "their vectors only",
    },
    "schedule.decay": {"cosine": "half a cosine to zero", "linear": "straight to zero", "constant": "no fall"},
    "memory": {"layer": "one decoder layer on the device", "model": "the whole model"},
    "optimizer.clipping": {"layer": "each layer's gradient by its own norm", "global": "by the norm of all"},
    "compute": {"model": "the model's dtype; bfloat16 for float16", "float32": "as it says", "bfloat16": "as it says"},
}
RANGES = {  # of fields that a validator checks, not the field itself
    "sparsity": "in [0, 1)",
    "dampening_frac": "at least 0, finite",
    "allocation.temperature": "above 0, finite",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file is stale")
    args = parser.parse_args()
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
        PLOT: draw_peers(*read_peers(RESULTS.read_text(encoding="utf-8"))),
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
        if modifier is LoRARecoveryModifier:
            parts.append(describe_short_form(modifier, RecoveryModifier))
            continue
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


def describe_short_form(modifier: type[Modifier], long_form: type[Modifier]) -> str:
    """Return what a short form has for defaults, where they differ from those of the long form."""
    hosts = set(Modifier.model_fields)
    ours, theirs = (kind().model_dump(exclude=hosts, exclude_none=True) for kind in (modifier, long_form))
    told = [f"`{name}: {show_value(value)}`" for name, value in keep_differences(ours, theirs).items()]
    return f"`{long_form.__name__}` with other defaults: {', '.join(told)}.\n"


def keep_differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a nested mapping that another one does not have, or has otherwise."""
    found = {}
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        mine, other = ours.get(name), theirs.get(name)
        if mine != other:
            nested = isinstance(mine, dict) and isinstance(other, dict)
            found[name] = keep_differences(mine, other) if nested else mine  # type: ignore[arg-type]
    return found


def list_fields(kind: type[BaseModel], before: str = "") -> list[str]:
    """Return the recipe fields of a modifier, without the host's own; those of nested fields as ``field.inner``."""
    names = []
    for name, field in kind.model_fields.items():
        if name not in Modifier.model_fields or before:
            nested = find_nested(field.annotation)
            names.append(f"{before}{name}")
            for kind_of_field in list_methods(nested) if nested in REGISTRIES else [nested] if nested else []:
                inner = list_fields(kind_of_field, f"{before}{name}.")
                names += [n for n in inner if n not in names and n.rpartition(".")[2] not in ("method", "rule")]
    return names


def list_methods(base: Any) -> list[type[BaseModel]]:
    """Return the classes of all methods of a kind."""
    return [REGISTRIES[base][name] for name in REGISTRIES[base]]


def find_methods(modifier: type[BaseModel], path: str) -> list[str]:
    """Return the names of the methods that have a field of a field; none where it is not a method's."""
    name, _, inner = path.partition(".")
    base = find_nested(modifier.model_fields[name].annotation)
    if not inner or base not in REGISTRIES:
        return []
    return [method for method in REGISTRIES[base] if inner in REGISTRIES[base][method].model_fields]


def find_nested(annotation: Any) -> type[BaseModel] | None:
    """Return the class of a nested field; None where it has none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(find_nested, get_args(annotation))), None)


def find_field(kind: type[BaseModel], path: str) -> tuple[type[BaseModel], str, FieldInfo]:
    """Return the class that owns a field, the field's name there, and the field."""
    name, _, rest = path.partition(".")
    field = kind.model_fields[name]
    nested = find_nested(field.annotation)
    if rest and nested in REGISTRIES:
        nested = next(method for method in list_methods(nested) if rest in method.model_fields)
    return find_field(nested, rest) if rest and nested else (kind, name, field)


def is_shared(modifier: type[Modifier], name: str) -> bool:
    """Return whether a field means what it means in StruPruneModifier."""
    if name not in list_fields(StruPruneModifier):
        return False
    ours, theirs = (find_field(kind, name)[2] for kind in (modifier, StruPruneModifier))
    if find_text(modifier, name) != find_text(StruPruneModifier, name):
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
    """Return whether a bare name of a topic is one that this modifier has an entry of its own for."""
    return f"{modifier.__name__}.{wanted}" in WHEN


def format_fields(modifier: type[Modifier], names: Sequence[str]) -> str:
    """Return the table of some fields, and a list of the named values that have a meaning."""
    rows = ["| field | type | default | range | meaning | when to change it |", "|---|---|---|---|---|---|"]
    values = []
    for name in names:
        field = find_field(modifier, name)[2]
        cells = (
            f"`{name}`",
            describe_type(field.annotation),
            format_default(read_default(field)),
            describe_range(name, field),
            find_text(modifier, name),
            find_advice(modifier, name),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        meanings, nested = CHOICES.get(name, {}), find_nested(field.annotation)
        if nested in REGISTRIES:
            values += [f"- `{name}`", *(f"    - `{n}`: {summarise(REGISTRIES[nested][n])}" for n in REGISTRIES[nested])]
        known = [f"    - `{value}`: {meanings[value]}" for value in list_choices(field.annotation) if value in meanings]
        if known:
            values += [f"- `{name}`", *known]
    return "\n".join(rows + (["", *values] if values else []))


def find_text(modifier: type[Modifier], name: str) -> str:
    """Return what the classes say of a field, the general ones first."""
    owner, leaf, _ = find_field(modifier, name)
    texts = [read_params(cls.__dict__.get("__doc__") or "").get(leaf) for cls in reversed(owner.__mro__)]
    methods = find_methods(modifier, name)
    of = f" (with {', '.join(f'`{method}`' for method in methods)})" if methods else ""
    return "; ".join(to_markdown(text) for text in texts if text) + of


def summarise(kind: type[BaseModel]) -> str:
    """Return what a method is, from its docstring."""
    first = " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())
    told = re.split(r"(?<=[a-z)`])\. (?=[A-Z])", to_markdown(first))[0].rstrip(".")
    return told[0].lower() + told[1:] if told[1:2].islower() else told


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
    return WHEN.get(f"{modifier.__name__}.{name}") or WHEN.get(name) or WHEN.get(name.rpartition(".")[2], "")


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
    if origin is list and find_nested(annotation):
        return "fields below, or a list of such mappings"
    if origin is list:
        return f"list of {describe_type(parts[0])}s"
    if origin is dict:
        return f"{describe_type(parts[1])}s by name: {describe_type(parts[0])}"
    if (nested := find_nested(annotation)) in REGISTRIES:
        return ", ".join(f"`{name}`" for name in REGISTRIES[nested])
    if nested:
        return "fields below"
    return {float: "number", int: "whole number", bool: "`true` or `false`", str: "text"}[annotation]


def read_default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def format_default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        key = next((key for key in ("method", "rule") if key in type(value).model_fields), "")
        value = getattr(value, key) if key else value.model_dump(exclude_defaults=True)
    return "" if value == {} else f"`{show_value(value)}`"


def show_value(value: Any) -> str:
    """Return a value as a recipe would have it, on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


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

_SECTION, _SIZES = (
    "A real model",
    ("20 %", "30 %", "50 %"),
)  # of docs/results.md: the table that is drawn has these columns
_DEFAULT = "default"  # the label of our own row


def read_peers(page: str) -> tuple[float, dict[str, list[tuple[float, float]]]]:
    """Return the dense perplexity and, by method, (percent removed, perplexity on WikiText-2), from the tables of a page.

    The table is the last of its section whose header has all the sizes; a cell reads ``WikiText-2 / books (removed)``.
    """
    section = page.partition(f"\n## {_SECTION}\n")[2].partition("\n## ")[0]
    dense, columns = 0.0, dict[int, float]()
    rows: dict[str, list[tuple[float, float]]] = {}
    for line in section.splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if cells[0] == "dense" and (match := re.match(r"[\d.]+", cells[1])):
            dense = dense or float(match[0])
            continue
        if set(_SIZES) <= set(cells):
            columns, rows = {cells.index(size): float(size.rstrip(" %")) for size in _SIZES}, {}
        elif not line.startswith("|"):
            columns = {}
        for column, size in columns.items():
            if match := re.match(r"([\d.]+) / [\d.]+(?: \(([\d.]+) %\))?$", cells[column]):
                rows.setdefault(cells[0], []).append((float(match[2] or size), float(match[1])))
    return dense, rows


def draw_peers(dense: float, rows: dict[str, list[tuple[float, float]]]) -> str:
    """Return an SVG of perplexity, on a logarithmic scale, against the share that was removed; a line per method."""
    left, top, width, height = 62, 14, 520, 292
    low, high = 0.9 * dense, 1.1 * max(value for points in rows.values() for _, value in points)
    furthest = 55.0  # percent

    def place(removed: float, value: float) -> tuple[float, float]:
        share = math.log(value / low) / math.log(high / low)
        return left + width * removed / furthest, top + height * (1 - share)

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 350" width="720" height="350" role="img" '
        'font-family="sans-serif" font-size="13"><title>Perplexity of SmolLM2-135M against the share removed</title>',
        '<rect width="720" height="350" fill="white"/>',
    ]
    for value in (50, 100, 200, 400, 800):
        _, y = place(0, value)
        lines.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for removed in range(0, 51, 10):
        x, y = place(removed, low)
        lines.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{removed} %</text>')
    ends = {name: place(*points[-1])[1] for name, points in rows.items()}
    taken = -math.inf
    for name in sorted(rows, key=ends.__getitem__):  # labels from the top, none over another
        ours = name == _DEFAULT
        colour, stroke = ("#2b6cb0", 3) if ours else ("#718096", 1.5)
        route = [place(*point) for point in [(0.0, dense), *rows[name]]]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in route)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{stroke + 1}" fill="{colour}"/>' for x, y in route[1:])
        taken = max(ends[name] + 4, taken + 15)
        weight = ' font-weight="bold"' if ours else ""
        label = "StruPrune" if ours else name
        lines += [
            f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="{stroke}"/>{dots}',
            f'<text x="{left + width - 36:.1f}" y="{taken:.1f}" fill="{colour}"{weight}>{label}</text>',
        ]
    x, y = left + width / 2, top + height / 2
    lines += [
        f'<text x="{x:.0f}" y="344" text-anchor="middle">share of the decoder layers\' linear parameters removed</text>',
        f'<text x="16" y="{y:.0f}" text-anchor="middle" transform="rotate(-90 16 {y:.0f})">perplexity, WikiText-2</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
