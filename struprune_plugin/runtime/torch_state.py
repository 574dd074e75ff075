"""Process-wide state of torch: what a caller has set does not reach probes, rehearsals and passes."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from compressed_tensors.offload.cache import OffloadCache
from torch import nn
from transformers import PreTrainedModel


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
    copies: dict[int, Any] = {}  # tied ones stay tied; the old one lives, and its id with it
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_inference():
                    copy = tensor.detach().clone()
                    copy = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
                    held[name], _ = copies.setdefault(id(tensor), (copy, tensor))


def renew_buffers(model: PreTrainedModel) -> None:
    """Give buffers that no folder holds, such as the frequencies of rotary embeddings, what loading gives: ``model.half()`` rounds
    them. Those that the class does not initialise by itself stay."""
    if hasattr(model.config, "quantization_config"):
        return
    with torch.device("meta"):
        fresh: Any = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    modules = dict(model.named_modules())
    for name, module in fresh.named_modules():
        buffers = {each: module._buffers[each] for each in module._non_persistent_buffers_set}
        buffers = {
            each: buffer for each, buffer in buffers.items() if buffer is not None and buffer.is_floating_point()
        }
        if not buffers or name not in modules or isinstance(modules[name]._buffers, OffloadCache):
            continue
        module._buffers |= {each: torch.full_like(buffer, torch.nan, device="cpu") for each, buffer in buffers.items()}
        fresh._init_weights(module)
        for each in buffers:
            present, wanted = modules[name]._buffers.get(each), module._buffers[each]
            if present is not None and not wanted.isnan().any() and present.shape == wanted.shape:
                modules[name]._buffers[each] = wanted.to(present.device)
