"""Speed of pruning on a card, against the floor."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from eval import scale
from eval.accelerator.steps import Place, Step
from eval.paper_sizes import make_llama_config, make_opt_config, prune_random
from eval.profile import measure_floor
from struprune_plugin import StruPruneModifier

SPARSITY = 0.3
TARGET = 2.0  # times the floor
FASP_SECONDS = 17.0  # OPT-125M, 128 x 2048 tokens, as FASP's paper tells


@dataclass(frozen=True)
class Shape:
    """A model's sizes, with random weights.

    :param all_layers: of the whole model
    :param layers: that are made here
    :param batch: sequences at a time
    """

    name: str
    all_layers: int
    layers: int
    samples: int = 128
    length: int = 2048
    batch: int = 1

    def make_config(self, layers: int) -> PreTrainedConfig:
        if self.name == "tiny":
            sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
            return LlamaConfig(
                **sizes, num_hidden_layers=layers, vocab_size=2048, max_position_embeddings=2 * self.length
            )
        changes = {"num_hidden_layers": layers}
        return (make_opt_config if self.name.startswith("OPT") else make_llama_config)(self.name, **changes)


TINY = Shape("tiny", 4, 2, samples=8, length=32, batch=4)
SPEED: tuple[tuple[Shape, float], ...] = (
    (Shape("OPT-125M", 12, 12, batch=8), 75.0),
    (Shape("LLaMA-2-7B", 32, 4, batch=2), 200.0),
    (Shape("OPT-1.3B", 24, 4, batch=4), 60.0),
    (Shape("LLaMA-2-70B", 80, 4), 420.0),
)


def list_speed_steps(reduced: bool) -> list[Step]:
    """Return the rates, then the shapes by worth."""
    rates = Step("rates", 60.0 if reduced else 30.0, measure_rates)
    shapes = ((TINY, 120.0),) if reduced else SPEED
    return [rates] + [
        Step(f"speed: {shape.name}", s, partial(measure_speed, shape), asdict(shape)) for shape, s in shapes
    ]


def measure_rates(place: Place) -> dict[str, Any]:
    """Return operations and bytes a second."""
    rates = scale.measure_rates(place.device.type, 256 if place.reduced else 8192)
    return {"rates": asdict(rates)}


def make_random(shape: Shape, layers: int, place: Place) -> PreTrainedModel:
    """Return a model of a shape with random bfloat16 weights, on the host; a card draws them fast."""
    torch.manual_seed(0)
    with place.device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape.make_config(layers), dtype=torch.bfloat16)
    return model.eval().to("cpu")


def measure_speed(shape: Shape, place: Place) -> dict[str, Any]:
    """Prune a shape by the default; return seconds by stage, the floor's, and what the whole model would take."""
    rates = scale.Rates(**measure_rates(place)["rates"])
    model = make_random(shape, shape.layers, place)
    counted = scale.count_seconds(_count(model, shape), scale.Job(shape.samples, shape.length, SPARSITY), rates)
    args = argparse.Namespace(batch=shape.batch, length=shape.length, samples=shape.samples)
    floor = measure_floor(model.to(place.device), args)  # type: ignore[arg-type]
    model.to("cpu")
    release_cache(place)
    modifier = StruPruneModifier(sparsity=SPARSITY)
    manifest = prune_random(model, modifier, shape.samples, shape.length, shape.batch)
    stages = {stage.name: stage.seconds for stage in manifest.stages}
    seconds, per_layer = stages["whole pass"], stages["whole pass"] / shape.layers
    return {
        "layers": shape.layers,
        "stages": stages,
        "floor": floor,
        "counted": sum(counted.values()),
        "peaks": {stage.name: stage.peak_bytes for stage in manifest.stages},
        "ratio": seconds / floor["whole pass"],
        "layer_seconds": per_layer,
        "model_seconds": per_layer * shape.all_layers,
        **({"fasp_seconds": FASP_SECONDS} if shape.name == "OPT-125M" else {}),
    }


def _count(model: PreTrainedModel, shape: Shape) -> scale.Size:
    config: Any = model.config
    is_opt = shape.name.startswith("OPT")
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return scale.Size(
        shape.name,
        hidden=config.hidden_size,
        ffn=config.ffn_dim if is_opt else config.intermediate_size,
        layers=shape.layers,
        kv_width=config.hidden_size // config.num_attention_heads * heads,
        linears=2 if is_opt else 3,
    )


def release_cache(place: Place) -> None:
    """Give back what the card's allocator keeps for later."""
    if place.device.type == "cuda":
        torch.cuda.empty_cache()


def describe_speed(row: Mapping[str, Any]) -> list[list[str]]:
    """Return the lines of a shape's table: stage, seconds, floor, target, ratio to the floor, peak."""
    lines = []
    for name, seconds in row["stages"].items():
        floor, peak = row["floor"].get(name), row["peaks"].get(name)
        against = [f"{floor:.2f}", f"{TARGET * floor:.2f}", f"{seconds / floor:.2f} ×"] if floor else ["—", "—", ""]
        lines.append([name, f"{seconds:.2f}", *against, "" if peak is None else f"{peak / 1e9:.3f}"])
    return lines
