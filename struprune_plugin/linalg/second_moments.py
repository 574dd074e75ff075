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

import torch
from torch import Tensor

_ALIGNED = 8  # widths that are multiples of it are multiplied four times as fast by a GPU's bfloat16 kernels
_NUM_BLOCKS = 16  # maximum number of row blocks of H
_LEAST_ROWS = 256  # minimum height of a block
# On a CPU, no product sums more terms than this: a BLAS splits longer sums among threads, and float32 rounds them more.
_TERMS = 512
_NARROW_ROWS = 1024  # rows of a bfloat16 product, which is computed before it is added


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


def make_moments(num_inputs: int, num_outputs: int, device: torch.device | str, dtype: torch.dtype) -> SecondMoments:
    """Return empty moments of a linear with ``num_inputs`` inputs and ``num_outputs`` outputs.

    :param dtype: accumulation dtype, float32 or float64
    """
    size = num_inputs + 1
    return SecondMoments(
        gram=torch.zeros(size, size, device=device, dtype=dtype),
        cross=torch.zeros(num_outputs, size, device=device, dtype=dtype),
        target_energy=torch.zeros((), device=device, dtype=torch.float64),
        absolute_sum=torch.zeros(num_inputs, device=device, dtype=dtype),
    )


def accumulate_moments(moments: SecondMoments, inputs: Tensor, targets: Tensor) -> None:
    """Add the tokens of one micro-batch to sums, which do not depend on how the tokens are split into batches.

    :param moments: updated in place
    :param inputs: inputs of the consuming linear, shape [tokens, n], any float dtype
    :param targets: target outputs of that linear, shape [tokens, d], any float dtype
    """
    dtype = moments.gram.dtype
    widened, targets = torch.nn.functional.pad(inputs.to(dtype), (0, 1), value=1.0), targets.to(dtype)
    moments.gram.addmm_(widened.T, widened)
    moments.cross.addmm_(targets.T, widened)
    moments.target_energy.add_(_measure_energy(targets))
    moments.absolute_sum.add_(_sum_absolute(widened[:, :-1]))


class MomentSums:
    """Running sums of :class:`SecondMoments`; only the upper triangle of H is computed and stored, in blocks of rows.

    The bias' row of H and column of C are sums over tokens, and the width of the products is padded to a multiple of 8.
    Bfloat16 inputs are multiplied as they are and accumulated in float32 where the device can: the products are exact and faster.
    On a GPU, targets are split into two bfloat16 parts, which hold 16 of their bits.

    :param sizes: (n, d): inputs and outputs of the linear
    :param device: device of the sums
    :param dtype: dtype of the sums, float32 or float64
    :param tokens: number of tokens converted to that dtype at once; on a CPU at most 512
    :param rows: rows of a product computed at once, where ``fetch`` is given
    :param fetch: function that moves a product to the device of the sums, where the activations are on another
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        device: torch.device | str,
        dtype: torch.dtype,
        tokens: int = 1 << 20,
        rows: int = 1 << 20,
        fetch: Callable[[Tensor], Tensor] | None = None,
    ):
        num_inputs, num_outputs = sizes
        self._dtype, self._tokens, self._rows, self._fetch = dtype, tokens, rows, fetch
        self._upper = [torch.zeros(shape, device=device, dtype=dtype) for shape in _list_blocks(num_inputs)]
        self._cross = torch.zeros(num_outputs, _align(num_inputs), device=device, dtype=dtype)
        # of inputs, of absolute inputs, of targets, and the number of tokens, or the sum of their squared weights
        self._sizes = num_inputs, num_inputs, num_outputs, 1
        self._sums = torch.zeros(sum(self._sizes), device=device, dtype=dtype)
        self._target_energy = torch.zeros((), device=device, dtype=torch.float64)

    def add(self, inputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> None:
        """Add the tokens of one sequence, or of several, as :func:`accumulate_moments` does.

        Float32 sums depend on the order of their terms. Added sequence by sequence, they do not depend on the split into
        batches. No BLAS guarantees the same order for another number of threads or another processor: there the last bits of a
        sum may differ, which :mod:`struprune_plugin.linalg.ties` keeps out of the choice of units.

        :param weights: factor on the error of each token, shape [tokens]; None for ones
        """
        narrow = weights is None and _multiplies_narrow(inputs, self._dtype)
        tokens = self._tokens if inputs.is_cuda else min(self._tokens, _TERMS)
        pieces, extra = inputs.split(tokens), self._cross.shape[1] - inputs.shape[1]
        factors = [None] * len(pieces) if weights is None else weights.to(self._dtype).split(tokens)
        for part, wanted, factor in zip(pieces, targets.split(tokens), factors, strict=True):
            part, wanted = part.to(part.dtype if narrow else self._dtype), wanted.to(self._dtype)
            if factor is not None:
                part, wanted = part * factor[:, None], wanted * factor[:, None]
            self._add_sums(part, wanted, factor)
            part = torch.nn.functional.pad(part, (0, extra)) if extra else part
            with _multiply_as_bfloat16(weights is None and inputs.dtype is torch.bfloat16):
                for block in self._upper:
                    right = part[:, -block.shape[1] :]
                    self._add_product(block, right[:, : len(block)], right)
            for piece in _split_bfloat16(wanted) if narrow else (wanted,):
                self._add_product(self._cross, piece, part)

    def _add_sums(self, inputs: Tensor, targets: Tensor, factor: Tensor | None) -> None:
        """Add the sums over tokens that need no product of matrices."""
        input_sum, target_sum = (_sum_tokens(part, factor, self._dtype) for part in (inputs, targets))
        count = input_sum.new_full((1,), len(inputs)) if factor is None else factor.square().sum()[None]
        sums, energy = torch.cat([input_sum, _sum_absolute(inputs), target_sum, count]), _measure_energy(targets)
        self._sums.add_(sums if self._fetch is None else self._fetch(sums))
        self._target_energy.add_(energy if self._fetch is None else self._fetch(energy))

    def _add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        narrow = right.dtype is not self._dtype
        if self._fetch is None and not narrow:
            total.addmm_(left.T, right)
            return
        step = min(self._rows, _NARROW_ROWS) if narrow else self._rows
        for start in range(0, len(total), step):
            rows = slice(start, start + step)
            part = left[:, rows].T
            product = torch.mm(part, right, out_dtype=self._dtype) if narrow else part @ right
            total[rows] += product if self._fetch is None else self._fetch(product)

    def list_parts(self) -> list[Tensor]:
        """Return all sums, for in-place addition."""
        return [*self._upper, self._cross, self._sums, self._target_energy]

    @staticmethod
    def assemble(together: Sequence[MomentSums], fetch: Callable[[Tensor], Tensor] | None = None) -> SecondMoments:
        """Return the moments of linears of one shape, with a first dimension more, and release the sums block by block.

        :param fetch: function that moves sums to the device of the moments
        """
        fetch, (size, *_) = fetch or (lambda tensor: tensor), together[0]._sizes
        cross, sums, energy = (
            fetch(stack([getattr(own, name) for own in together])) for name in ("_cross", "_sums", "_target_energy")
        )
        bias, absolute, target_sum, count = sums.split(together[0]._sizes, 1)
        gram = cross.new_empty(len(together), size + 1, size + 1)
        gram[:, -1, :-1], gram[:, :-1, -1], gram[:, -1, -1] = bias, bias, count[:, 0]
        while together[0]._upper:
            block = fetch(stack([own._upper.pop() for own in together]))
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
    if tokens.is_cuda:
        return tokens.T @ tokens
    total = tokens.new_zeros(tokens.shape[1], tokens.shape[1])
    for part in tokens.split(_TERMS):
        total.addmm_(part.T, part)
    return total


def multiply_in_parts(left: Tensor, right: Tensor) -> Tensor:
    """Return ``A B`` in the dtype of A, shapes [rows, n] and [n, d], in parts, so that B is never converted as a whole."""
    terms = _TERMS * 8 if left.is_cuda else _TERMS  # rows of B converted at once
    total = left.new_zeros(len(left), right.shape[1])
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
def _multiply_as_bfloat16(exact: bool) -> Iterator[None]:
    """Multiply float32 matrices that hold bfloat16 numbers as such, accumulated in float32, on a processor that can."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, can = matmul.fp32_precision, torch.cpu.get_capabilities()
    if exact and (can.get("avx512_bf16") or can.get("amx_bf16")):
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _split_bfloat16(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return two bfloat16 tensors whose sum equals float32 values to within a relative 2^-16."""
    high = values.bfloat16()
    return high, (values - high).bfloat16()


def _sum_tokens(values: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum over tokens, of each times its factor, shape [n]."""
    if factor is not None and values.is_cuda:
        return factor @ values  # without a copy
    return (values if factor is None else values * factor[:, None]).sum(0, dtype=dtype)


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


def select_inputs(moments: SecondMoments, columns: Tensor) -> SecondMoments:
    """Return the moments of the given inputs in the given order, the bias last.

    :param columns: input at each position, shape [..., k], int64
    """
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


def add_moments(moments: SecondMoments, others: SecondMoments) -> None:
    """Add the moments of other tokens, in place."""
    for total, other in zip(vars(moments).values(), vars(others).values(), strict=True):
        total.add_(other)


def move_moments(moments: SecondMoments, move: Callable[[Tensor], Tensor]) -> SecondMoments:
    """Return the moments with every tensor moved by ``move``."""
    return SecondMoments(*map(move, vars(moments).values()))


def stack_moments(parts: Sequence[SecondMoments]) -> SecondMoments:
    """Return the moments of several linears of one shape, with a first dimension more; those of one alone as a view."""
    return SecondMoments(*map(stack, zip(*(vars(part).values() for part in parts), strict=True)))


def sum_energies(moments: SecondMoments) -> Tensor:
    """Return ``tr(H) + tr(Y Y^T)`` of one linear or of several, shape [...], float64, which is finite if every token was."""
    return moments.gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64) + moments.target_energy


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape with a first dimension more; one alone as a view."""
    return parts[0][None] if len(parts) == 1 else torch.stack(list(parts))


def unstack_moments(moments: SecondMoments) -> list[SecondMoments]:
    """Return the moments of every linear of a stack, as views."""
    return [SecondMoments(*parts) for parts in zip(*vars(moments).values(), strict=True)]


def subtract_moments(moments: SecondMoments, part: SecondMoments) -> SecondMoments:
    """Return the float64 moments of the tokens of ``moments`` without those of ``part``, which are among them."""
    wide = replace(moments, gram=moments.gram.double(), cross=moments.cross.double())
    return SecondMoments(*(a - b for a, b in zip(vars(wide).values(), vars(part).values(), strict=True)))


def append_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [W, b] in float64, shape [d, n + 1] (b = 0 where the linear has none)."""
    column = torch.zeros_like(weight[:, 0]) if bias is None else bias
    return torch.cat([weight, column[:, None]], dim=1).to(torch.float64)


def measure_error(moments: SecondMoments, weight: Tensor, columns: Tensor | None = None) -> Tensor:
    """Return ``||Y - W P||^2`` of any weight from the moments alone, of one linear or of several.

    ``||Y - W P||^2 = tr(Y Y^T) - 2 tr(W C^T) + tr(W H W^T)``.
    Source: method.md section 2.

    :param weight: shape [..., d, k + 1], bias last, float64
    :param columns: inputs that the weight reads, shape [..., k]; all n where None
    :return: sum of squares over outputs and tokens, at least 0, shape [...]
    """
    if columns is not None:
        moments = select_inputs(moments, columns)
    gram, cross = moments.gram.double(), moments.cross.double()
    error = moments.target_energy - 2 * (weight * cross).sum((-2, -1)) + (weight * (weight @ gram)).sum((-2, -1))
    return error.clamp(min=0)


def with_bias_index(columns: Tensor, bias_index: int) -> Tensor:
    """Return input columns with the index of the bias appended, shape [..., k] -> [..., k + 1]."""
    return torch.nn.functional.pad(columns, (0, 1), value=bias_index)
