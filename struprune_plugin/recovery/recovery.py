"""A recovery on a model that is lent for it: teacher, adapters, states and steps put together, and what is told of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from struprune_plugin.device.ranks import count_ranks
from struprune_plugin.device.room import Room, open_room
from struprune_plugin.maths.adam import AdamRates
from struprune_plugin.passes.journal import Journal
from struprune_plugin.recovery.adapters import attach_adapters
from struprune_plugin.recovery.budget import RecoveryPlacement
from struprune_plugin.recovery.choices import Choices
from struprune_plugin.recovery.layered import LayeredModel, carry_weights, find_compute_dtype
from struprune_plugin.recovery.run import RecoveryRun, Texts
from struprune_plugin.recovery.states import TrainedStates, list_trained
from struprune_plugin.recovery.step import Objective, Stepper, StepSettings
from struprune_plugin.recovery.teacher import LayeredTeacher

_FISHER_SAMPLES = 16


@dataclass(frozen=True)
class Recovery:
    """What is known of a recovery before it starts.

    :param linears: full names of those that get adapters
    :param teacher: folder or hub name of the dense model; None without a loss that asks it
    :param journal: keeps steps, so that a killed run goes on there; None where nobody asked for that
    """

    choices: Choices
    linears: list[str]
    texts: Texts
    teacher: str | None
    placement: RecoveryPlacement
    journal: Journal | None

    def run(self, model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
        """Train a model whose weights are plain tensors on the host; return what the manifest tells of it."""
        began = time.perf_counter()
        with open_room(count_on_cpu=self.choices.measure_memory) as room, self._open_journal() as journal:
            teacher, fisher, told = self._load_teacher(model, room, device)
            with ExitStack() as stack:
                if self.choices.method == "lora":
                    how = self.choices.rank, self.choices.alpha, self.choices.dropout
                    _own(model.get_submodule(name).weight for name in self.linears)
                    with room.on_host():
                        stack.enter_context(attach_adapters(model, self.linears, *how))
                if self.choices.memory == "model":
                    stack.enter_context(carry_weights(model, room, device))
                run = self._make_run(model, room, device, teacher, fisher, journal, self._open_folder(stack))
                with room.stage("teacher"):
                    told |= self._ask_teacher(run, teacher, journal)
                with room.stage("training"):
                    run.run()
            record = self._describe(run, told or None)
            if self.choices.method == "lora":
                merged = run.measure_holdout() if self.texts.holdout else None  # as rounded to the model's dtype
                record |= {"linears": len(self.linears), "versions": {"peft": version("peft")}, "merged": merged}
            return record | self._close(run, room, time.perf_counter() - began)

    # -- the parts ------------------------------------------------------------------------------------------------

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
        choices, layered = self.choices, self._make_layered(model, room, device)
        parameters = list_trained(layered, choices.method)
        _own(parameters.values())
        with room.on_host(choices.memory == "layer"):
            rates, dtype = AdamRates(decay=choices.weight_decay), getattr(torch, choices.state_dtype)
            states = TrainedStates(parameters, rates, dtype, folder, choices.seed)
        objective = Objective(**choices.losses, temperature=choices.distill_temperature, fisher=fisher)
        stepper = Stepper(layered, states, objective, self._make_step_settings())
        every = None if self.journal is None else choices.checkpoint_steps
        return RecoveryRun(layered, states, stepper, objective, choices, self.texts, teacher, journal, every)

    def _make_step_settings(self) -> StepSettings:
        choices = self.choices
        return StepSettings(
            max_norm=choices.max_grad_norm,
            clipping=choices.clipping,
            resident=choices.memory == "model",
            held_sums=None if choices.memory == "model" else self.placement.held_sums,
            holds=choices.method != "full",
            dropout=choices.dropout > 0,
            seed=choices.seed,
        )

    def _make_layered(self, model: PreTrainedModel, room: Room, device: torch.device) -> LayeredModel:
        dtype = find_compute_dtype(model, self.choices.compute)
        ahead = self.placement.ahead and self.choices.memory == "layer"
        return LayeredModel(model, room, device, dtype, ahead, self.placement.vocabulary)

    @contextmanager
    def _open_journal(self) -> Iterator[Journal]:
        """Give the run's journal, or one that goes with the stage."""
        if self.journal is not None:
            yield self.journal
            return
        with tempfile.TemporaryDirectory(prefix="struprune-recovery-") as folder:
            journal = Journal(Path(folder))
            journal.open({})
            yield journal

    def _open_folder(self, stack: ExitStack) -> Path | None:
        """Return a folder of our own for files of states, which goes with the stage; None without one."""
        if self.choices.state_folder is None:
            return None
        Path(self.choices.state_folder).mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="struprune-states-", dir=self.choices.state_folder)
        return Path(stack.enter_context(folder))

    # -- teacher --------------------------------------------------------------------------------------------------

    def _load_teacher(
        self, model: PreTrainedModel, room: Room, device: torch.device
    ) -> tuple[LayeredTeacher | None, Tensor | None, dict[str, Any]]:
        """Return the teacher, the Fisher information of its layers' outputs where that is asked for, and what is told of it."""
        name, choices = self.teacher, self.choices
        if name is None:
            return None, None, {}
        dense = AutoModelForCausalLM.from_pretrained(name, dtype=model.dtype).eval().requires_grad_(False)
        if dense.num_parameters() <= model.num_parameters():
            logger.warning(
                f"teacher: {name!r} is no larger than the model it teaches ({dense.num_parameters():,} parameters). "
                "Name the dense checkpoint in the field teacher."
            )
        teacher = LayeredTeacher(self._make_layered(dense, room, device), choices.micro_batch_size)
        told = {"name": name, "parameters": dense.num_parameters()}
        if not choices.asks("hidden") or choices.hidden_distance != "fisher":
            return teacher, None, told
        with room.stage("teacher"):
            return teacher, teacher.measure_fisher(self.texts.train[:_FISHER_SAMPLES], choices.seed), told

    def _ask_teacher(self, run: RecoveryRun, teacher: LayeredTeacher | None, journal: Journal) -> dict[str, Any]:
        """Keep the teacher's distributions on the disk; let go of its weights where nothing else is asked of it."""
        choices = self.choices
        if teacher is None or not choices.asks("kl"):
            return {}
        samples = [*self.texts.train, *self.texts.holdout]
        teacher.write_logits(samples, run.list_asked(), journal, choices.distill_top_k, choices.distill_temperature)
        if not choices.asks("hidden"):
            teacher.forget_weights()
        return {"cache_bytes": teacher.cache_bytes}

    # -- what is told ---------------------------------------------------------------------------------------------

    def _describe(self, run: RecoveryRun, teacher: dict[str, Any] | None) -> dict[str, Any]:
        curve = run.curve
        return {
            "trained_parameters": run.count_trained(),
            "samples": {"trained": len(self.texts.train), "held_out": len(self.texts.holdout)},
            "teacher": teacher,
            "steps": len(curve.loss),
            "tokens_seen": curve.tokens_seen[-1],
            "best_step": curve.best_step,
            "holdout": curve.holdout,
            "train": {n: getattr(curve, n) for n in ("loss", "learning_rate", "tokens_seen", "seconds")},
        }

    def _close(self, run: RecoveryRun, room: Room, seconds: float) -> dict[str, Any]:
        """Tell a person how it went; return what it took."""
        curve = run.curve
        losses = [row["loss"] for row in curve.holdout if "loss" in row]
        held = f", held-out {losses[0]:.4f} -> {min(losses):.4f}" if losses else ""
        logger.info(
            f"Recovery: {len(curve.loss)} steps, loss {curve.loss[0]:.4f} -> {curve.loss[-1]:.4f}{held}, {seconds:.1f} s"
        )
        stages = [{"name": name, **asdict(stage)} for name, stage in room.stages.items()]
        return {"seconds": round(seconds, 3), "memory_measure": room.measure, "stages": stages}


def _own(parameters: Iterable[nn.Parameter]) -> None:
    """Give every process weights of its own: the host lets processes share them, and each would move them, or merge into them."""
    for parameter in parameters if count_ranks() > 1 else ():
        parameter.data = parameter.data.clone()
