"""Dtype in which a device computes: float32 where it has no products of the model's own dtype."""

from typing import Literal

import torch

Precision = Literal["auto", "model", "float32"]  # values of the recipe field ``precision``

_CPU_FLAGS = {  # names in torch.cpu.get_capabilities, of x86 and of Arm
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def has_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a device has instructions for products of a dtype; without them, they take up to ten times as long as
    float32's."""
    if device.type == "cpu" and dtype in _CPU_FLAGS:
        flags = torch.cpu.get_capabilities()
        return any(flags.get(name) for name in _CPU_FLAGS[dtype])
    if device.type == "cuda" and dtype is torch.bfloat16:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return True


def find_widened(precision: Precision, device: torch.device) -> frozenset[torch.dtype]:
    """Return the dtypes whose layers compute in float32 on a device."""
    if precision == "model":
        return frozenset()
    return frozenset(dtype for dtype in _CPU_FLAGS if precision == "float32" or not has_products(dtype, device))


def describe_precision(dtype: torch.dtype, precision: Precision, device: torch.device) -> str:
    """Return the dtype in which layers of a dtype compute on a device and, where it is another, why, as text."""
    name = str(dtype).removeprefix("torch.")
    if dtype not in find_widened(precision, device):
        return name
    because = f"precision: {precision}" if precision == "float32" else f"this device has no {name} products"
    return f"float32 ({because}); saved in {name}"
