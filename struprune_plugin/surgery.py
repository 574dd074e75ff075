"""Make modules smaller in place, from kept indices and re-solved weights.

Every shape change is an ``nn.Parameter`` assignment: the host keeps parameters in offload caches, where an in-place
change or ``.data =`` would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compressed_tensors.quantization import QuantizationStatus, initialize_module_for_quantization
from torch import Tensor, nn

from struprune_plugin.rotation import rotate_columns
from struprune_plugin.solve import expand_units
from struprune_plugin.statistics import append_bias
from struprune_plugin.topology import UnitGroup, find_family, find_linear, list_linears


def slice_group(
    layer: nn.Module, group: UnitGroup, keep: Tensor, weight: Tensor, producers: Mapping[str, Tensor] | None = None
) -> None:
    """Remove all units but ``keep`` from a decoder layer, and give the consumer its new weights.

    :param layer: the decoder layer of ``group``
    :param keep: sorted kept units, shape [kept], int64; from every block the same number
    :param weight: new weights of the consumer, bias last, shape [d, kept * columns_per_unit + 1], cast to its dtype
    :param producers: new weights of linears that feed it, by name, kept rows only, bias last; the old rows where absent
    """
    keep = keep.cpu()
    for name in group.producers:
        producer = find_linear(layer, name)
        rows = expand_units(keep, producer.out_features // group.num_units)
        bias = None if producer.bias is None else producer.bias[rows.to(producer.bias.device)]
        _set_parameters(producer, producer.weight[rows.to(producer.weight.device)], bias)
    for name, new in (producers or {}).items():
        set_weight(find_linear(layer, name), new)
    set_weight(find_linear(layer, group.consumer), weight)
    if group.count_attribute:
        setattr(layer.get_submodule(group.count_module), group.count_attribute, len(keep) // group.num_blocks)


def rotate_group(layer: nn.Module, group: UnitGroup, basis: Tensor) -> None:
    """Rotate the values of every head in the linear that makes them and the one that reads them; the function stays.

    :param group: of kind ``vo``
    :param basis: orthogonal, rows are the new channels, shape [blocks, width, width], float64
    """
    producer, consumer = find_linear(layer, group.producers[0]), find_linear(layer, group.consumer)
    rows = append_bias(*read_weight(producer))
    columns = append_bias(*read_weight(consumer))
    basis = basis.to(rows.device)
    set_weight(producer, (basis @ rows.view(*basis.shape[:2], -1)).flatten(0, 1))
    set_weight(consumer, rotate_columns(columns, basis, group.columns_per_unit))


def mask_group(
    layer: nn.Module, group: UnitGroup, keep: Tensor, weight: Tensor, producers: Mapping[str, Tensor] | None = None
) -> None:
    """Give a dense layer the function that :func:`slice_group` gives it, by zero columns instead of fewer.

    Parameters as in :func:`slice_group`. Shapes stay, so that masked and physical results can be compared.
    """
    for name, new in (producers or {}).items():
        rows = append_bias(*read_weight(find_linear(layer, name)))
        rows[expand_units(keep.to(rows.device), len(rows) // group.num_units)] = new.to(rows)
        set_weight(find_linear(layer, name), rows)
    consumer = find_linear(layer, group.consumer)
    masked = weight.new_zeros(weight.shape[0], group.num_columns)
    masked[:, expand_units(keep.to(weight.device), group.columns_per_unit)] = weight[:, :-1]
    _set_parameters(consumer, masked, None if consumer.bias is None else weight[:, -1])


def read_weight(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a linear, onloaded where they are offloaded, detached."""
    return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()


def set_weight(linear: nn.Linear, weight: Tensor) -> None:
    """Give a linear new weights of any size, bias last, shape [rows, columns + 1], cast to its dtype."""
    _set_parameters(linear, weight[:, :-1], None if linear.bias is None else weight[:, -1])


def _set_parameters(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    old = linear.weight
    linear.weight = nn.Parameter(weight.detach().to(old.device, old.dtype).contiguous(), old.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().to(old.device, old.dtype).contiguous(), old.requires_grad)
    linear.out_features, linear.in_features = weight.shape
    if hasattr(linear, "quantization_scheme"):  # a quantiser later in the recipe has sized its parameters already
        assert linear.quantization_status <= QuantizationStatus.INITIALIZED  # type: ignore[operator]
        initialize_module_for_quantization(linear, force_zero_point=hasattr(linear, "weight_zero_point"))


@dataclass(frozen=True)
class LayerCopy:
    """What :func:`slice_group` changes of a decoder layer, on the host.

    :param linears: (weight, bias) by name
    :param counts: sizes kept in attributes, by module and attribute
    """

    linears: dict[str, tuple[Tensor, Tensor | None]]
    counts: dict[tuple[str, str], int]


def copy_layer(model: nn.Module, layer: nn.Module, groups: Sequence[UnitGroup]) -> LayerCopy:
    """Take down all linears of a decoder layer, and the sizes that its groups keep in attributes."""

    def hold(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", copy=True)

    linears = {name: read_weight(find_linear(layer, name)) for name in list_linears(find_family(model))}
    held = {name: (hold(weight), None if bias is None else hold(bias)) for name, (weight, bias) in linears.items()}
    places = [(group.count_module, group.count_attribute) for group in groups if group.count_attribute]
    return LayerCopy(held, {(m, name): getattr(layer.get_submodule(m), name) for m, name in places})


def restore_layer(layer: nn.Module, copy: LayerCopy) -> None:
    """Undo :func:`slice_group` and :func:`set_weight`, to the bit."""
    for name, (weight, bias) in copy.linears.items():
        _set_parameters(find_linear(layer, name), weight, bias)
    for (module, name), count in copy.counts.items():
        setattr(layer.get_submodule(module), name, count)


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
