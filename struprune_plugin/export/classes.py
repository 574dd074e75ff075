"""Registration of the pruned classes with transformers: all that an engine needs of this package, with transformers alone."""

from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from struprune_plugin.export import modeling_struprune as modeling

PRUNED_PREFIX = "struprune_"  # prefix of the model_type of a pruned model
_TASKS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")  # heads on the pruned trunk
_AUTO_CLASSES = [transformers.AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText]
_AUTO_CLASSES += [getattr(transformers, f"AutoModelFor{task}") for task in _TASKS]


class _PrunedConfigs(dict):
    """Additions to transformers' mapping of configurations; pruned classes are created on request."""

    def __contains__(self, model_type: object) -> bool:
        stock = str(model_type).removeprefix(PRUNED_PREFIX)
        return super().__contains__(model_type) or (stock != model_type and stock in CONFIG_MAPPING)

    def __getitem__(self, model_type: str) -> type[PreTrainedConfig]:
        if not super().__contains__(model_type):
            self[model_type] = register_type(CONFIG_MAPPING[model_type.removeprefix(PRUNED_PREFIX)])
        return super().__getitem__(model_type)


def register_auto_classes() -> None:
    """Register pruned checkpoints of any of transformers' types for loading without a trust flag."""
    if not isinstance(CONFIG_MAPPING._extra_content, _PrunedConfigs):
        CONFIG_MAPPING._extra_content = _PrunedConfigs(CONFIG_MAPPING._extra_content)


def register_type(stock: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Register a stock configuration's pruned classes, with saving of their modelling file; return the pruned configuration."""
    config = modeling.derive_class(modeling.PREFIX + stock.__name__)
    AutoConfig.register(config.model_type, config, exist_ok=True)
    config.register_for_auto_class("AutoConfig")
    for auto, model_class in _find_models(stock).items():
        pruned = modeling.derive_class(modeling.PREFIX + model_class.__name__)
        auto.register(config, pruned, exist_ok=True)
        pruned.register_for_auto_class(auto.__name__)
    return config


def _find_models(stock: type[PreTrainedConfig]) -> dict[Any, Any]:
    """Return the model classes of a configuration, by auto class, without models that take only a part of it."""
    mapped = {auto: auto._model_mapping.get(stock, None) for auto in _AUTO_CLASSES}
    models = {auto: model for auto, model in mapped.items() if getattr(model, "config_class", None) is stock}
    if AutoModelForImageTextToText in models:
        models.setdefault(AutoModelForCausalLM, models[AutoModelForImageTextToText])
    if AutoModelForCausalLM not in models:  # Emu 3's language model has no separate type there
        module = stock.__module__.split(".")[-2]
        for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
            if model_type_to_module_name(model_type) == module and getattr(transformers, name).config_class is stock:
                models.setdefault(AutoModelForCausalLM, getattr(transformers, name))
    return models


def name_auto_classes(config: PreTrainedConfig) -> dict[str, str]:
    """Return a pruned configuration's ``auto_map``, including the class without a head, which engines use and saving omits."""
    file = modeling.__name__.rpartition(".")[2]
    stock = next(c for c in type(config).__mro__ if not c.__name__.startswith(modeling.PREFIX))
    models = {auto.__name__: f"{file}.{modeling.PREFIX}{model.__name__}" for auto, model in _find_models(stock).items()}
    return {"AutoConfig": f"{file}.{type(config).__name__}", **models}
