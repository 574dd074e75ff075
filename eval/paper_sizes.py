"""Sizes of the architectures in the paper's tables, counted on models without weights; pruning of random weights."""

import copy
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PreTrainedConfig, PreTrainedModel

from eval.measure import fit_exponent
from struprune_plugin import StruPruneModifier, oneshot, read_manifest
from struprune_plugin.evaluation.text import DEMO_MODEL, pack_windows
from struprune_plugin.model.layers import find_layouts, find_linear
from struprune_plugin.storage.manifest import Manifest

# name -> (hidden size, layers, heads), the published configurations; FFN 4 d, vocabulary 50,272, 2048 positions
OPT_SIZES: dict[str, tuple[int, int, int]] = {
    "OPT-125M": (768, 12, 12),
    "OPT-350M": (1024, 24, 16),
    "OPT-1.3B": (2048, 24, 32),
    "OPT-2.7B": (2560, 32, 32),
    "OPT-6.7B": (4096, 32, 32),
    "OPT-13B": (5120, 40, 40),
    "OPT-30B": (7168, 48, 56),
    "OPT-66B": (9216, 64, 72),
}
# name -> (hidden size, FFN width, layers, heads, KV heads); vocabulary 32,000
LLAMA2_SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "LLaMA-2-7B": (4096, 11008, 32, 32, 32),
    "LLaMA-2-13B": (5120, 13824, 40, 40, 40),
    "LLaMA-2-70B": (8192, 28672, 80, 64, 8),
}
PAPER_MEMORY: dict[str, tuple[float, float, float]] = {  # method -> the paper's gigabytes on the three models
    "FASP": (0.24, 0.69, 2.51),
    "sliceGPT": (0.25, 0.71, 2.42),
    "StruPrune (the paper's)": (0.02, 0.02, 0.10),
}
MEMORY_MODELS = ("OPT-125M", "OPT-350M", "OPT-1.3B")


@dataclass(frozen=True)
class ModelSize:
    """Parameters of one model, biases and norms counted.

    :param total: of the whole model, tied weights once
    :param layer: of one decoder layer
    :param ffn: of its FFN's linears
    :param attention: of its attention's linears
    """

    name: str
    hidden_size: int
    num_layers: int
    total: int
    layer: int
    ffn: int
    attention: int


def make_opt_config(name: str, **changes: Any) -> OPTConfig:
    """Return the configuration of a published OPT."""
    width, layers, heads = OPT_SIZES[name]
    odd = {"do_layer_norm_before": False, "word_embed_proj_dim": 512} if name == "OPT-350M" else {}
    values: dict[str, Any] = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 4 * width}
    values |= {"num_hidden_layers": layers, "num_attention_heads": heads}
    values |= {"vocab_size": 50272, "max_position_embeddings": 2048}
    return OPTConfig(**values | odd | changes)


def make_llama_config(name: str, **changes: Any) -> LlamaConfig:
    """Return the configuration of a published LLaMA-2."""
    width, ffn, layers, heads, kv_heads = LLAMA2_SIZES[name]
    values: dict[str, Any] = {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers}
    values |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    values |= {"vocab_size": 32000, "tie_word_embeddings": False}
    return LlamaConfig(**values | changes)


def count_sizes(name: str, config: PreTrainedConfig) -> ModelSize:
    """Count a model of a configuration on one decoder layer, built without weights; the others are like it."""
    single = copy.deepcopy(config)
    single.num_hidden_layers = 1
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(single)
    layer, layout = find_layouts(model)[0]
    attention_units, ffn_units = layout.units[:2]

    def count(names: Sequence[str]) -> int:
        return sum(p.numel() for linear in names for p in find_linear(layer, linear).parameters())

    ffn = count(ffn_units.list_linears())
    attention = count([*dict.fromkeys(attention_units.list_linears())])
    per_layer = sum(parameter.numel() for parameter in layer.parameters())
    total = model.num_parameters() + (config.num_hidden_layers - 1) * per_layer
    return ModelSize(name, config.hidden_size, config.num_hidden_layers, total, per_layer, ffn, attention)


def count_all() -> list[ModelSize]:
    """Count every OPT and LLaMA-2."""
    configs: dict[str, PreTrainedConfig] = {name: make_opt_config(name) for name in OPT_SIZES}
    configs |= {name: make_llama_config(name) for name in LLAMA2_SIZES}
    return [count_sizes(name, config) for name, config in configs.items()]


def draw_figure(sizes: list[ModelSize], file: Path) -> None:
    """Draw depth and width against the parameters of a model, both axes logarithmic, a line a family."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(9, 3.6), layout="constrained")).subplots(1, 2)
    for family, marker in (("OPT", "o"), ("LLaMA-2", "s")):
        members = sorted((size for size in sizes if size.name.startswith(family)), key=lambda size: size.total)
        totals = [size.total for size in members]
        axes[0].plot(totals, [size.num_layers for size in members], marker=marker, label=family)
        axes[1].plot(totals, [size.layer for size in members], marker=marker, label=family)
    for axis, what in zip(axes, ("decoder layers", "parameters a decoder layer"), strict=True):
        total = [min(size.total for size in sizes), max(size.total for size in sizes)]
        start = axis.lines[0].get_ydata()[0]
        root = [start, start * (total[1] / total[0]) ** 0.5]
        axis.plot(total, root, linestyle=":", color="grey", label="square root of N")
        axis.set(xscale="log", yscale="log", xlabel="parameters N", ylabel=what)
        axis.legend()
    figure.savefig(file, dpi=150)


def estimate_growth(sizes: list[ModelSize]) -> dict[str, float | None]:
    """Return the exponents e of ``depth ~ N^e`` and ``width ~ N^e``."""
    totals = [float(size.total) for size in sizes]
    parts = {"depth": [float(size.num_layers) for size in sizes], "width": [float(size.layer) for size in sizes]}
    return {name: fit_exponent(totals, values) for name, values in parts.items()}


def prune_random(
    model: PreTrainedModel, modifier: StruPruneModifier, samples: int, length: int, batch_size: int = 1
) -> Manifest:
    """Prune a model that came from no folder, in place, on random tokens; return the manifest."""
    ids = torch.randint(4, model.config.vocab_size, (samples, length))
    dataset = pack_windows(ids)
    with tempfile.TemporaryDirectory() as scratch:
        model.config._name_or_path = scratch
        (Path(scratch) / "config.json").write_text(json.dumps(model.config.to_dict()))
        oneshot(
            model=model,
            recipe=modifier,
            output_dir=Path(scratch) / "out",
            dataset=dataset,
            tokenizer=str(DEMO_MODEL),
            batch_size=batch_size,
            num_calibration_samples=samples,
            shuffle_calibration_samples=False,
        )
        return read_manifest(Path(scratch) / "out")
