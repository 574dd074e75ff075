"""``RecoveryModifier``: train a pruned model with no more than a decoder layer on the device."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from compressed_tensors.offload import disable_onloading
from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from llmcompressor.utils.dev import get_main_device
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from struprune_plugin.data import load_tokenizer, pack_windows
from struprune_plugin.device.ranks import count_ranks, gather_sequences
from struprune_plugin.device.room import Room, find_free_bytes, open_room
from struprune_plugin.maths.adam import AdamRates
from struprune_plugin.model.footprint import read_sizes
from struprune_plugin.model.layers import QUANTISER_PARAMETERS, find_decoder_layers, find_linear
from struprune_plugin.modifiers.checks import check_alone, check_order, check_targets, list_later_modifiers
from struprune_plugin.modifiers.job import open_journal
from struprune_plugin.modifiers.patterns import check_patterns
from struprune_plugin.modifiers.recovery_stage import RecoveryStage, warn_of_small_teacher
from struprune_plugin.passes.journal import Journal
from struprune_plugin.recovery.adapters import attach_adapters, lift_dispatch, match_linears, seed_random
from struprune_plugin.recovery.budget import BACKWARD_COPIES, RecoveryPlacement, RecoverySizes, place_recovery
from struprune_plugin.recovery.layered import LayeredModel, carry_weights, list_rest
from struprune_plugin.recovery.run import RecoveryRun, RunSettings, Texts
from struprune_plugin.recovery.samples import Sample, read_samples, split_samples
from struprune_plugin.recovery.states import TrainedStates
from struprune_plugin.recovery.step import REST, Clipping, Objective, Stepper, StepSettings
from struprune_plugin.recovery.teacher import LayeredTeacher
from struprune_plugin.recovery.training import Schedule

_RATES = {"lora": 1e-3, "full": 1e-4, "norms_and_biases": 1e-3}  # method -> learning rate
_FISHER_SAMPLES = 16
_USELESS: dict[str, tuple[str, ...]] = {  # without what the key says: fields that do nothing
    "method: lora": ("rank", "alpha", "targets", "dropout"),
    "losses: kl": ("distill_temperature", "distill_top_k"),
    "losses: hidden": ("hidden_distance",),
    "losses: kl or hidden": ("teacher",),
    "data": ("text_column", "seq_length", "tokens"),
    "memory: layer": ("memory_budget", "state_folder"),
    "a held-out part": ("patience",),
}


Loss = Literal["cross_entropy", "kl", "hidden"]


def _learn_from_the_dense() -> dict[Loss, float]:
    return {"kl": 1.0}


class RecoveryModifier(RecoveryStage):
    """
    Trains a pruned model towards the text, or towards the dense model, with one decoder layer on the device at a time.

    A stage between pruning and quantising. A step takes the micro-batches of a batch through the layers together: forward with
    every layer's input kept on the host, the head and its losses in pieces of the vocabulary, then backward, each layer run
    again, and its weights moved as soon as their gradient is there. Weights travel twice a step, whatever the batch; the
    weights, the moments of AdamW and hidden states are at rest on the host. Source: L2L (Pudipeddi et al., 2020), LOMO
    (Lv et al., 2023).

    :param method: ``lora`` trains low-rank adapters and merges them; ``full`` all weights of the decoder layers and the norm
        after them; ``norms_and_biases`` their vectors alone. Embeddings and the head, which pruning leaves whole, stay
    :param memory: ``layer`` holds one decoder layer on the device (two while the next is fetched), ``model`` the whole model
        and the graphs of its forward pass: a quarter fewer operations
    :param rank: of the adapters
    :param alpha: scale of the adapters, divided by the rank
    :param targets: linears of the decoder layers to adapt: full names, last parts (``q_proj``, ``fc1``) or ``re:<pattern>``;
        all that the model family names where left out
    :param dropout: on the inputs of the adapters, in [0, 1); the model's own dropout stays off
    :param losses: weights of ``cross_entropy`` (with the text), ``kl`` (the divergence from the dense model's distribution)
        and ``hidden`` (the distance of every layer's output from the dense one's, mean over layers)
    :param hidden_distance: ``cosine`` (one minus it), or ``fisher``: half the squares, weighed by the diagonal of the Fisher
        information of the dense layer's output
    :param distill_temperature: T of the divergence
    :param distill_top_k: tokens kept of each of the teacher's distributions, beside one bucket for the rest: on the disk,
        ``6 k + 2`` bytes a token
    :param teacher: folder or hub name of the dense model; the checkpoint that is being pruned where left out. It runs layer
        by layer, in passes of its own
    :param data: text to train on: JSON-lines files or hub data sets, mixed evenly; the calibration samples where left out
    :param text_column: of the data
    :param seq_length: tokens of a window; windows are packed without padding
    :param tokens: read so many of the data; all where left out
    :param epochs: passes over the training part, each in an order of its own
    :param max_steps: stop after so many steps
    :param learning_rate: of AdamW, after the warm-up; 0.001, and 0.0001 for ``full``, where left out
    :param schedule: how it falls after the warm-up: ``cosine``, ``linear`` (both to zero) or ``constant``
    :param warmup_fraction: share of the steps in which it rises from zero
    :param weight_decay: of AdamW
    :param batch_size: sequences a step, of all processes together
    :param micro_batch_size: sequences on the device at a time
    :param max_grad_norm: clip of the gradient's norm
    :param clipping: ``layer`` clips every layer's gradient by its own norm, at once; ``global`` by the norm of all, which
        ``method: full`` finds by a second backward pass
    :param seed: of the adapters' start, the order of samples, dropout and rounding
    :param holdout_fraction: the last samples, of which none is trained on (at least one where above 0); what is best on them
        is kept, be it the model as it was
    :param holdout_steps: measure them so often, in steps, and at the end
    :param patience: stop after so many measurements without a better one
    :param checkpoint_steps: with ``checkpoint_dir``: keep so often, in steps, what a killed run goes on from
    :param compute: dtype of weights and hidden states in a layer: ``model``'s own (bfloat16 for float16), or another
    :param state_dtype: of AdamW's moments: ``float32``, or ``bfloat16``, rounded at random
    :param state_folder: where moments and float32 copies lie as files while it trains, if memory does not hold them
    :param memory_budget: bytes that the device may hold; the next layer is not fetched early, and gradients are added up on
        the host, where they do not fit. None takes what an accelerator has free
    :param measure_memory: count on a CPU, too, what an accelerator would hold

    Example recipe::

        pruning_stage:
          pruning_modifiers:
            StruPruneModifier: {sparsity: 0.3}
        recovery_stage:
          recovery_modifiers:
            RecoveryModifier: {method: full, losses: {kl: 1.0}, data: [train.jsonl], tokens: 4000000}
    """

    method: Literal["lora", "full", "norms_and_biases"] = "full"
    memory: Literal["layer", "model"] = "layer"
    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    targets: list[str] | None = Field(default=None, min_length=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    losses: dict[Loss, float] = Field(default_factory=_learn_from_the_dense)
    hidden_distance: Literal["cosine", "fisher"] = "cosine"
    distill_temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    distill_top_k: int = Field(default=64, ge=1)
    data: str | list[str] | None = None
    text_column: str = "text"
    seq_length: int = Field(default=512, ge=2)
    tokens: int | None = Field(default=None, ge=1)
    epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    schedule: Schedule = "cosine"
    warmup_fraction: float = Field(default=0.1, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    batch_size: int = Field(default=8, ge=1)
    micro_batch_size: int = Field(default=4, ge=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    clipping: Clipping = "layer"
    seed: int = 0
    holdout_fraction: float = Field(default=0.05, ge=0, lt=1)
    holdout_steps: int = Field(default=50, ge=1)
    patience: int | None = Field(default=None, ge=1)
    checkpoint_steps: int = Field(default=50, ge=1)
    compute: Literal["model", "float32", "bfloat16"] = "model"
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    state_folder: str | None = None
    memory_budget: int | None = Field(default=None, ge=1)
    measure_memory: bool = False

    _names: list[str] = PrivateAttr(default_factory=list)
    _texts: Texts | None = PrivateAttr(default=None)
    _watched: dict[str, list[Sample]] = PrivateAttr(default_factory=dict)
    _placement: RecoveryPlacement | None = PrivateAttr(default=None)
    _teacher_name: str | None = PrivateAttr(default=None)
    _journal: Journal | None = PrivateAttr(default=None)
    _tokenizer: Any = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check_fields(self) -> RecoveryModifier:
        if self.start is not None or self.end is not None:
            raise ValueError("start and end must be left out: recovery happens once, in a stage of its own.")
        if not any(self.losses.values()) or not all(0 <= weight < float("inf") for weight in self.losses.values()):
            raise ValueError(
                f"losses must hold finite weights, at least 0 and one of them above, got {self.losses}. "
                "Take {kl: 1.0}, say."
            )
        check_patterns("targets", self.targets or [])
        asked = {name for name, weight in self.losses.items() if weight}
        present = {
            "method: lora": self.method == "lora",
            "losses: kl": "kl" in asked,
            "losses: hidden": "hidden" in asked,
            "losses: kl or hidden": bool(asked & {"kl", "hidden"}),
            "data": self.data is not None,
            "memory: layer": self.memory == "layer",
            "a held-out part": self.holdout_fraction > 0,
        }
        for what, names in _USELESS.items():
            for name in () if present[what] else names:
                value = getattr(self, name)
                if (
                    value != type(self).model_fields[name].default
                ):  # saved recipes spell defaults too; they ask for nothing
                    raise ValueError(
                        f"{name} must be left out without {what}, got {value}. Leave it out, or ask for that."
                    )
        return self

    def take_journal(self, journal: Journal) -> None:
        """Take in where steps are kept, so that a killed run goes on there."""
        self._journal = journal

    def take_tokenizer(self, tokenizer: Any) -> None:
        """Take in the tokenizer of the run, or where it lies; the model's folder is asked where nobody gives one."""
        self._tokenizer = tokenizer

    def watch(self, texts: Mapping[str, list[Sample]]) -> None:
        """Take in more texts, whose cross entropy is told with every held-out measurement."""
        self._watched = dict(texts)

    # -- lifecycle ------------------------------------------------------------------------------------------------

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        if self.state_folder is not None and Path(self.state_folder).is_file():
            raise ValueError(f"state_folder: must be a folder, {self.state_folder} is a file. Choose another path.")
        check_order(self)
        check_targets(state.model, list_later_modifiers(self))
        self._check_model(state.model)
        if self.method == "lora":
            self._names = match_linears(state.model, self.targets, type(self).__name__)
            self._check_rank(state.model, self._names, self.rank)
        samples = self._read_samples(state)
        self._check_lengths(samples, state.model)
        self._texts = Texts(*split_samples(samples, self.holdout_fraction), self._watched)
        if {"kl", "hidden"} & {name for name, weight in self.losses.items() if weight}:
            self._teacher_name = self._find_teacher(state.model)
        longest = max(len(sample.tokens) for sample in samples)
        self._placement = place_recovery(self._find_budget(), self._read_sizes(state.model, longest))
        if self._journal is not None:
            open_journal(self._journal, state.model, state.data.calib if self.data is None else [])
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        check_alone(self)
        model, device = state.model, get_main_device()
        began = time.perf_counter()
        with (
            seed_random(self.seed, device),
            lift_dispatch(model, device),
            DisableQuantization(model),
            open_room(count_on_cpu=self.measure_memory) as room,
            self._open_journal() as journal,
            ExitStack() as stack,
        ):
            teacher, asked, told = self._load_teacher(model, room, device)
            if self.method == "lora":
                with room.on_host():
                    adapters = attach_adapters(model, self._names, self.rank, self.alpha, self.dropout)
                    stack.enter_context(adapters)
            if self.memory == "model":
                stack.enter_context(carry_weights(model, room, device))
            run = self._make_run(model, room, device, teacher, asked, journal, self._open_folder(stack))
            with room.stage("teacher"):
                told |= self._ask_teacher(run, teacher, journal)
            with room.stage("training"):
                run.run()
        self._record = self._make_record(run, room, told or None, time.perf_counter() - began)
        self._texts = None

    def _make_run(
        self,
        model: PreTrainedModel,
        room: Room,
        device: torch.device,
        teacher: LayeredTeacher | None,
        fisher: Tensor | None,
        journal: Journal,
        folder: Path | None,
    ) -> RecoveryRun:
        assert self._texts is not None
        layered = self._make_layered(model, room, device)
        parameters = list_trained(layered, self.method)
        if count_ranks() > 1:  # the host lets processes share weights: each would move them
            for parameter in parameters.values():
                parameter.data = parameter.data.clone()
        with room.on_host(self.memory == "layer"):
            rates = AdamRates(decay=self.weight_decay)
            states = TrainedStates(parameters, rates, getattr(torch, self.state_dtype), folder, self.seed)
        objective = Objective(**self.losses, temperature=self.distill_temperature, fisher=fisher)
        stepper = Stepper(layered, states, objective, self._make_step_settings())
        return RecoveryRun(
            layered, states, stepper, objective, self._make_run_settings(), self._texts, teacher, journal
        )

    def _make_step_settings(self) -> StepSettings:
        assert self._placement is not None
        return StepSettings(
            max_norm=self.max_grad_norm,
            clipping=self.clipping,
            resident=self.memory == "model",
            sums_on_host=self._placement.sums_on_host,
            holds=self.method != "full",
            dropout=self.dropout > 0,
            seed=self.seed,
        )

    def _make_run_settings(self) -> RunSettings:
        return RunSettings(
            epochs=self.epochs,
            max_steps=self.max_steps,
            learning_rate=self.learning_rate or _RATES[self.method],
            schedule=self.schedule,
            warmup_fraction=self.warmup_fraction,
            batch_size=self.batch_size,
            micro_size=self.micro_batch_size,
            seed=self.seed,
            measure_steps=self.holdout_steps,
            patience=self.patience,
            checkpoint_steps=None if self._journal is None else self.checkpoint_steps,
        )

    def _make_layered(self, model: PreTrainedModel, room: Room, device: torch.device) -> LayeredModel:
        assert self._placement is not None
        dtype, ahead = self._find_dtype(model), self._placement.ahead and self.memory == "layer"
        return LayeredModel(model, room, device, dtype, ahead, self._placement.vocabulary)

    def _make_record(
        self, run: RecoveryRun, room: Room, teacher: dict[str, Any] | None, seconds: float
    ) -> dict[str, Any]:
        curve, texts = run.curve, self._texts
        assert texts is not None
        losses = [row["loss"] for row in curve.holdout if "loss" in row]
        held = f", held-out {losses[0]:.4f} -> {min(losses):.4f}" if losses else ""
        logger.info(
            f"Recovery: {len(curve.loss)} steps, loss {curve.loss[0]:.4f} -> {curve.loss[-1]:.4f}{held}, {seconds:.1f} s"
        )
        return {
            "settings": {n: v for n, v in self.model_dump().items() if n not in Modifier.model_fields},
            "trained_parameters": run.count_trained(),
            "samples": {"trained": len(texts.train), "held_out": len(texts.holdout)},
            "teacher": teacher,
            "steps": len(curve.loss),
            "tokens_seen": curve.tokens_seen[-1],
            "seconds": round(seconds, 3),
            "best_step": curve.best_step,
            "holdout": curve.holdout,
            "train": {n: getattr(curve, n) for n in ("loss", "learning_rate", "tokens_seen", "seconds")},
            "memory_measure": room.measure,
            "stages": [{"name": name, **asdict(stage)} for name, stage in room.stages.items()],
        }

    @contextmanager
    def _open_journal(self) -> Iterator[Journal]:
        """Give the run's journal, or one that goes with the stage."""
        if self._journal is not None:
            yield self._journal
            return
        with tempfile.TemporaryDirectory(prefix="struprune-recovery-") as folder:
            journal = Journal(Path(folder))
            journal.open({})
            yield journal

    def _open_folder(self, stack: ExitStack) -> Path | None:
        """Return a folder of our own for files of states, which goes with the stage; None without one."""
        if self.state_folder is None:
            return None
        Path(self.state_folder).mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="struprune-states-", dir=self.state_folder)
        return Path(stack.enter_context(folder))

    # -- teacher --------------------------------------------------------------------------------------------------

    def _load_teacher(
        self, model: PreTrainedModel, room: Room, device: torch.device
    ) -> tuple[LayeredTeacher | None, Tensor | None, dict[str, Any]]:
        """Return the teacher, the Fisher information of its layers' outputs where that is asked for, and what is told of it."""
        name, texts = self._teacher_name, self._texts
        if name is None:
            return None, None, {}
        assert texts is not None
        dense = AutoModelForCausalLM.from_pretrained(name, dtype=model.dtype).eval().requires_grad_(False)
        warn_of_small_teacher(name, dense.num_parameters(), model)
        teacher = LayeredTeacher(self._make_layered(dense, room, device), self.micro_batch_size)
        told = {"name": name, "parameters": dense.num_parameters()}
        if not self.losses.get("hidden") or self.hidden_distance != "fisher":
            return teacher, None, told
        with room.stage("teacher"):
            return teacher, teacher.measure_fisher(texts.train[:_FISHER_SAMPLES], self.seed), told

    def _ask_teacher(self, run: RecoveryRun, teacher: LayeredTeacher | None, journal: Journal) -> dict[str, Any]:
        """Keep the teacher's distributions on the disk; let go of its weights where nothing else is asked of it."""
        texts = self._texts
        assert texts is not None
        if teacher is None or not self.losses.get("kl"):
            return {}
        samples = [*texts.train, *texts.holdout]
        teacher.write_logits(samples, run.list_asked(), journal, self.distill_top_k, self.distill_temperature)
        if not self.losses.get("hidden"):
            teacher.forget_weights()
        return {"cache_bytes": teacher.cache_bytes}

    # -- what a run reads -----------------------------------------------------------------------------------------

    def _read_samples(self, state: State) -> list[Sample]:
        """Return all samples, in an order that does not depend on the number of processes."""
        if self.data is None:
            samples, _ = read_samples(state.data.calib, type(self).__name__)
            if count_ranks() == 1:
                return samples
            return [Sample(tokens) for tokens in gather_sequences([sample.tokens for sample in samples])]
        tokenizer = self._tokenizer or state.model.config._name_or_path
        tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        sources = [self.data] if isinstance(self.data, str) else self.data
        return [Sample(row) for row in pack_windows(sources, tokenizer, self.seq_length, self.tokens, self.text_column)]

    def _find_dtype(self, model: PreTrainedModel) -> torch.dtype:
        if self.compute != "model":
            return getattr(torch, self.compute)
        return torch.bfloat16 if model.dtype == torch.float16 else model.dtype

    def _find_budget(self) -> int | None:
        return None if self.memory == "model" else self.memory_budget or find_free_bytes()

    def _read_sizes(self, model: PreTrainedModel, longest: int) -> RecoverySizes:
        """Read what the budget is judged by off a model and the shape of a micro-batch."""
        sizes = read_sizes(model, [], torch.Size([self.micro_batch_size, longest]))
        item, head = self._find_dtype(model).itemsize, model.get_output_embeddings()
        with disable_onloading():
            rest = sum(tensor.numel() for tensor in list_rest(model).values())
            head_width = head.weight.shape[1]
        ratio = item / model.dtype.itemsize
        largest = sums = 0
        for name, layer in find_decoder_layers(model):
            counts = self._count_trained(name, layer)
            sums, largest = max(sums, sum(counts)), max(largest, *counts, 0)
        return RecoverySizes(
            layer=round(sizes.layer * ratio) + item * (sums if self.method == "lora" else 0),
            sums=max(4, item) * sums,
            largest=item * largest,
            activations=round(BACKWARD_COPIES * sizes.activations * ratio),
            tokens=self.micro_batch_size * longest,
            rest=item * rest,
            width=max(model.config.hidden_size, head_width),
            item=item,
        )

    def _count_trained(self, name: str, layer: nn.Module) -> list[int]:
        """Return the sizes of what is trained in a layer."""
        if self.method == "lora":
            here = [find_linear(layer, n[len(name) + 1 :]) for n in self._names if n.startswith(f"{name}.")]
            return [self.rank * side for linear in here for side in linear.weight.shape]
        return [p.numel() for p in list_layer_parameters(layer, self.method).values()]


def list_trained(model: LayeredModel, method: str) -> dict[str, nn.Parameter]:
    """Return what a method trains, by layer and name, as :class:`~struprune_plugin.recovery.step.Stepper` wants it."""
    found = {
        f"{index}.{name}": parameter
        for index, layer in enumerate(model.layers)
        for name, parameter in list_layer_parameters(layer, method).items()
    }
    if method != "lora":  # project_in of OPT-350M is a matrix, and stands before the layers
        vectors = {n: p for n, p in model.rest.items() if isinstance(p, nn.Parameter) and p.dim() == 1}
        found |= {f"{REST}.{name}": parameter for name, parameter in vectors.items()}
    return found


def list_layer_parameters(layer: nn.Module, method: str) -> dict[str, nn.Parameter]:
    """Return what a method trains in one layer, by name; adapters are what wants a gradient."""
    named = {n: p for n, p in layer.named_parameters() if n.rpartition(".")[2] not in QUANTISER_PARAMETERS}
    if method == "lora":
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    return {name: parameter for name, parameter in named.items() if method == "full" or parameter.dim() == 1}
