"""Experts of a mixture as separate linears, and packed again at their new width.

Transformers stores all experts of a layer in a few tensors of three dimensions. llm-compressor splits them into linears. The
position of their rows in the tensors is measured, so that experts of another width can be packed in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading, get_cache_init_kwargs, offload_module
from compressed_tensors.offload.cache import OffloadCache
from compressed_tensors.utils import patch_attr
from llmcompressor.modeling.moe import linear_experts
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes
from torch import Tensor, nn

_WIDTHS = ("moe_intermediate_size", "intermediate_dim", "intermediate_size")  # names that llm-compressor reads
_PACKED = "_struprune_packed"  # attribute of split experts: the original module without its tensors


@dataclass(frozen=True)
class Slot:
    """Position of an expert's linear in a packed tensor.

    :param tensor: name of the packed tensor
    :param transposed: whether it holds columns before rows
    :param first: index of the run among the runs of rows that the tensor holds one after the other, or of the row among the rows
        that alternate in it
    :param runs: number of runs, or of alternating rows
    :param alternates: whether rows alternate
    """

    tensor: str
    transposed: bool
    first: int
    runs: int
    alternates: bool

    def shape(self, linear: torch.Size) -> tuple[int, ...]:
        """Return the shape of one expert's packed tensor, given the shape of its linear's weight or bias."""
        rows, columns = linear[0] * self.runs, linear[1:]
        return (*columns, rows) if self.transposed else (rows, *columns)

    def view(self, packed: Tensor) -> Tensor:
        """Return the rows of one expert's packed tensor that belong to the linear."""
        rows = packed.mT if self.transposed else packed
        if self.alternates:
            return rows[self.first :: self.runs]
        count = len(rows) // self.runs
        return rows[self.first * count : (self.first + 1) * count]


Slots = dict[str, Slot]  # by parameter name within an expert
_SLOTS: dict[tuple[type, tuple[str, ...]], Slots] = {}  # measured slots by class and tensor names; sizes do not matter


def list_experts(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) of every list of split experts in a decoder layer."""
    for name, module in layer.named_modules():
        if isinstance(module, LinearExperts2D):
            yield name, module


def take_apart(model: nn.Module) -> None:
    """Split the experts of a model into linears where llm-compressor supports the class; the model's function does not change."""
    for name, packed in _list_packed(model):
        kind = LinearExperts2D.get_linear_experts_cls(type(packed))
        down = packed.down_proj
        width = down.shape[1 if kind.is_transposed else 2]
        config = _SizedConfig(getattr(packed, "config", getattr(model, "config", None)), width, down.dtype)
        if hasattr(packed, "expert_dim"):  # llm-compressor reads it for Llama 4
            packed.expert_dim = width
        with ExitStack() as stack:
            if down.is_meta:
                stack.enter_context(torch.device("meta"))
            if not isinstance(packed._parameters, OffloadCache):  # llm-compressor always wraps the linears
                stack.enter_context(patch_attr(linear_experts, "offload_module", lambda *_, **__: None))
            made = kind.from_experts_module(packed, config)
        _remember(made, packed)
        model.set_submodule(name, made)
    for _, made in list_experts(model):
        if _PACKED not in vars(made) and hasattr(made, "_source_experts_cls"):  # split by llm-compressor itself
            with torch.device("meta"):
                _remember(made, made._source_experts_cls(made._source_config))


def _list_packed(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, module) of packed experts that llm-compressor supports.

    llm-compressor parses the source of a class, so each class is checked once.
    """
    held = [(name, module) for name, module in model.named_modules() if "down_proj" in module._parameters]
    one_of_each = nn.ModuleList({type(module): module for _, module in held}.values())
    known = {type(module) for _, module in get_non_linearized_moes(one_of_each)}
    return [(name, module) for name, module in held if type(module) in known]


class _SizedConfig:
    """Configuration that reports the experts' present width and dtype to llm-compressor; pruning may have changed them."""

    def __init__(self, config: Any, width: int, dtype: torch.dtype):
        self.config, self.told = config, {**dict.fromkeys(_WIDTHS, width), "dtype": dtype}

    def __getattr__(self, name: str) -> Any:
        if name in ("config", "told"):  # not yet set while the object is copied
            raise AttributeError(name)
        if name == "text_config" and not hasattr(self.config, name):  # Llama 4 is supported in a wrapper only
            return self
        value: Any = self.told[name] if name in self.told else getattr(self.config, name)
        return value.removeprefix("struprune_") if name == "model_type" else value  # of a previously pruned model


def _remember(made: Any, packed: Any) -> None:
    """Store on split experts the information needed to pack them again."""
    with disable_onloading():
        held = dict(packed._parameters)
        shapes = {name: p.shape[1:] for name, p in held.items() if p is not None and p.dim() > 1}
    key = (type(packed), tuple(shapes))
    slots = _SLOTS[key] = _SLOTS.get(key) or _measure_slots(made[0], packed, shapes)
    empty = copy.copy(packed)
    for name in ("forward", "_original_forward_func"):  # set by offloading, which is applied again later
        vars(empty).pop(name, None)
    empty._parameters = {
        name: None if name in {slot.tensor for slot in slots.values()} else held[name] for name in held
    }
    vars(made)[_PACKED] = empty, slots


def _measure_slots(expert: Any, packed: Any, shapes: Mapping[str, torch.Size]) -> Slots:
    """Return the slots of an expert's parameters, found by splitting an expert whose elements are numbered."""
    numbered = copy.copy(packed)
    numbered._parameters, first = {}, 0
    for name, shape in shapes.items():
        numbers = torch.arange(first, first + shape.numel(), dtype=torch.float64).view(1, *shape)
        numbered._parameters[name], first = nn.Parameter(numbers, requires_grad=False), first + shape.numel()
    linears = {name: linear for name, linear in expert.named_children() if isinstance(linear, nn.Linear)}
    taken = {
        name: nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, dtype=torch.float64)
        for name, linear in linears.items()
    }
    with torch.no_grad():
        type(expert).copy_from_experts_module(
            SimpleNamespace(intermediate_size=expert.intermediate_size, **taken), numbered, 0
        )
    return {
        f"{name}.{part}": _read_slot(parameter.long(), numbered)
        for name, linear in taken.items()
        for part, parameter in linear.named_parameters()
    }


def _read_slot(numbers: Tensor, numbered: Any) -> Slot:
    """Return the slot whose view of the numbered packed tensor holds the same numbers as the parameter.

    :raises ValueError: no slot matches
    """
    for name, packed in numbered._parameters.items():
        one = packed[0]
        for transposed in (False, True)[: one.dim()]:
            rows = (one.mT if transposed else one).shape[0]
            runs = rows // len(numbers)
            for alternates, first in ((a, f) for a in (False, True)[:runs] for f in range(runs)):
                slot = Slot(name, transposed, first, runs, alternates)
                found = slot.view(one)
                if found.shape == numbers.shape and torch.equal(found.long(), numbers):
                    return slot
    raise ValueError("experts: their linears must be runs of rows of the packed tensors, got another order.")


def list_packed_shapes(model: nn.Module, narrower: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return the shapes of split experts' tensors after packing, by full tensor name.

    :param narrower: names of lists of experts whose number of channels is halved
    """
    shapes = {}
    for name, experts in list_experts(model):
        for parameter, slot in vars(experts)[_PACKED][1].items() if _PACKED in vars(experts) else ():
            with disable_onloading():
                rows, *columns = experts[0].get_parameter(parameter).shape
            if name in narrower:
                reads = parameter.startswith("down_proj")
                rows, columns = (rows, [c // 2 for c in columns]) if reads else (rows // 2, columns)
            shapes[f"{name}.{slot.tensor}"] = (experts.num_experts, *slot.shape(torch.Size([rows, *columns])))
    return shapes


@torch.no_grad()
def pack_experts(model: nn.Module) -> None:
    """Pack experts that :func:`take_apart` split, at their present width; the model's function does not change.

    Experts with a quantisation scheme stay linears, the form in which llm-compressor saves them.
    """
    for name, experts in [found for found in list_experts(model) if _PACKED in vars(found[1])]:
        if any(hasattr(module, "quantization_scheme") for module in experts.modules()):
            continue
        empty, slots = vars(experts)[_PACKED]
        empty._parameters, empty.num_experts = dict(empty._parameters), experts.num_experts
        with disable_onloading():  # weights are packed where they are
            for parameter, slot in slots.items():
                first = experts[0].get_parameter(parameter)
                if empty._parameters[slot.tensor] is None:
                    shape, trains = (experts.num_experts, *slot.shape(first.shape)), first.requires_grad
                    empty._parameters[slot.tensor] = nn.Parameter(first.new_zeros(shape), requires_grad=trains)
                whole = empty._parameters[slot.tensor]
                for index in range(experts.num_experts):
                    slot.view(whole[index]).copy_(experts[index].get_parameter(parameter))
        if isinstance(experts[0].get_submodule(parameter.rpartition(".")[0])._parameters, OffloadCache):
            offload_module(empty, **get_cache_init_kwargs(experts))
        model.set_submodule(name, empty)
