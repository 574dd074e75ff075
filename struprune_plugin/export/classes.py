"""The pruned classes, made known to transformers: all that an engine needs of this package, with transformers alone."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from struprune_plugin.export import modeling_struprune as modeling
from struprune_plugin.model.families import FAMILIES

_AUTO_CLASSES = (AutoModel, AutoModelForCausalLM)


def _list_stock_configs() -> list[type[PreTrainedConfig]]:
    return [CONFIG_MAPPING[model_type] for family in FAMILIES for model_type in family.model_types]


def register_auto_classes() -> None:
    """Make transformers load pruned checkpoints without a trust flag, and save their modelling file with them."""
    for stock in _list_stock_configs():
        config = modeling.derive_class(modeling.PREFIX + stock.__name__)
        AutoConfig.register(config.model_type, config, exist_ok=True)
        config.register_for_auto_class("AutoConfig")
        for auto in _AUTO_CLASSES:
            model = modeling.derive_class(modeling.PREFIX + auto._model_mapping[stock].__name__)
            auto.register(config, model, exist_ok=True)
            model.register_for_auto_class(auto.__name__)


def list_architectures() -> list[str]:
    """Return the class names of all pruned causal language models, as checkpoints name them."""
    return [modeling.PREFIX + AutoModelForCausalLM._model_mapping[stock].__name__ for stock in _list_stock_configs()]


def name_auto_classes(config: PreTrainedConfig) -> dict[str, str]:
    """Return a pruned configuration's ``auto_map``: engines ask for the class without a head too, which saving leaves out."""
    file = modeling.__name__.rpartition(".")[2]
    found = {"AutoConfig": f"{file}.{type(config).__name__}"}
    for auto in _AUTO_CLASSES:
        found[auto.__name__] = f"{file}.{auto._model_mapping[type(config)].__name__}"
    return found
