"""``RecoveryModifier``: the modifier that trains a pruned model; ``LoRARecoveryModifier``: the same with other defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.offload.cache import DiskCache
from llmcompressor.core import Event, State
from llmcompressor.utils.dev import get_main_device
from llmcompressor.utils.helpers import DisableQuantization
from pydantic import PrivateAttr, model_validator
from transformers import PreTrainedModel

from struprune_plugin.evaluation.text import load_tokenizer, pack_windows
from struprune_plugin.export.convert import wrap_save
from struprune_plugin.layerwise.samples import Sample, read_samples, split_samples
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.modifiers.checks import (
    check_alone,
    check_order,
    check_sequences,
    check_targets,
    check_weights,
    list_modifiers,
    split_modifiers,
)
from struprune_plugin.modifiers.patterns import check_patterns
from struprune_plugin.modifiers.setup import open_store
from struprune_plugin.modifiers.stage_modifier import StageModifier
from struprune_plugin.recovery.adapters import lift_dispatch, match_linears, seed_random
from struprune_plugin.recovery.memory import place_recovery, read_recovery_sizes
from struprune_plugin.recovery.recover import Recovery
from struprune_plugin.recovery.recovery_config import RecoveryConfig
from struprune_plugin.recovery.training import Texts
from struprune_plugin.runtime.device_context import find_free_bytes
from struprune_plugin.runtime.distributed import count_ranks, gather
from struprune_plugin.storage.checkpoint import read_config
from struprune_plugin.storage.manifest import MANIFEST_NAME, RecoveryRecord, read_manifest, write_manifest
from struprune_plugin.storage.records import EvaluationRecord


class RecoveryModifier(StageModifier, RecoveryConfig):
    """
    Modifier that trains a pruned model on text or towards the dense model, with one decoder layer on the device at a time.

    It runs between pruning and quantising. In a step, all micro-batches of a batch pass through each layer together. The forward
    pass stores every layer's input on the host, the head and its losses are computed in pieces of the vocabulary, and the
    backward pass runs each layer again and updates its weights as soon as their gradient is complete. Weights are transferred
    twice per step, for any batch size; weights, moments of AdamW and hidden states are kept on the host. Source: L2L (Pudipeddi
    et al., 2020), LOMO (Lv et al., 2023).

    Lifecycle:
        - on_initialize: read the text, check recipe and model
        - on_calibration_start: train
        - on_finalize: add the record to the saved manifest

    Example recipe::

        pruning_stage:
          pruning_modifiers:
            StruPruneModifier: {sparsity: 0.3}
        recovery_stage:
          recovery_modifiers:
            RecoveryModifier: {weights: all, loss: {kl: 1.0}, data: {files: [train.jsonl], tokens: 4000000}}
    """

    _recovery: Recovery | None = PrivateAttr(default=None)
    _tokenizer: Any = PrivateAttr(default=None)
    _watched: dict[str, list[Sample]] = PrivateAttr(default_factory=dict)
    _record: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check_adapter_targets(self) -> RecoveryModifier:
        if self.adapters:
            check_patterns("adapters.targets", self.adapters.targets or [])
        return self

    @property
    def record(self) -> dict[str, Any]:
        """Manifest record of the training; empty before it."""
        return self._record

    def list_paths(self) -> list[str]:
        """Return the paths that the stage itself reads or writes: teacher, text files and state folder."""
        named = [self.loss.teacher, self.optimizer.state_folder, *(self.data.files if self.data else [])]
        return [path for path in named if path is not None]

    def take_tokenizer(self, tokenizer: Any) -> None:
        """Set the run's tokenizer or its path; with None, that of the model's folder is used."""
        self._tokenizer = tokenizer

    def watch(self, texts: Mapping[str, list[Sample]]) -> None:
        """Set texts whose cross entropy is recorded with every held-out measurement."""
        self._watched = dict(texts)

    # -- lifecycle ------------------------------------------------------------------------------------------------

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        check_order(self)
        check_targets(state.model, split_modifiers(self)[1])
        if any(isinstance(module._parameters, DiskCache) for module in state.model.modules()):
            raise ValueError(
                f"model: must be held in memory for {type(self).__name__}, got weights offloaded to disk. Load it without disk "
                "offloading."
            )
        check_weights(state.model)
        self._recovery = self._prepare(state)
        if self._store is not None:
            stages = sum(isinstance(other, RecoveryModifier) for other in list_modifiers())
            if stages > 1:  # their parts would have the same names
                raise ValueError(
                    f"checkpoint_dir: must be left out for several recovery stages in one recipe, got {stages}. Remove it, or run "
                    "each recovery stage by itself."
                )
            open_store(self._store, state.model, [] if self.data else state.data.calib)
        return True

    def _prepare(self, state: State) -> Recovery:
        """Return the recovery that the recipe describes, after reading its text and checking its settings."""
        samples, largest = self._read_samples(state)
        longest = max(len(sample.tokens) for sample in samples)
        check_sequences(state.model, longest, max(int(sample.tokens.max()) for sample in samples))
        folder = self.optimizer.state_folder
        if folder is not None and Path(folder).is_file():
            raise ValueError(f"optimizer.state_folder: must be a folder, {folder} is a file. Choose another path.")
        linears = match_linears(state.model, self.adapters) if self.adapters else []
        micro_size = self.micro_batch_size or largest
        sizes = read_recovery_sizes(state.model, self, linears, torch.Size([micro_size, longest]))
        return Recovery(
            config=self,
            linears=linears,
            texts=Texts(
                *split_samples(samples, self.holdout.fraction if self.holdout else 0), micro_size, self._watched
            ),
            teacher=None if set(self.loss.weights) == {"cross_entropy"} else self._find_teacher(state.model),
            placement=place_recovery(self.memory_budget, None if self.memory == "model" else find_free_bytes(), sizes),
            store=self._store,
        )

    def _read_samples(self, state: State) -> tuple[list[Sample], int]:
        """Return all samples, in an order independent of the number of processes, and the size of their largest batch."""
        if self.data is not None:
            tokenizer = self._tokenizer or state.model.config._name_or_path
            tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
            rows = pack_windows(self.data.files, tokenizer, self.data.window, self.data.tokens, self.data.column)
            return [Sample(row) for row in rows], 1
        samples, largest = read_samples(state.data.calib, type(self).__name__)
        if count_ranks() > 1:
            samples = [Sample(tokens) for part in gather([sample.tokens for sample in samples]) for tokens in part]
        return samples, largest

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        check_alone(self)
        assert self._recovery is not None
        model, device = state.model, get_main_device()
        with seed_random(self.seed, device), lift_dispatch(model, device), DisableQuantization(model):
            left = {name for name, _ in model.named_modules()}  # pruning may have removed whole modules since
            linears = [name for name in self._recovery.linears if name in left]
            told = replace(self._recovery, linears=linears).run(model, device)
        self._recovery = None
        self._record = {"settings": self.dump_fields(), **told}

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        if not self._record:
            return True  # llm-compressor finalises an aborted run
        record, source = self._record, state.model.config._name_or_path

        def add_record(folder: str) -> None:
            """Add the record to the manifest of this run's pruning stage or, without one, of the loaded pruned folder."""
            manifest = next((path for path in (folder, source) if (Path(path) / MANIFEST_NAME).is_file()), None)
            if manifest is not None:  # None if nothing was ever pruned
                told = {
                    "evaluation": EvaluationRecord(),
                    "recovery": RecoveryRecord(**record),
                }  # earlier scores no longer apply
                write_manifest(read_manifest(manifest).model_copy(update=told), folder)

        wrap_save(state.model, add_record)
        return True

    def _find_teacher(self, model: PreTrainedModel) -> str:
        """Return the path of the dense model; raise if it has another vocabulary."""
        name = self.loss.teacher or model.config._name_or_path
        try:
            config = read_config(name)
        except ValueError as error:
            raise ValueError(f"loss.teacher: {str(error).removeprefix('model: ')}") from None
        layers = len(find_decoder_layers(model)), config.get_text_config(decoder=True).num_hidden_layers
        if self.loss.hidden and layers[0] != layers[1]:
            raise ValueError(
                f"loss.hidden: the model must have the teacher's {layers[1]} layers, got {layers[0]}. Remove loss.hidden, or "
                "recover in the recipe that removes the layers."
            )
        own, other = (each.get_text_config(decoder=True).vocab_size for each in (model.config, config))
        if own != other:
            raise ValueError(
                f"loss.teacher: {name!r} must have the model's vocabulary of {own} tokens, got {other}. Name the dense "
                "checkpoint of the pruned model."
            )
        return name


_LORA: dict[str, Any] = {
    **{"adapters": {}, "loss": {"cross_entropy": 1.0}, "micro_batch_size": None},
    "schedule": {"epochs": 2, "learning_rate": 5e-4},
    "optimizer": {"clipping": "global"},
    "holdout": {"fraction": 0.1, "steps": None},
}
_PARTS = (
    "schedule",
    "optimizer",
    "holdout",
)  # mappings whose fields that a recipe leaves out come from _LORA


class LoRARecoveryModifier(RecoveryModifier):
    """
    Modifier that trains low-rank adapters on a pruned model and merges them: a :class:`RecoveryModifier` with other defaults.

    The whole model is on the device, unless there is a ``memory_budget``; a micro-batch is a calibration batch, and the held-out
    loss is measured after every epoch.

    Example recipe::

        recovery_stage:
          recovery_modifiers:
            LoRARecoveryModifier: {adapters: {rank: 8}, loss: {kl: 1.0}}
    """

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, fields: dict[str, Any]) -> dict[str, Any]:
        parts = {name: {**_LORA[name], **fields[name]} for name in _PARTS if isinstance(fields.get(name), dict)}
        return {**_LORA, "memory": "layer" if fields.get("memory_budget") else "model", **fields, **parts}
