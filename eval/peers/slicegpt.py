"""SliceGPT for OPT and LLaMA: rotate the residual stream to its principal components and cut the smallest ones off.

Source: Ashkboos et al. 2024, "SliceGPT: Compress Large Language Models by Deleting Rows and Columns" (ICLR), reimplemented
from the paper, with the settings of the authors' program. As there, norms lose their parameters to the linears behind
them, layer norms their centring to the linears before them too, each cut has a basis of its own, the residual additions
get shortcut matrices between the bases, cuts go from the first to the last and see what the cuts before them left, and the
last FFN's output, which feeds the head, keeps the full width.

Legend:
    X [tokens, d]  residual stream that enters a norm, for layer norms its mean over channels gone
    Q [d, k]       orthonormal basis of the k largest principal components of X
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from eval.peers import PeerResult
from eval.peers.calibration import record_calls, run_again
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.layerwise.calls import LayerCall
from struprune_plugin.linalg.second_moments import append_bias
from struprune_plugin.model.layers import count_prunable_parameters, find_decoder_layers, find_linear
from struprune_plugin.model.surgery import read_weight, set_weight

ROUND_TO = 8  # as the authors' program does by default


@dataclass(frozen=True)
class _Layout:
    """Where a model family keeps what SliceGPT changes; names within a decoder layer, or, of the ends, within the model.

    :param attention_norm: in front of attention; ``ffn_norm`` in front of the FFN
    :param ffn: the modules that the FFN's input runs through, one after the other
    :param embeddings: whose sum enters the first layer
    :param last_norm: in front of the head
    """

    attention_norm: str
    attention_inputs: tuple[str, ...]
    attention_output: str
    ffn_norm: str
    ffn: tuple[str, ...]
    ffn_inputs: tuple[str, ...]
    ffn_output: str
    embeddings: tuple[str, ...]
    last_norm: str


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OPT = _Layout(
    attention_norm="self_attn_layer_norm",
    attention_inputs=_QKV,
    attention_output="self_attn.out_proj",
    ffn_norm="final_layer_norm",
    ffn=("fc1", "activation_fn", "fc2"),
    ffn_inputs=("fc1",),
    ffn_output="fc2",
    embeddings=("model.decoder.embed_tokens", "model.decoder.embed_positions"),
    last_norm="model.decoder.final_layer_norm",
)
_LLAMA = _Layout(
    attention_norm="input_layernorm",
    attention_inputs=_QKV,
    attention_output="self_attn.o_proj",
    ffn_norm="post_attention_layernorm",
    ffn=("mlp",),
    ffn_inputs=("mlp.gate_proj", "mlp.up_proj"),
    ffn_output="mlp.down_proj",
    embeddings=("model.embed_tokens",),
    last_norm="model.norm",
)
_LAYOUTS = {"opt": _OPT, "llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA}


class RootMeanSquareNorm(nn.Module):
    """``x / sqrt(||x||^2 / d + eps)``: what is left of a norm, its gain, shift and centring elsewhere.

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
    """``x S + ffn(norm(x))``; S as in :class:`SlicedAttention`."""

    def __init__(self, norm: RootMeanSquareNorm, ffn: nn.Module, shortcut: Tensor):
        super().__init__()
        self.norm, self.ffn, self.shortcut = norm, ffn, nn.Parameter(shortcut)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return cast(Tensor, hidden_states @ self.shortcut + self.ffn(self.norm(hidden_states)))


class SlicedLayer(nn.Module):
    """A decoder layer of two sliced modules; it has no parameters but linears and shortcuts."""

    def __init__(self, attention: SlicedAttention, ffn: SlicedFFN):
        super().__init__()
        self.attention, self.ffn = attention, ffn

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return cast(Tensor, self.ffn(self.attention(hidden_states, **kwargs)))


@torch.no_grad()
def prune_slicegpt(folder: str, windows: Tensor, slice_fraction: float, round_to: int = ROUND_TO) -> PeerResult:
    """Prune an OPT, LLaMA, Mistral or Qwen checkpoint with SliceGPT.

    Differs from the paper: the basis is that of the stream before the norm, not after it, as in the authors' program.

    :param windows: calibration tokens, shape [windows, window], int64
    :param slice_fraction: share of the embedding channels to cut, in [0, 1). Shortcuts are added, so that fewer parameters
        go than this says; none or less than none below about 0.12
    :param round_to: the width left is rounded down to a multiple of this; 1 cuts exactly
    :raises ValueError: the contract of ``slice_fraction``, another family, or an OPT of another shape (as OPT-350m)
    """
    model, _ = load_checkpoint(folder, "float32")  # so that no rotation is rounded
    width = count_kept_channels(model, slice_fraction, round_to)
    dense = count_prunable_parameters(model)
    start = time.perf_counter()
    layout = _LAYOUTS[model.config.model_type]
    _fuse_ends(model, layout)
    calls = record_calls(model, windows)
    basis = find_principal_basis((call.hidden for call in calls), width).to(model.device)
    for name in layout.embeddings:
        embedding = cast(nn.Embedding, model.get_submodule(name))
        _set_embedding(embedding, embedding.weight.double() @ basis)
    hidden = [_project(call.hidden.to(model.device), basis) for call in calls]
    layers = find_decoder_layers(model)
    for index, (name, layer) in enumerate(layers):
        out_width = width if index < len(layers) - 1 else model.config.hidden_size
        sliced, hidden, basis = _slice_layer(layer, layout, calls, hidden, basis, out_width)
        model.set_submodule(name, sliced)
    _rotate_inputs(cast(nn.Linear, model.lm_head), basis)
    seconds = time.perf_counter() - start
    left = sum(p.numel() for _, layer in find_decoder_layers(model) for p in layer.parameters())
    note = f"{width} of {model.config.hidden_size} embedding channels; shortcuts counted; head and embeddings not"
    return PeerResult(model.eval(), 1 - left / dense, seconds, note)


def count_kept_channels(model: nn.Module, slice_fraction: float, round_to: int) -> int:
    """Return the embedding channels that stay.

    :raises ValueError: as :func:`prune_slicegpt`
    """
    config = cast(Any, model.config)
    size = config.hidden_size
    if config.model_type not in _LAYOUTS:
        raise ValueError(
            f"slicegpt: model must be one of {', '.join(_LAYOUTS)}, got {config.model_type}. Choose another model."
        )
    is_opt = config.model_type == "opt"
    if is_opt and (
        not config.do_layer_norm_before or config._remove_final_layer_norm or config.word_embed_proj_dim != size
    ):
        raise ValueError(
            "slicegpt: model must be an OPT with norms before its modules and before the head, and unprojected embeddings, "
            "got another OPT. Choose another model."
        )
    # the product of two floats may fall just short of a whole number
    width = int(round((1 - slice_fraction) * size, 6))
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
    layer: nn.Module, layout: _Layout, calls: list[LayerCall], hidden: list[Tensor], basis: Tensor, out_width: int
) -> tuple[SlicedLayer, list[Tensor], Tensor]:
    """Rotate and slice one decoder layer.

    A module is first given the basis of its input, and runs with its output still in all d channels; from those comes
    the basis of the output.

    :param hidden: the stream that enters, in ``basis``, one tensor a call
    :param out_width: channels to keep of the stream that leaves
    :return: (layer, the stream that leaves, its basis)
    """
    width, dtype = basis.shape[1], hidden[0].dtype
    norms = [layer.get_submodule(name) for name in (layout.attention_norm, layout.ffn_norm)]
    inputs = [[find_linear(layer, n) for n in names] for names in (layout.attention_inputs, layout.ffn_inputs)]
    outputs = [find_linear(layer, name) for name in (layout.attention_output, layout.ffn_output)]
    for norm, readers, writer in zip(norms, inputs, outputs, strict=True):
        _fuse_norm(norm, readers)
        if isinstance(norm, nn.LayerNorm):
            _center_outputs(writer)

    for linear in inputs[0]:
        _rotate_inputs(linear, basis)
    attention = layer.get_submodule(layout.attention_output.rpartition(".")[0])
    sliced = SlicedAttention(_strip_norm(norms[0]), attention, basis.T.to(dtype))
    middle = [run_again(call, sliced, stream) for call, stream in zip(calls, hidden, strict=True)]
    inner = find_principal_basis(middle, width)
    _rotate_outputs(outputs[0], inner)
    sliced.shortcut = nn.Parameter((basis.T @ inner).to(dtype))

    for linear in inputs[1]:
        _rotate_inputs(linear, inner)
    parts = nn.Sequential(*(layer.get_submodule(name) for name in layout.ffn))
    ffn = SlicedFFN(_strip_norm(norms[1]), parts, inner.T.to(dtype))
    leaving = [ffn(_project(stream, inner)) for stream in middle]
    outer = find_principal_basis(leaving, out_width)
    _rotate_outputs(outputs[1], outer)
    ffn.shortcut = nn.Parameter((inner.T @ outer).to(dtype))
    return SlicedLayer(sliced, ffn), [_project(stream, outer) for stream in leaving], outer


def _fuse_ends(model: nn.Module, layout: _Layout) -> None:
    """Move the last norm's gain and shift into the head, tied no longer; before layer norms, centre the embeddings."""
    head, norm = cast(nn.Linear, model.lm_head), model.get_submodule(layout.last_norm)
    embeddings = [cast(nn.Embedding, model.get_submodule(name)) for name in layout.embeddings]
    _fuse_norm(norm, [head])
    model.set_submodule(layout.last_norm, _strip_norm(norm))
    cast(Any, model.config).tie_word_embeddings = False
    if isinstance(norm, nn.LayerNorm):
        for embedding in embeddings:
            weight = embedding.weight.double()
            _set_embedding(embedding, weight - weight.mean(1, keepdim=True))


def _fuse_norm(norm: nn.Module, linears: Iterable[nn.Linear]) -> None:
    """Move a norm's gain g and shift s into the linears that read it: ``W (g x + s) + b = (W g) x + (W s + b)``."""
    gain, shift = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if gain is None:
        return
    for linear in linears:
        full = append_bias(*read_weight(linear))
        weight, bias = full[:, :-1], full[:, -1]
        if shift is not None:
            if linear.bias is None:  # the norm's shift ends up there
                linear.bias = nn.Parameter(linear.weight.new_zeros(linear.out_features))
            bias = weight @ shift.double() + bias
        set_weight(linear, torch.cat([weight * gain.double(), bias[:, None]], dim=1))


def _strip_norm(norm: nn.Module) -> RootMeanSquareNorm:
    """Return what is left of a norm whose gain and shift are elsewhere."""
    if isinstance(norm, nn.LayerNorm):
        return RootMeanSquareNorm(norm.normalized_shape[0], norm.eps)
    gain = cast(Tensor, norm.weight)
    return RootMeanSquareNorm(len(gain), cast(float, norm.variance_epsilon))


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


def _set_embedding(embedding: nn.Embedding, weight: Tensor) -> None:
    embedding.weight = nn.Parameter(weight.to(embedding.weight.dtype))
    embedding.embedding_dim = weight.shape[1]
