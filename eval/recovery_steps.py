"""One step of a recovery: its seconds and bytes under one layer and on the whole model, beside an ordinary training loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from eval.account import count_memory
from eval.measure import count_live_bytes, time_side_by_side
from struprune_plugin.layerwise.runner import LayerwiseRunner
from struprune_plugin.layerwise.samples import Sample
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.recovery.objective import Objective
from struprune_plugin.recovery.recovery_config import Loss, Optimizer, RecoveryConfig
from struprune_plugin.recovery.states import TrainedStates, list_trained
from struprune_plugin.recovery.step import Stepper
from struprune_plugin.reporting.tables import format_table
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.offload_plan import MAX_LOGITS
from struprune_plugin.storage.files import format_bytes

CPU = torch.device("cpu")


def find_loss(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of sequences, summed over predicted tokens, by one pass over the whole model."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def measure_steps(pruned: Path, samples: list[Sample], repeats: int) -> dict[str, Any]:
    """Return seconds and peak bytes of one full fine-tuning step on a pruned model: under one layer, with the whole model on
    the device, and by the ordinary loop (autograd over the model, torch's AdamW).

    :param samples: the sequences of the step
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(pruned).float().eval().requires_grad_(False)
    runs: dict[str, Callable[[], object]] = {}
    peaks: dict[str, int] = {}
    for name, resident in (("under one layer", False), ("RecoveryModifier, memory: model", True)):
        runs[name] = _make_step(model, samples, DeviceContext(), resident)
    with count_memory(), DeviceContext.open() as context, context.watch() as peak:
        _make_step(model, samples, context, resident=False)()
    peaks["under one layer"] = peak[0]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    seconds: dict[str, float] = {}
    for name, embeddings in (("ordinary loop", False), ("ordinary loop, embeddings too", True)):
        with _train_all(model, embeddings):
            peaks[name] = weights + count_live_bytes(_make_plain_step(model, samples))
            model.zero_grad()
            seconds |= time_side_by_side({**runs, name: _make_plain_step(model, samples)}, repeats)
    layer = max(sum(p.numel() * 4 for p in layer.parameters()) for _, layer in find_decoder_layers(model))
    return {"seconds": seconds, "peak_bytes": peaks, "layer_bytes": layer, "model_bytes": weights}


class _train_all:  # used as a function
    """Let the weights of a model collect gradients while the block lasts, embeddings and head only on request."""

    def __init__(self, model: PreTrainedModel, embeddings: bool):
        self._model, self._embeddings = model, embeddings

    def __enter__(self) -> None:
        self._model.requires_grad_(True)
        for ends in (self._model.get_input_embeddings(), self._model.get_output_embeddings()):
            ends.requires_grad_(self._embeddings)

    def __exit__(self, *_: object) -> None:
        self._model.requires_grad_(False)
        self._model.zero_grad()


def _make_step(
    model: PreTrainedModel, samples: list[Sample], context: DeviceContext, resident: bool
) -> Callable[[], object]:
    vocabulary = MAX_LOGITS // len(samples[0].tokens) if resident else 1024
    runner = LayerwiseRunner(model, context, CPU, torch.float32, ahead=False, vocabulary=vocabulary)
    with context.on_host():
        states = TrainedStates(list_trained(runner, "all"), Optimizer())
    config = RecoveryConfig(memory="model" if resident else "layer")
    stepper = Stepper(runner, states, Objective(runner, Loss(cross_entropy=1.0)), config, None if resident else 0)
    count = sum(sample.num_targets for sample in samples)
    return lambda: stepper.take([runner.embed([sample]) for sample in samples], count, 1, 1e-9)


def _make_plain_step(model: PreTrainedModel, samples: list[Sample]) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    count = sum(sample.num_targets for sample in samples)

    def step() -> None:
        optimizer.zero_grad()
        for sample in samples:
            (find_loss(model, sample.tokens[None]) / count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def format_steps(told: dict[str, Any]) -> str:
    """Return the table of what a step costs."""
    plain = told["seconds"]["ordinary loop"]
    lines = []
    for name, seconds in told["seconds"].items():
        peak = told["peak_bytes"].get(name)
        cells = ["", ""] if peak is None else [format_bytes(peak), f"{peak / told['layer_bytes']:.1f}"]
        lines.append([name, f"{seconds:.3f}", f"{seconds / plain:.2f} ×", *cells])
    header = ["one step", "seconds", "to the ordinary", "peak on the device", "in layers (float32)"]
    return format_table(header, lines)
