"""Loading of the model that a run compresses."""

from pathlib import Path
from typing import Any

import psutil
import torch
from compressed_tensors.offload import load_offloaded_model
from llmcompressor.pytorch.model_load.helpers import parse_dtype
from torch import nn
from transformers import FineGrainedFP8Config, Mxfp4Config, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange

from struprune_plugin.model.structure.tiny import find_auto_class
from struprune_plugin.storage.checkpoint import find_checkpoint, is_packed, load_whole
from struprune_plugin.storage.files import check_room, measure_weight_bytes

_LEFT_FREE = 5 * 10**9  # bytes of the host's memory that an offloaded model leaves free
_UNPACKED: dict[str, Any] = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}


def load_model(path: str, config: PretrainedConfig, kwargs: dict[str, Any], folder: Path | None) -> PreTrainedModel:
    """Load a model as llm-compressor does; wrappers around a text decoder are loaded whole, packed weights are unpacked.

    :param folder: folder for the weights that would leave less than 5 GB of the host's memory free; None loads all to memory
    """
    options = {
        "revision": kwargs.get("model_revision", "main"),
        "dtype": parse_dtype(kwargs.get("precision", "auto")),
        "trust_remote_code": kwargs.get("trust_remote_code_model", False),
    }
    auto = find_auto_class(config)
    if is_packed(config):
        options["quantization_config"] = _UNPACKED[config.quantization_config["quant_method"]](dequantize=True)
    if folder is None:
        model = load_whole(auto, path, **options)
    else:
        stored = find_checkpoint(path, options["revision"])
        held = measure_weight_bytes(stored) if stored else 0
        check_room([("offload_folder", folder, max(0, held + _LEFT_FREE - psutil.virtual_memory().available))])
        folder.mkdir(parents=True, exist_ok=True)

        class Whole:  # llm-compressor's loader replaces its ``from_pretrained`` by one that offloads
            @classmethod
            def from_pretrained(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
                return load_whole(auto, *args, **kwargs)

        with load_offloaded_model(Whole):  # type: ignore[arg-type]
            model = Whole.from_pretrained(path, device_map="auto_offload", offload_folder=str(folder), **options)
    if is_packed(config):
        _forget_packing(model)
    return model


def _forget_packing(model: PreTrainedModel) -> None:
    """Make an unpacked model run and save as if its weights had never been packed."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dtype == torch.bfloat16 != model.dtype:  # MXFP4 is always unpacked to bfloat16
                delattr(module, name)  # assignment to a weight on disk would cast the new value to the old dtype
                setattr(module, name, nn.Parameter(parameter.detach().to(model.dtype), parameter.requires_grad))
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    prefixes = [each for each in model._weight_conversions if isinstance(each, PrefixChange)]
    unpacked = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = prefixes + [each for each in unpacked if not isinstance(each, PrefixChange)]
