"""Second moments of streamed activations: all that importance, allocation and solves need, in one pass.

Legend (per linear that consumes a group's units):
    P [n + 1, tokens]  inputs of the linear, with a last row of ones that carries the bias
    Y [d, tokens]      target output
    W [d, n + 1]       weights, with the bias as last column
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

_ALIGNED = 8  # widths that are multiples of it are multiplied four times as fast by a GPU's bfloat16 kernels
_NUM_BLOCKS = 16  # maximum number of row blocks of H
_LEAST_ROWS = 256  # minimum height of a block
# On a CPU, no product sums more terms than this: a BLAS splits longer sums among threads, and float32 rounds them more.
_TERMS = 512
_NARROW_ROWS = 1024  # rows of a bfloat16 product, which is computed before it is added
_FETCHED = 256  # tokens, and rows of a product, that are on the device at once where sums are not
Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SecondMoments:
    """Sums over calibration tokens for one consuming linear. The tensors are updated in place.

    :param gram: ``H = P P^T``, shape [n + 1, n + 1]; the last row and column belong to the bias
    :param cross: ``C = Y P^T``, shape [d, n + 1]
    :param target_energy: ``tr(Y Y^T)``, scalar
    :param absolute_sum: ``sum_t |x_it|``, shape [n]
    """

    gram: Tensor
    cross: Tensor
    target_energy: Tensor
    absolute_sum: Tensor

    @property
    def num_tokens(self) -> int:
        return round(self.gram[-1, -1].item())  # the row of ones against itself


def make_moments(weight: Tensor) -> SecondMoments:
    """Return empty moments of the regression of a weight, bias last, on its device and in its dtype."""
    size, energy = weight.shape[1], weight.new_zeros((), dtype=torch.float64)
    return SecondMoments(
        weight.new_zeros(size, size), weight.new_zeros(weight.shape), energy, weight.new_zeros(size - 1)
    )


def accumulate_moments(moments: SecondMoments, inputs: Tensor, targets: Tensor, last: Tensor | None = None) -> None:
    """Add the tokens of one micro-batch to sums, in place; these do not depend on how the tokens are split into batches.

    :param inputs: shape [tokens, n], any float dtype; ``targets`` of shape [tokens, d]
    :param last: last row of P in place of ones, shape [tokens, 1]
    """
    dtype = moments.gram.dtype
    widened = torch.cat([inputs, inputs.new_ones(len(inputs), 1) if last is None else last], 1).to(dtype)
    targets = targets.to(dtype)
    moments.gram.addmm_(widened.T, widened)
    moments.cross.addmm_(targets.T, widened)
    moments.target_energy.add_(_measure_energy(targets))
    moments.absolute_sum.add_(_sum_absolute(widened[:, :-1]))


class MomentSums:
    """Running sums of :class:`SecondMoments`; only the upper triangle of H is computed and stored, in blocks of rows.

    The bias' row of H and column of C are sums over tokens, and the width of the products is padded to a multiple of 8.
    Bfloat16 inputs are multiplied as they are and accumulated in float32 where the device can: the products are exact and faster.
    Where they are weighted, they are rounded to bfloat16 once more. Their targets are rounded to bfloat16 on such a CPU, and
    split into two bfloat16 parts, which hold 16 of their bits, on a GPU.

    :param sizes: (n, d): inputs and outputs of the linear; d may be 0 where the target is the linear's own output
    :param dtype: of the sums, float32 or float64
    :param fetch: moves a product to the device of the sums, where the activations are on another
    :ivar num_outputs: d
    :ivar num_rows: number of tokens added
    """

    def __init__(
        self, sizes: tuple[int, int], device: torch.device | str, dtype: torch.dtype, fetch: Move | None = None
    ):
        num_inputs, self.num_outputs = sizes
        make = partial(torch.zeros, device=device, dtype=dtype)
        self._dtype, self._fetch = dtype, fetch
        self._upper = [make(shape) for shape in _list_blocks(num_inputs)]
        self._cross = make(self.num_outputs, _align(num_inputs))
        # of inputs, of absolute inputs, of targets, and the number of tokens, or the sum of their squared weights
        self._sizes = num_inputs, num_inputs, self.num_outputs, 1
        self._sums = make(sum(self._sizes))
        self._target_energy = torch.zeros((), device=device, dtype=torch.float64)
        self.num_rows = 0

    def add(self, inputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> None:
        """Add the tokens of one sequence, or of several, as :func:`accumulate_moments` does.

        Added sequence by sequence, sums do not depend on the split into batches. With another number of threads or another
        processor their last bits may differ, which :mod:`struprune_plugin.linalg.ties` keeps out of the choice of units.

        :param weights: factor on the error of each token, shape [tokens]; None for ones
        """
        self.num_rows += len(inputs)
        narrow, rounds = _multiplies_narrow(inputs, self._dtype), inputs.dtype is torch.bfloat16
        fetch = self._fetch or (lambda tensor: tensor)
        tokens = min(_FETCHED if self._fetch else len(inputs), len(inputs) if inputs.is_cuda else _TERMS)
        pieces, extra = inputs.split(tokens), self._cross.shape[1] - inputs.shape[1]
        factors = [None] * len(pieces) if weights is None else weights.to(self._dtype).split(tokens)
        for part, wanted, factor in zip(pieces, targets.split(tokens), factors, strict=True):
            wanted = wanted.to(self._dtype)
            if factor is not None:
                part, wanted = part.to(self._dtype) * factor[:, None], wanted * factor[:, None]
                part = part.bfloat16() if rounds else part
            part = part if narrow else part.to(self._dtype)
            ones = wanted.new_ones(len(part)) if factor is None else factor
            weighed = (part, wanted) if factor is None else (part * factor[:, None], wanted * factor[:, None])
            input_sum, target_sum = (values.sum(0, dtype=self._dtype) for values in weighed)
            self._sums.add_(fetch(torch.cat([input_sum, _sum_absolute(part), target_sum, ones.square().sum()[None]])))
            self._target_energy.add_(fetch(_measure_energy(wanted)))
            part = torch.nn.functional.pad(part, (0, extra)) if extra else part
            high = wanted.bfloat16() if narrow else wanted
            with _multiply_as_bfloat16(rounds):
                for block in self._upper:
                    right = part[:, -block.shape[1] :]
                    self._add_product(block, right[:, : len(block)], right)
                for piece in (high, (wanted - high).bfloat16()) if narrow else (wanted,):
                    self._add_product(self._cross, piece, part)

    def _add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        narrow = right.dtype is not self._dtype
        if self._fetch is None and not narrow:
            total.addmm_(left.T, right)
            return
        step = _FETCHED if self._fetch else _NARROW_ROWS
        for start in range(0, len(total), step):
            rows = slice(start, start + step)
            part = left[:, rows].T
            product = torch.mm(part, right, out_dtype=self._dtype) if narrow else part @ right
            total[rows] += product if self._fetch is None else self._fetch(product)

    def list_parts(self) -> list[Tensor]:
        """Return all sums, for in-place addition."""
        return [*self._upper, self._cross, self._sums, self._target_energy]

    @staticmethod
    def assemble(together: Sequence[MomentSums], fetch: Move | None = None) -> SecondMoments:
        """Return the moments of linears of one shape, with a first dimension more, and release the sums block by block."""
        fetch, (size, *_) = fetch or (lambda tensor: tensor), together[0]._sizes
        cross, sums, energy = (
            fetch(stack([getattr(each, name) for each in together])) for name in ("_cross", "_sums", "_target_energy")
        )
        bias, absolute, target_sum, count = sums.split(together[0]._sizes, 1)
        gram = cross.new_empty(len(together), size + 1, size + 1)
        gram[:, -1, :-1], gram[:, :-1, -1], gram[:, -1, -1] = bias, bias, count[:, 0]
        while together[0]._upper:
            block = fetch(stack([each._upper.pop() for each in together]))
            start = cross.shape[2] - block.shape[2]
            block = block[:, : size - start, : size - start]  # without the padding
            height = block.shape[1]
            square = block[..., :height]  # no BLAS guarantees that ``P P^T`` is symmetric to the last bit
            gram[:, start : start + height, start : start + height] = square.triu() + square.triu(1).mT
            gram[:, start : start + height, start + height : size] = block[..., height:]
            gram[:, start + height : size, start : start + height] = block[..., height:].mT
        return SecondMoments(gram, torch.cat([cross[..., :size], target_sum[..., None]], 2), energy, absolute)


def multiply_by_itself(tokens: Tensor) -> Tensor:
    """Return ``G^T G`` of one sequence, shape [tokens, d] -> [d, d], on a CPU in parts of 512 tokens."""
    total = tokens.new_zeros(tokens.shape[1], tokens.shape[1])
    for part in tokens.split(max(len(tokens), 1) if tokens.is_cuda else _TERMS):
        total.addmm_(part.T, part)
    return total


def multiply_in_parts(left: Tensor, right: Tensor) -> Tensor:
    """Return ``A B`` in the dtype of A, shapes [rows, n] and [n, d], in parts, so that B is never converted as a whole.

    Where B is bfloat16 and a processor multiplies such numbers, A is rounded to it.
    """
    terms = _TERMS * 8 if left.is_cuda else _TERMS  # rows of B converted at once
    total = left.new_zeros(len(left), right.shape[1])
    with _multiply_as_bfloat16(right.dtype is torch.bfloat16):
        for columns, rows in zip(left.split(terms, dim=1), right.split(terms), strict=True):
            total.addmm_(columns, rows.to(left.dtype))
    return total


def count_sums(num_inputs: int, num_outputs: int) -> int:
    """Return the number of elements of :class:`MomentSums`."""
    products = sum(height * width for height, width in _list_blocks(num_inputs)) + num_outputs * _align(num_inputs)
    return products + 2 * num_inputs + num_outputs + 2


def _align(width: int) -> int:
    return -(-width // _ALIGNED) * _ALIGNED


def _list_blocks(num_inputs: int) -> list[tuple[int, int]]:
    """Return the shapes of the row blocks of an upper triangle, each from its own diagonal column on, of aligned sizes."""
    size = _align(num_inputs)
    height = max(_LEAST_ROWS, _align(-(-size // _NUM_BLOCKS)))
    return [(min(height, size - start), size - start) for start in range(0, size, height)]


def _multiplies_narrow(inputs: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the device multiplies bfloat16 inputs into float32 sums."""
    return inputs.is_cuda and inputs.dtype is torch.bfloat16 and dtype is torch.float32


@contextmanager
def _multiply_as_bfloat16(narrow: bool) -> Iterator[None]:
    """Round float32 matrices to bfloat16 in products, accumulated in float32, on a processor that multiplies such numbers: exact
    where they hold no others."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, can = matmul.fp32_precision, torch.cpu.get_capabilities()
    if narrow and (can.get("avx512_bf16") or can.get("amx_bf16")):
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _sum_absolute(inputs: Tensor) -> Tensor:
    """Return the sum of absolute inputs over tokens, float32 or better, shape [n]."""
    dtype = torch.float32 if inputs.dtype is torch.bfloat16 else None
    if inputs.is_cuda:
        return torch.linalg.vector_norm(inputs, 1, dim=0, dtype=dtype)  # without a copy
    return inputs.abs().sum(0, dtype=dtype)  # four times as fast on a CPU


def _measure_energy(targets: Tensor) -> Tensor:
    """Return the sum of squares: on a CPU per token in the targets' dtype, over tokens in float64."""
    if targets.is_cuda:
        return torch.linalg.vector_norm(targets, dtype=torch.float64).square()  # without a copy
    return torch.linalg.vector_norm(targets, dim=1).double().square().sum()


def reproduce_weight(moments: SecondMoments, weight: Tensor) -> SecondMoments:
    """Return the moments of inputs with those of the output of a weight as the target: ``C = W H``, ``tr(Y Y^T) = tr(W C^T)``.

    :param weight: shape [..., d, n + 1], bias last
    """
    weight = weight.to(moments.gram.dtype)
    cross = weight @ moments.gram
    return replace(moments, cross=cross, target_energy=(cross * weight).sum((-2, -1), dtype=torch.float64))


def select_inputs(moments: SecondMoments, columns: Tensor) -> SecondMoments:
    """Return the moments of the inputs at each position of ``columns``, shape [..., k], int64, the bias last."""
    rows = with_bias_index(columns, moments.gram.shape[-1] - 1)
    return replace(
        moments,
        gram=take_block(moments.gram, rows),
        cross=take_columns(moments.cross, rows),
        absolute_sum=moments.absolute_sum.gather(-1, columns),
    )


def take_block(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return the same rows and columns of one or several matrices, shapes [..., n, n] and [..., k] -> [..., k, k]."""
    linear = () if rows.dim() == 1 else (torch.arange(len(rows), device=rows.device)[:, None, None],)
    return matrix[(*linear, rows[..., :, None], rows[..., None, :])]


def take_columns(matrix: Tensor, columns: Tensor) -> Tensor:
    """Return columns of one or several matrices, shapes [..., d, n] and [..., k] -> [..., d, k]."""
    return matrix.gather(-1, columns[..., None, :].expand(*matrix.shape[:-1], -1))


def move_moments(moments: SecondMoments, move: Move) -> SecondMoments:
    return SecondMoments(*map(move, vars(moments).values()))


def sum_energies(moments: SecondMoments) -> Tensor:
    """Return ``tr(H) + tr(Y Y^T)`` of one linear or of several, shape [...], float64, which is finite if every token was."""
    return moments.gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64) + moments.target_energy


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape with a first dimension more; one alone as a view."""
    return parts[0][None] if len(parts) == 1 else torch.stack(list(parts))


def append_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [W, b] in float64, shape [d, n + 1] (b = 0 where the linear has none)."""
    column = torch.zeros_like(weight[:, 0]) if bias is None else bias
    return torch.cat([weight, column[:, None]], dim=1).to(torch.float64)


def measure_error(moments: SecondMoments, weight: Tensor, columns: Tensor | None = None) -> Tensor:
    """Return ``||Y - W P||^2`` of any weight from the moments alone, of one linear or of several.

    ``||Y - W P||^2 = tr(Y Y^T) - 2 tr(W C^T) + tr(W H W^T)``, at least 0, shape [...]. Source: method.md section 2.

    :param weight: shape [..., d, k + 1], bias last; products are in the dtype of the moments
    :param columns: inputs that the weight reads, shape [..., k]; all n where None
    """
    if columns is not None:
        moments = select_inputs(moments, columns)
    weight = weight.to(moments.gram.dtype)
    explained = (weight * (2 * moments.cross - weight @ moments.gram)).sum((-2, -1), dtype=torch.float64)
    return (moments.target_energy - explained).clamp(min=0)


def with_bias_index(columns: Tensor, bias_index: int) -> Tensor:
    """Return input columns with the index of the bias appended, shape [..., k] -> [..., k + 1]."""
    return torch.nn.functional.pad(columns, (0, 1), value=bias_index)
