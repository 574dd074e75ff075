"""Registration of pruned models with vLLM, which finds this module by its ``vllm.general_plugins`` entry point.

Nothing else imports it.
"""

from __future__ import annotations

from struprune_plugin.export.classes import list_architectures

BACKEND = "vllm.model_executor.models.transformers:TransformersForCausalLM"


def register() -> None:
    """Register pruned models with vLLM's Transformers backend.

    Importing the package has already registered their configurations and classes with transformers. Layers may differ in heads:
    each layer's configuration holds its head size.
    """
    from vllm import ModelRegistry

    supported = ModelRegistry.get_supported_archs()
    for name in list_architectures():
        if name not in supported:
            ModelRegistry.register_model(name, BACKEND)
