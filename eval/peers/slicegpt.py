"""SliceGPT for OPT: rotate the residual stream to its principal components and cut the smallest ones off.

Source: Ashkboos et al. 2024, "SliceGPT: Compress Large Language Models by Deleting Rows and Columns" (ICLR), written anew
from the paper, with the settings of the authors' program. As there, layer norms become norms without parameters, each cut
has a basis of its own, the residual additions get shortcut matrices between the bases, cuts go from the first to the last
and see what the cuts before them left, and the last FFN's output, which feeds the head, keeps the full width.

Legend:
    X [tokens, d]  residual stream that enters a norm, its mean over channels gone
    Q [d, k]       orthonormal basis of the k largest principal components of X
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from eval.peers import PeerResult
from eval.peers.calibration import record_calls
from struprune_plugin.evaluation import load_checkpoint
from struprune_plugin.layer.calls import LayerCall
from struprune_plugin.maths.statistics import append_bias
from struprune_plugin.model.layers import count_prunable_parameters, find_decoder_layers
from struprune_plugin.model.surgery import read_weight, set_weight

ROUND_TO = 8  # as the authors' program does by default


class RootMeanSquareNorm(nn.Module):
    """``x / sqrt(||x||^2 / d + eps)``: what a layer norm does to a stream without mean, its gain and shift elsewhere.

    :param width: d, that of the dense model: what was cut off was small and counts as zero
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.square().sum(-1, keepdim=True) / self.width + self.eps)


class SlicedAttention(nn.Module):
    """``x S + attention(norm(x))``.

    :param shortcut: S, from the basis of the stream that comes in to that of the stream that goes out
    """

    def __init__(self, norm: RootMeanSquareNorm, attention: nn.Module, shortcut: Tensor):
        super().__init__()
        self.norm, self.attention, self.shortcut = norm, attention, nn.Parameter(shortcut)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        output, _ = self.attention(self.norm(hidden_states), **kwargs)
        return hidden_states @ self.shortcut + output


class SlicedFFN(nn.Module):
    """``x S + fc2(activation(fc1(norm(x))))``; S as in :class:`SlicedAttention`."""

    def __init__(
        self, norm: RootMeanSquareNorm, fc1: nn.Module, activation: nn.Module, fc2: nn.Module, shortcut: Tensor
    ):
        super().__init__()
        self.norm, self.fc1, self.activation, self.fc2 = norm, fc1, activation, fc2
        self.shortcut = nn.Parameter(shortcut)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.shortcut + self.fc2(self.activation(self.fc1(self.norm(hidden_states))))


class SlicedLayer(nn.Module):
    """A decoder layer of two sliced modules; it has no parameters but linears and shortcuts."""

    def __init__(self, attention: SlicedAttention, ffn: SlicedFFN):
        super().__init__()
        self.attention, self.ffn = attention, ffn

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return cast(Tensor, self.ffn(self.attention(hidden_states, **kwargs)))


@torch.no_grad()
def prune_slicegpt(folder: str, windows: Tensor, slice_fraction: float, round_to: int = ROUND_TO) -> PeerResult:
    """Prune an OPT checkpoint with SliceGPT.

    Differs from the paper: the basis is that of the stream before the norm, not after it, as in the authors' program.

    :param windows: calibration tokens, shape [windows, window], int64
    :param slice_fraction: share of the embedding channels to cut, in [0, 1). Shortcuts are added, so that fewer parameters
        go than this says; none or less than none below about 0.12
    :param round_to: the width left is rounded down to a multiple of this; 1 cuts exactly
    :raises ValueError: the contract of ``slice_fraction``, or no OPT of the usual shape (that of OPT-350m is not)
    """
    model, _ = load_checkpoint(folder)
    width = count_kept_channels(model, slice_fraction, round_to)
    dense = count_prunable_parameters(model)
    start = time.perf_counter()
    _fuse_ends(model)
    calls = record_calls(model, windows)
    decoder = model.model.decoder
    basis = find_principal_basis((call.hidden for call in calls), width).to(model.device)
    for embedding in (decoder.embed_tokens, decoder.embed_positions):
        _set_embedding(embedding, embedding.weight.double() @ basis)
    hidden = [_project(call.hidden.to(model.device), basis) for call in calls]
    layers = decoder.layers
    for index in range(len(layers)):
        out_width = width if index < len(layers) - 1 else model.config.hidden_size
        layers[index], hidden, basis = _slice_layer(layers[index], calls, hidden, basis, out_width)
    _rotate_inputs(model.lm_head, basis)
    seconds = time.perf_counter() - start
    left = sum(p.numel() for _, layer in find_decoder_layers(model) for p in layer.parameters())
    note = (
        f"{width} of {model.config.hidden_size} embedding channels; shortcuts counted; head and embeddings not counted"
    )
    return PeerResult(model.eval(), 1 - left / dense, seconds, note)


def count_kept_channels(model: nn.Module, slice_fraction: float, round_to: int) -> int:
    """Return the embedding channels that stay.

    :raises ValueError: as :func:`prune_slicegpt`
    """
    config = cast(Any, model.config)
    size = config.hidden_size
    usual = config.model_type == "opt" and config.do_layer_norm_before and not config._remove_final_layer_norm
    if not usual or config.word_embed_proj_dim != size:
        raise ValueError(
            "slicegpt: model must be an OPT with norms before its modules and before the head, and unprojected embeddings, "
            f"got another {config.model_type}. Choose another model."
        )
    width = int(
        round((1 - slice_fraction) * size, 6)
    )  # the product of two floats may fall just short of a whole number
    width -= width % round_to
    if not (0 <= slice_fraction < 1 and width >= 1):
        raise ValueError(
            f"slicegpt: slice_fraction must leave from {round_to} to {size} channels, got {slice_fraction}. Change it."
        )
    return width


def find_principal_basis(signals: Iterable[Tensor], width: int) -> Tensor:
    """Return the eigenvectors of the second moment ``sum X^T X`` with the largest eigenvalues.

    :param signals: X in batches, shape [..., d]
    :param width: k
    :return: Q, shape [d, k], float64, on the signals' device
    """
    moment: Tensor | None = None
    for signal in signals:
        tokens = signal.reshape(-1, signal.shape[-1]).double()
        batch = tokens.T @ tokens
        moment = batch if moment is None else moment + batch
    assert moment is not None
    return torch.linalg.eigh(moment).eigenvectors.flip(1)[:, :width]  # eigh returns ascending eigenvalues


def _slice_layer(
    layer: nn.Module, calls: list[LayerCall], hidden: list[Tensor], basis: Tensor, out_width: int
) -> tuple[SlicedLayer, list[Tensor], Tensor]:
    """Rotate and slice one decoder layer.

    A module is first given the basis of its input, and runs with its output still in all d channels; from those comes
    the basis of the output.

    :param hidden: the stream that enters, in ``basis``, one tensor a call
    :param out_width: channels to keep of the stream that leaves
    :return: (layer, the stream that leaves, its basis)
    """
    dense = cast(Any, layer)
    width, dtype, attention = basis.shape[1], hidden[0].dtype, dense.self_attn
    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    for linear in (*inputs, attention.out_proj, dense.fc1, dense.fc2):
        _ensure_bias(linear)
    _fuse_norm(dense.self_attn_layer_norm, inputs)
    _fuse_norm(dense.final_layer_norm, [dense.fc1])
    _center_outputs(attention.out_proj)
    _center_outputs(dense.fc2)
    first, second = (_strip_norm(norm) for norm in (dense.self_attn_layer_norm, dense.final_layer_norm))

    for linear in inputs:
        _rotate_inputs(linear, basis)
    sliced = SlicedAttention(first, attention, basis.T.to(dtype))
    middle = [call.repeat(sliced, stream) for call, stream in zip(calls, hidden, strict=True)]
    inner = find_principal_basis(middle, width)
    _rotate_outputs(attention.out_proj, inner)
    sliced.shortcut = nn.Parameter((basis.T @ inner).to(dtype))

    _rotate_inputs(dense.fc1, inner)
    ffn = SlicedFFN(second, dense.fc1, dense.activation_fn, dense.fc2, inner.T.to(dtype))
    outputs = [ffn(_project(stream, inner)) for stream in middle]
    outer = find_principal_basis(outputs, out_width)
    _rotate_outputs(dense.fc2, outer)
    ffn.shortcut = nn.Parameter((inner.T @ outer).to(dtype))
    return SlicedLayer(sliced, ffn), [_project(stream, outer) for stream in outputs], outer


def _fuse_ends(model: nn.Module) -> None:
    """Take the mean out of the embeddings, and move the last norm's gain and shift into the head, tied no longer."""
    opt = cast(Any, model)
    decoder = opt.model.decoder
    _ensure_bias(opt.lm_head)
    _fuse_norm(decoder.final_layer_norm, [opt.lm_head])
    decoder.final_layer_norm = _strip_norm(decoder.final_layer_norm)
    opt.config.tie_word_embeddings = False
    for embedding in (decoder.embed_tokens, decoder.embed_positions):
        weight = embedding.weight.double()
        _set_embedding(embedding, weight - weight.mean(1, keepdim=True))


def _fuse_norm(norm: nn.LayerNorm, linears: Iterable[nn.Linear]) -> None:
    """Move a layer norm's gain and shift into the linears that read it: ``W (g x + s) + b = (W g) x + (W s + b)``."""
    if not norm.elementwise_affine:
        return
    gain, shift = norm.weight.double(), norm.bias.double()
    for linear in linears:
        full = append_bias(*read_weight(linear))
        weight, bias = full[:, :-1], full[:, -1]
        set_weight(linear, torch.cat([weight * gain, (weight @ shift + bias)[:, None]], dim=1))


def _strip_norm(norm: nn.LayerNorm) -> RootMeanSquareNorm:
    return RootMeanSquareNorm(norm.normalized_shape[0], norm.eps)


def _center_outputs(linear: nn.Linear) -> None:
    """Take the mean over the output channels out of a linear."""
    full = append_bias(*read_weight(linear))
    set_weight(linear, full - full.mean(0))


def _rotate_inputs(linear: nn.Linear, basis: Tensor) -> None:
    """Let a linear read the stream in a basis Q: ``W Q``."""
    full = append_bias(*read_weight(linear))
    set_weight(linear, torch.cat([full[:, :-1] @ basis, full[:, -1:]], dim=1))


def _rotate_outputs(linear: nn.Linear, basis: Tensor) -> None:
    """Let a linear write to the stream in a basis Q: ``Q^T W``, ``Q^T b``."""
    set_weight(linear, basis.T @ append_bias(*read_weight(linear)))


def _project(hidden: Tensor, basis: Tensor) -> Tensor:
    return (hidden.double() @ basis).to(hidden.dtype)


def _ensure_bias(linear: nn.Linear) -> None:
    """Give a linear a bias of zeros where it has none: the norms' shifts end up there."""
    if linear.bias is None:
        linear.bias = nn.Parameter(linear.weight.new_zeros(linear.out_features))


def _set_embedding(embedding: nn.Embedding, weight: Tensor) -> None:
    embedding.weight = nn.Parameter(weight.to(embedding.weight.dtype))
    embedding.embedding_dim = weight.shape[1]
