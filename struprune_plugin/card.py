"""The model card of an output folder: README.md with the Hub's metadata, and what was measured of the model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from loguru import logger

from struprune_plugin.checkpoint import find_checkpoint
from struprune_plugin.manifest import MANIFEST_NAME, read_manifest
from struprune_plugin.report import format_bytes, format_table, measure_weight_bytes

CARD_NAME = "README.md"
_CARRIED = ("license", "license_name", "license_link", "language")  # of the dense model's card
_LEGAL = ("LICENSE*", "NOTICE*", "USE_POLICY*")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)$")
_TAGS = ["struprune", "structured-pruning", "llm-compressor"]


def write_card(folder: Path, base: str = "") -> Path:
    """Write the card of an output folder, and carry the dense model's licence over.

    :param base: folder or hub name of the dense model; the manifest's where there is one
    """
    manifest = read_manifest(folder) if (folder / MANIFEST_NAME).is_file() else {}
    base = manifest["model"]["base"] if manifest else base
    source = find_checkpoint(base) if base else None
    carried = _read_card(source)
    if source is not None:
        _carry_legal(source, folder)
    name, hub_name = Path(base).name or "a model", find_hub_name(base, source)
    data = ModelCardData(
        base_model=hub_name,
        base_model_relation="quantized" if _is_quantised(folder) else "finetune" if hub_name else None,
        tags=_TAGS,
        library_name="transformers",
        pipeline_tag="text-generation",
        model_name=f"{name}-pruned",
        eval_results=_list_results(manifest.get("evaluation", {})) or None,
        **{key: carried[key] for key in _CARRIED if key in carried},
    )
    text = f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(_describe(folder, manifest, name, hub_name)) + "\n"
    ModelCard(text)  # raises on what the Hub could not read
    (folder / CARD_NAME).write_text(text, encoding="utf-8")
    return folder / CARD_NAME


def try_write_card(folder: Path, base: str = "") -> None:
    """Write the card; where that fails, say so: no run is lost for its card."""
    try:
        write_card(folder, base)
    except Exception as error:
        logger.warning(f"{folder.name}: no model card is written: {' '.join(str(error).split())}")


def find_hub_name(base: str, folder: Path | None) -> str | None:
    """Return the Hub's name of a model; None for a folder of one's own, which nobody else could find."""
    if not Path(base).is_dir():
        return base if _HUB_NAME.fullmatch(base) else None
    for part in () if folder is None else folder.resolve().parts:
        if found := _CACHED.fullmatch(part):
            return f"{found[1]}/{found[2]}"
    return None


def _read_card(folder: Path | None) -> dict[str, Any]:
    """Return the metadata of a model's own card; nothing where it has none that can be read."""
    file = None if folder is None else folder / CARD_NAME
    if file is None or not file.is_file():
        return {}
    try:
        return ModelCard.load(file, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # whatever its many readers met: a card that is broken has no say
        return {}


def _carry_legal(source: Path, folder: Path) -> None:
    for pattern in _LEGAL:
        for file in source.glob(pattern):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _is_quantised(folder: Path) -> bool:
    return "quantization_config" in _read_config(folder)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _list_results(evaluation: Mapping[str, Any]) -> list[EvalResult]:
    """Return what was measured as the Hub's model index has it."""
    found = []
    for entry in evaluation.get("perplexity", ()):
        label = f"perplexity (windows of {entry['window']} tokens)"
        found.append(_make_result(entry["text"], "perplexity", label, entry["value"]))
    for entry in evaluation.get("tasks", ()):
        found.append(_make_result(entry["task"], entry["metric"], entry["metric"], entry["value"]))
    return found


def _make_result(dataset: str, metric: str, label: str, value: float) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=re.sub(r"\W+", "-", dataset),
        dataset_name=dataset,
        metric_type=metric,
        metric_name=label,
        metric_value=value,
    )


def _describe(folder: Path, manifest: Mapping[str, Any], name: str, hub_name: str | None) -> list[str]:
    """Return the card's paragraphs."""
    link = f"[{hub_name}](https://huggingface.co/{hub_name})" if hub_name else f"`{name}`"
    parts = [
        f"# {name}, pruned",
        f"{link}, made smaller by [llm-compressor]({_HOST}) with StruPrune: whole units are gone.",
    ]
    if manifest:
        parts.append(_describe_pruning(folder, manifest))
    if rows := list_result_rows(manifest.get("evaluation", {})):
        parts += ["## Results", f"```\n{format_table(['', 'dense', 'pruned'], rows)}\n```"]
    parts += ["## Load it", f"```python\n{make_snippet(folder)}```"]
    parts.append(_describe_code(folder))
    if manifest:
        parts += ["## Make it again", _describe_recipe(manifest)]
    return parts


_HOST = "https://github.com/vllm-project/llm-compressor"


def _describe_pruning(folder: Path, manifest: Mapping[str, Any]) -> str:
    budget, model = manifest["budget"], manifest["model"]
    before, after = model["parameters_before"], model["parameters_after"]
    rows = [
        ["parameters", f"{before:,} → {after:,} ({after / before - 1:+.1%})"],
        ["decoder linears removed", f"{budget['met_sparsity']:.1%}"],
        ["weights on disk", format_bytes(measure_weight_bytes(folder))],
        ["allocation over layers", manifest["allocation"]["method"]],
        [
            "calibration",
            f"{manifest['calibration']['num_sequences']} sequences, {manifest['calibration']['num_tokens']:,} tokens",
        ],
    ]
    return "| | |\n|---|---|\n" + "\n".join(f"| {left} | {right} |" for left, right in rows)


def list_result_rows(evaluation: Mapping[str, Any]) -> list[list[str]]:
    """Return (what, dense, pruned) of everything that was measured; standard errors where they are known."""
    rows = []
    for entry in evaluation.get("perplexity", ()):
        told = [f"{value:.2f}" if value is not None else "" for value in (entry["dense"], entry["value"])]
        rows.append([f"perplexity, {entry['text']}, windows of {entry['window']}", *told])
    for entry in evaluation.get("tasks", ()):
        limited = f", {entry['limit']} examples" if entry["limit"] else ""
        cells = [
            format_score(entry["dense"], entry["dense_stderr"]),
            format_score(entry["value"], entry["stderr"]),
        ]
        rows.append([f"{entry['task']}, {entry['metric']}{limited}", *cells])
    return rows


def format_score(value: float | None, error: float | None) -> str:
    """Return a score with its standard error."""
    if value is None:
        return ""
    return f"{value:.4g}" if error is None else f"{value:.3f} ± {error:.3f}"


def make_snippet(folder: Path) -> str:
    """Return Python that loads an output folder and writes a sentence."""
    trust = ", trust_remote_code=True" if "auto_map" in _read_config(folder) else ""
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'path = "."  # this folder, or its name on the Hub\n'
        f'model = AutoModelForCausalLM.from_pretrained(path, dtype="auto"{trust})\n'
        "tokenizer = AutoTokenizer.from_pretrained(path)\n"
        'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))\n"
    )


def _describe_code(folder: Path) -> str:
    if "auto_map" in _read_config(folder):
        return (
            "`trust_remote_code=True` runs the modelling file in this folder: stock classes know no layers of different sizes. "
            "After `import struprune_plugin` it is not needed."
        )
    return "The stock classes load it; no code of the folder runs."


def _describe_recipe(manifest: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in manifest.get("versions", {}).items())
    return (
        "`recipe.yaml` is what was run, `struprune.json` what it decided, layer by layer. On the same model and calibration text "
        f"the same recipe gives the same weights.{f' Versions: {versions}.' if versions else ''}"
    )
