"""How fast a card prunes, against the floor, and what it holds, by its own counters and by the account."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from eval import scale
from eval.accelerator.steps import Place, Step
from eval.paper_sizes import count_least_budget, make_llama_config, make_opt_config, prune_random
from eval.profile import measure_floor
from struprune_plugin import StruPruneModifier
from struprune_plugin.device.account import LiveBytes
from struprune_plugin.model.layers import find_decoder_layers

SPARSITY = 0.3
WITHIN = 0.1  # the account's peak, of the counters'
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
# shape, budget in decoder layers (None: none, 0: the least), seconds; systems as wide as 70B's take a host hours
MEMORY: tuple[tuple[Shape, float | None, float], ...] = (
    (Shape("LLaMA-2-7B", 32, 1), None, 60.0),
    (Shape("LLaMA-2-7B", 32, 1), 4.0, 150.0),
    (Shape("LLaMA-2-7B", 32, 1), 0.0, 150.0),
    (Shape("LLaMA-2-70B", 80, 1), None, 200.0),
)


def list_pruning_steps(reduced: bool) -> list[Step]:
    """Return the rates, then speed and memory by worth."""
    rates = Step("rates", 60.0 if reduced else 30.0, measure_rates)
    shapes = ((TINY, 120.0),) if reduced else SPEED
    budgets = ((TINY, None, 120.0), (TINY, 0.0, 120.0)) if reduced else MEMORY
    speed = [Step(f"speed: {shape.name}", s, partial(measure_speed, shape), asdict(shape)) for shape, s in shapes]
    memory = [
        Step(f"memory: {s.name}, {tell_budget(budget)}", limit, partial(measure_memory, s, budget), asdict(s))
        for s, budget, limit in budgets
    ]
    return [rates, *speed[:2], *memory[:3], *speed[2:], *memory[3:]]


def tell_budget(layers: float | None) -> str:
    """Name a mode."""
    return "default" if layers is None else f"budget of {layers:g} layers" if layers else "least budget"


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
    _release(place)
    modifier = StruPruneModifier(sparsity=SPARSITY)
    manifest = prune_random(model, modifier, shape.samples, shape.length, shape.batch)
    stages = {stage["name"]: stage["seconds"] for stage in manifest["stages"]}
    seconds, per_layer = stages["whole pass"], stages["whole pass"] / shape.layers
    return {
        "layers": shape.layers,
        "stages": stages,
        "floor": floor,
        "counted": sum(counted.values()),
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


class CardBytes(LiveBytes):
    """The account, of the card's tensors: what an operation makes is counted where it lies on the card."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                self._add(leaf.untyped_storage())
        return result


def measure_memory(shape: Shape, budget_layers: float | None, place: Place) -> dict[str, Any]:
    """Prune with as few sequences as the widest solve needs; return the peak by the counters and by the account.

    Under a budget the card's allocator is held to it: to go past it is an error.
    """
    model = make_random(shape, shape.layers, place)
    width = getattr(model.config, "ffn_dim", None) or model.config.intermediate_size
    layer = sum(p.numel() * p.element_size() for p in find_decoder_layers(model)[0][1].parameters())
    budget = None if budget_layers is None else round(budget_layers * layer)
    if budget == 0:
        budget = count_least_budget(model, {}, shape.length)
    modifier = StruPruneModifier(sparsity=SPARSITY, memory_budget=budget, measure_memory=True)
    with _hold_to(budget, place), CardBytes() if place.device.type == "cuda" else nullcontext() as account:
        manifest = prune_random(model, modifier, width // shape.length + 1, shape.length)
    peak = max(stage["peak_bytes"] for stage in manifest["stages"])
    counted = peak if account is None else account.peak
    reserved = torch.cuda.max_memory_reserved() if place.device.type == "cuda" else None
    return {
        "layer_bytes": layer,
        "budget_bytes": budget,
        "peak_bytes": peak,
        "account_bytes": counted,
        "reserved_bytes": reserved,
        "measure": manifest["memory_measure"],
        "passed": abs(counted / peak - 1) <= WITHIN and (budget is None or peak <= budget),
    }


@contextmanager
def _hold_to(budget: int | None, place: Place) -> Iterator[None]:
    """Let the card's allocator give no more than a budget."""
    if place.device.type == "cpu":
        yield
        return
    _release(place)
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if budget is None else budget / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _release(place: Place) -> None:
    if place.device.type == "cuda":
        torch.cuda.empty_cache()


def describe_speed(row: Mapping[str, Any]) -> list[list[str]]:
    """Return the lines of a shape's table: stage, seconds, floor, ratio."""
    lines = []
    for name, seconds in row["stages"].items():
        floor = row["floor"].get(name)
        ratio = f"{seconds / floor:.2f} ×" if floor else ""
        lines.append([name, f"{seconds:.2f}", f"{floor:.2f}" if floor else "—", ratio])
    return lines
