"""Options shared by several commands, and what they mean together. This module imports nothing heavy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from huggingface_hub import constants
from rich.markup import escape

from struprune_plugin.cli.console import Screen
from struprune_plugin.recipes.shipped import find_recipe, list_recipes
from struprune_plugin.storage.files import is_hub_name

_RESTARTED = "STRUPRUNE_RESTARTED"  # set in a process that was restarted to see one device


def option(name: str, help: str, metavar: str | None = None, panel: str | None = None, **more: Any) -> Any:
    """Return a typer option; a boolean one is a flag without its negation."""
    return typer.Option(name, help=escape(help), metavar=metavar, rich_help_panel=panel, **more)


def whole(name: str, help: str, low: int = 1, panel: str | None = None) -> Any:
    """Return an option for a whole number."""
    return option(name, help, "N", panel, min=low)


def _complete_recipe(incomplete: str) -> list[str]:
    return [name for name in list_recipes() if name.startswith(incomplete)]


def _recipe(help: str = "") -> Any:
    told = f"recipe: a YAML file, or a name that `struprune recipes` lists{help}"
    return option("--recipe", told, "R", autocompletion=_complete_recipe)


Floats = Literal["auto", "float32", "bfloat16", "float16"]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="model folder or hub name, e.g. facebook/opt-125m")]
Folder = Annotated[Path, typer.Argument(metavar="OUT", help="pruned folder")]
RecipeName = Annotated[str, _recipe()]
DefaultedRecipe = Annotated[str | None, _recipe(" [default: struprune]")]
Seed = Annotated[int, option("--seed", "seed of all random choices", "N", min=0, max=2**32 - 1)]
Dtype = Annotated[Floats, option("--dtype", "dtype that the model is loaded in")]
Device = Annotated[str, option("--device", "device: auto, cpu, cuda or cuda:N", "D")]
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
_REMOVE = "fraction of the decoder layers' parameters to remove, in [0, 1)"
Sparsity = Annotated[float | None, option("--sparsity", _REMOVE, "R", _CHANGES)]
Budget = Annotated[str | None, option("--budget", _LIMIT, "YAML", _CHANGES)]
Effort = Annotated[Literal["fast", "default", "best"] | None, option("--effort", _EFFORT, None, _CHANGES)]
Settings = Annotated[list[str] | None, option("--set", _SET, "FIELD=VALUE", _CHANGES)]

_SCORING = "Scoring"
_TASKS = "lm-eval tasks, e.g. arc_easy,hellaswag"
_FOLDER = "folder with lm-eval task files, e.g. eval/tasks"
ScoredText = Annotated[
    Path | None, option("--text", "text for the perplexity [default: a shipped sample]", "FILE.jsonl", _SCORING)
]
Window = Annotated[int, whole("--window", "tokens per window of the perplexity", 2, _SCORING)]
MaxTokens = Annotated[int | None, whole("--max-tokens", "score only the first N tokens [default: all]", 1, _SCORING)]
Tasks = Annotated[str | None, option("--tasks", _TASKS, "a,b", _SCORING)]
IncludePath = Annotated[str | None, option("--include-path", _FOLDER, "DIR", _SCORING)]
Limit = Annotated[int | None, whole("--limit", "examples per task [default: all]", 1, _SCORING)]

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
    :raises ValueError: a setting is not FIELD=VALUE, is not valid YAML, or sets a field twice
    """
    changes = {name: value for name, value in fields.items() if value is not None}
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


def check_names(device: str, recipe: str | None, models: Sequence[str], texts: Sequence[str | Path | None]) -> None:
    """Raise if the name of a device, recipe, model or text is invalid, before anything heavy is imported."""
    check_device(device)
    if recipe is not None and "\n" not in recipe:  # otherwise it is a YAML text
        find_recipe(recipe)
    for text in texts:
        if text is not None and Path(text).suffix in (".json", ".jsonl") and not Path(text).is_file():
            raise ValueError(f"text: must be an existing JSON-lines file, got {os.fspath(text)!r}. Correct the path.")
    for model in models:
        _check_model_name(model)


def check_device(device: str) -> None:
    """Raise if a word names no device."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ValueError(f"--device: must be auto, cpu, cuda or cuda:N, got {device!r}. Choose one of these.")


def _check_model_name(name: str) -> None:
    """Raise if a name is neither a model folder nor, as far as can be known locally, a hub name."""
    cached = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    found = None
    if Path(name).is_dir():
        found = None if (Path(name) / "config.json").is_file() else "a folder without a config.json"
    elif not is_hub_name(name):
        found = "no such folder"
    elif constants.HF_HUB_OFFLINE and not cached.is_dir():
        found = "no such folder, and no model of that name in the hub's cache while HF_HUB_OFFLINE is set"
    if found is not None:
        raise ValueError(
            f"model: {name!r} must be a model folder or a hub name that can be loaded, got {found}. Correct the path or the name."
        )


def prepare(device: str, screen: Screen, verbose: bool = False) -> None:
    """Register StruPrune with llm-compressor and transformers, restrict them to one device, and set what they log.

    An import may already have started CUDA, which then ignores changes to the environment; so the process is restarted. N of
    ``cuda:N`` counts the GPUs that ``CUDA_VISIBLE_DEVICES`` shows, as torch does.
    """
    import torch

    from struprune_plugin import registration  # noqa: F401

    kind, _, index = device.partition(":")
    held, restarted = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.pop(_RESTARTED, None)
    found = torch.cuda.is_available()  # without a card there is nothing to hide
    if found and not restarted and (kind == "cpu" or index):
        cards = held.split(",") if held else [str(number) for number in range(torch.cuda.device_count())]
        visible = "" if kind == "cpu" else dict(enumerate(cards)).get(int(index))
        found = visible is not None
        if visible is not None and visible != held:
            os.environ |= {"CUDA_VISIBLE_DEVICES": visible, _RESTARTED: "1"}
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if kind == "cuda" and not found:
        raise ValueError(
            f"--device: {device!r} must be present, but torch finds no such GPU. Use --device auto or cpu."
        )
    screen.set_log(verbose)
