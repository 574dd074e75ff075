"""Training samples: calibration sequences with a teacher's targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TeacherTargets:
    """Stored part of the teacher's distribution over the next token.

    :param log_probs: log-probabilities at the distillation temperature, shape [..., k + 1], the last one that of all tokens not
        in ``indices``; shape [..., V] in vocabulary order where ``indices`` is None
    :param indices: the k likeliest tokens, shape [..., k]; None where every token is kept
    """

    log_probs: Tensor
    indices: Tensor | None

    def flatten(self) -> TeacherTargets:
        """Return the targets with all leading axes flattened into one axis of tokens."""
        indices = None if self.indices is None else self.indices.flatten(0, -2)
        return TeacherTargets(self.log_probs.flatten(0, -2), indices)


@dataclass(frozen=True)
class Sample:
    """Calibration sequence, on the host, padding removed.

    :param tokens: shape [S], int64
    :param teacher: float16 and int32, for the S - 1 predictions; None without distillation
    """

    tokens: Tensor
    teacher: TeacherTargets | None = None

    @property
    def num_targets(self) -> int:
        return len(self.tokens) - 1


def read_samples(loader: Iterable | None, who: str) -> tuple[list[Sample], int]:
    """Return the calibration sequences in the loader's order, padding removed, and the largest batch size.

    :param who: name of the caller, for the message
    :raises ValueError: there are no data, or no sequence of two tokens
    """
    if loader is None:
        raise ValueError(
            f"dataset: calibration text must be given, got none. {who} trains on it; pass dataset=… to oneshot."
        )
    samples, largest = [], 0
    for batch in loader:
        ids = batch["input_ids"].cpu()
        mask = batch.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask.cpu()
        samples += [Sample(row[kept.bool()]) for row, kept in zip(ids, mask, strict=True)]
        largest = max(largest, len(ids))
    samples = [sample for sample in samples if sample.num_targets > 0]
    if not samples:
        raise ValueError(
            "dataset: calibration text must hold at least one sequence of two tokens, got none. Give longer samples."
        )
    return samples, largest


def split_samples(samples: list[Sample], fraction: float) -> tuple[list[Sample], list[Sample]]:
    """Return (training part, held-out part); the latter is the last ``fraction``, at least one sample where that is above 0.

    :raises ValueError: no sample is left to train on
    """
    num_held = max(1, round(fraction * len(samples))) if fraction > 0 else 0
    if num_held >= len(samples):
        raise ValueError(
            f"holdout.fraction: must leave a sample to train on, got {fraction} ({num_held} of {len(samples)} samples held "
            "out). Lower it or raise the number of samples."
        )
    return samples[: len(samples) - num_held], samples[len(samples) - num_held :]


def make_micro_batches(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Yield groups of at most ``size`` samples of one length."""
    by_length: dict[int, list[Sample]] = {}
    for sample in samples:
        by_length.setdefault(len(sample.tokens), []).append(sample)
    for group in by_length.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def stack_teacher(samples: Sequence[Sample], device: torch.device) -> TeacherTargets:
    """Return the teacher targets of samples of one length, on the device."""
    parts = [sample.teacher for sample in samples]
    log_probs = torch.stack([part.log_probs for part in parts if part is not None]).to(device)
    indices = [part.indices for part in parts if part is not None and part.indices is not None]
    return TeacherTargets(log_probs, torch.stack(indices).to(device) if indices else None)


def find_largest_shape(batches: Iterable[Mapping[str, Tensor]]) -> torch.Size:
    """Return the most sequences and the most tokens per sequence of any batch."""
    return torch.Size(map(max, zip(*(batch["input_ids"].shape for batch in batches), strict=True)))
