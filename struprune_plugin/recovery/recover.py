"""A recovery from set-up to record: teacher, adapters, optimizer states and steps put together."""

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
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.layerwise.runner import LayerwiseRunner, compute_dtype_of
from struprune_plugin.model.layers import count_parameters
from struprune_plugin.model.structure.tiny import find_auto_class
from struprune_plugin.recovery.adapters import attach_adapters
from struprune_plugin.recovery.memory import RecoveryPlacement
from struprune_plugin.recovery.objective import Objective
from struprune_plugin.recovery.recovery_config import RecoveryConfig
from struprune_plugin.recovery.states import TrainedStates, list_trained
from struprune_plugin.recovery.step import Stepper
from struprune_plugin.recovery.teacher import LayerwiseTeacher
from struprune_plugin.recovery.training import RecoveryRun, RunCurve, Texts
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import count_ranks
from struprune_plugin.storage.checkpoint import read_config
from struprune_plugin.storage.resume_store import ResumeStore


@dataclass(frozen=True)
class Recovery:
    """Setup of a recovery.

    :param linears: full names of those that get adapters
    :param teacher: folder or hub name of the dense model; None without a loss that asks it
    :param store: keeps steps, so that a killed run goes on there; None where nobody asked for that
    """

    config: RecoveryConfig
    linears: list[str]
    texts: Texts
    teacher: str | None
    placement: RecoveryPlacement
    store: ResumeStore | None

    def run(self, model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
        """Train a model whose weights are plain tensors in host memory; return the manifest's record."""
        began = time.perf_counter()
        with DeviceContext.open() as context, self._open_store() as store:
            teacher = self._load_teacher(model, context, device)
            with ExitStack() as stack:
                if self.config.adapters:
                    _own(model.get_submodule(name).weight for name in self.linears)
                    with context.on_host():
                        stack.enter_context(attach_adapters(model, self.linears, self.config.adapters))
                if self.config.memory == "model":
                    stack.callback(model.to, "cpu")
                    model.to(device)
                runner = self._make_runner(model, context, device)
                stepper = self._make_stepper(runner, self._open_folder(stack))
                run = RecoveryRun(self.config, self.texts, stepper, teacher, store, self.store is not None)
                if teacher is not None and self.config.loss.kl:
                    with context.stage("teacher"):
                        asked, texts = run.list_asked(), self.texts
                        teacher.write_logits(texts.samples, asked, store, self.config.loss.kl, texts.describe())
                        if not self.config.loss.hidden:
                            teacher.forget_weights()
                with context.stage("training"):
                    run.run()
            record = self._describe(run, teacher)
            stages = [{"name": name, **asdict(stage)} for name, stage in context.stages.items()]
            seconds = time.perf_counter() - began
            _log(run.curve, seconds)
            return {**record, "seconds": round(seconds, 3), "memory_measure": context.measure, "stages": stages}

    # -- the parts ------------------------------------------------------------------------------------------------

    def _make_runner(self, model: PreTrainedModel, context: DeviceContext, device: torch.device) -> LayerwiseRunner:
        dtype = compute_dtype_of(model, self.config.compute)
        ahead = self.placement.ahead and self.config.memory == "layer"
        return LayerwiseRunner(model, context, device, dtype, ahead, self.placement.vocabulary)

    def _make_stepper(self, runner: LayerwiseRunner, folder: Path | None) -> Stepper:
        """Return the object that takes optimizer steps.

        :param folder: for files of states; None where they lie in memory
        """
        config, on_host = self.config, self.config.memory == "layer"
        parameters = list_trained(runner, config.trained)
        with runner.context.on_host(on_host):
            states = TrainedStates(parameters, config.optimizer, folder, config.seed)
        held_sums = self.placement.held_sums if on_host else None
        return Stepper(runner, states, Objective(runner, config.loss), config, held_sums)

    @contextmanager
    def _open_store(self) -> Iterator[ResumeStore]:
        """Yield the run's store, or a temporary one that is removed after the stage."""
        if self.store is not None:
            yield self.store
            return
        with tempfile.TemporaryDirectory(prefix="struprune-recovery-") as folder:
            store = ResumeStore(Path(folder))
            store.open({})
            yield store

    def _open_folder(self, stack: ExitStack) -> Path | None:
        """Return a temporary folder for optimizer states, removed after the stage; None if states lie in memory."""
        parent = self.config.optimizer.state_folder
        if parent is None:
            return None
        Path(parent).mkdir(parents=True, exist_ok=True)
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="struprune-states-", dir=parent)))

    def _load_teacher(
        self, model: PreTrainedModel, context: DeviceContext, device: torch.device
    ) -> LayerwiseTeacher | None:
        if self.teacher is None:
            return None
        own = (
            self.teacher == model.config._name_or_path
        )  # the model as it was, at the revision from which it was loaded
        revision = getattr(model.config, "_commit_hash", None) if own else None
        kind = find_auto_class(read_config(self.teacher))  # of a wrapper, that of the whole model
        dense = kind.from_pretrained(self.teacher, dtype=model.dtype, revision=revision or "main")
        dense = dense.eval().requires_grad_(False)
        if (size := count_parameters(dense)) <= count_parameters(model):
            logger.warning(
                f"loss.teacher: {self.teacher!r} is no larger than the model it teaches ({size:,} parameters). "
                "Name the dense checkpoint."
            )
        return LayerwiseTeacher(self._make_runner(dense, context, device), self.texts.micro_size)

    def _describe(self, run: RecoveryRun, teacher: LayerwiseTeacher | None) -> dict[str, Any]:
        """Return the manifest's record. Adapters have been merged and rounded to the model's dtype."""
        curve = run.curve
        told: dict[str, Any] = {
            "trained_parameters": sum(value.numel() for value in run.states.parameters.values()),
            "state_bytes": run.states.num_bytes,
            "samples": {"trained": len(self.texts.train), "held_out": len(self.texts.holdout)},
            "teacher": teacher and {"name": self.teacher, **teacher.describe()},
            "steps": len(curve.loss),
            "tokens_seen": curve.tokens_seen[-1],
            "best_step": curve.best_step,
            "holdout": curve.holdout,
            "train": {n: getattr(curve, n) for n in ("loss", "learning_rate", "tokens_seen", "seconds")},
        }
        if self.config.adapters:
            merged = run.measure_holdout() or None
            told |= {"linears": len(self.linears), "versions": {"peft": version("peft")}, "merged": merged}
        return told


def _log(curve: RunCurve, seconds: float) -> None:
    losses = [row["loss"] for row in curve.holdout if "loss" in row]
    held = f", held-out {losses[0]:.4f} -> {min(losses):.4f}" if losses else ""
    loss = f"{curve.loss[0]:.4f} -> {curve.loss[-1]:.4f}"
    logger.info(f"Recovery: {len(curve.loss)} steps, loss {loss}{held}, {seconds:.1f} s")


def _own(parameters: Iterable[nn.Parameter]) -> None:
    """Copy weights for this process: processes share llm-compressor's memory, and each merges its own adapters."""
    for parameter in parameters if count_ranks() > 1 else ():
        parameter.data = parameter.data.clone()
