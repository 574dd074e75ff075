"""Make modules smaller in place, from kept indices and re-solved weights.

Every shape change is an ``nn.Parameter`` assignment: the host keeps parameters in offload caches, where an in-place
change or ``.data =`` would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.offload.cache import OffloadCache
from compressed_tensors.quantization import QuantizationStatus, initialize_module_for_quantization
from torch import Tensor, nn

from struprune_plugin.device.residence import release_weights
from struprune_plugin.maths.elimination import expand_units
from struprune_plugin.maths.rotation import rotate_columns
from struprune_plugin.maths.statistics import append_bias, with_bias_index
from struprune_plugin.model.families import find_family
from struprune_plugin.model.layers import find_linear, list_linears, read_counts
from struprune_plugin.model.units.group import UnitGroup


def slice_group(
    layer: nn.Module, group: UnitGroup, keep: Tensor, weight: Tensor, producers: Mapping[str, Tensor] | None = None
) -> None:
    """Remove all units but ``keep`` from a decoder layer, and give the consumer its new weights.

    :param layer: the decoder layer of ``group``
    :param keep: sorted kept units, shape [kept], int64; from every block the same number
    :param weight: new weights of the consumer, in unit order, bias last, shape [d, kept * columns_per_unit + 1], cast to
        its dtype
    :param producers: new weights of linears that feed it, by name, kept rows only, bias last; the old rows where absent
    """
    keep = keep.cpu()
    for name in group.producers:
        producer = find_linear(layer, name)
        rows = group.find_kept_rows(name, keep)
        bias = None if producer.bias is None else producer.bias[rows.to(producer.bias.device)]
        _set_parameters(producer, producer.weight[rows.to(producer.weight.device)], bias)
    for name, new in (producers or {}).items():
        set_weight(find_linear(layer, name), new)
    set_consumer(layer, group, weight)
    group.unit.update_counts(layer, group, len(keep))


def grow_group(layer: nn.Module, group: UnitGroup, keep: Tensor) -> None:
    """Undo the shapes of :func:`slice_group`: put the units that went back, as zeros; the layer's function stays.

    :param group: as it was before the units went
    :param keep: sorted units that are still there, shape [kept], int64
    """
    for name in group.producers:
        producer = find_linear(layer, name)
        rows, total = group.find_kept_rows(name, keep), len(group.find_row_owners(name))
        weight = producer.weight.new_zeros(total, producer.in_features).index_copy(0, rows, producer.weight.detach())
        bias = None
        if producer.bias is not None:
            bias = producer.bias.new_zeros(total).index_copy(0, rows, producer.bias.detach())
        _set_parameters(producer, weight, bias)
    mask_group(layer, group, keep, read_consumer(layer, group))
    group.unit.update_counts(layer, group.resize(len(keep)), group.num_units)


def rotate_group(layer: nn.Module, group: UnitGroup, basis: Tensor) -> None:
    """Rotate the values of every head in the linear that makes them and the one that reads them; the function stays.

    :param group: of a kind that rotates
    :param basis: orthogonal, rows are the new channels, shape [blocks, width, width], float64
    """
    (name,) = group.producers
    set_weight(find_linear(layer, name), rotate_producer(layer, group, basis))
    columns = rotate_columns(read_consumer(layer, group), basis, group.columns_per_unit)
    set_consumer(layer, group, columns)


def rotate_producer(
    layer: nn.Module, group: UnitGroup, basis: Tensor, fetch: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return the weights of the linear that makes the values, these rotated, shape [rows, columns + 1], float64, bias last.

    Parameters as in :func:`rotate_group`.

    :param fetch: brings weights to where they are rotated
    """
    (name,) = group.producers
    rows = append_bias(*read_weight(find_linear(layer, name), fetch))
    basis = basis.to(rows.device)
    values = (group.find_row_owners(name) >= 0).nonzero().flatten().to(rows.device)
    rows[values] = (basis @ rows[values].view(*basis.shape[:2], -1)).flatten(0, 1)
    return rows


def mask_group(
    layer: nn.Module, group: UnitGroup, keep: Tensor, weight: Tensor, producers: Mapping[str, Tensor] | None = None
) -> None:
    """Give a dense layer the function that :func:`slice_group` gives it, by zero columns instead of fewer.

    Parameters as in :func:`slice_group`. Shapes stay, so that masked and physical results can be compared.
    """
    for name, new in (producers or {}).items():
        rows = append_bias(*read_weight(find_linear(layer, name)))
        rows[group.find_kept_rows(name, keep).to(rows.device)] = new.to(rows)
        set_weight(find_linear(layer, name), rows)
    masked = weight.new_zeros(weight.shape[0], group.num_columns + 1)
    masked[:, with_bias_index(expand_units(keep.to(weight.device), group.columns_per_unit), group.num_columns)] = weight
    set_consumer(layer, group, masked)


def read_weight(linear: nn.Linear, fetch: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a linear, onloaded where they are offloaded, detached.

    :param fetch: brings them to where they are wanted
    """
    fetch = fetch or Tensor.detach
    return fetch(linear.weight), None if linear.bias is None else fetch(linear.bias)


def read_consumer(layer: nn.Module, group: UnitGroup, fetch: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the consumer's weights, columns in unit order, bias last, shape [d, n + 1], float64.

    :param fetch: brings them to where they are wanted
    """
    weight, bias = read_weight(find_linear(layer, group.consumer), fetch)
    return append_bias(group.to_unit_order(weight), bias)


def set_consumer(layer: nn.Module, group: UnitGroup, weight: Tensor) -> None:
    """Give the consumer new weights, of all or of the kept units, columns in unit order, bias last."""
    columns = group.to_module_order(weight[:, :-1])
    set_weight(find_linear(layer, group.consumer), torch.cat([columns, weight[:, -1:]], 1))


def sum_rows(group: UnitGroup, producer: str, per_row: Tensor) -> Tensor:
    """Sum a quantity of a producing linear's rows over those of every unit, shape [rows] -> [units]."""
    owners = group.find_row_owners(producer).to(per_row.device)
    owned = owners >= 0
    return per_row.new_zeros(group.num_units).index_add_(0, owners[owned], per_row[owned])


def set_weight(linear: nn.Linear, weight: Tensor) -> None:
    """Give a linear new weights of any size, bias last, shape [rows, columns + 1], cast to its dtype."""
    _set_parameters(linear, weight[:, :-1], None if linear.bias is None else weight[:, -1])


def _set_parameters(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    release_weights(linear)  # the host would keep the old ones, of another size, beside the new
    with disable_onloading():
        old = linear.weight
    device = None if isinstance(linear._parameters, OffloadCache) else old.device  # the cache places what it is given

    def cast(tensor: Tensor) -> nn.Parameter:
        return nn.Parameter(tensor.detach().to(old.dtype).to(device).contiguous(), old.requires_grad)

    linear.weight = cast(weight)
    if bias is not None:
        linear.bias = cast(bias)
    linear.out_features, linear.in_features = weight.shape
    if hasattr(linear, "quantization_scheme"):  # a quantiser later in the recipe has sized its parameters already
        assert linear.quantization_status <= QuantizationStatus.INITIALIZED  # type: ignore[operator]
        initialize_module_for_quantization(linear, force_zero_point=hasattr(linear, "weight_zero_point"))


@dataclass(frozen=True)
class LayerCopy:
    """What pruning changes of a decoder layer, on the host.

    :param linears: (weight, bias) by name
    :param counts: sizes that the attention module keeps in attributes, by name
    """

    linears: dict[str, tuple[Tensor, Tensor | None]]
    counts: dict[str, int]

    def list_tensors(self) -> dict[str, Tensor]:
        """Return all tensors by the names of the parameters."""
        parts = {f"{name}.weight": weight for name, (weight, _) in self.linears.items()}
        return parts | {f"{name}.bias": bias for name, (_, bias) in self.linears.items() if bias is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], linears: Sequence[str], counts: dict[str, int]) -> LayerCopy:
        """Read what :meth:`list_tensors` gave.

        :param linears: which names are linears
        """
        return cls({name: (tensors[f"{name}.weight"], tensors.get(f"{name}.bias")) for name in linears}, counts)


def copy_layer(model: nn.Module, layer: nn.Module) -> LayerCopy:
    """Take down all linears of a decoder layer, and the sizes that its attention module keeps in attributes."""

    def hold(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", copy=True)

    family = find_family(model)
    linears = {name: read_weight(find_linear(layer, name)) for name in list_linears(family, layer)}
    held = {name: (hold(weight), None if bias is None else hold(bias)) for name, (weight, bias) in linears.items()}
    return LayerCopy(held, read_counts(layer.get_submodule(family.attention.module)))


def restore_layer(model: nn.Module, layer: nn.Module, copy: LayerCopy) -> None:
    """Give a layer back what was taken down of it, to the bit."""
    for name, (weight, bias) in copy.linears.items():
        _set_parameters(find_linear(layer, name), weight, bias)
    for name, count in copy.counts.items():
        setattr(layer.get_submodule(find_family(model).attention.module), name, count)


def check_sliceable(layer: nn.Module, group: UnitGroup) -> None:
    """Refuse linears that cannot be sliced.

    :raises ValueError: no plain linear, or already quantised
    """
    for name in (*group.producers, group.consumer):
        linear = find_linear(layer, name)
        status = getattr(linear, "quantization_status", None)
        if not isinstance(linear, nn.Linear) or (status is not None and status > QuantizationStatus.INITIALIZED):
            raise ValueError(
                f"{group.layer_name}.{name}: must be a linear that is not yet quantised, got {type(linear).__name__} with "
                f"status {status}. Prune first and quantise afterwards, or load the full-precision checkpoint."
            )
