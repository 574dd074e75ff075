"""Experts of a mixture: split by llm-compressor from a few tensors into linears, and packed again at their new width."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading, get_cache_init_kwargs, offload_module
from compressed_tensors.offload.cache import DiskCache, OffloadCache
from compressed_tensors.utils import patch_attr
from llmcompressor.modeling.moe import linear_experts, llama4
from llmcompressor.modeling.moe.gpt_oss import GptOssExpertMLP
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes
from torch import Tensor, nn

_WIDTHS = ("moe_intermediate_size", "intermediate_dim", "intermediate_size")  # names that llm-compressor reads
_PACKED = "_struprune_packed"  # attribute of split experts: the original module without its tensors


@dataclass(frozen=True)
class _Packed:
    """Module from which experts were split, and its tensors' shapes, with ``width`` channels, without the axis of the experts."""

    module: Any
    shapes: Mapping[str, Sequence[int]]
    width: int

    def list_shapes(self, num_experts: int, width: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors for experts of another number or width."""
        shapes = {}
        for name, (*shape,) in self.shapes.items():
            reads = name.startswith("down_proj")
            if not reads or len(shape) > 1:  # else a bias of the outputs
                axis = int(len(shape) > 1 and reads != self.module.is_transposed)
                shape[axis] = shape[axis] // self.width * width
            shapes[name] = (num_experts, *shape)
        return shapes


def list_experts(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) of every list of split experts in a decoder layer."""
    yield from ((name, module) for name, module in layer.named_modules() if isinstance(module, LinearExperts2D))


@contextmanager
def run_experts_fast(model: nn.Module) -> Iterator[None]:
    """Run lists of split experts without a wait for the device at every expert; what they return does not change."""
    plain = LinearExperts2D.forward
    with ExitStack() as stack:
        stack.enter_context(patch_attr(LinearExperts2D, "forward", _run_experts))
        for _, experts in list_experts(model):
            if vars(experts).get("_original_forward_func") is plain:  # set by offloading
                stack.enter_context(patch_attr(experts, "_original_forward_func", _run_experts))
        yield


def _run_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of the experts' weighed outputs, as ``LinearExperts2D.forward`` does, in the same order."""
    expert, order = chosen.T.flatten().sort(stable=True)
    starts = torch.searchsorted(expert, torch.arange(experts.num_experts + 1, device=expert.device)).tolist()
    tokens, factors = order % len(chosen), weights.T.flatten()[order][:, None]
    total = torch.zeros_like(hidden)
    for index, part in enumerate(map(slice, starts, starts[1:])):
        weighed = experts[index](hidden[tokens[part]]) * factors[part]
        total.index_add_(0, tokens[part], weighed.to(total.dtype))
    return total


def linearize_experts(model: nn.Module) -> None:
    """Split the experts of a model into linears where llm-compressor supports the class; the model's function does not change."""
    held = [(name, module) for name, module in model.named_modules() if "down_proj" in module._parameters]
    one_of_each = nn.ModuleList({type(module): module for _, module in held}.values())  # parsing their source is slow
    known = {type(module) for _, module in get_non_linearized_moes(one_of_each)}
    for name, packed in [(name, module) for name, module in held if type(module) in known]:
        linear_class = LinearExperts2D.get_linear_experts_cls(type(packed))
        down = packed.down_proj
        width = down.shape[1 if linear_class.is_transposed else 2]
        config = _SizedConfig(getattr(packed, "config", getattr(model, "config", None)), width, down.dtype)
        if hasattr(packed, "expert_dim"):  # llm-compressor reads it for Llama 4
            packed.expert_dim = width
        with ExitStack() as stack:
            if down.is_meta:
                stack.enter_context(torch.device("meta"))
            if not isinstance(packed._parameters, OffloadCache):  # llm-compressor always wraps the linears
                for module in (linear_experts, llama4):
                    stack.enter_context(patch_attr(module, "offload_module", lambda *_, **__: None))
            experts = linear_class.from_experts_module(packed, config)
        _remember(experts, packed)
        model.set_submodule(name, experts)
    for _, experts in list_experts(model):
        if _PACKED not in vars(experts) and hasattr(experts, "_source_experts_cls"):  # split by llm-compressor itself
            with torch.device("meta"):
                _remember(experts, experts._source_experts_cls(experts._source_config))


class _SizedConfig:
    """Configuration that reports the experts' present width and dtype to llm-compressor; pruning may have changed them."""

    def __init__(self, config: Any, width: int, dtype: torch.dtype):
        self.config, self.present = config, {**dict.fromkeys(_WIDTHS, width), "dtype": dtype}

    def __getattr__(self, name: str) -> Any:
        if name in ("config", "present"):  # not yet set while the object is copied
            raise AttributeError(name)
        if name == "text_config" and not hasattr(self.config, name):  # Llama 4 is supported in a wrapper only
            return self
        value: Any = self.present[name] if name in self.present else getattr(self.config, name)
        return value.removeprefix("struprune_") if name == "model_type" else value  # of a previously pruned model


def _remember(experts: Any, packed: Any) -> None:
    """Store on split experts the information needed to pack them again."""
    with disable_onloading():
        held = dict(packed._parameters)
    packs = ("gate_up_proj", "up_proj", "down_proj")
    shapes = {name: p.shape[1:] for name, p in held.items() if p is not None and name.startswith(packs)}
    empty = copy.copy(packed)
    for name in ("forward", "_original_forward_func"):  # set by offloading, which is applied again later
        vars(empty).pop(name, None)
    empty._parameters = held | dict.fromkeys(shapes)
    vars(experts)[_PACKED] = _Packed(empty, shapes, experts[0].down_proj.in_features)


def list_packed_shapes(model: nn.Module, narrower: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return the shapes of split experts' tensors after packing, by full name, with half the channels in lists of ``narrower``."""
    shapes = dict[str, tuple[int, ...]]()
    for name, experts in list_experts(model):
        if packed := vars(experts).get(_PACKED):
            width = experts[0].down_proj.in_features // (2 if name in narrower else 1)
            tensors = packed.list_shapes(experts.num_experts, width)
            shapes |= {f"{name}.{tensor}": shape for tensor, shape in tensors.items()}
    return shapes


@torch.no_grad()
def pack_experts(model: nn.Module) -> None:
    """Pack split experts at their present width; those with a quantisation scheme stay linears, as llm-compressor saves them."""
    for name, experts in [pair for pair in list_experts(model) if _PACKED in vars(pair[1])]:
        if any(hasattr(module, "quantization_scheme") for module in experts.modules()):
            continue
        packed, down = vars(experts)[_PACKED], experts[0].down_proj
        module, shapes = packed.module, packed.list_shapes(experts.num_experts, down.in_features)
        is_on_disk = isinstance(down._parameters, DiskCache)
        with nullcontext() if is_on_disk else disable_onloading():  # weights are packed where they are
            old = down.weight
            empty = {tensor: nn.Parameter(old.new_zeros(shape), old.requires_grad) for tensor, shape in shapes.items()}
            module._parameters, module.num_experts = module._parameters | empty, experts.num_experts
            for index in range(experts.num_experts):
                experts[index].intermediate_size = down.in_features  # llm-compressor places the rows by it
                experts[index].copy_to_experts_module(module, index)
            if isinstance(experts[0], GptOssExpertMLP):  # reads alternating rows, writes one half after the other
                for tensor in ("gate_up_proj", "gate_up_proj_bias"):
                    halves = module._parameters[tensor]
                    halves.copy_(halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2))
        if isinstance(down._parameters, OffloadCache):
            offload_module(module, **get_cache_init_kwargs(experts))
        model.set_submodule(name, module)
