"""What both forms of the recovery stage are: the fields that they share, what they refuse, and how they reach the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from compressed_tensors.offload.cache import DiskCache
from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from llmcompressor.utils.dev import get_main_device
from llmcompressor.utils.helpers import DisableQuantization
from pydantic import Field, PrivateAttr, model_validator
from transformers import AutoConfig, PreTrainedModel

from struprune_plugin.checkpoint import check_whole
from struprune_plugin.device.ranks import count_ranks, gather_sequences
from struprune_plugin.device.room import find_free_bytes
from struprune_plugin.export import MANIFEST_NAME, read_manifest, wrap_save, write_manifest
from struprune_plugin.modifiers.checks import (
    check_alone,
    check_order,
    check_targets,
    check_vocabulary,
    list_later_modifiers,
    list_modifiers,
)
from struprune_plugin.modifiers.job import open_journal
from struprune_plugin.modifiers.patterns import check_patterns
from struprune_plugin.passes.journal import Journal
from struprune_plugin.recovery.adapters import lift_dispatch, match_linears, seed_random
from struprune_plugin.recovery.budget import place_recovery, read_recovery_sizes
from struprune_plugin.recovery.choices import Choices, Schedule
from struprune_plugin.recovery.recovery import Recovery
from struprune_plugin.recovery.run import Texts
from struprune_plugin.recovery.samples import Sample, read_samples, split_samples


class RecoveryStage(Modifier):
    """A stage that trains a pruned model between pruning and quantising.

    :param rank: of the adapters
    :param alpha: scale of the adapters, divided by the rank
    :param targets: linears of the decoder layers to adapt: full names, last parts (``q_proj``, ``fc1``) or ``re:<pattern>``;
        all that the model family names where left out
    :param dropout: on the inputs of the adapters, in [0, 1); the model's own dropout stays off
    :param distill_temperature: T of the divergence
    :param distill_top_k: tokens kept of each of the teacher's distributions, beside one bucket for the rest: on the disk,
        ``6 k + 2`` bytes a token
    :param teacher: folder or hub name of the dense model; the checkpoint that is being pruned where left out. It runs layer
        by layer, in passes of its own
    :param max_steps: stop after so many steps
    :param schedule: how the learning rate falls after the warm-up: ``cosine``, ``linear`` (both to zero) or ``constant``
    :param warmup_fraction: share of the steps in which it rises from zero
    :param weight_decay: of AdamW
    :param batch_size: sequences a step, of all processes together
    :param max_grad_norm: clip of the gradient's norm
    :param seed: of the adapters' start, the order of samples, dropout and rounding
    :param holdout_fraction: the last samples, of which none is trained on (at least one where above 0); what is best on them
        is kept, be it the model as it was. At 0 the last step's values are kept
    """

    requires_calibration_data: bool = False  # no pass over the layers: it trains between two of them

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    targets: list[str] | None = Field(default=None, min_length=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    distill_temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    distill_top_k: int = Field(default=64, ge=1)
    teacher: str | None = None
    max_steps: int | None = Field(default=None, ge=1)
    schedule: Schedule = "cosine"
    warmup_fraction: float = Field(default=0.1, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    batch_size: int = Field(default=8, ge=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    seed: int = 0
    holdout_fraction: float = Field(default=0.05, ge=0, lt=1)

    _recovery: Recovery | None = PrivateAttr(default=None)
    _journal: Journal | None = PrivateAttr(default=None)
    _watched: dict[str, list[Sample]] = PrivateAttr(default_factory=dict)
    _record: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check_stage(self) -> RecoveryStage:
        if self.start is not None or self.end is not None:
            raise ValueError("start and end must be left out: recovery happens once, in a stage of its own.")
        check_patterns("targets", self.targets or [])
        return self

    @property
    def record(self) -> dict[str, Any]:
        """What the manifest tells of the training; empty before it."""
        return self._record

    def take_journal(self, journal: Journal) -> None:
        """Take in where steps are kept, so that a killed run goes on there."""
        self._journal = journal

    def watch(self, texts: Mapping[str, list[Sample]]) -> None:
        """Take in more texts, whose cross entropy is told with every held-out measurement."""
        self._watched = dict(texts)

    # -- what each form says for itself ---------------------------------------------------------------------------

    def _choose(self, largest: int) -> Choices:
        """Return what is asked for.

        :param largest: sequences of the largest calibration batch; 0 where the stage reads text of its own
        """
        raise NotImplementedError

    def _read_choices(self) -> dict[str, Any]:
        """Return the fields of the recipe that bear the name of a choice."""
        known = type(self).model_fields
        return {field.name: getattr(self, field.name) for field in fields(Choices) if field.name in known}

    def _read_samples(self, state: State) -> tuple[list[Sample], int]:
        """Return all samples, in an order that does not depend on the number of processes, and the largest batch of them."""
        samples, largest = read_samples(state.data.calib, type(self).__name__)
        if count_ranks() > 1:
            samples = [Sample(tokens) for tokens in gather_sequences([sample.tokens for sample in samples])]
        return samples, largest

    def _is_on_calibration_text(self) -> bool:
        return True

    @property
    def asks_teacher(self) -> bool:
        """Whether the dense model's distributions are asked for, in a pass of their own."""
        raise NotImplementedError

    def _tell(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return a record in the words of this form."""
        return record

    # -- lifecycle ------------------------------------------------------------------------------------------------

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        check_order(self)
        check_targets(state.model, list_later_modifiers(self))
        self._check_model(state.model)
        self._recovery = self._prepare(state)
        if self._journal is not None:
            stages = sum(isinstance(other, RecoveryStage) for other in list_modifiers())
            if stages > 1:  # whose parts would bear the same names
                raise ValueError(
                    f"checkpoint_dir: must be left out for several recovery stages in one recipe, got {stages}. Leave it out, or "
                    "recover in runs of their own."
                )
            open_journal(self._journal, state.model, state.data.calib if self._is_on_calibration_text() else [])
        return True

    def _prepare(self, state: State) -> Recovery:
        """Read what the recipe asks of the model and of its text; refuse what cannot succeed."""
        samples, largest = self._read_samples(state)
        self._check_lengths(samples, state.model)
        choices, linears = self._choose(largest), []
        if choices.method == "lora":
            linears = match_linears(state.model, self.targets, type(self).__name__)
            self._check_rank(state.model, linears)
        longest = max(len(sample.tokens) for sample in samples)
        free = None if choices.memory == "model" else find_free_bytes()
        return Recovery(
            choices=choices,
            linears=linears,
            texts=Texts(*split_samples(samples, self.holdout_fraction), self._watched),
            teacher=self._find_teacher(state.model) if choices.asks("kl", "hidden") else None,
            placement=place_recovery(
                choices.memory_budget, free, read_recovery_sizes(state.model, choices, linears, longest)
            ),
            journal=self._journal,
        )

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        check_alone(self)
        assert self._recovery is not None
        model, device = state.model, get_main_device()
        with seed_random(self.seed, device), lift_dispatch(model, device), DisableQuantization(model):
            told = self._recovery.run(model, device)
        settings = {n: v for n, v in self.model_dump().items() if n not in Modifier.model_fields}
        self._record, self._recovery = {"settings": settings, **self._tell(told)}, None

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

    # -- what is refused ------------------------------------------------------------------------------------------

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

    def _check_rank(self, model: PreTrainedModel, names: Sequence[str]) -> None:
        widest = max(min(model.get_submodule(name).weight.shape) for name in names)
        if self.rank > widest:
            raise ValueError(
                f"{type(self).__name__}: rank must be at most {widest}, the smaller side of the largest linear that it adapts, got "
                f"{self.rank}. 8 is a good start."
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
