"""Conversion of a sliced model to the class and configuration with which it is saved and loaded."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compressed_tensors.distributed import is_source_process
from compressed_tensors.offload import disable_onloading
from compressed_tensors.utils import patch_attr
from loguru import logger
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from struprune_plugin.export import any_class
from struprune_plugin.export import modeling_struprune as modeling
from struprune_plugin.export.classes import name_auto_classes, register_type
from struprune_plugin.export.custom_code import derive_beside, is_custom
from struprune_plugin.export.older_readers import copy_carried, keep_old_keys
from struprune_plugin.export.stock_config import list_sizes
from struprune_plugin.model.experts import pack_experts
from struprune_plugin.model.layers import find_decoder_layers, find_layouts, measure_layer
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.locate import find_stock, is_pruned, make_dense_config, read_padding
from struprune_plugin.model.unit_kind import UNIT_KINDS, UnitGroup
from struprune_plugin.runtime.residence import compare_embeddings_on_host
from struprune_plugin.storage.checkpoint import fetch_carried, find_checkpoint

_EXPERT_KEYS = ("moe_intermediate_size", "intermediate_size")  # in the order in which engines ask for them
_HOST_SAVING = "llmcompressor.transformers.compression.compressed_tensors_utils"


def adopt_paddings(model: PreTrainedModel, groups: Sequence[UnitGroup]) -> None:
    """Let the modules around linears that will lose units handle the dense width, where their code needs it."""
    for group in groups:
        layer = model.get_submodule(group.layer_name)
        for name, padding in group.unit.describe_padding(group).items():
            if read_padding(layer, name):
                continue
            owner, attribute = modeling.find_owner(layer, name)
            with any_class.keep_offload(owner):
                modeling.adopt_padding(owner, attribute, padding)


def adopt_config(model: PreTrainedModel) -> None:
    """Convert a sliced model to its pruned class, with a configuration read from the shapes of its layers.

    :raises ValueError: a tensor outside the linears of decoder layers differs from the dense class
    """
    pack_experts(model)
    old: Any = model.config
    layout = any_class.describe_layout(model, find_structure(model).layers)
    config: Any = copy.copy(old)  # text and vision configurations stay shared with the modules
    if is_custom(model):
        config.__class__, model_class, config.auto_map = derive_beside(model)
        config.layout = layout
    else:
        config.__class__, config.layout = register_type(find_stock(type(old))), layout
        model_class = modeling.derive_class(modeling.PREFIX + find_stock(type(model)).__name__)
        _state_sizes(config, model, make_dense_config(old))
        config.auto_map = name_auto_classes(config)
    any_class.share_config(model, old, config)
    with any_class.keep_offload(model):
        model.__class__ = model_class
    modeling.mark_layers(model, layout)
    config.architectures = [model_class.__name__]


def _state_sizes(config: Any, model: PreTrainedModel, dense: Any) -> None:
    """State a model's sizes in its pruned configuration by the dense one's own keys, too, for engines that read them."""
    twin = any_class.build_dense(find_stock(type(model)), dense)
    any_class.replace_conv1d(twin)
    if config.is_heterogeneous and not dense.is_heterogeneous:
        config.per_layer_config = None  # that of an earlier run, with which single values cannot be read
    key, widths = _find_expert_widths(model, dense, twin)
    if len(set(widths.values())) == 1:  # all layers have it
        config.layout["dense"] = {key: getattr(dense.get_text_config(decoder=True), key)}
        setattr(config.get_text_config(decoder=True), key, next(iter(widths.values())))
        widths = {}
    stated, known = _list_stated_sizes(model, dense, twin), dense.to_dict()
    for index, sizes in stated.items():
        sizes.pop(key, None)  # it is the experts' alone
        sizes |= {key: widths[index]} if index in widths else {}
    differing = {name for sizes in stated.values() for name, size in sizes.items() if size != known[name]}
    config.layout["states_sizes"] = bool(differing)
    if differing:
        config.per_layer_config = {i: {n: sizes[n] for n in differing if n in sizes} for i, sizes in stated.items()}
        if "num_attention_heads" in differing and getattr(config, "head_dim", None) is None:
            # else readers divide the hidden size by the heads
            config.head_dim = next(size.head_dim for size in list_sizes(model) if size.num_heads)


def _list_stated_sizes(model: PreTrainedModel, dense: Any, twin: PreTrainedModel) -> dict[int, dict[str, int]]:
    """Return every layer's numbers of heads and FFN width, by the dense configuration's keys, where it has one value for each."""
    if dense.get_text_config(decoder=True) is not dense or dense.is_heterogeneous:
        return {}
    stated, known = dict[int, dict[str, int]](), dense.to_dict()
    pairs = zip(find_layouts(model), find_layouts(twin), strict=True)
    for index, ((layer, layout), (before, _)) in enumerate(pairs):
        sizes, whole = measure_layer(layout, layer), measure_layer(layout, before)
        keys = dict[str, str]()
        for name in dict.fromkeys(unit.kind for unit in layout.units):
            keys |= UNIT_KINDS.parse(name).list_config_keys(layout, layer)
        stated[index] = {k: getattr(sizes, n) for k, n in keys.items() if known.get(k) == getattr(whole, n)}
    return stated


def _find_expert_widths(model: PreTrainedModel, dense: Any, twin: PreTrainedModel) -> tuple[str, dict[int, int]]:
    """Return the key by which engines build kernels for packed experts, empty where there is none, and the widths by layer."""
    text = dense.get_text_config(decoder=True)
    with disable_onloading():
        now, before = (
            {
                index: parameter.numel() // len(parameter) // text.hidden_size
                for index, (_, layer) in enumerate(find_decoder_layers(each))
                for name, parameter in layer.named_parameters()
                if name.endswith(".down_proj") and parameter.dim() == 3
            }
            for each in (model, twin)
        )
    known = set(before.values())
    key = next((key for key in _EXPERT_KEYS if [getattr(text, key, None)] == [*known]), "")
    return (key, now) if key and now.keys() == before.keys() else ("", {})


def adopt_stock(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Convert a model whose layers all have a stock configuration's sizes to the stock class; padding grows, experts are packed."""
    pack_experts(model)
    old: Any = model.config
    any_class.grow_padded(model)
    any_class.restore_conv1d(model)
    any_class.copy_settings(old, config)
    parts = [(old, config), *((getattr(old, key, None), getattr(config, key, None)) for key in config.sub_configs)]
    for before, after in parts:
        if before is not None:
            any_class.share_config(model, before, after)
    with any_class.keep_offload(model):
        model.__class__ = find_stock(type(model))
    config.architectures = [type(model).__name__]
    if is_custom(model):  # saved with its original code
        type(config).register_for_auto_class("AutoConfig")
        type(model).register_for_auto_class("AutoModelForCausalLM")
    else:
        vars(config).pop("auto_map", None)  # of code in the source folder, which was not run


def carry_files(source: str, output: Path, config: PreTrainedConfig, revision: str | None = None) -> None:
    """Copy the files of tokenizer and processor that the output folder lacks; add the keys that its configuration lacks.

    :param config: the output's configuration
    """
    if source:
        fetch_carried(source, revision or "main")
    if source and (folder := find_checkpoint(source, revision or "main")):
        copy_carried(folder, output)
        keep_old_keys(folder, output, config, is_stock=not is_pruned(type(config)))


@contextmanager
def keep_generation_settings() -> Iterator[None]:
    """Let models be saved with the generation settings that they came with, also if transformers warns of them, as of LLaMA-2's."""
    inner = GenerationConfig.validate

    def validate(self: GenerationConfig, strict: bool = False, **kwargs: Any) -> None:
        inner(self, strict=False, **kwargs)

    with patch_attr(GenerationConfig, "validate", validate):
        yield


def wrap_save(model: PreTrainedModel, after: Callable[[str], object]) -> None:
    """Wrap ``model.save_pretrained`` so that it keeps the pruned configuration and calls ``after``.

    After a checkpoint is written, llm-compressor replaces its config.json by the original one that it finds through
    ``config._name_or_path``. That name is therefore blank while saving, and only then (a later run needs it).

    :param after: called with the folder after everything else has been written
    """
    inner = model.save_pretrained

    def save_pretrained(save_directory: str, *args: Any, **kwargs: Any) -> None:
        name = model.config._name_or_path
        model.config._name_or_path = ""
        logger.disable(_HOST_SAVING)  # warns that it cannot find the original config, as intended
        try:
            with warnings.catch_warnings(), compare_embeddings_on_host(), keep_generation_settings():
                warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
                inner(save_directory, *args, **kwargs)
        finally:
            logger.enable(_HOST_SAVING)
            model.config._name_or_path = name
        if is_source_process():  # one of several processes writes, as in llm-compressor's own save
            carry_files(name, Path(save_directory), model.config, getattr(model.config, "_commit_hash", None))
            after(str(save_directory))

    save_pretrained._overridden = True  # type: ignore[attr-defined]  # llm-compressor wraps only what lacks this mark
    model.save_pretrained = save_pretrained
