"""Options shared by several commands, in groups. This module imports nothing heavy."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

import typer
from huggingface_hub import constants
from rich.markup import escape

from struprune_plugin.cli.console import Screen, run_command
from struprune_plugin.recipes.shipped import find_recipe, list_recipes
from struprune_plugin.storage.files import is_hub_name, read_bytes

_RESTARTED = "STRUPRUNE_RESTARTED"  # set in a process that was restarted to see one device


def make_callback(run: Callable[..., int | None]) -> Callable[..., int]:
    """Return a command as a typer callback: its groups of options are flattened, its errors become exit statuses.

    :param run: the command; its parameters are arguments, options, and dataclasses of options, one of them the screen
    """
    hints = get_type_hints(run, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    members = {name: inspect.signature(group).parameters for name, group in groups.items()}

    def call(**values: Any) -> int:
        for name, group in groups.items():
            values[name] = group(**{key: values.pop(key) for key in members[name]})
        return run_command(partial(run, **values), values["screen"])

    flat = []
    for name, own in inspect.signature(run).parameters.items():
        group = groups.get(name)
        known = hints if group is None else get_type_hints(group, include_extras=True)
        for parameter in members.get(name, {name: own}).values():
            kind, told = get_args(known[parameter.name])
            told = copy(told)
            told.rich_help_panel = getattr(group, "title", None)
            annotation: Any = Annotated[kind, told]  # type: ignore[valid-type]
            flat.append(parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY))
    call.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    paragraphs = inspect.cleandoc(run.__doc__ or "").split("\n\n")
    call.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return call


def option(help: str, metavar: str | None = None, name: str | None = None, **more: Any) -> Any:
    """Return a typer option; its name defaults to that of the field."""
    return typer.Option(*filter(None, (name,)), help=escape(help), metavar=metavar, **more)


def flag(name: str, help: str) -> Any:
    """Return a boolean option without a value."""
    return typer.Option(name, help=help)


def whole(help: str, low: int = 1, high: int = 10**9 - 1) -> Any:
    """Return an option for a whole number within a range."""

    def read(value: Any) -> int:
        text = str(value)
        if not text.isdecimal() or len(text) > 10 or not low <= int(text) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}, got {text!r}")
        return int(text)

    return option(help, "N", parser=read)


def num_bytes(help: str) -> Any:
    """Return an option for a number of bytes: digits, or digits before kB, MB, GB."""

    return option(help, "BYTES", parser=lambda value: read_bytes(str(value)))


def _complete_recipe(incomplete: str) -> list[str]:
    return [name for name in list_recipes() if name.startswith(incomplete)]


_RECIPE_HELP = "recipe: a YAML file, or a name that `struprune recipes` lists"
RECIPE = option(_RECIPE_HELP, "R", autocompletion=_complete_recipe)
DEFAULTED_RECIPE = option(f"{_RECIPE_HELP} [default: struprune]", "R", autocompletion=_complete_recipe)
Floats = Literal["auto", "float32", "bfloat16", "float16"]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="model folder or hub name, e.g. facebook/opt-125m")]
Folder = Annotated[Path, typer.Argument(metavar="OUT", help="pruned folder")]
Seed = Annotated[int, whole("seed of all random choices", 0, 2**32 - 1)]
Dtype = Annotated[Floats, option("dtype that the model is loaded in")]
Device = Annotated[str, option("device: auto, cpu, cuda or cuda:N", "D")]
Overwrite = Annotated[bool, flag("--overwrite", "replace an earlier output of StruPrune")]


@dataclass(frozen=True)
class Amount:
    """Size of the calibration text."""

    title: ClassVar = "Calibration text"
    num_samples: Annotated[int | None, whole("number of calibration samples [default: 64; 256 with --effort best]")] = (
        None
    )
    seq_length: Annotated[int, whole("tokens per sample", low=2)] = 256  # a token alone has no context
    batch_size: Annotated[int, whole("samples on the device at a time")] = 8

    def count_samples(self, changes: dict[str, Any]) -> int:
        """Return the number of sequences; if none is given, it follows from the effort in the changes to the recipe."""
        return self.num_samples or (256 if changes.get("effort") == "best" else 64)


@dataclass(frozen=True)
class Calibration(Amount):
    """Calibration text and its size."""

    data: Annotated[
        str | None,
        option(
            "FILE.jsonl, c4, wikitext2, a hub data set, or self: text of the model [default: a shipped sample]", "SRC"
        ),
    ] = None
    text_column: Annotated[str, option("column of the text in the data", "NAME")] = "text"


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


@dataclass(frozen=True)
class Settings:
    """Changed fields of the recipe."""

    title: ClassVar = "Changes to the recipe"
    settings: Annotated[
        list[str] | None,
        option("set a field of the recipe, e.g. prune_ffn=false; may be repeated", "FIELD=VALUE", name="--set"),
    ] = None

    def read(self) -> dict[str, Any]:
        """Return the changed values by field, including fields that have their own option.

        :raises ValueError: a setting is not FIELD=VALUE, is not valid YAML, or sets a field twice
        """
        changes = {name: value for name, value in vars(self).items() if name != "settings" and value is not None}
        if "budget" in changes:
            changes["budget"] = read_yaml("--budget", changes["budget"])
        for setting in self.settings or ():
            name, equals, text = setting.partition("=")
            if not name or not equals:
                raise ValueError(
                    f"--set: must be FIELD=VALUE, got {setting!r}. Write, for example, --set prune_ffn=false."
                )
            value = read_yaml(f"--set: {name}", text)
            if name in changes:
                raise ValueError(
                    f"--set: {name} must be set once, got {changes[name]!r} and {value!r}. Remove one of the two."
                )
            changes[name] = value
        return changes


@dataclass(frozen=True)
class Changes(Settings):
    """Changed fields of the recipe, some of them with their own options."""

    sparsity: Annotated[
        float | None, option("fraction of the decoder layers' parameters to remove, in [0, 1)", "R")
    ] = None
    budget: Annotated[
        str | None,
        option("limit for the pruned model, e.g. '{bytes: 400MB}' or '{speedup: 1.3, costs: FILE}'", "YAML"),
    ] = None
    effort: Annotated[
        Literal["fast", "default", "best"] | None,
        option("fast saves time; best improves quality, with four times the text"),
    ] = None
    memory_budget: Annotated[int | None, num_bytes("bytes that the run may use on the device, e.g. 2GB")] = None


@dataclass(frozen=True)
class Scores:
    """Text and tasks of the scoring."""

    title: ClassVar = "Scoring"
    text: Annotated[Path | None, option("text for the perplexity [default: a shipped sample]", "FILE.jsonl")] = None
    window: Annotated[int, whole("tokens per window of the perplexity", low=2)] = 256
    max_tokens: Annotated[int | None, whole("score only the first N tokens [default: all]")] = None
    tasks: Annotated[str | None, option("lm-eval tasks, e.g. arc_easy,hellaswag", "a,b")] = None
    include_path: Annotated[str | None, option("folder with lm-eval task files, e.g. eval/tasks", "DIR")] = None
    limit: Annotated[int | None, whole("examples per task [default: all]")] = None

    def read_tasks(self) -> list[str]:
        """Return the names of lm-eval's tasks.

        :raises ValueError: an empty name, or no such folder of tasks
        """
        tasks = [] if self.tasks is None else [name.strip() for name in self.tasks.split(",")]
        if not all(tasks):
            raise ValueError(
                f"--tasks: must be names separated by commas, got {self.tasks!r}. Correct it, or remove it."
            )
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ValueError(
                f"--include-path: must be a folder with task files, got {self.include_path!r}. Correct the path."
            )
        return tasks


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
    """Register StruPrune with llm-compressor and transformers, restrict them to one device, and reduce their log.

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
    screen.set_logging(verbose)
