"""Removal of whole sublayers, attention or an FFN with its norms: the modules to remove are measured on a tiny instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.export import modeling_struprune as modeling
from struprune_plugin.export.any_class import (
    build_dense,
    list_absent,
    make_dense_config,
    replace_conv1d,
)
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.layout import AttentionLayout, FFNLayout, Sublayer
from struprune_plugin.model.structure.locate import find_stock, locate_layers
from struprune_plugin.model.structure.tiny import build_tiny, draw_tokens
from struprune_plugin.model.units.group import UnitGroup

SUBLAYERS = {  # name in recipes: kinds of modules that may be removed whole
    "none": (),
    "attention": ("attention",),
    "ffn": ("ffn",),
    "both": ("attention", "ffn"),
}
_LEADS = "the first attention module of its type gives the number of cached tokens"
_CLOSE = 1e-5  # relative to the largest logit
_TOKENS, _FIRST = 16, 10  # tokens of a trial: all, and those before the cache is used
_KNOWN: dict[tuple[Any, str], list[dict[str, Sublayer]]] = {}


def allow_sublayers(model: Any, groups: Sequence[UnitGroup], sublayers: str) -> list[UnitGroup]:
    """Return groups with their ``sublayer`` set, where the recipe allows its removal and the trial on a tiny instance passes.

    :param sublayers: one of :data:`SUBLAYERS`
    :raises ValueError: no sublayer may be removed
    """
    kinds = SUBLAYERS[sublayers]
    if not kinds:
        return list(groups)
    known, found, flaws = find_sublayers(model), [], dict[str, str]()
    for group in groups:
        sublayer = known[group.layer_index].get(group.consumer) if group.module_kind in kinds else None
        if sublayer is not None and sublayer.flaw:
            flaws[sublayer.flaw] = group.name
            sublayer = None
        if sublayer is not None:
            rest = _count_weights(model.get_submodule(group.layer_name), sublayer) - group.num_units * group.unit_cost
            group = replace(group, sublayer=sublayer, rest=rest)
        found.append(group)
    if not any(group.sublayer for group in found):
        flaws = {flaw: name for flaw, name in flaws.items() if flaw != _LEADS} or flaws
        why = next((f"{name}: {flaw}" for flaw, name in flaws.items()), f"no {' and no '.join(kinds)} among the units")
        raise ValueError(
            f"`sublayers: {sublayers}` finds no module that can be removed whole ({why}). Set `sublayers: none`."
        )
    for flaw, name in flaws.items():
        logger.debug(f"sublayers: {name} and modules like it cannot be removed whole: {flaw}")
    return found


def _count_weights(layer: nn.Module, sublayer: Sublayer) -> int:
    return sum(p.numel() for name in sublayer.absent for p in layer.get_submodule(name).parameters())


def remove_sublayer(layer: nn.Module, group: UnitGroup) -> None:
    """Remove a group's module from its decoder layer, with its norms."""
    assert group.sublayer is not None
    for name, parts in group.sublayer.absent.items():
        modeling.remove_module(layer, name, parts)
    if all(parameter.dim() < 2 for parameter in layer.parameters()):
        for name in group.sublayer.shared:
            modeling.remove_module(layer, name, -1)


def restore_sublayers(model: PreTrainedModel) -> None:
    """Restore removed sublayers at the dense model's size with zero weights; the model's function does not change.

    :raises ValueError: the removed modules have buffers
    """
    path = locate_layers(model)
    dense: nn.Module = build_dense(find_stock(type(model)), make_dense_config(model.config))
    modeling.replace_conv1d(dense)
    for layer, twin in zip(model.get_submodule(path).children(), dense.get_submodule(path).children(), strict=True):
        for name in list_absent(layer):
            made, (owner, _, own) = twin.get_submodule(name), name.rpartition(".")
            if next(made.buffers(), None) is not None:
                raise ValueError(
                    f"{name}: the removed module must hold weights alone, got buffers. Keep the folder as it is."
                )
            made.to_empty(device="cpu").to(model.dtype)
            for parameter in made.parameters():
                parameter.data.zero_()
            setattr(layer.get_submodule(owner), own, made)


# -- the proof ----------------------------------------------------------------------------------------------------------


def find_sublayers(model: PreTrainedModel) -> list[dict[str, Sublayer]]:
    """Return per layer the sublayers of attention and FFNs, by the linear that reads the units.

    Measured once per class and configuration, on a tiny instance: weights on which the logits no longer depend once the linear
    returns zeros are removed with it. The instance without them must give the same logits as with zeros, also token by token.
    """
    config, kind = make_dense_config(model.config), find_stock(type(model))
    key = kind, config.to_json_string()
    if key not in _KNOWN:
        tiny = build_tiny(config, kind=kind)
        replace_conv1d(tiny)
        _KNOWN[key] = _measure(tiny)
    return _KNOWN[key]


def _measure(tiny: PreTrainedModel) -> list[dict[str, Sublayer]]:
    structure, leaders = find_structure(tiny), _list_cache_leaders(tiny)
    found: list[dict[str, Sublayer]] = [{} for _ in range(len(structure))]
    for kind, layout in enumerate(structure.kinds):
        members = [index for index in range(len(structure)) if structure.kind_of[index] == kind]
        for module in (layout.attention, *layout.ffns):
            if module is None:
                continue
            stays = [index for index in members if isinstance(module, AttentionLayout) and index in leaders]
            goes = [index for index in members if index not in stays]
            for index in stays:
                found[index][module.output] = Sublayer(flaw=_LEADS)
            sublayer = _examine(tiny, module, goes) if goes else Sublayer()
            for index in goes:
                found[index][module.output] = sublayer
        last = found[members[-1]]
        if not any(sublayer.flaw for sublayer in last.values()):
            shared = _list_shared(tiny, find_decoder_layers(tiny)[members[-1]][1], last)
            for index in members:
                found[index] = {name: replace(sublayer, shared=shared) for name, sublayer in found[index].items()}
    return found


def _list_shared(tiny: PreTrainedModel, layer: nn.Module, sublayers: Mapping[str, Sublayer]) -> list[str]:
    """Return the modules of a layer that have no effect once all its sublayers are removed, and belong to none of them."""
    tokens, dense = draw_tokens(tiny.config, 2, _TOKENS, seed=5), deepcopy(layer.state_dict())
    before = _list_idle(tiny, layer, tokens)
    for consumer in sublayers:
        _silence(layer, consumer)
    idle = _list_idle(tiny, layer, tokens) - before
    layer.load_state_dict(dense)
    gone = [name for sublayer in sublayers.values() for name in sublayer.absent]
    return _list_owners(layer, idle, before, gone)


def _list_cache_leaders(model: PreTrainedModel) -> set[int]:
    """Return the indices of the first layer of every type, whose caches give transformers the token count and mask sizes."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    return {0, *(types.index(kind) for kind in set(types))}


def _examine(tiny: PreTrainedModel, module: AttentionLayout | FFNLayout, indices: Sequence[int]) -> Sublayer:
    """Return the sublayer of a module that several layers have."""
    tokens = draw_tokens(tiny.config, 2, _TOKENS, seed=5)
    masked, cut = deepcopy(tiny), deepcopy(tiny)
    last = find_decoder_layers(masked)[indices[-1]][1]
    before = _list_idle(masked, last, tokens)
    _silence(last, module.output)
    idle = _list_idle(masked, last, tokens) - before
    try:
        absent = _describe(masked, last, module, idle, before, tokens)
        for index in indices:
            _silence(find_decoder_layers(masked)[index][1], module.output)
            for name, parts in absent.items():
                modeling.remove_module(find_decoder_layers(cut)[index][1], name, parts)
        for run in (_run_whole, _run_cached):
            wanted = run(masked, tokens)
            error = float((run(cut, tokens) - wanted).abs().max() / wanted.abs().max())
            if not error <= _CLOSE:
                return Sublayer(flaw=f"removing it changes the logits by {error:.1e}, compared with zeros in its place")
    except Exception as error:  # any error of a class that relies on the module
        return Sublayer(flaw=f"the model does not run without it ({type(error).__name__}: {error})")
    return Sublayer(absent)


@torch.no_grad()
def _silence(layer: nn.Module, consumer: str) -> None:
    """Set a linear's parameters to zero."""
    for parameter in layer.get_submodule(consumer).parameters():
        parameter.zero_()


@torch.enable_grad()
def _list_idle(model: PreTrainedModel, layer: nn.Module, tokens: Tensor) -> set[str]:
    """Return the names of a layer's parameters on which the logits do not depend."""
    named = dict(layer.named_parameters())
    for parameter in named.values():
        parameter.requires_grad_(True)
    logits = model(input_ids=tokens, use_cache=False).logits
    gradients = torch.autograd.grad((logits * logits.detach().cos()).sum(), list(named.values()), allow_unused=True)
    return {name for name, one in zip(named, gradients, strict=True) if one is None or not one.any()}


def _describe(
    masked: PreTrainedModel,
    layer: nn.Module,
    module: AttentionLayout | FFNLayout,
    idle: set[str],
    before: set[str],
    tokens: Tensor,
) -> dict[str, int]:
    """Return the modules to remove, with their stand-ins: the module that holds the linears where it holds no other used weights,
    else the linears; and other modules none of whose weights are used."""
    own = {f"{module.output}.{name}" for name, _ in layer.get_submodule(module.output).named_parameters()}
    root = module.module if isinstance(module, AttentionLayout) else _find_holder((*module.producers, module.output))
    inside = {f"{root}.{name}" for name, _ in layer.get_submodule(root).named_parameters()} if root else set()
    if not inside or inside - idle - before - own:
        absent = {**dict.fromkeys(module.producers, -1), module.output: 0}
    else:
        absent = {root: _count_parts(masked, layer.get_submodule(root), tokens)}
    return absent | dict.fromkeys(_list_owners(layer, idle, before, list(absent)), -1)


def _list_owners(layer: nn.Module, idle: set[str], before: set[str], gone: Sequence[str]) -> list[str]:
    """Return the modules outside ``gone`` all of whose weights are idle, some of them newly so."""
    held = tuple(f"{name}." for name in gone)
    owners = {name.rpartition(".")[0] for name in idle if not name.startswith(held)} - {""}
    weights = {
        owner: {f"{owner}.{name}" for name, _ in layer.get_submodule(owner).named_parameters()} for owner in owners
    }
    return sorted(owner for owner, names in weights.items() if names <= idle | before)


def _find_holder(names: Sequence[str]) -> str:
    """Return the name of the innermost module that holds all named modules; empty where that is the layer."""
    parts = [name.split(".")[:-1] for name in names]
    common = next((i for i, level in enumerate(zip(*parts, strict=False)) if len(set(level)) > 1), min(map(len, parts)))
    return ".".join(parts[0][:common])


@torch.no_grad()
def _count_parts(model: PreTrainedModel, module: nn.Module, tokens: Tensor) -> int:
    """Return the number of parts of a module's output; 0 where it is a tensor."""
    found: list[int] = []
    handle = module.register_forward_hook(
        lambda _m, _a, output: found.append(0 if isinstance(output, Tensor) else len(output))
    )
    try:
        model(input_ids=tokens, use_cache=False)
    finally:
        handle.remove()
    return found[0]


@torch.no_grad()
def _run_whole(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits


@torch.no_grad()
def _run_cached(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits of the last tokens, computed one by one with a cache of the preceding tokens."""
    output, found = model(input_ids=tokens[:, :_FIRST], use_cache=True), []
    for place in range(_FIRST, _TOKENS):
        output = model(input_ids=tokens[:, place : place + 1], past_key_values=output.past_key_values, use_cache=True)
        found.append(output.logits)
    return torch.cat(found, 1)
