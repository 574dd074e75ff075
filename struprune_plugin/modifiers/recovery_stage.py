"""What every recovery stage refuses, and how it reaches the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressed_tensors.offload.cache import DiskCache
from llmcompressor.core import State
from llmcompressor.modifiers import Modifier
from loguru import logger
from pydantic import PrivateAttr
from transformers import AutoConfig, PreTrainedModel

from struprune_plugin.checkpoint import check_whole
from struprune_plugin.export import MANIFEST_NAME, read_manifest, wrap_save, write_manifest
from struprune_plugin.modifiers.checks import check_vocabulary
from struprune_plugin.recovery.samples import Sample


class RecoveryStage(Modifier):
    """A stage that trains a pruned model between pruning and quantising."""

    requires_calibration_data: bool = False

    teacher: str | None = None

    _record: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def record(self) -> dict[str, Any]:
        """What the manifest tells of the training; empty before it."""
        return self._record

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        if not self._record:
            return True  # an aborted run that the host winds down
        record, source = self._record, state.model.config._name_or_path

        def add_record(folder: str) -> None:
            """Add to the manifest of this run's pruning stage or, without one, of the pruned folder that was loaded."""
            manifest = next((path for path in (folder, source) if (Path(path) / MANIFEST_NAME).is_file()), None)
            if manifest is not None:  # none where nothing was ever pruned
                told = {name: part for name, part in read_manifest(manifest).items() if name != "evaluation"}
                write_manifest({**told, "recovery": record}, folder)  # what was measured before is not this model's

        wrap_save(state.model, add_record)
        return True

    def _check_model(self, model: PreTrainedModel) -> None:
        if getattr(model.config, "quantization_config", None) is not None:
            raise ValueError(
                "model: must not be quantised yet, got a config with quantization_config. "
                "Recover the full-precision checkpoint and quantise afterwards."
            )
        if any(isinstance(module._parameters, DiskCache) for module in model.modules()):
            raise ValueError(
                f"model: must be held in memory for {type(self).__name__}, got weights offloaded to disk. "
                "Load it without disk offloading."
            )

    def _check_lengths(self, samples: Sequence[Sample], model: PreTrainedModel) -> None:
        longest = max(len(sample.tokens) for sample in samples)
        positions = getattr(model.config, "max_position_embeddings", longest)
        check_vocabulary(model, max(int(sample.tokens.max()) for sample in samples))
        if longest > positions:
            raise ValueError(
                f"dataset: samples must have at most the model's {positions} positions, got {longest} tokens. "
                "Lower the length of the samples."
            )

    def _check_rank(self, model: PreTrainedModel, names: Sequence[str], rank: int) -> None:
        widest = max(min(model.get_submodule(name).weight.shape) for name in names)
        if rank > widest:
            raise ValueError(
                f"{type(self).__name__}: rank must be at most {widest}, the smaller side of the largest linear that it adapts, got "
                f"{rank}. 8 is a good start."
            )

    def _find_teacher(self, model: PreTrainedModel) -> str:
        name = self.teacher or model.config._name_or_path
        try:
            config = AutoConfig.from_pretrained(name)
        except Exception as error:  # a broken config.json raises whatever its many readers met
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"teacher: must be a model folder or a hub name that can be loaded, got {name!r}: {first}"
            ) from None
        if config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"teacher: {name!r} must have the model's vocabulary of {model.config.vocab_size} tokens, got "
                f"{config.vocab_size}. Name the checkpoint that is pruned."
            )
        try:
            check_whole(name, config)
        except ValueError as error:
            told = str(error).removeprefix("model: ")
            raise ValueError(f"teacher: {name!r} must be a whole checkpoint, got: {told}") from None
        return name


def warn_of_small_teacher(name: str, parameters: int, model: PreTrainedModel) -> None:
    """Say so where a teacher is no larger than its student."""
    if parameters <= model.num_parameters():
        logger.warning(
            f"teacher: {name!r} is no larger than the model it teaches ({parameters:,} parameters). "
            "Name the dense checkpoint in the field teacher."
        )
