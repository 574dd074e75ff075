"""State of a loaded model: what its owner has set on it neither changes a run nor is lost by it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

from compressed_tensors.offload import disable_onloading
from compressed_tensors.offload.cache import OffloadCache
from loguru import logger
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ATTRIBUTES = {"gradient_checkpointing": False, "_compiled_call_impl": None}  # as they are in a model from a folder
_INNER = ("__func__", "func", "__wrapped__")  # of bound methods, partial functions and decorators


@contextmanager
def rest_model(model: nn.Module) -> Iterator[None]:
    """Run the block with a model as its folder gives it, and restore its state afterwards.

    It is in eval mode, without gradient checkpointing, compiled calls, replaced ``forward`` functions, and hooks that are not its
    class' own; all its floating-point weights learn. Modules and parameters that the block makes get the state of what was there
    under their names, or around them.
    """
    modules, modes = dict(model.named_modules()), {name: part.training for name, part in model.named_modules()}
    with disable_onloading():
        learning = {name: each.requires_grad for name, each in model.named_parameters()}
    with ExitStack() as stack:
        stack.callback(_restore, model, modes, learning)
        for module in modules.values():
            module.training = False
            for name, value in _ATTRIBUTES.items():
                if getattr(module, name, value) != value:
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, value)
        with disable_onloading():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.requires_grad_(True)
        _lift_hooks(modules, stack)
        _lift_forwards(modules, stack)
        yield


def _restore(model: nn.Module, modes: dict[str, bool], learning: dict[str, bool]) -> None:
    """Set modes and ``requires_grad`` by the names of modules and parameters, or by what was around those that are new."""

    def find_place(name: str) -> str:
        return name if name in modes else find_place(name.rpartition(".")[0])

    for name, module in model.named_modules():
        module.training = modes[find_place(name)]
    with disable_onloading():
        for name, parameter in model.named_parameters():
            around = [learning[name]] if name in learning else []
            around = around or [flag for other, flag in learning.items() if other.startswith(find_place(name))]
            frozen = bool(around) and not any(around)
            if parameter.is_floating_point() and (frozen or name in learning):
                parameter.requires_grad_(not frozen)


def _lift_hooks(modules: dict[str, nn.Module], stack: ExitStack) -> None:
    """Take hooks off that neither torch nor the code of the model's classes has registered; handles on them stay valid."""

    def put_back(held: dict[int, Any], others: dict[int, Any]) -> None:
        new = dict(held)
        held.clear()
        held.update(others | new)

    code = {type(module).__module__ for module in modules.values()}
    for module in modules.values():
        for held in (getattr(module, name) for name in _HOOKS):
            others = {key: hook for key, hook in held.items() if not _is_own(hook, code)}
            if others:
                stack.callback(put_back, held, others)
            for key in others:
                del held[key]


def _is_own(hook: Any, code: set[str]) -> bool:
    hook = hook.func if isinstance(hook, partial) else hook
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return where in code or where.startswith("torch.nn.")


def _lift_forwards(modules: dict[str, nn.Module], stack: ExitStack) -> None:
    """Let modules run by their classes' code."""

    def put_back(module: Any, of_class: Callable[..., Any], forward: Any) -> None:
        if type(module).forward is not of_class:
            return  # the module pads what is narrow now, which another function does not
        if hasattr(module, "_original_forward_func"):  # llm-compressor has offloaded it, and wraps methods alone
            bound = wraps(forward)(lambda _module, *args, **kwargs: forward(*args, **kwargs))
            module._original_forward_func = bound
        else:
            module.forward = forward

    foreign = []
    for name, module in modules.items():
        forward = find_forward(module)
        if forward is not None:
            foreign += [] if wraps_own(module, forward) else [name]
            stack.callback(put_back, module, type(module).forward, forward)
            del module.forward
    if foreign:
        logger.warning(
            f"{len(foreign)} modules run by another forward than their classes', which no folder can hold, so that the run leaves "
            f"it out: {', '.join(foreign[:3])}{' …' if len(foreign) > 3 else ''}"
        )


def find_forward(module: nn.Module) -> Any:
    """Return what has replaced ``forward`` on a module itself, None where nothing has but offloading or a quantiser."""
    is_hosts = isinstance(module._parameters, OffloadCache) or hasattr(module, "quantization_scheme")
    return None if is_hosts or hasattr(module, "_hf_hook") else vars(module).get("forward")


def wraps_own(module: nn.Module, forward: Any) -> bool:
    """Return whether a function that has replaced a module's ``forward`` is a decorated form of its class' (autocast, compile)."""
    of_class = [_unwrap(vars(base)["forward"]) for base in type(module).__mro__ if "forward" in vars(base)]
    return _unwrap(forward) in of_class


def _unwrap(function: Any) -> Any:
    inner = next((getattr(function, name) for name in _INNER if getattr(function, name, None) is not None), None)
    return function if inner is None else _unwrap(inner)
