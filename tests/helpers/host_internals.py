"""What we lean on inside llm-compressor, compressed-tensors, transformers, peft and lm-eval, beyond what they document.

One line each: what, who needs it, why, and since which version of its package it has been as we know it, which is the oldest that
`pyproject.toml` allows (older ones were not looked at). `tests/project/test_host_internals.py` says which has moved.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Internal:
    """Something of the host's.

    :param where: ``module:name.name``, or a module alone
    :param used_in: the file of ours to adapt when it moves
    :param why: what we need it for
    :param since: the oldest version of its package that it is known from
    :param takes: parameters, or fields of a dataclass, that we pass or override by name
    :param says: what its source must hold, where a behaviour and no name is leant on
    """

    where: str
    used_in: str
    why: str
    since: str
    takes: tuple[str, ...] = ()
    says: tuple[str, ...] = ()


_LC, _CT, _TF, _PEFT, _LM = "0.14", "0.19", "5.15", "0.21", "0.4.13"
_PLUGIN = "modifiers/pruning.py"
_LOG = "modifiers/host_log.py"
_CACHE = "llmcompressor.pipelines.cache"
_SAVING = "llmcompressor.transformers.compression.compressed_tensors_utils"
_OFFLOAD = "compressed_tensors.offload"
_QUANT = "compressed_tensors.quantization"
_TRANSFORM = "llmcompressor.modifiers.transform"

INTERNALS = [
    # -- llm-compressor: the run ----------------------------------------------------------------------------------
    Internal("llmcompressor:oneshot", "entrypoint.py", "ours wraps it", _LC, ("model", "recipe", "output_dir")),
    Internal("llmcompressor.logger:configure_logger", "_import_host.py", "to import it without what it logs", _LC),
    Internal("llmcompressor.logger:LoggerConfig", "_import_host.py", "the same", _LC),
    Internal(
        "llmcompressor.modifiers.factory:ModifierFactory.register", "registration.py", "the way into recipes", _LC
    ),
    Internal("llmcompressor.modifiers:ModifierFactory.create", "recipes/load.py", "to read a recipe ourselves", _LC),
    Internal("llmcompressor.modifiers:Modifier.on_initialize", _PLUGIN, "our modifiers' life begins here", _LC),
    Internal("llmcompressor.modifiers:Modifier.on_calibration_start", _PLUGIN, "a pass starts", _LC),
    Internal("llmcompressor.modifiers:Modifier.on_finalize", _PLUGIN, "the config becomes the pruned one", _LC),
    Internal("llmcompressor.recipe:Recipe.from_dict", "recipes/load.py", "a recipe that we have read", _LC),
    Internal("llmcompressor.core:Event", _PLUGIN, "an argument of every event", _LC),
    Internal("llmcompressor.core:State", _PLUGIN, "it holds the model and the data", _LC),
    Internal(
        "llmcompressor.core:active_session",
        "modifiers/checks.py",
        "its lifecycle.recipe.modifiers are the other stages",
        _LC,
    ),
    Internal(
        "llmcompressor.utils.helpers:calibration_forward_context",
        "modifiers/host_pipeline.py",
        "passes of our own loop run as the host's would",
        _LC,
        ("model",),
    ),
    # -- llm-compressor: other modifiers, memory, saving ----------------------------------------------------------
    Internal(
        "llmcompressor.modifiers.pruning.sparsegpt.sgpt_base:SparsityModifierBase",
        "modifiers/checks.py",
        "zeros must come after us",
        _LC,
    ),
    Internal(
        "llmcompressor.modifiers.quantization:QuantizationMixin.resolved_config",
        "modifiers/widths.py",
        "widths must fit a later quantiser's groups",
        _LC,
    ),
    Internal(f"{_TRANSFORM}:AWQModifier", "modifiers/checks.py", "works on the final weights", _LC),
    Internal(f"{_TRANSFORM}:SmoothQuantModifier", "modifiers/checks.py", "the same", _LC),
    Internal("llmcompressor.utils.dev:get_main_device", "runtime/device_context.py", "where layers run", _LC),
    Internal(
        "llmcompressor.utils.helpers:DisableQuantization",
        "allocation/measurements.py",
        "forward passes on real weights",
        _LC,
    ),
    Internal(
        "llmcompressor.pytorch.model_load.helpers:parse_dtype",
        "modifiers/host_arguments.py",
        "to load as llm-compressor does",
        _LC,
    ),
    Internal(
        "llmcompressor.entrypoints.oneshot:get_non_linearized_moes",
        "entrypoint.py",
        "experts stay as their class holds them where no quantiser runs",
        _LC,
        ("model",),
    ),
    Internal(
        "llmcompressor.modeling.moe.linearize:get_non_linearized_moes",
        "model/experts.py",
        "the experts that it can take apart",
        _LC,
        ("model",),
    ),
    Internal(
        "llmcompressor.modifiers.pruning:REAPPruningModifier",
        "modifiers/mixtures.py",
        "it and our whole experts do not go together",
        _LC,
    ),
    Internal(
        "llmcompressor.modeling.moe.linear_experts:LinearExperts2D.from_experts_module",
        "model/experts.py",
        "takes experts apart; its experts know num_experts",
        _LC,
        ("experts", "config"),
    ),
    Internal(
        "llmcompressor.modeling.moe:linear_experts.offload_module",
        "model/experts.py",
        "experts of a model that is not offloaded stay where they are",
        _LC,
    ),
    Internal(
        "llmcompressor.modeling.moe:context._CALIBRATE_ALL_EXPERTS",
        "modifiers/host_pipeline.py",
        "every expert sees the tokens that its router sends there; all, where asked, in layerwise/expert_streams.py",
        _LC,
    ),
    Internal(f"{_OFFLOAD}:offload_module", "model/experts.py", "packed experts lie where linears lay", _CT),
    Internal(f"{_OFFLOAD}:get_cache_init_kwargs", "model/experts.py", "the same", _CT),
    Internal(
        "llmcompressor.entrypoints:Oneshot.validate_model",
        "entrypoint.py",
        "refuses a folder of packed weights, though they were unpacked",
        _LC,
        ("model",),
    ),
    Internal(
        "llmcompressor.entrypoints.oneshot:norm_calibration_context",
        "entrypoint.py",
        "norms keep their weights where no quantiser runs",
        _LC,
        ("model",),
    ),
    Internal("llmcompressor.core.lifecycle:logger", _LOG, "its steps are hidden in a run of ours", _LC),
    Internal("llmcompressor.pipelines.independent.pipeline:logger", _LOG, "the same", _LC),
    Internal("llmcompressor.recipe.recipe:logger", _LOG, "the same", _LC),
    Internal("llmcompressor.utils.dev:logger", _LOG, "it says once that there is no accelerator", _LC),
    Internal("llmcompressor.logger:support_log_once", _LOG, "the same", _LC, says=("log_once",)),
    Internal(f"{_CACHE}:IntermediatesCache.pin_memory", "entrypoint.py", "fails without an accelerator", _LC),
    Internal(
        f"{_SAVING}:modify_save_pretrained",
        "export/convert.py",
        "wraps save_pretrained only where it lacks this mark",
        _LC,
        says=("_overridden",),
    ),
    Internal(
        f"{_SAVING}:resave_config",
        "export/convert.py",
        "brings the dense config.json back where a name leads to it",
        _LC,
        says=("_name_or_path",),
    ),
    Internal(
        "llmcompressor.utils.transformers:get_embeddings",
        "runtime/residence.py",
        "which modules it compares",
        _LC,
        ("model",),
    ),
    Internal(
        f"{_SAVING}:_retie_embeddings",
        "runtime/residence.py",
        "compares both embeddings before it saves, where they are onloaded",
        _LC,
        ("model",),
        says=("torch.equal",),
    ),
    # -- compressed-tensors ---------------------------------------------------------------------------------------
    Internal("compressed_tensors.distributed:get_source_rank", "runtime/distributed.py", "several processes", _CT),
    Internal("compressed_tensors.distributed:init_dist", "runtime/distributed.py", "the same", _CT),
    Internal("compressed_tensors.distributed:is_distributed", "runtime/distributed.py", "the same", _CT),
    Internal("compressed_tensors.distributed:is_source_process", "entrypoint.py", "one process writes", _CT),
    Internal(
        f"{_OFFLOAD}:disable_offloading",
        "runtime/device_context.py",
        "a layer's weights stay while it is worked on",
        _CT,
    ),
    Internal(f"{_OFFLOAD}:disable_onloading", "runtime/residence.py", "to look at weights where they are", _CT),
    Internal(f"{_OFFLOAD}:load_offloaded_model", "modifiers/host_arguments.py", "models larger than the memory", _CT),
    Internal(f"{_OFFLOAD}:remove_dispatch", "recovery/adapters.py", "weights that can be trained", _CT),
    Internal(f"{_OFFLOAD}:set_onload_device", "recovery/adapters.py", "the same, given back", _CT),
    Internal(f"{_OFFLOAD}.cache:DiskCache", "modifiers/recovery.py", "weights on the disk", _CT),
    Internal(
        f"{_OFFLOAD}.cache:OffloadCache.keep_onloaded_values", "runtime/residence.py", "weights leave the device", _CT
    ),
    Internal(
        f"{_OFFLOAD}.cache:OffloadCache.__init__",
        "runtime/residence.py",
        "embeddings stay on the host",
        _CT,
        ("onload_device",),
    ),
    Internal(f"{_OFFLOAD}.cache:OffloadCache.offloading_disabled", "runtime/residence.py", "weights are kept", _CT),
    Internal(
        f"{_OFFLOAD}.cache:OffloadCache.from_mapping",
        "runtime/residence.py",
        "weights fetched ahead are kept by what they were loaded from",
        _CT,
        says=("offloaded_values",),
    ),
    Internal(f"{_OFFLOAD}.module:unwrap_offload_forward", "export/any_class.py", "modules of another class", _CT),
    Internal(f"{_QUANT}:QuantizationArgs", "modifiers/widths.py", "group sizes", _CT, ("strategy", "group_size")),
    Internal(f"{_QUANT}:QuantizationScheme", "modifiers/widths.py", "the same", _CT, ("targets", "weights")),
    Internal(f"{_QUANT}:QuantizationStrategy", "modifiers/widths.py", "the same", _CT),
    Internal(f"{_QUANT}:QuantizationMetadata", "model/layers.py", "names of a quantiser's parameters", _CT),
    Internal(f"{_QUANT}:QuantizationStatus.INITIALIZED", "model/surgery.py", "what may still be cut", _CT),
    Internal(
        f"{_QUANT}:initialize_module_for_quantization",
        "model/surgery.py",
        "scales of the new shapes",
        _CT,
        ("force_zero_point",),
    ),
    Internal("compressed_tensors.utils:is_match", "modifiers/widths.py", "targets as llm-compressor reads them", _CT),
    Internal("compressed_tensors.utils:match_targets", "modifiers/widths.py", "the same", _CT),
    Internal("compressed_tensors.utils:match_name", "model/units/__init__.py", "the same", _CT),
    Internal("compressed_tensors.utils:patch_attr", "runtime/residence.py", "to change what is put back", _CT),
    # -- transformers ---------------------------------------------------------------------------------------------
    Internal("transformers.activations:ACT2FN", "model/ffn_weights.py", "an FFN apart from its layer", _TF),
    Internal(
        "transformers.conversion_mapping:get_checkpoint_conversion_mapping",
        "export/modeling_struprune.py",
        "names of stored weights",
        _TF,
    ),
    Internal(
        "transformers.conversion_mapping:get_model_conversion_mapping",
        "modifiers/host_arguments.py",
        "a model that was unpacked is saved unpacked",
        _TF,
        ("model", "add_legacy"),
    ),
    Internal("transformers.core_model_loading:PrefixChange", "modifiers/host_arguments.py", "the same", _TF),
    Internal(
        "transformers.core_model_loading:revert_weight_conversion",
        "modifiers/host_arguments.py",
        "the same",
        _TF,
        says=("_weight_conversions",),
    ),
    Internal(
        "transformers.conversion_mapping:register_checkpoint_conversion_mapping",
        "export/modeling_struprune.py",
        "the same",
        _TF,
    ),
    Internal(
        "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS",
        "export/modeling_struprune.py",
        "attention whose values are narrower than its keys",
        _TF,
    ),
    Internal(
        "transformers.models.auto.configuration_auto:CONFIG_MAPPING._extra_content",
        "export/classes.py",
        "stock configurations, and where pruned ones are looked for",
        _TF,
    ),
    Internal(
        "transformers.models.auto.configuration_auto:model_type_to_module_name",
        "export/classes.py",
        "classes of the same folder",
        _TF,
    ),
    Internal(
        "transformers.models.auto.modeling_auto:MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "export/classes.py",
        "names of all pruned classes",
        _TF,
    ),
    Internal(
        "transformers.models.auto.auto_factory:add_generation_mixin_to_remote_model",
        "export/custom_code.py",
        "classes from a checkpoint's code, as loading makes them",
        _TF,
    ),
    Internal(
        "transformers.dynamic_module_utils:get_class_from_dynamic_module",
        "storage/checkpoint.py",
        "configurations of a folder's code, before anything is loaded",
        _TF,
        ("class_reference", "pretrained_model_name_or_path"),
    ),
    Internal(
        "transformers.dynamic_module_utils:get_relative_import_files",
        "export/custom_code.py",
        "files of that code",
        _TF,
    ),
    Internal(
        "transformers.modeling_utils:PreTrainedModel.is_custom_code",
        "export/modeling_struprune.py",
        "buffers that are in no file",
        _TF,
    ),
    Internal("transformers.pytorch_utils:Conv1D", "export/modeling_struprune.py", "linears stored transposed", _TF),
    Internal(
        "transformers.models.llama.modeling_llama:LlamaMLP",
        "export/modeling_block_configs.py",
        "an FFN of a layer's own width",
        _TF,
        ("config",),
    ),
    Internal("transformers.utils:cached_file", "storage/checkpoint.py", "files of a hub name", _TF),
    Internal("transformers.utils:logging", "storage/checkpoint.py", "to load without its log", _TF),
    Internal(
        "transformers.integrations.heterogeneity",
        "export/modeling_struprune.py",
        "per_layer_config is its schema",
        _TF,
    ),
    # -- peft and lm-eval -----------------------------------------------------------------------------------------
    Internal("peft.tuners.lora:LoraLayer.merge", "recovery/adapters.py", "adapters become weights", _PEFT),
    Internal("lm_eval.tasks:TaskManager", "evaluation/scoring.py", "tasks of a folder", _LM, ("include_path",)),
    Internal("lm_eval:simple_evaluate", "evaluation/scoring.py", "scores", _LM, ("model", "tasks", "limit")),
    Internal("lm_eval.models.huggingface:HFLM", "evaluation/scoring.py", "the same", _LM),
    Internal(
        "lm_eval:evaluator.add_env_info", "evaluation/scoring.py", "describes the machine, which nobody reads", _LM
    ),
]
