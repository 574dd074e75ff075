"""Digests of the calibration data, batch by batch, for a replay."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from struprune_plugin.runtime.distributed import gather


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
