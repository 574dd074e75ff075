"""Trial removal of units: a tiny model without their rows must give the same logits as without only their columns."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from struprune_plugin.model.structure.couplings import Measured
from struprune_plugin.model.structure.layout import Part, UnitLayout
from struprune_plugin.model.structure.locate import scale_counts
from struprune_plugin.model.structure.tiny import TinyRun


@torch.no_grad()
def find_flaw(
    unit: UnitLayout,
    measured: Measured,
    gone: Tensor,
    run: TinyRun,
    heads: tuple[str, int] | None = None,
    slices: bool = True,
) -> str:
    """Return why a module cannot lose columns with their rows; empty where it can.

    With a column go the rows that reach columns that go, and no others.

    :param gone: whether a column of the module's last linear goes, shape [columns], bool
    :param heads: where the columns are those of the first value head: the attention module, and its number of value heads
    :param slices: whether the module is also run with sliced linears
    """
    layers, consumer = measured.layers, unit.output
    reached = {name: measured.couplings[name, consumer].reached for name in unit.producers}
    rows = {name: each.any(1) & ~each[:, ~gone].any(1) for name, each in reached.items()}
    with _change(layers, [consumer, *rows, *([heads[0]] if heads else [])]):
        for layer in layers:
            _view(layer.get_submodule(consumer))[:, gone] = 0
        wanted = run()
        for layer in layers:
            for name, lost in rows.items():
                linear: Any = layer.get_submodule(name)
                _view(linear)[lost] = 0
                if linear.bias is not None:
                    linear.bias.data[lost] = 0
        if run.describe_difference(run(), wanted):
            return "other modules read its rows, too"
        if not slices:
            return ""
        try:
            for layer in layers:
                _slice(layer.get_submodule(consumer), columns=~gone)
                for name, lost in rows.items():
                    _slice(layer.get_submodule(name), rows=~lost)
                if heads:
                    scale_counts(layer.get_submodule(heads[0]), heads[1] - 1, heads[1])
            is_same = not run.describe_difference(run(), wanted)
            return "" if is_same else "removing its rows changes more than zeros in their place do"
        except Exception as error:  # any error of a module that relies on its width
            return f"the module does not run at another width ({type(error).__name__})"


@torch.no_grad()
def survives_mixing(
    layers: Sequence[nn.Module],
    consumer: str,
    rows: Sequence[tuple[str, Part, Tensor]],
    matrix: Tensor,
    run: TinyRun,
    scale: float = 1.0,
) -> bool:
    """Return whether a model's logits stay when an orthogonal matrix, shape [width, width], mixes the channels of every head.

    A permutation shows that channels are interchangeable; any other matrix shows that values may be rotated.

    :param consumer: the linear that reads the channels, head by head
    :param rows: rows that produce them, as :func:`~struprune_plugin.units.attention_reading.list_channel_rows` returns them
    :param scale: factor on the channels, by which the consumer divides: large ones reach a bound on values, if there is one
    """

    def mix(by: Tensor, back: Tensor) -> Tensor:
        for layer in layers:
            weight = _view(layer.get_submodule(consumer)).unflatten(1, (-1, len(matrix)))
            weight.copy_(weight @ back)
            for name, _, heads in rows:
                linear: Any = layer.get_submodule(name)
                for head in heads:
                    _view(linear)[head] = by @ _view(linear)[head]
                    if linear.bias is not None:
                        linear.bias.data[head] = by @ linear.bias.data[head]
        return run()

    eye = torch.eye(len(matrix))
    with _change(layers, [consumer, *dict.fromkeys(name for name, *_ in rows)]):
        wanted = mix(scale * eye, eye / scale)
        return not run.describe_difference(mix(matrix, matrix.mT), wanted)


def _view(linear: Any) -> Tensor:
    """Return a view of a linear's weights, shape [rows, columns]; Conv1D stores them transposed."""
    return linear.weight.data if isinstance(linear, nn.Linear) else linear.weight.data.mT


@contextmanager
def _change(layers: Sequence[nn.Module], names: Sequence[str]) -> Iterator[None]:
    """Give modules copies of their parameters during the block, and everything as it was afterwards."""
    modules = [layer.get_submodule(name) for layer in layers for name in names]
    before = [{**vars(module), "_parameters": module._parameters} for module in modules]
    try:
        for module in modules:
            copies = {name: p if p is None else nn.Parameter(p.clone()) for name, p in module._parameters.items()}
            module._parameters = copies
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            vars(module).update(old)


def _slice(linear: Any, rows: Tensor | slice = slice(None), columns: Tensor | slice = slice(None)) -> None:
    weight = _view(linear)[rows][:, columns]
    linear.weight = nn.Parameter(weight if isinstance(linear, nn.Linear) else weight.mT.contiguous())
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias[rows])
    setattr(linear, "out_features" if isinstance(linear, nn.Linear) else "nf", len(weight))
