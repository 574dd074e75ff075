"""Options shared by several commands, and what they mean together. This module imports nothing heavy."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from struprune_plugin.cli.console import Screen
from struprune_plugin.recipes.shipped import find_recipe
from struprune_plugin.storage.files import check_model


def option(name: str, help: str, metavar: str | None = None, panel: str | None = None, **more: Any) -> Any:
    """Return a typer option; a boolean one is a flag without its negation."""
    return typer.Option(name, help=escape(help), metavar=metavar, rich_help_panel=panel, **more)


def _read_share(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (share := float(text)) < 1:
            return share
    raise typer.BadParameter(f"must be at least 0 and below 1, got {text!r}. For 30 %, write 0.3.")


Floats = Literal["auto", "float32", "bfloat16", "float16"]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="model folder or hub name, e.g. facebook/opt-125m")]
Folder = Annotated[Path, typer.Argument(metavar="OUT", help="pruned folder", exists=True, file_okay=False)]
RecipeName = Annotated[str, option("--recipe", "recipe: a YAML file, or a name that `struprune recipes` lists", "R")]
Seed = Annotated[
    int, option("--seed", "seed of torch; adapters have their own: --set seed=N", "N", min=0, max=2**32 - 1)
]
Dtype = Annotated[Floats, option("--dtype", "dtype that the model is loaded in")]
Overwrite = Annotated[bool, option("--overwrite", "replace an earlier output")]
TrustRemoteCode = Annotated[bool, option("--trust-remote-code", "run the code that comes with the model")]

_LANGUAGE = "languages whose common words count beside the text, e.g. en,de (needs wordfreq)"
_WORDS = "file of common words, one per line, with or without a count"
Vocabulary = Annotated[str, option("--vocabulary", "rows that stay: a share, a number, or auto", "N")]
_FIRST = "first remove tokens that --data does not need, as `struprune trim` does: a share or a number of rows, or auto"
SmallVocabulary = Annotated[str | None, option("--vocabulary", _FIRST, "N")]
Language = Annotated[str | None, option("--language", _LANGUAGE, "L")]
Words = Annotated[Path | None, option("--words", _WORDS, "FILE", exists=True, dir_okay=False)]

_TEXT = "Calibration text"
_DATA = "FILE.jsonl, c4, wikitext2, or a hub data set [default: a shipped sample]"
_SAMPLES = "number of calibration samples [default: 64; 256 with effort best]"
_LENGTH = "tokens per sample [default: 256; on an accelerator 768 if no amount of text is given]"
Data = Annotated[str | None, option("--data", _DATA, "SRC", _TEXT)]
TextColumn = Annotated[str, option("--text-column", "column of the text in the data", "NAME", _TEXT)]
_STREAM = "do not begin every window with the tokenizer's beginning-of-text token: cut one stream of texts"
NoWindowBos = Annotated[bool, option("--no-window-bos", _STREAM, panel=_TEXT)]
NumSamples = Annotated[int | None, option("--num-samples", _SAMPLES, "N", _TEXT, min=1)]
SeqLength = Annotated[int | None, option("--seq-length", _LENGTH, "N", _TEXT, min=2)]
BatchSize = Annotated[int, option("--batch-size", "samples on the device at a time", "N", _TEXT, min=1)]

_CHANGES = "Changes to the recipe"
_REMOVE = "fraction of the parameters of layers' linears to remove, in [0, 1) [default: the recipe's, 0.2 in struprune]"
_LIMIT = "limit for the whole model, e.g. '{parameters: 0.7}' or '{bytes: 400MB}'"
_EFFORT = "fast saves time; best improves quality, with up to four times the text"
_SET = "set a field of the recipe, e.g. prune_ffn=false; may be repeated"
Sparsity = Annotated[float | None, option("--sparsity", _REMOVE, "R", _CHANGES, parser=_read_share)]
Budget = Annotated[str | None, option("--budget", _LIMIT, "YAML", _CHANGES)]
Effort = Annotated[Literal["fast", "default", "best"] | None, option("--effort", _EFFORT, None, _CHANGES)]
Settings = Annotated[list[str] | None, option("--set", _SET, "FIELD=VALUE", _CHANGES)]

_SCORING = "Scoring"
_SCORED = "text for the perplexity [default: a shipped sample]"
_FOLDER = "folder with further lm-eval task files"
ScoredText = Annotated[Path | None, option("--text", _SCORED, "FILE.jsonl", _SCORING, exists=True, dir_okay=False)]
Window = Annotated[int, option("--window", "tokens per window of the perplexity", "N", _SCORING, min=2)]
NoScoredBos = Annotated[bool, option("--no-window-bos", _STREAM, panel=_SCORING)]
MaxTokens = Annotated[int | None, option("--max-tokens", "score only the first N tokens", "N", _SCORING, min=1)]
Tasks = Annotated[str, option("--tasks", "lm-eval tasks, e.g. arc_easy,hellaswag", "a,b", _SCORING)]
IncludePath = Annotated[Path | None, option("--include-path", _FOLDER, "DIR", _SCORING, exists=True, file_okay=False)]
Limit = Annotated[int | None, option("--limit", "examples per task [default: all]", "N", _SCORING, min=1)]

_OUTPUT = "Output"
_QUIET = "print only results and errors: no progress bars, no warnings"
Json = Annotated[bool, option("--json", "print the results as JSON, and nothing else on stdout", panel=_OUTPUT)]
Quiet = Annotated[bool, option("--quiet", _QUIET, panel=_OUTPUT)]


def choose_windows(
    model: str, trusts: bool, num_samples: int | None, seq_length: int | None, changes: dict[str, Any]
) -> tuple[int, int]:
    """Return the number of calibration sequences and the tokens of each, by default what the text that ships can fill."""
    import torch

    from struprune_plugin.storage.checkpoint import read_config

    is_best = changes.get("effort") == "best"
    if num_samples is seq_length is None and not is_best and torch.accelerator.is_available():
        config = read_config(model, trust_remote_code=trusts).get_text_config(decoder=True)
        seq_length = min(768, getattr(config, "max_position_embeddings", None) or 768)
    return num_samples or (256 if is_best else 64), seq_length or 256


def describe_run(
    dtype: str,
    trusts: bool,
    data: str | None,
    column: str,
    no_window_bos: bool,
    windows: tuple[int, int],
    batch_size: int,
) -> dict[str, Any]:
    """Return arguments of :func:`struprune_plugin.oneshot`; the same command calibrates on the same samples.

    :param windows: number of calibration samples, tokens of each
    """
    from struprune_plugin.evaluation.text import DEMO_CALIBRATION

    return {
        "precision": dtype,
        "trust_remote_code_model": trusts,
        "dataset": data or DEMO_CALIBRATION,
        "text_column": column,
        "window_bos": not no_window_bos,
        "num_calibration_samples": windows[0],
        "max_seq_length": windows[1],
        "batch_size": batch_size,
        "shuffle_calibration_samples": False,
    }


def read_changes(settings: Sequence[str] | None, budget: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return the changed values of a recipe by field.

    :param settings: values of ``--set``
    :param fields: fields that have their own option; None where it was not given
    :raises ValueError: a setting is not FIELD=VALUE in valid YAML, or sets a field twice
    """
    import yaml

    changes = {name: value for name, value in fields.items() if value is not None}
    for setting in [*(settings or ()), *([] if budget is None else [f"budget={budget}"])]:
        name, equals, text = setting.partition("=")
        if not name or not equals:
            raise ValueError(f"--set: must be FIELD=VALUE, got {setting!r}. Write, for example, --set prune_ffn=false.")
        if name in changes:
            raise ValueError(f"--set: {name} must be set once, got {setting!r} as well. Remove one.")
        try:
            changes[name] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an invalid date
            raise ValueError(f"{name} must be valid YAML, got {text!r}: {error}. Correct the value.") from None
    return changes


def read_sparsities(text: str) -> list[float]:
    """Parse ``first:last:step`` or a comma-separated list, of numbers above 0 and below 1."""
    sparsities: list[float] = []
    with suppress(ValueError):
        if ":" in text:
            first, last, step = map(float, text.split(":"))
            if 0 < first < last < 1 and step >= 0.001:
                sparsities = [round(first + index * step, 6) for index in range(int((last - first) / step + 1e-6) + 1)]
        else:
            sparsities = [float(part) for part in text.split(",")]
    if not sparsities or not all(0 < value < 1 for value in sparsities):
        raise ValueError(
            f"--sparsity: must be first:last:step or numbers separated by commas, each above 0 and below 1, got {text!r}. "
            "Write, for example, 0.1:0.6:0.1 or 0.2,0.4."
        )
    return sparsities


def read_ranking(
    vocabulary: str | None, data: str | None, column: str, language: str | None, words: Path | None
) -> dict[str, Any] | None:
    """Return fields of :class:`~struprune_plugin.vocabulary.trim_plan.Ranking`, for rows that go first; None if none do."""
    if vocabulary is None:
        if language or words:
            raise ValueError("--language, --words: must come with --vocabulary, got none. Add it, or leave them out.")
        return None
    size = read_vocabulary(vocabulary)
    if data is None:
        raise ValueError(
            "--vocabulary: must come with --data, text like that which the model will read, got none. Add it."
        )
    return {"text": data, "vocabulary": size, "text_column": column, "language": language, "words": words}


def read_vocabulary(text: str) -> float | Literal["auto"]:
    """Parse a share or a number of rows, or ``auto``."""
    with suppress(ValueError):
        return "auto" if text == "auto" else float(text)
    raise ValueError(f"--vocabulary: must be auto, a share or a number of rows, got {text!r}. For half, write 0.5.")


def read_pick(text: str) -> float:
    """Parse a permitted loss: 0.05 for ``+5% perplexity``."""
    match = re.fullmatch(r"\+(\d+(?:[.]\d+)?)% perplexity", text.strip())
    if match is None:
        raise ValueError(f"--pick: must be like '+5% perplexity', got {text!r}. Give how far perplexity may rise.")
    return float(match[1]) / 100


def prepare(screen: Screen, models: Sequence[str], recipe: str | None = None) -> None:
    """Register StruPrune with llm-compressor and transformers, and set what they log.

    :raises ValueError: no such recipe or model, before anything heavy is imported
    """
    if recipe is not None and "\n" not in recipe:  # otherwise it is a YAML text
        find_recipe(recipe)
    for model in models:
        check_model(model)
    from struprune_plugin import registration  # noqa: F401

    screen.set_log()
