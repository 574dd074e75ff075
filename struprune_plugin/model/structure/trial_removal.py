"""Trial removal of units: a tiny model without their rows must give the same logits as without only their columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from struprune_plugin.model.structure.layout import HEAD_COUNTS, Part

_CLOSE = 1e-5  # relative to the largest logit


@dataclass(frozen=True)
class Trial:
    """Trial removal of about a third of the units of one module.

    :param consumer: the linear that loses columns
    :param columns: indices of these columns
    :param rows: indices of the rows removed with them, by producer
    :param slices: whether the module is also run with sliced linears
    :param heads: where the columns are those of the first value head: the attention module, and its number of value heads
    """

    consumer: str
    columns: Tensor
    rows: Mapping[str, Tensor]
    slices: bool
    heads: tuple[str, int] = ("", 1)


def make_trial(
    consumer: str, reached: Mapping[str, Tensor], columns: Tensor, slices: bool, heads: tuple[str, int] = ("", 1)
) -> Trial:
    """Return a trial that removes columns and the rows that reach these columns and no others.

    :param reached: per producer, whether a row reaches a column of the consumer, shape [rows, columns], bool
    """
    gone = torch.zeros(next(iter(reached.values())).shape[1], dtype=torch.bool)
    gone[columns] = True
    rows = {name: (each.any(1) & ~each[:, ~gone].any(1)).nonzero().flatten() for name, each in reached.items()}
    return Trial(consumer, columns, rows, slices, heads)


@torch.no_grad()
def find_flaw(layers: Sequence[nn.Module], trial: Trial, run: Callable[[], Tensor]) -> str:
    """Return why the units of one module are not removable; empty where they are.

    :param layers: layers that have the module
    :param run: returns the model's logits
    """
    with _change(layers, trial, zero_rows=False):
        wanted = run()
    with _change(layers, trial, zero_rows=True):
        problem = _compare(run(), wanted, "other modules read its rows, too")
    if problem or not trial.slices:
        return problem
    try:
        with _slice(layers, trial):
            return _compare(run(), wanted, "removing its rows changes more than zeros in their place do")
    except Exception as error:  # any error of a module that relies on its width
        return f"the module does not run at another width ({type(error).__name__})"


@torch.no_grad()
def mixes(
    layers: Sequence[nn.Module],
    consumer: str,
    rows: Sequence[tuple[str, Part, Tensor]],
    matrix: Tensor,
    run: Callable[[], Tensor],
) -> bool:
    """Return whether a model's logits do not change when the channels of every head are mixed by an orthogonal matrix.

    A permutation shows that channels are interchangeable; any other matrix shows that values may be rotated.

    :param consumer: the linear that reads the channels, head by head
    :param rows: rows that produce them, as :func:`~struprune_plugin.model.structure.units.list_channel_rows` returns them
    :param matrix: shape [width, width]
    """
    wanted, columns = run(), torch.arange(_view(layers[0].get_submodule(consumer)).shape[1]).view(-1, len(matrix))
    with _keep(layers, [consumer, *dict.fromkeys(name for name, *_ in rows)]):
        for layer in layers:
            weight = _view(layer.get_submodule(consumer))
            for head in columns:
                weight[:, head] = weight[:, head] @ matrix.mT
            for name, _, heads in rows:
                linear: Any = layer.get_submodule(name)
                for head in heads:
                    _view(linear)[head] = matrix @ _view(linear)[head]
                    if linear.bias is not None:
                        linear.bias.data[head] = matrix @ linear.bias.data[head]
        return not _compare(run(), wanted, "differs")


def _compare(given: Tensor, wanted: Tensor, problem: str) -> str:
    return "" if float((given - wanted).abs().max()) <= _CLOSE * float(wanted.abs().max()) else problem


def _view(linear: Any) -> Tensor:
    """Return a view of a linear's weights, shape [rows, columns]; Conv1D stores them transposed."""
    return linear.weight.data if isinstance(linear, nn.Linear) else linear.weight.data.mT


@contextmanager
def _change(layers: Sequence[nn.Module], trial: Trial, zero_rows: bool) -> Iterator[None]:
    """Set a consumer's columns to zero, and the producers' rows where ``zero_rows``."""
    with _keep(layers, (trial.consumer, *trial.rows)):
        for layer in layers:
            _view(layer.get_submodule(trial.consumer))[:, trial.columns] = 0
            for name, rows in trial.rows.items() if zero_rows else ():
                linear: Any = layer.get_submodule(name)
                _view(linear)[rows] = 0
                if linear.bias is not None:
                    linear.bias.data[rows] = 0
        yield


@contextmanager
def _keep(layers: Sequence[nn.Module], names: Sequence[str]) -> Iterator[None]:
    """Restore the present weights of linears on exit."""
    linears: list[Any] = [layer.get_submodule(name) for layer in layers for name in names]
    before = [{name: p.data.clone() for name, p in linear.named_parameters(recurse=False)} for linear in linears]
    try:
        yield
    finally:
        for linear, old in zip(linears, before, strict=True):
            for name, value in old.items():
                getattr(linear, name).data = value


@contextmanager
def _slice(layers: Sequence[nn.Module], trial: Trial) -> Iterator[None]:
    """Remove columns from the consumer and rows from the producers inside the block."""
    changes: list[tuple[Any, dict[str, Any]]] = []
    for layer in layers:
        for name in (trial.consumer, *trial.rows):
            linear: Any = layer.get_submodule(name)
            weight, bias = _view(linear), linear.bias
            if name == trial.consumer:
                weight = weight[:, _list_rest(trial.columns, weight.shape[1])]
            else:
                rest = _list_rest(trial.rows[name], weight.shape[0])
                weight, bias = weight[rest], None if bias is None else nn.Parameter(bias.data[rest])
            old = {
                key: getattr(linear, key) for key in ("weight", "bias", "nf", "out_features") if hasattr(linear, key)
            }
            changes.append((linear, old))
            linear.weight = nn.Parameter(weight if isinstance(linear, nn.Linear) else weight.mT.contiguous())
            linear.bias = bias
            linear.nf = linear.out_features = len(weight)
        name, blocks = trial.heads
        module: Any = layer.get_submodule(name)
        counts = {key: getattr(module, key) for key in HEAD_COUNTS if blocks > 1 and hasattr(module, key)}
        changes.append((module, counts))
        for key, count in counts.items():
            setattr(module, key, count * (blocks - 1) // blocks)
    try:
        yield
    finally:
        for linear, old in changes:
            for key, value in old.items():
                setattr(linear, key, value)


def _list_rest(gone: Tensor, count: int) -> Tensor:
    rest = torch.ones(count, dtype=torch.bool)
    rest[gone] = False
    return rest.nonzero().flatten()
