"""Process-wide state of torch: what a caller has set does not reach probes, rehearsals and passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn


@contextmanager
def reset_torch() -> Iterator[None]:
    """Run the block with gradients, float32, the CPU, products in full precision and no autocast; also a decorator."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        with suppress(RuntimeError):  # torch does not tell it where it was set per backend
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def copy_inference_tensors(model: nn.Module) -> None:
    """Replace parameters and buffers that were made in ``torch.inference_mode``, through which no gradient flows, by copies."""
    made: dict[int, Any] = {}  # tied ones stay tied
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_inference():
                    copy = tensor.detach().clone()
                    copy = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
                    held[name] = made.setdefault(id(tensor), (copy, tensor))[0]  # the old one lives, and its id with it
