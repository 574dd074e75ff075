"""``LoRARecoveryModifier``: the modifier that trains a pruned model by low-rank adapters."""

import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from llmcompressor.core import Event, State
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger
from pydantic import PrivateAttr
from torch import Tensor

from struprune_plugin.export.convert import wrap_save
from struprune_plugin.layerwise.calls import mark_tokens
from struprune_plugin.layerwise.passes import enter_device_context
from struprune_plugin.modifiers.checks import check_order, check_sequences, check_weights, read_batches, read_rows
from struprune_plugin.modifiers.stage_modifier import StageModifier
from struprune_plugin.recovery.training import AdapterTraining, RecoveryConfig, attach_adapters, match_linears
from struprune_plugin.runtime.distributed import check_one_process
from struprune_plugin.runtime.precision import Precision
from struprune_plugin.storage.manifest import MANIFEST_NAME, RecoveryRecord, read_manifest, write_manifest


class LoRARecoveryModifier(StageModifier, RecoveryConfig):
    """
    Modifier that trains low-rank adapters on the calibration text, with one decoder layer on the device at a time.

    It runs between pruning and quantising, and minimises the cross entropy; the adapters that are best on held-out samples are
    merged into the weights. See :class:`~struprune_plugin.recovery.training.AdapterTraining`. For longer or wider training give
    the output folder to ``transformers.Trainer``.

    :param precision: as of :class:`~struprune_plugin.modifiers.fields.StructuredModifier`
    """

    precision: Precision = "auto"

    _samples: tuple[list[Tensor], list[Tensor]] = PrivateAttr(default=([], []))  # to train on, held out
    _micro_size: int = PrivateAttr(default=1)
    _linears: list[str] = PrivateAttr(default_factory=list)
    _record: dict[str, Any] = PrivateAttr(default_factory=dict)  # of the manifest; empty before the training

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        check_order(self, self.split_recipe()[0])
        check_weights(state.model)
        check_one_process("LoRARecoveryModifier", "Prune with several, then train the output in one.")
        batches = read_batches(state.data.calib)
        rows = read_rows(state.model, batches)
        pairs = [(batch.get("labels"), batch["input_ids"], mark_tokens(batch)) for batch in batches]
        same = (
            one.shape == ids.shape and torch.equal(one[kept], ids[kept]) for one, ids, kept in pairs if one is not None
        )
        if not all(same):
            logger.warning("dataset: labels have no effect, the adapters learn all tokens that attention_mask admits.")
        samples = [ids[kept] for ids, kept in rows if kept.sum() > 1]  # one token predicts none
        fraction = self.holdout.fraction if self.holdout else 0.0
        num_train = len(samples) - (max(1, round(fraction * len(samples))) if fraction else 0)
        if num_train < 1:
            raise ValueError(
                f"dataset: must leave a sequence of two tokens to train on, got {len(samples)} of them, {len(samples) - num_train} "
                "held out. Raise the number of samples, or lower holdout.fraction."
            )
        check_sequences(state.model, max(map(len, samples)), max(int(sample.max()) for sample in samples))
        self._micro_size = max(len(batch["input_ids"]) for batch in batches)
        self._samples = samples[:num_train], samples[num_train:]
        self._linears = match_linears(state.model, self.adapters)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        self.check_alone()
        began, model = time.perf_counter(), state.model
        train, held_out = self._samples
        with (
            DisableQuantization(model),
            enter_device_context(model, precision=self.precision) as context,
            context.stage("training"),
            attach_adapters(model, self._linears, self.adapters, self.seed) as parameters,
        ):
            curve = AdapterTraining(model, parameters, self, self._micro_size, context).run(train, held_out)
        self._record = {
            "settings": self.dump_fields(),
            "steps": len(curve.losses),
            **asdict(curve),
            "trained_parameters": sum(parameter.numel() for parameter in parameters),
            "linears": len(self._linears),
            "samples": {"trained": len(train), "held_out": len(held_out)},
            "computed_in": context.computed_in,
            "seconds": round(time.perf_counter() - began, 3),
            "memory_measure": context.measure,
            "stages": [{"name": name, **asdict(stage)} for name, stage in context.stages.items()],
            "versions": {"peft": version("peft")},
        }

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        if not self._record:
            return True  # llm-compressor finalises an aborted run
        changes = {"evaluation": [], "recovery": RecoveryRecord(**self._record)}  # earlier scores are void
        source = state.model.config._name_or_path

        def add_record(folder: str) -> None:
            # to the manifest of this run's pruning or, without one, of the loaded folder
            manifest = next((path for path in (folder, source) if (Path(path) / MANIFEST_NAME).is_file()), None)
            if manifest is not None:  # None if nothing was ever pruned
                write_manifest(read_manifest(manifest).model_copy(update=changes), folder)

        wrap_save(state.model, add_record)
        return True
