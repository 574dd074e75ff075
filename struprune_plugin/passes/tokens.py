"""What a replay compares: the calibration data, batch by batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from struprune_plugin.device.ranks import gather_digests


class TokenDigest:
    """Tells one run's calibration batches from another's.

    :param check: called with the digest once the first layer has seen all batches
    """

    def __init__(self, check: Callable[[str], None] = lambda _digest: None) -> None:
        self._digest = hashlib.sha256()
        self._check = check

    def add(self, tokens: Tensor) -> None:
        """Take in the token indices of one batch, in order."""
        tokens = tokens.detach().cpu().to(torch.int64)
        self._digest.update(repr(tuple(tokens.shape)).encode() + tokens.numpy().tobytes())

    def finish(self) -> None:
        """Check the digest over the batches of all processes, in hexadecimal."""
        digests = gather_digests(self._digest.digest())
        self._check((digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()).hex())
