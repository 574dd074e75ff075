"""Make the field tables of docs/recipes.md, from the modifiers' fields and their docstrings, and docs/quality.svg.

    python -m eval.make_docs              # writes what stands between the markers of docs/recipes.md, and the plot
    python -m eval.make_docs --check      # says what that would change; status 1 where something

What a field is, its type, default and range come from the code. When to touch it, and what a named value means, is written here.
The plot's figures are those of the tables in docs/results.md.
"""

from __future__ import annotations

import argparse
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
    "sparsity": "always, unless a budget says what counts",
    "budget": "where bytes, the cache or the clock count, not parameters",
    "budget.parameters": "beside others; alone it is `sparsity`",
    "budget.bytes": "where the model must fit a disk, a download or a memory",
    "budget.cache": "where long contexts or many users fill the memory; `attention_unit: head` takes keys, too",
    "budget.speedup": "where seconds count",
    "budget.phase": "`prompt` where prompts are long and answers short",
    "budget.batch": "as the model will be served",
    "budget.length": "as the model will be served",
    "budget.engine": "a file of `struprune costs` where another machine or engine serves",
    "targets": "to prune some layers or one kind of module alone: `['re:.*layers\\.[0-7]\\..*fc2']`",
    "ignore": "to spare layers, the first and the last for instance",
    "attention_unit": "`head` where attention itself is to get faster, `none` where stock classes are to load the output",
    "prune_ffn": "`false` to prune attention alone",
    "experts": "`none` to leave a mixture's experts as they are",
    "experts.units": "`whole` where fewer experts of their own width are wanted; `both` to let the budget choose",
    "experts.criterion": "`reap` to drop the experts that llm-compressor's REAPPruningModifier drops",
    "sublayers": "`both` where whole sublayers and layers may go: deep models, and where the clock counts",
    "experts.widths": "`per_layer` where no engine but transformers, with our file, is to run the output",
    "experts.calibrate_all_experts": "where the manifest says `scale` of many experts: little text, or a router that skips some",
    "width_multiple": "64 or 128 for tensor cores and tensor parallelism; quantisers that follow need no word of yours",
    "output": "`uniform` where no code of ours may travel with the output, for instance to serve it",
    "importance": "to compare; `wanda` scores without eliminating, and so takes less time",
    "importance.max_sparsity": "with that of the allocation",
    "importance.as_printed": "to see what the paper's formula does as it is printed",
    "sensitivity": "`none` to save its seconds and its memory, or for the paper's variants",
    "sensitivity.samples": "raise it where the calibration data are plenty and varied",
    "effort": "first of all: it needs no other field to be known",
    "rotate_values": "`false` where kept value channels must be the dense model's own",
    "allocation": "`uniform` where all layers must shrink alike; `softmax…` and `global_threshold` for the paper's variants",
    "allocation.samples": "raise it where the calibration data are plenty and varied",
    "allocation.trial_samples": "0 to save its time; more where calibration text is plentiful",
    "allocation.temperature": "one number to skip the search",
    "allocation.max_sparsity": "lower it where a layer loses nearly all of its units",
    "allocation.rho": "never: it cancels, and is here so that Algorithm 3 is complete",
    "allocation.gamma": "1 to leave depth out of Algorithm 3; lower to spare early layers more",
    "allocation.as_printed": "to see what the paper's formulas do as they are printed",
    "allocation.threshold": "to compare",
    "allocation.spread": "higher to let layers differ more",
    "weight_update": "`admm` for the paper's variants; `none` to see what deletion alone does",
    "alpha": "to weigh ADMM's linear terms against its activation terms",
    "beta": "the same, from the other side",
    "steps": "more where the objective in the manifest still falls at the last step",
    "inner_steps": "the same, for attention",
    "importance.learning_rate": "lower it where attention's objective does not fall",
    "weight_update.learning_rate": "lower it where attention's objective does not fall",
    "attention_method": "1 to compare with the paper's appendix",
    "reconstruct": "`local` to save the dense path, whose hidden states wait on the host",
    "dampening_frac": "a number, say 0.01, to save the search, or for equal terms with other methods",
    "ffn_tuning": "`{epochs: 6}` where two to three times the seconds do not matter",
    "ffn_tuning.epochs": "6 where two to three times the seconds do not matter",
    "ffn_tuning.learning_rate": "lower it where the held-out error in the manifest rises from epoch 0 on",
    "memory_budget": "where the device must hold less than it has free",
    "replay": "to get the same model again, bit by bit",
    "SparsityAllocatorModifier.allocation": "as in a pruning stage; `uniform` needs no stage of its own",
    "weights": "`norms_and_biases` where next to nothing may change",
    "adapters": "where training text is scarce, or the host's memory",
    "adapters.rank": "higher where training text is plenty",
    "adapters.alpha": "with the rank, where their ratio is to stay",
    "adapters.targets": "to train attention or the FFN alone",
    "adapters.dropout": "above 0 where the held-out loss rises while the training loss falls",
    "loss": "always: it says what the model is for",
    "loss.cross_entropy": "beside `kl` where the text is what the model will be used on",
    "loss.kl": "where the dense model is at hand; its own text need not be",
    "loss.kl.weight": "beside another loss",
    "loss.kl.temperature": "seldom",
    "loss.kl.top_k": "higher where the disk is large",
    "loss.hidden": "where text is scarce",
    "loss.teacher": "where the checkpoint that is pruned was pruned before: name the dense one",
    "data": "always, but for a short repair: the calibration samples are few",
    "data.files": "always",
    "data.column": "where the text has another name",
    "data.window": "as long as what the model will read",
    "data.tokens": "to bound the time",
    "holdout": "`null` to train on every sample, and to know less",
    "holdout.fraction": "lower where text is scarce",
    "holdout.steps": "lower for a finer curve; each measurement is a pass over the held-out part",
    "holdout.patience": "to stop where text repeats itself and nothing more is learnt",
    "schedule": "always",
    "schedule.epochs": "more where the held-out loss still falls at the last one",
    "schedule.max_steps": "to bound the time",
    "schedule.learning_rate": "lower where the loss jumps; adapters take twice as much with `loss: {kl: 1.0}`",
    "schedule.decay": "seldom",
    "schedule.warmup_fraction": "seldom",
    "batch_size": "lower for more steps from few samples",
    "micro_batch_size": "lower where a micro-batch does not fit the device, higher where it idles",
    "checkpoint_steps": "lower where steps are slow",
    "seed": "to see how much of a difference is chance",
    "optimizer": "seldom",
    "optimizer.weight_decay": "seldom",
    "optimizer.max_grad_norm": "seldom",
    "optimizer.clipping": "`global` for the ordinary loop's numbers, where the host's memory holds all gradients",
    "optimizer.state_dtype": "`bfloat16` where the host's memory is short",
    "optimizer.state_folder": "where the host's memory does not hold the moments",
    "compute": "`bfloat16` for a float32 model on a processor or card that multiplies it faster",
    "memory": "`model` where all of it fits the device: weights need not travel",
    "RecoveryModifier.memory_budget": "where the device must hold less than it has free",
}

# What the named values of a field mean; values that the code does not know are left out.
CHOICES: dict[str, dict[str, str]] = {
    "attention_unit": {
        "head": "whole heads; under grouped queries a key-value head with its query heads",
        "value_channels": "value channels, the same number from every value head; queries and keys stay",
        "none": "attention stays",
    },
    "reconstruct": {
        "residual": "what the dense residual stream is after the module: repairs inherited error",
        "block": "the dense module's output",
        "local": "the module's own output on the pruned path's inputs",
    },
    "output": {"per_layer": "every layer its own size", "uniform": "all layers the same size; stock classes load it"},
    "weights": {
        "all": "all weights of the decoder layers and the norm after them",
        "norms_and_biases": "their vectors",
    },
    "schedule.decay": {"cosine": "half a cosine to zero", "linear": "straight to zero", "constant": "no fall"},
    "memory": {"layer": "one decoder layer on the device", "model": "all of it"},
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
    parser.add_argument("--check", action="store_true", help="write nothing")
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
    """Tell whether a field means what it means in StruPruneModifier."""
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
    """Tell whether a bare name of a topic is one that this modifier has an entry of its own for."""
    return f"{modifier.__name__}.{wanted}" in WHEN


def format_fields(modifier: type[Modifier], names: Sequence[str]) -> str:
    """Return the table of some fields, and a list of the named values that have a meaning."""
    rows = ["| field | type | default | range | what | when to touch it |", "|---|---|---|---|---|---|"]
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
        return "fields below, or a list of such"
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


if __name__ == "__main__":
    sys.exit(main())
