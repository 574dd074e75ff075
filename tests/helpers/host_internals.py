"""What we lean on inside llm-compressor, compressed-tensors, transformers, peft and lm-eval, beyond a name that we import.

``tests/project/test_host_internals.py`` says which has moved. Names that are only imported need no entry: the import fails.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Internal:
    """Something of the host's.

    :param where: ``module:name.name``, or a module alone
    :param why: what we need it for
    :param takes: parameters, or fields of a dataclass, that we pass or override by name
    :param says: what its source must hold, where a behaviour and no name is leant on
    """

    where: str
    why: str
    takes: tuple[str, ...] = ()
    says: tuple[str, ...] = ()


_SAVING = "llmcompressor.transformers.compression.compressed_tensors_utils"
_CACHE = "compressed_tensors.offload.cache:OffloadCache"
_QUANT = "compressed_tensors.quantization"

INTERNALS = [
    Internal("llmcompressor:oneshot", "ours wraps it", ("model", "recipe", "output_dir")),
    Internal("llmcompressor.modifiers.factory:ModifierFactory.register", "the way into recipes"),
    Internal("llmcompressor.modifiers:Modifier.on_initialize", "our modifiers' life begins here"),
    Internal("llmcompressor.modifiers:Modifier.on_calibration_start", "a pass starts"),
    Internal("llmcompressor.modifiers:Modifier.on_finalize", "the config becomes the pruned one"),
    Internal("llmcompressor.recipe:Recipe.from_dict", "a recipe that we have read"),
    Internal("llmcompressor.utils.helpers:calibration_forward_context", "our passes run as the host's", ("model",)),
    Internal(
        "llmcompressor.modifiers.quantization:QuantizationMixin.resolved_config", "widths fit a quantiser's groups"
    ),
    Internal("llmcompressor.entrypoints.oneshot:get_non_linearized_moes", "experts stay as they are held", ("model",)),
    Internal("llmcompressor.modeling.moe.linearize:get_non_linearized_moes", "experts to linearize", ("model",)),
    Internal(
        "llmcompressor.modeling.moe.linear_experts:LinearExperts2D.from_experts_module",
        "linearizes experts; its experts know num_experts",
        ("experts", "config"),
    ),
    Internal(
        "llmcompressor.modeling.moe.linear_experts:ExpertMLPWithGate.copy_to_experts_module",
        "packs experts at their present width",
        ("experts", "index"),
        says=("self.intermediate_size",),
    ),
    Internal("llmcompressor.modeling.moe:linear_experts.offload_module", "experts stay where they are"),
    Internal("llmcompressor.modeling.moe:context._CALIBRATE_ALL_EXPERTS", "experts see what their router sends"),
    Internal(
        "llmcompressor.entrypoints:Oneshot.validate_model", "refuses unpacked weights of a packed folder", ("model",)
    ),
    Internal("llmcompressor.entrypoints.oneshot:norm_calibration_context", "norms keep their weights", ("model",)),
    Internal("llmcompressor.pipelines.cache:IntermediatesCache.pin_memory", "fails without an accelerator"),
    Internal("llmcompressor.utils.transformers:get_embeddings", "which modules are compared", ("model",)),
    Internal(f"{_SAVING}:_retie_embeddings", "compares embeddings on the device", ("model",), says=("torch.equal",)),
    Internal(f"{_CACHE}.keep_onloaded_values", "weights leave the device"),
    Internal(f"{_CACHE}.__init__", "embeddings stay on the host", ("onload_device",)),
    Internal(f"{_CACHE}.offloading_disabled", "weights are kept"),
    Internal(f"{_CACHE}.from_mapping", "weights fetched ahead", says=("offloaded_values",)),
    Internal(f"{_QUANT}:QuantizationArgs", "group sizes", ("strategy", "group_size")),
    Internal(f"{_QUANT}:QuantizationScheme", "group sizes", ("targets", "weights")),
    Internal(f"{_QUANT}:QuantizationStatus.INITIALIZED", "what may still be cut"),
    Internal(f"{_QUANT}:initialize_module_for_quantization", "scales of the new shapes", ("force_zero_point",)),
    Internal(
        "transformers.conversion_mapping:get_model_conversion_mapping",
        "a model that was unpacked is saved unpacked",
        ("model", "add_legacy"),
    ),
    Internal(
        "transformers.models.auto.configuration_auto:CONFIG_MAPPING._extra_content",
        "stock configurations, and where pruned ones are looked for",
    ),
    Internal(
        "transformers.dynamic_module_utils:get_class_from_dynamic_module",
        "configurations of a folder's code, before anything is loaded",
        ("class_reference", "pretrained_model_name_or_path"),
    ),
    Internal("transformers.modeling_utils:PreTrainedModel.is_custom_code", "buffers that are in no file"),
    Internal("transformers.integrations.heterogeneity", "per_layer_config is its schema"),
    Internal("peft.tuners.lora:Linear.get_delta_weight", "adapters become weights"),
    Internal("lm_eval.tasks:TaskManager", "tasks of a folder", ("include_path",)),
    Internal("lm_eval:simple_evaluate", "scores", ("model", "tasks", "limit")),
    Internal("lm_eval:evaluator.add_env_info", "describes the machine, which nobody reads"),
]
