"""In-place shrinking of modules, from kept indices and re-solved weights.

Every change assigns an ``nn.Parameter``: in llm-compressor's offload caches an in-place change or ``.data =`` would be lost.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.offload.cache import OffloadCache
from compressed_tensors.quantization import QuantizationStatus, initialize_module_for_quantization
from torch import Tensor, nn

from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.rotation import rotate_columns
from struprune_plugin.linalg.second_moments import append_bias, with_bias_index
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.structure.locate import read_counts, read_numbers, read_padding
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.runtime.distributed import wait_for_all
from struprune_plugin.runtime.residence import drop_onloaded


def slice_group(
    layer: nn.Module,
    group: UnitGroup,
    keep: Tensor,
    weight: Tensor | None = None,
    producers: Mapping[str, Tensor] | None = None,
) -> None:
    """Remove all units but ``keep`` from a decoder layer, and set the consumer's new weights.

    :param keep: sorted kept units, shape [kept], int64; the same number per block
    :param weight: the consumer's, in unit order, bias last, shape [d, kept * columns_per_unit + 1], cast to its dtype; None
        keeps the present ones
    :param producers: new weights of producing linears, by name, kept rows only, bias last; others keep their old rows
    """
    weight, keep = read_kept(layer, group, keep) if weight is None else weight, keep.cpu()
    for name in group.producers:
        producer = find_linear(layer, name)
        rows = group.find_kept_rows(name, keep)
        bias = None if producer.bias is None else producer.bias[rows.to(producer.bias.device)]
        _set_parameters(producer, producer.weight[rows.to(producer.weight.device)], bias)
    for name, new in (producers or {}).items():
        set_weight(find_linear(layer, name), new)
    for name in _list_tensors(layer, group):
        (owner, old), rows = _find_tensor(layer, name), group.find_kept_rows(name, keep)
        _set_tensor(owner, name, old.index_select(_find_axis(old), rows.to(old.device)))
    set_consumer(layer, group, weight)
    group.unit.resize_module(layer, group, len(keep))


def grow_group(layer: nn.Module, group: UnitGroup, keep: Tensor) -> None:
    """Undo the shapes of :func:`slice_group`, with zeros for the removed units; the layer's function does not change.

    :param group: the group before the units were removed
    :param keep: sorted present units, shape [kept], int64
    """
    for name in group.producers:
        producer = find_linear(layer, name)
        kept, old = group.find_kept_rows(name, keep), append_bias(*read_weight(producer))
        grown = old.new_zeros(len(group.find_row_owners(name)), old.shape[1])
        set_weight(producer, grown.index_copy(0, kept, old))
    for name in _list_tensors(layer, group):
        (owner, old), rows = _find_tensor(layer, name), group.find_kept_rows(name, keep)
        if old.dim() > 1 and old.numel() == 1:
            raise ValueError(
                f"{name}: must keep at least two units, which show their axis, got one in shape {[*old.shape]}. Leave the folder "
                "in the per-layer form."
            )
        shape, axis = [*old.shape], _find_axis(old)
        shape[axis] = len(group.find_row_owners(name))
        _set_tensor(owner, name, old.new_zeros(shape).index_copy(axis, rows, old))
    mask_group(layer, group, keep, read_consumer(layer, group))
    group.unit.resize_module(layer, group.resize(len(keep)), group.num_units)


def rotate_group(layer: nn.Module, group: UnitGroup, basis: Tensor) -> None:
    """Rotate every head's values in the producing and the consuming linear; the layer's function does not change.

    :param basis: orthogonal, rows are the new channels, shape [blocks, width, width], float64
    """
    (name,) = group.producers
    set_weight(find_linear(layer, name), rotate_producer(layer, group, basis))
    set_consumer(layer, group, rotate_columns(read_consumer(layer, group), basis, group.columns_per_unit))


def rotate_producer(
    layer: nn.Module, group: UnitGroup, basis: Tensor, fetch: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return the weights of the linear that produces the values, value rows rotated, shape [rows, columns + 1], float64, bias last.

    :param fetch: moves weights to the device of the rotation
    """
    (name,) = group.producers
    rows = append_bias(*read_weight(find_linear(layer, name), fetch))
    basis = basis.to(rows.device)
    values = (group.find_row_owners(name) >= 0).nonzero().flatten().to(rows.device)
    rows[values] = (basis @ rows[values].view(*basis.shape[:2], -1)).flatten(0, 1)
    return rows


def blank_group(layer: nn.Module, group: UnitGroup, keep: Tensor) -> None:
    """Set all rows that belong to units that go to zero, of linears and tensors, and their columns; the shapes stay."""
    for name in group.producers:
        old, kept = append_bias(*read_weight(find_linear(layer, name))), group.find_kept_rows(name, keep)
        set_weight(find_linear(layer, name), torch.zeros_like(old).index_copy(0, kept, old[kept]))
    for name in _list_tensors(layer, group):
        (owner, old), kept = _find_tensor(layer, name), group.find_kept_rows(name, keep)
        axis = _find_axis(old)
        _set_tensor(owner, name, torch.zeros_like(old).index_copy(axis, kept, old.index_select(axis, kept)))
    mask_group(layer, group, keep)


def _list_tensors(layer: nn.Module, group: UnitGroup) -> list[str]:
    """Return the names of a group's tensors beside linears, without those that the module reads in part as they are."""
    return [name for name in group.tensors if not read_padding(layer, name)]


def _find_axis(tensor: Tensor) -> int:
    """Return the axis of a tensor's rows: the first with several entries."""
    return next((axis for axis, size in enumerate(tensor.shape) if size > 1), 0)


def _find_tensor(layer: nn.Module, name: str) -> tuple[nn.Module, Tensor]:
    """Return the module that holds a parameter or buffer, and that, onloaded where it is offloaded, detached."""
    owner, _, attribute = name.rpartition(".")
    module = layer.get_submodule(owner)
    return module, getattr(module, attribute).detach()


def _set_tensor(owner: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter or buffer, cast to its dtype, where it is; not by attribute, which would onload the old one and leave it."""
    attribute = name.rpartition(".")[2]
    with disable_onloading():
        old = getattr(owner, attribute)
    is_parameter = isinstance(old, nn.Parameter)
    held: Any = owner._parameters if is_parameter else owner._buffers
    device = None if isinstance(held, OffloadCache) else old.device  # the cache itself places tensors
    new = value.detach().to(old.dtype).to(device).contiguous()
    held[attribute] = nn.Parameter(new, old.requires_grad) if is_parameter else new


def change_tensor(layer: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Set a parameter or buffer of a layer to a function of itself, cast to its dtype."""
    owner, old = _find_tensor(layer, name)
    new = change(old).clone(memory_format=torch.contiguous_format)  # a view of it would change with it
    if isinstance(owner._parameters, OffloadCache):
        wait_for_all()  # processes share offloaded weights: all have read before one writes
    _set_tensor(owner, name, new)


def mask_group(layer: nn.Module, group: UnitGroup, keep: Tensor, weight: Tensor | None = None) -> None:
    """Set columns of a dense layer to zero, so that it computes what it does after :func:`slice_group`, in its old shapes."""
    weight = read_kept(layer, group, keep) if weight is None else weight
    masked = weight.new_zeros(weight.shape[0], group.num_columns + 1)
    masked[:, with_bias_index(unit_columns(keep.to(weight.device), group.columns_per_unit), group.num_columns)] = weight
    set_consumer(layer, group, masked)


def read_weight(linear: nn.Linear, fetch: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a linear, onloaded where they are offloaded, detached or as ``fetch`` returns them."""
    fetch = fetch or Tensor.detach
    return fetch(linear.weight), None if linear.bias is None else fetch(linear.bias)


def read_consumer(layer: nn.Module, group: UnitGroup, fetch: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the consumer's weights, columns in unit order, bias last, shape [d, n + 1], float64, where ``fetch`` moves them."""
    weight, bias = read_weight(find_linear(layer, group.consumer), fetch)
    return append_bias(group.to_unit_order(weight), bias)


def read_kept(layer: nn.Module, group: UnitGroup, keep: Tensor) -> Tensor:
    """Return :func:`read_consumer` of the kept units alone, and of the bias."""
    return read_consumer(layer, group)[
        :, with_bias_index(unit_columns(keep, group.columns_per_unit), group.num_columns)
    ]


def pick_two_thirds(group: UnitGroup) -> Tensor:
    """Return two thirds of a group's units, for a proof, sorted, shape [kept], int64: the same number per block.

    Some of them move to another place: of two units the second stays.
    """
    per_block, units = group.num_units // group.num_blocks, torch.arange(group.num_units)
    return units[(units % per_block % 3 != int(per_block > 2)) | (per_block == 1)]


def pick_first(group: UnitGroup, num_keep: int) -> Tensor:
    """Return the first units of every block, sorted, shape [num_keep], int64."""
    blocks = torch.arange(group.num_units).view(group.num_blocks, -1)
    return blocks[:, : num_keep // group.num_blocks].flatten()


def set_consumer(layer: nn.Module, group: UnitGroup, weight: Tensor) -> None:
    """Set the consumer's weights, for all or for the kept units, columns in unit order, bias last."""
    columns = group.to_module_order(weight[:, :-1])
    set_weight(find_linear(layer, group.consumer), torch.cat([columns, weight[:, -1:]], 1))


def sum_rows(group: UnitGroup, producer: str, per_row: Tensor) -> Tensor:
    """Return a per-row quantity of a producing linear summed per unit, shape [rows] -> [units]."""
    owners = group.find_row_owners(producer).to(per_row.device)
    owned = owners >= 0
    return per_row.new_zeros(group.num_units).index_add_(0, owners[owned], per_row[owned])


def set_weight(linear: nn.Linear, weight: Tensor) -> None:
    """Set a linear's weights, of any size, bias last, shape [rows, columns + 1], cast to its dtype."""
    _set_parameters(linear, weight[:, :-1], None if linear.bias is None else weight[:, -1])


def _set_parameters(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    drop_onloaded(linear)  # llm-compressor would otherwise keep the old ones, of another size
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            _set_tensor(linear, name, tensor)
    linear.out_features, linear.in_features = weight.shape
    if hasattr(linear, "quantization_scheme"):  # a quantiser later in the recipe has sized its parameters already
        assert linear.quantization_status <= QuantizationStatus.INITIALIZED  # type: ignore[operator]
        initialize_module_for_quantization(linear, force_zero_point=hasattr(linear, "weight_zero_point"))


@dataclass(frozen=True)
class LayerCopy:
    """Host copy of what pruning changes in a decoder layer: (weight, bias) of linears, what modules count by
    themselves, the padding of linears, see :func:`~struprune_plugin.model.structure.locate.read_padding`, and other tensors, each
    by name."""

    linears: dict[str, tuple[Tensor, Tensor | None]]
    counts: dict[str, dict[str, int | float]]
    padding: dict[str, dict[str, Any]]
    tensors: dict[str, Tensor] = field(default_factory=dict)


def copy_layer(layer: nn.Module, groups: Sequence[UnitGroup]) -> LayerCopy:
    """Return a host copy of the parts of a decoder layer that pruning of its groups changes."""

    def hold(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True)

    names = dict.fromkeys(name for g in groups for name in (*g.producers, *g.extra_linears, g.consumer))
    counts: dict[str, Any] = {g.module: read_counts(layer.get_submodule(g.module)) for g in groups if g.module}
    tensors = {name: hold(_find_tensor(layer, name)[1]) for g in groups for name in g.tensors}
    for name in {name.rpartition(".")[0] for g in groups if g.tensors for name in (*g.tensors, g.consumer)}:
        counts[name] = read_numbers(layer.get_submodule(name))
    linears = {name: read_weight(find_linear(layer, name), hold) for name in names}
    padding = {name: deepcopy(read_padding(layer, name)) for name in (*names, *tensors)}
    return LayerCopy(linears, counts, padding, tensors)


def restore_layer(layer: nn.Module, copy: LayerCopy) -> None:
    """Restore the recorded state of a layer, bit for bit."""
    for name, (weight, bias) in copy.linears.items():
        _set_parameters(find_linear(layer, name), weight, bias)
    for name, tensor in copy.tensors.items():
        _set_tensor(_find_tensor(layer, name)[0], name, tensor)
    for name, padding in copy.padding.items():
        read_padding(layer, name).update(deepcopy(padding))
    for module, counts in copy.counts.items():
        for name, count in counts.items():
            setattr(layer.get_submodule(module), name, count)


def check_sliceable(layer: nn.Module, group: UnitGroup) -> None:
    """Raise ValueError where one of a group's linears is none, or is already quantised."""
    for name in (*group.producers, group.consumer):
        linear = find_linear(layer, name)
        status = getattr(linear, "quantization_status", None)
        if not isinstance(linear, nn.Linear) or (status is not None and status > QuantizationStatus.INITIALIZED):
            raise ValueError(
                f"{group.layer_name}.{name}: must be a linear that is not yet quantised, got {type(linear).__name__} with "
                f"status {status}. Prune first and quantise afterwards, or load the full-precision checkpoint."
            )
