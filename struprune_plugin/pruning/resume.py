"""Properties by which a run knows the store from which it resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.runtime.distributed import gather

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def describe_run(
    recipe: list[dict[str, Any]], versions: dict[str, str], model: PreTrainedModel, loader: Iterable[dict[str, Tensor]]
) -> dict[str, Any]:
    """Return the properties that must be unchanged for a run to resume, by topic."""
    parts = (batch[name] for batch in loader for name in ("input_ids", "attention_mask") if name in batch)
    return {
        "recipe": recipe,
        "model": describe_weights(model),
        "configuration": json.loads(model.config.to_json_string()),
        "data": digest_tokens(parts),
        "versions": versions,
        "threads": torch.get_num_threads(),
    }


def describe_weights(model: PreTrainedModel) -> str:
    """Return a digest of what a model saves (names, dtypes, shapes, sums) that distinguishes dense models.

    Weights are summed as integers, so that every device gives the same sums, and read once all are computed.
    """
    found = []
    for path, module in model.named_modules():
        for key, weight in {**module._parameters, **module._buffers}.items():
            if weight is not None and key not in module._non_persistent_buffers_set:
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
    """Return the SHA-256 of all processes' token indices [sequences, tokens], in order, in hexadecimal."""
    own = hashlib.sha256()
    for tokens in batches:
        tokens = tokens.detach().cpu().to(torch.int64)
        own.update(repr(tuple(tokens.shape)).encode() + tokens.numpy().tobytes())
    digests = gather(own.digest())
    return (digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()).hex()
