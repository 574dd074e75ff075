"""Decoder layers of a model: their position, the names of their linears and their sizes."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from compressed_tensors.offload import disable_onloading
from compressed_tensors.quantization import QuantizationMetadata
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.layout import LayerLayout
from struprune_plugin.model.structure.locate import find_linear as find_linear
from struprune_plugin.model.structure.locate import locate_layers
from struprune_plugin.model.unit_kind import UNIT_KINDS

QUANTISER_PARAMETERS = frozenset(QuantizationMetadata.all_qparam_names())
_ENTRY = 75  # bytes of a tensor in a file's header, beside its name
SOFT_CAP = "attn_logit_softcapping"  # too large for a random instance's logits to reach, so no measurement shows it


def find_decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of every decoder layer, first to last."""
    path = locate_layers(model)
    return [(f"{path}.{name}", layer) for name, layer in model.get_submodule(path).named_children()]


def find_layouts(model: nn.Module) -> list[tuple[nn.Module, LayerLayout]]:
    """Return (layer, layout of its prunable units) of every decoder layer, first to last."""
    structure, named = find_structure(model), find_decoder_layers(model)
    return [(layer, structure[index]) for index, (_, layer) in enumerate(named)]


def read_hidden_size(model: PreTrainedModel) -> int:
    """Return the width of the residual stream: the configuration's or, if a custom one has another name for it, the embeddings'."""
    config = model.config.get_text_config(decoder=True)
    return int(getattr(config, "hidden_size", 0) or model.get_input_embeddings().weight.shape[-1])


def count_prunable_parameters(model: nn.Module, mixtures: bool = False, named: Collection[str] = ()) -> int:
    """Return the number of parameters of all linears of the modules that hold units, with or without mixtures: the base of
    ``sparsity``. Biases count, parameters that a quantiser later in the recipe has added do not.

    :param named: kinds of units that the recipe names, some of which count only then
    """
    modules: list[nn.Module] = []
    for layer, layout in find_layouts(model):
        modules += [layer.get_submodule(name) for name in layout.list_linears(named)]
        lists = [layer.get_submodule(unit.output) for unit in layout.units if mixtures and unit.of_mixture]
        modules += [module for members in lists for module in members.modules()]
    with disable_onloading():
        named_parameters = [pair for module in modules for pair in module.named_parameters(recurse=False)]
    return sum(parameter.numel() for name, parameter in named_parameters if name not in QUANTISER_PARAMETERS)


def list_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return a model's parameters by name, tied ones once, without those added by a quantiser later in the recipe."""
    with disable_onloading():  # else every access to an offloaded weight gives another copy, and tied ones come twice
        named = list(model.named_parameters())
    return [pair for pair in named if pair[0].rpartition(".")[2] not in QUANTISER_PARAMETERS]


def count_parameters(model: nn.Module) -> int:
    """Return the number of the parameters that :func:`list_parameters` returns."""
    return sum(parameter.numel() for _, parameter in list_parameters(model))


def count_weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's saved weights: those of :func:`list_parameters`, and an estimate of the file's header."""
    return sum(parameter.nbytes + len(name) + _ENTRY for name, parameter in list_parameters(model))


def can_fuse_attention(model: PreTrainedModel) -> bool:
    """Return whether attention may run fused, without attention maps; sdpa ignores a soft cap."""
    config = model.config.get_text_config(decoder=True)
    return model._supports_sdpa and getattr(config, SOFT_CAP, None) is None


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of one decoder layer that configurations state; 0 where there is nothing to prune.

    :param head_dim: width of a head's values in the dense model
    :param value_head_dim: their present width
    :param width: FFN channels
    """

    num_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    value_head_dim: int = 0
    width: int = 0


def measure_layer(layout: LayerLayout, layer: nn.Module) -> LayerSizes:
    """Return a decoder layer's sizes, read from its linears, of several modules of a kind the first one's."""
    sizes = dict[str, int]()
    for unit in reversed(layout.units):
        sizes |= UNIT_KINDS.parse(unit.kind).read_sizes(unit, layer)
    return LayerSizes(**sizes)


@contextmanager
def freeze_weights(model: nn.Module) -> Iterator[None]:
    """Disable the gradients of all weights; offloaded ones stay where they are."""
    with disable_onloading():
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
