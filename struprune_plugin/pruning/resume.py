"""Storage of a pruning pass' finished decoder layers, from which a run resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.model.surgery import LayerCopy
from struprune_plugin.runtime.distributed import gather
from struprune_plugin.storage.manifest import GroupRecord
from struprune_plugin.storage.resume_store import ResumeStore

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


@dataclass(frozen=True)
class LayerOutcome:
    """Outcome of the pruning of one decoder layer.

    :param groups: one record per group, in order
    :param changed: whether anything was removed from this layer or from one before it
    :param copy: for a log, copy of the changed layer
    """

    groups: list[GroupRecord]
    changed: bool
    copy: LayerCopy | None = None


class LayerLog:
    """Log of the finished layers, first to last without a gap.

    :param store: store of the layers
    """

    def __init__(self, store: ResumeStore):
        self._store = store
        self._is_whole = True  # whether every layer read so far was present

    def take(self, index: int) -> LayerOutcome | None:
        """Return a finished layer; None from the first missing layer on."""
        held = self._store.read(_name(index), LayerOutcome) if self._is_whole else None
        self._is_whole = held is not None
        return held

    def keep(self, index: int, outcome: LayerOutcome) -> None:
        """Write a finished layer to the store.

        :raises OSError: the disk refuses
        """
        self._store.write(_name(index), outcome)


def _name(index: int) -> str:
    return f"layer-{index:05d}"


def describe_run(
    recipe: list[dict[str, Any]], versions: dict[str, str], model: PreTrainedModel, loader: Iterable[dict[str, Tensor]]
) -> dict[str, Any]:
    """Return the properties that must be unchanged for a run to resume, by topic.

    :param recipe: fields of every modifier, in order
    :param versions: versions of the packages
    """
    parts = (batch[name] for batch in loader for name in ("input_ids", "attention_mask") if name in batch)
    return {
        "recipe": recipe,
        "model": describe_weights(model),
        "data": digest_tokens(parts),
        "versions": versions,
        "threads": torch.get_num_threads(),
    }


def describe_weights(model: PreTrainedModel) -> str:
    """Return a digest of a model's parameters (names, dtypes, shapes, sums) that distinguishes dense models.

    Weights are summed as integers, so that every device gives the same sums, and read once all are computed.
    """
    found = []
    for path, module in model.named_modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                numbers = weight.detach().view(_INTEGERS[weight.itemsize])
                columns = numbers.reshape(-1, *weight.shape[-1:]).sum(0, dtype=torch.int64)
                places = torch.arange(1, columns.numel() + 1, device=columns.device)
                told = (f"{path}.{key}", str(weight.dtype), tuple(weight.shape))
                found.append((told, columns.sum(), (columns * places).sum()))
    digest = hashlib.sha256()
    for told, *sums in found:
        digest.update(repr((told, [int(part) for part in sums])).encode())
    return digest.hexdigest()


def digest_tokens(batches: Iterable[Tensor]) -> str:
    """Return the SHA-256 of all processes' token indices, in order, in hexadecimal.

    :param batches: shape [sequences, tokens] each
    """
    own = hashlib.sha256()
    for tokens in batches:
        tokens = tokens.detach().cpu().to(torch.int64)
        own.update(repr(tuple(tokens.shape)).encode() + tokens.numpy().tobytes())
    digests = gather(own.digest())
    return (digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()).hex()
