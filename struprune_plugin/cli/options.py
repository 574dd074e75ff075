"""Options shared by several commands, and what they mean together. This module imports nothing heavy."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from struprune_plugin.cli.console import Screen
from struprune_plugin.recipes.shipped import find_recipe, list_recipes
from struprune_plugin.storage.files import check_model, check_text


def option(name: str, help: str, metavar: str | None = None, panel: str | None = None, **more: Any) -> Any:
    """Return a typer option; a boolean one is a flag without its negation."""
    return typer.Option(name, help=escape(help), metavar=metavar, rich_help_panel=panel, **more)


def whole(name: str, help: str, low: int = 1, panel: str | None = None) -> Any:
    """Return an option for a whole number."""
    return option(name, help, "N", panel, min=low)


def _complete_recipe(incomplete: str) -> list[str]:
    return [name for name in list_recipes() if name.startswith(incomplete)]


Floats = Literal["auto", "float32", "bfloat16", "float16"]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="model folder or hub name, e.g. facebook/opt-125m")]
Folder = Annotated[Path, typer.Argument(metavar="OUT", help="pruned folder")]
_RECIPE = "recipe: a YAML file, or a name that `struprune recipes` lists"
RecipeName = Annotated[str, option("--recipe", _RECIPE, "R", autocompletion=_complete_recipe)]
Seed = Annotated[int, option("--seed", "seed of all random choices", "N", min=0, max=2**32 - 1)]
Dtype = Annotated[Floats, option("--dtype", "dtype that the model is loaded in")]
_DEVICE = "device; CUDA_VISIBLE_DEVICES chooses among several GPUs"
Device = Annotated[Literal["auto", "cpu", "cuda"], option("--device", _DEVICE)]
Overwrite = Annotated[bool, option("--overwrite", "replace an earlier output")]
TrustRemoteCode = Annotated[bool, option("--trust-remote-code", "run the code that comes with the model")]

_TEXT = "Calibration text"
_DATA = "FILE.jsonl, c4, wikitext2, a hub data set, or self: text of the model [default: a shipped sample]"
_SAMPLES = "number of calibration samples [default: 64; 256 with --effort best]"
Data = Annotated[str | None, option("--data", _DATA, "SRC", _TEXT)]
TextColumn = Annotated[str, option("--text-column", "column of the text in the data", "NAME", _TEXT)]
NumSamples = Annotated[int | None, whole("--num-samples", _SAMPLES, panel=_TEXT)]
SeqLength = Annotated[int, whole("--seq-length", "tokens per sample", 2, _TEXT)]  # a token alone has no context
BatchSize = Annotated[int, whole("--batch-size", "samples on the device at a time", panel=_TEXT)]

_CHANGES = "Changes to the recipe"
_LIMIT = "limit for the pruned model, e.g. '{bytes: 400MB}' or '{speedup: 1.3, costs: FILE}'"
_EFFORT = "fast saves time; best improves quality, with four times the text"
_SET = "set a field of the recipe, e.g. prune_ffn=false; may be repeated"
_REMOVE = "fraction of the decoder layers' parameters to remove, in [0, 1) [default: the recipe's, 0.2 in struprune]"
Sparsity = Annotated[str | None, option("--sparsity", _REMOVE, "R", _CHANGES)]
Budget = Annotated[str | None, option("--budget", _LIMIT, "YAML", _CHANGES)]
Effort = Annotated[Literal["fast", "default", "best"] | None, option("--effort", _EFFORT, None, _CHANGES)]
Settings = Annotated[list[str] | None, option("--set", _SET, "FIELD=VALUE", _CHANGES)]

_SCORING = "Scoring"
_TASKS = "lm-eval tasks, e.g. arc_easy,hellaswag"
_FOLDER = "folder with further lm-eval task files"
ScoredText = Annotated[
    Path | None, option("--text", "text for the perplexity [default: a shipped sample]", "FILE.jsonl", _SCORING)
]
Window = Annotated[int, whole("--window", "tokens per window of the perplexity", 2, _SCORING)]
MaxTokens = Annotated[int | None, whole("--max-tokens", "score only the first N tokens [default: all]", 1, _SCORING)]
Tasks = Annotated[str | None, option("--tasks", _TASKS, "a,b", _SCORING)]
IncludePath = Annotated[str | None, option("--include-path", _FOLDER, "DIR", _SCORING)]
Limit = Annotated[int | None, whole("--limit", "examples per task [default: all]", 1, _SCORING)]

_PICK = re.compile(r"([+-])(\d+(?:[.]\d+)?)(%?) (\S+)")

_OUTPUT = "Output"
Json = Annotated[bool, option("--json", "print the results as JSON, and nothing else on stdout", panel=_OUTPUT)]
Quiet = Annotated[
    bool, option("--quiet", "print only results and errors: no progress bars, no warnings", panel=_OUTPUT)
]


def count_samples(num_samples: int | None, changes: dict[str, Any]) -> int:
    """Return the number of sequences; if none is given, it follows from the effort in the changes to the recipe."""
    return num_samples or (256 if changes.get("effort") == "best" else 64)


def read_yaml(where: str, text: str) -> Any:
    """Parse a value written as YAML.

    :param where: name of the option, for messages
    :raises ValueError: the text is not valid YAML
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an invalid date
        problem = " ".join(str(error).split())
        raise ValueError(f"{where} must be valid YAML, got {text!r}: {problem}. Correct the value.") from None


def read_changes(settings: Sequence[str] | None, **fields: Any) -> dict[str, Any]:
    """Return the changed values of a recipe by field.

    :param settings: values of ``--set``
    :param fields: fields that have their own option; None where it was not given
    :raises ValueError: a sparsity outside [0, 1); a setting is not FIELD=VALUE, is not valid YAML, or sets a field twice
    """
    changes = {name: value for name, value in fields.items() if value is not None}
    if "sparsity" in changes:
        changes["sparsity"] = _read_share(changes["sparsity"])
    if "budget" in changes:
        changes["budget"] = read_yaml("--budget", changes["budget"])
    for setting in settings or ():
        name, equals, text = setting.partition("=")
        if not name or not equals:
            raise ValueError(f"--set: must be FIELD=VALUE, got {setting!r}. Write, for example, --set prune_ffn=false.")
        value = read_yaml(f"--set: {name}", text)
        if name in changes:
            raise ValueError(
                f"--set: {name} must be set once, got {changes[name]!r} and {value!r}. Remove one of the two."
            )
        changes[name] = value
    return changes


def _read_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ValueError(f"--sparsity: must be at least 0 and below 1, got {text!r}. For 30 %, write 0.3.")
    return share


def read_tasks(tasks: str | None, include_path: str | None) -> list[str]:
    """Return the names of lm-eval's tasks.

    :raises ValueError: an empty name, or no such folder of tasks
    """
    names = [] if tasks is None else [name.strip() for name in tasks.split(",")]
    if not all(names):
        raise ValueError(f"--tasks: must be names separated by commas, got {tasks!r}. Correct it, or remove it.")
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"--include-path: must be a folder with task files, got {include_path!r}. Correct the path.")
    return names


def read_sparsities(text: str) -> list[float]:
    """Parse ``first:last:step`` or a comma-separated list.

    :raises ValueError: another form, a number outside (0, 1), or a repeated number
    """
    try:
        found = [float(part) for part in text.split(",")] if ":" not in text else _spread(*map(float, text.split(":")))
    except (ValueError, TypeError):
        found = []
    if not found or not all(0 < value < 1 for value in found) or len(set(found)) < len(found):
        raise ValueError(
            f"--sparsity: must be first:last:step or numbers separated by commas, each above 0 and below 1, got {text!r}. "
            "Write, for example, 0.1:0.6:0.1 or 0.2,0.4."
        )
    return found


def _spread(first: float, last: float, step: float) -> list[float]:
    """Return the numbers of a range; empty if it is not a range, or has more than a hundred numbers."""
    count = (last - first) / step if step > 0 else -1.0
    return [round(first + index * step, 6) for index in range(int(count + 1e-6) + 1)] if 0 <= count < 100 else []


def read_pick(text: str, tasks: Sequence[str]) -> tuple[float, bool, str]:
    """Parse a permitted loss, e.g. ``+5% perplexity`` or ``-0.01 arc_easy``, into (amount, whether relative, measure).

    :param tasks: tasks that the sweep scores
    :raises ValueError: another form, or a task that is not among these
    """
    found = _PICK.fullmatch(text.strip())
    if found is None or (found[1] == "+") != (found[4] == "perplexity"):
        raise ValueError(
            f"--pick: must be like '+5% perplexity' or '-1% TASK', got {text!r}. Give how far perplexity may "
            "rise, or the score of a task may fall."
        )
    if found[4] not in ("perplexity", *tasks):
        raise ValueError(f"--pick: must name what the sweep measures, got {found[4]!r}. Add it to --tasks.")
    return float(found[2]) / (100 if found[3] else 1), bool(found[3]), found[4]


def prepare(
    screen: Screen,
    recipe: str | None = None,
    models: Sequence[str] = (),
    texts: Sequence[str | Path | None] = (),
    device: str = "auto",
    verbose: bool = False,
) -> None:
    """Register StruPrune with llm-compressor and transformers, and set what they log.

    :raises ValueError: the name of a recipe, model or text is invalid, before anything heavy is imported; no GPU
    """
    if recipe is not None and "\n" not in recipe:  # otherwise it is a YAML text
        find_recipe(recipe)
    for text in texts:
        if text is not None and Path(text).suffix in (".json", ".jsonl"):
            check_text(text)
    for model in models:
        check_model(model)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda must be present, but torch finds no such GPU. Use --device auto or cpu.")
    from struprune_plugin import registration  # noqa: F401

    screen.set_log(verbose)
