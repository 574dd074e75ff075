"""An accelerator that is played on a CPU: tensors say that they are on another device, and mixing both sides is refused.

Where no card is at hand, this is what finds tensors left on the wrong side. Every tensor of the played device wraps one of the
host; every operation runs on what is wrapped. Rules are CUDA's: beside tensors of the device, of the host's only scalars may
be read, indices, and what is copied from.
"""

import sys
from contextlib import ExitStack, contextmanager

import torch
from compressed_tensors.offload.utils import send_tensors
from compressed_tensors.utils import patch_attr
from llmcompressor.utils import dev
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = torch.device("lazy", 0)  # a type without kernels of its own, whose backward pass runs on the calling thread
_ANY_SIDE = {"copy_", "_to_copy", "is_same_size", "_has_compatible_shallow_copy_type"}
_READ_BY_HOST = {"_local_scalar_dense", "nonzero", "equal"}


class PlayedTensor(torch.Tensor):
    """A tensor of the played device; ``inner`` is the host's that it wraps."""

    @staticmethod
    def __new__(cls, inner):
        sizes = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        played = torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=DEVICE, **sizes)
        played.inner = inner
        return played

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.inner.data_ptr()


class PlayedDevice(TorchDispatchMode):
    """Runs every operation, on either side.

    :ivar num_operations: that the device ran
    :ivar num_waits: those of them for which the host would wait
    :ivar bytes_in: that were copied to the device
    """

    def __init__(self):
        super().__init__()
        self.num_operations = self.num_waits = self.bytes_in = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, result = func._schema.name.removeprefix("aten::"), _run(func, args, kwargs or {})
        if any(isinstance(tensor, PlayedTensor) for tensor in _list_tensors(args, kwargs or {})):
            self.num_operations += 1
            leaves = name == "_to_copy" and not isinstance(result, PlayedTensor)
            self.num_waits += leaves or name in _READ_BY_HOST
        if name in ("_to_copy", "copy_") and isinstance(result, PlayedTensor):
            source = args[0] if name == "_to_copy" else args[1]
            self.bytes_in += 0 if isinstance(source, PlayedTensor) else source.nbytes
        return result


class _Literals(TorchFunctionMode):
    """Tensors of numbers are made past every dispatch mode: make them on the host, and move them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.new_tensor:
            source, *args = args
            kwargs = {"dtype": source.dtype, "device": source.device} | kwargs
            func = torch.tensor
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == DEVICE.type:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


def _run(func, args, kwargs):
    tensors = _list_tensors(args, kwargs)
    played = [tensor for tensor in tensors if isinstance(tensor, PlayedTensor)]
    if played and len(played) < len(tensors):
        _check_sides(func, args, tensors)
    wanted = kwargs.get("device")
    if wanted is not None:
        wanted = torch.device(wanted)
        kwargs = {**kwargs, "device": torch.device("cpu") if wanted.type == DEVICE.type else wanted}
    result = func(*_map(_unwrap, args), **{name: _map(_unwrap, value) for name, value in kwargs.items()})
    if wanted is not None and wanted.type != DEVICE.type:
        return result
    if wanted is not None or (played and not _is_host_copy(func, args)):
        result = _map(PlayedTensor, result)
    return return_and_correct_aliasing(func, args, kwargs, result)


def _map(function, value):
    """Apply a function to the tensors of an operation, which lie in lists and tuples where there are several."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return type(value)([_map(function, part) for part in value]) if type(value) in (list, tuple) else value


def _list_tensors(args, kwargs):
    found = []
    _map(found.append, (*args, *kwargs.values()))
    return found


def _unwrap(tensor):
    return tensor.inner if isinstance(tensor, PlayedTensor) else tensor


def _is_host_copy(func, args):
    """Tell whether the host's tensor is what a copy from the device ends in."""
    return func._schema.name == "aten::copy_" and not isinstance(args[0], PlayedTensor)


def _check_sides(func, args, tensors):
    name = func._schema.name.removeprefix("aten::")
    of_host = [tensor for tensor in tensors if not isinstance(tensor, PlayedTensor)]
    changes_host = name.endswith("_") and not isinstance(args[0], PlayedTensor)
    fine = name in _ANY_SIDE or (all(tensor.dim() == 0 for tensor in of_host) and not changes_host)
    if name in ("index", "index_put", "index_put_"):
        values = args[2:3] if name != "index" else ()
        fine = isinstance(args[0], PlayedTensor) and all(isinstance(v, PlayedTensor) or v.dim() == 0 for v in values)
    if not fine:
        sides = ", ".join(f"{'device' if isinstance(t, PlayedTensor) else 'host'} {tuple(t.shape)}" for t in tensors)
        raise AssertionError(f"{func}: all tensors must be on one side, got {sides}")


def _send(value, *args, **kwargs):
    """Move as the host's ``send_tensors``, whose tensors change class, which wrappers cannot."""
    match value:
        case torch.Tensor():
            with torch.no_grad():
                moved = value.to(*args, **kwargs)
            if isinstance(value, torch.nn.Parameter) and moved is not value:
                return torch.nn.Parameter(moved, value.requires_grad)
            return moved
        case list() | tuple():
            return type(value)(_send(part, *args, **kwargs) for part in value)
        case dict():
            return {name: _send(part, *args, **kwargs) for name, part in value.items()}
        case _:
            return value


@contextmanager
def play_device():
    """Let the played device be the main device while the block lasts."""
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", {})  # an attribute might be imported only when it is asked for
            if names.get("get_main_device") is dev.get_main_device and module is not dev:
                stack.enter_context(patch_attr(module, "get_main_device", lambda: DEVICE))
            if names.get("send_tensors") is send_tensors:
                stack.enter_context(patch_attr(module, "send_tensors", _send))
        asked = torch.is_autocast_enabled
        off = patch_attr(torch, "is_autocast_enabled", lambda kind=None: kind != DEVICE.type and asked(kind or "cpu"))
        stack.enter_context(off)
        played = stack.enter_context(PlayedDevice())
        stack.enter_context(_Literals())
        yield played
