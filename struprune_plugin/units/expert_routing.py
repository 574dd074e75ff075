"""What goes with an expert: tensors with one entry each, found on a tiny instance by a number that no other size has."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes
from torch import nn
from transformers import PreTrainedConfig

from struprune_plugin.model.experts import linearize_experts, list_experts, pack_experts
from struprune_plugin.model.structure import tiny
from struprune_plugin.model.structure.locate import find_stock, locate_layers, make_dense_config
from struprune_plugin.model.structure.shrinking import find_first, shrink_config
from struprune_plugin.model.surgery import change_tensor

_WIDE, _KEEP = 10, (0, 2, 4, 5, 7, 9)  # no other size of a tiny instance is 10; as many stay of both halves
_STEPS, _FINE = (8, 4, 2), 16  # experts that go at a time, and how many times as many there must be
_GROUPS, _GROUPS_TAKEN = ("n_group", "num_expert_group"), ("topk_group",)
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts")


@dataclass(frozen=True)
class Routing:
    """What is removed with an expert: the text configuration's ``key`` for their number, a layer's ``tensors`` with one entry each,
    by the axis of the entries, and the (module name, attribute) of its modules that store the number (``counts``)."""

    key: str
    tensors: Mapping[str, int]
    counts: Sequence[tuple[str, str]]

    def drop(self, layer: nn.Module, experts: str, keep: Sequence[int]) -> None:
        """Remove all experts but ``keep`` (sorted) from a decoder layer's list of split experts, and from its router."""
        members: Any = layer.get_submodule(experts)
        left = {str(place): members[index] for place, index in enumerate(keep)}
        others = {name: module for name, module in members._modules.items() if not name.isdigit()}
        members._modules, members.num_experts = left | others, len(keep)
        modules, entries = dict(layer.named_modules()), torch.tensor(keep)
        for name, axis in self.tensors.items():
            owner, _, attribute = name.rpartition(".")
            if hasattr(modules.get(owner), attribute):
                change_tensor(layer, name, lambda old, axis=axis: old.index_select(axis, entries.to(old.device)))  # type: ignore[misc]
        for name, attribute in self.counts:
            if hasattr(module := modules.get(name), attribute):
                setattr(module, attribute, len(keep))


def list_counts(config: PreTrainedConfig, num_experts: int) -> tuple[range, int]:
    """Return the admissible numbers of kept experts per layer, largest first, and the number of groups of experts.

    At least as many experts stay as a token is routed to. Where routing selects groups first, every group keeps the same number,
    at least two, because a group is scored by its best two experts. From 32 experts on, 2, 4 or 8 go at a time if that divides
    their number, so that as many processes of an engine share them evenly.

    :raises ValueError: the text configuration does not give the number of experts that a token is routed to
    """
    values = vars(config)
    top_k = find_first(values, _TOP_K)
    named, taken = find_first(values, _GROUPS), find_first(values, _GROUPS_TAKEN) or 1
    groups = named or 1
    if not top_k:
        raise ValueError(
            f"none of {', '.join(_TOP_K)} gives the number of experts per token in {type(config).__name__}"
        )
    least = groups * max(-(-top_k // taken), 2) if named else top_k
    step = next((step for step in _STEPS if num_experts % step == 0 and num_experts >= _FINE * step), 1)
    return range(num_experts, least - 1, -math.lcm(groups, step)), groups


def find_routing(model: nn.Module) -> Routing:
    """Return the parts of a model that are removed with entire experts; measured once per class and configuration.

    :raises ValueError: an instance from which experts were removed differs from one built with fewer, or none can be built
    """
    model_class, config = tiny.find_class(make_dense_config(model.config), find_stock(type(model)))  # type: ignore[arg-type]
    try:
        return tiny.prove_once("routing", model_class, config, lambda: _measure(model_class, shrink_config(config)))
    except Exception as error:  # any error of a class that relies on its number of experts
        raise ValueError(f"{config.model_type}: {type(error).__name__}: {error}") from None


@torch.no_grad()
def _measure(model_class: Any, small: PreTrainedConfig) -> Routing:
    """Find the key that sets the number of experts, and prove what goes with them."""
    text = vars(small.get_text_config(decoder=True))
    problem = "no key of the configuration gives the number of experts"
    for key in [name for name, value in text.items() if type(value) is int and "expert" in name]:
        try:
            wide, narrow = (_build(model_class, small, key, number) for number in (_WIDE, len(_KEEP)))
        except Exception as error:  # the key may hold another size
            problem = f"{key}: {error}"
            continue
        numbers = [{module.num_experts for _, module in get_non_linearized_moes(model)} for model in (wide, narrow)]
        if numbers == [{_WIDE}, {len(_KEEP)}]:
            routing = Routing(key, *_list_entries(wide))
            _prove(routing, wide, narrow)
            return routing
    raise ValueError(problem)


def _build(model_class: Any, small: PreTrainedConfig, key: str, number: int) -> Any:
    changed = copy.deepcopy(small)
    setattr(changed.get_text_config(decoder=True), key, number)
    return tiny.build_instance(model_class, changed)


def _list_entries(wide: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return ``tensors`` and ``counts`` of :class:`Routing`: whatever has the number of experts besides these themselves."""
    tensors, counts = dict[str, int](), dict[tuple[str, str], None]()
    for layer in wide.get_submodule(locate_layers(wide)).children():
        packed = tuple(name for name, _ in get_non_linearized_moes(layer))
        for name, tensor in chain(layer.named_parameters(), layer.named_buffers()):
            if _WIDE in tensor.shape and name.rpartition(".")[0] not in packed:
                tensors[name] = [*tensor.shape].index(_WIDE)
        for name, module in layer.named_modules():
            counters = [attribute for attribute, value in vars(module).items() if type(value) is int and value == _WIDE]
            counts |= dict.fromkeys((name, attribute) for attribute in counters if name not in packed)
    return tensors, list(counts)


def _prove(routing: Routing, wide: Any, narrow: Any) -> None:
    """Raise where a model with removed experts differs from an instance of the class built with fewer experts."""
    tables = [name for name, tensor in wide.state_dict().items() if tensor.dtype == torch.int64]
    if tables:  # of DeepSeek V4: the experts of every token
        raise ValueError(f"{tables[0]} holds whole numbers, which may be those of experts")
    tokens, num_args = tiny.draw_tokens(wide.config, 2, 24), set[int]()
    linearize_experts(wide)
    for layer in wide.get_submodule(locate_layers(wide)).children():
        for name, members in list_experts(layer):
            routing.drop(layer, name, _KEEP)
            members.register_forward_pre_hook(lambda _module, args: num_args.add(len(args)))
    logits = wide(input_ids=tokens, use_cache=False).logits
    if num_args != {3}:
        raise ValueError("the experts are called without the router's choice of tokens")
    pack_experts(wide)
    narrow.load_state_dict(wide.state_dict())
    wanted = narrow(input_ids=tokens, use_cache=False).logits
    if difference := tiny.TinyRun(narrow, tokens).describe_difference(logits, wanted):
        raise ValueError(
            f"removing experts gives other logits than a configuration with fewer experts, by {difference}"
        )
