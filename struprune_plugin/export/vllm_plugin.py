"""Pruned model types for vLLM, which finds this by its ``vllm.general_plugins`` entry point; nothing else imports it."""

from __future__ import annotations

from struprune_plugin.export.classes import list_architectures

BACKEND = "vllm.model_executor.models.transformers:TransformersForCausalLM"


def register() -> None:
    """Let vLLM run pruned models by its Transformers backend.

    Importing the package has registered their configurations and classes with transformers already. vLLM takes the number
    of heads from one place for all layers: models whose layers differ in heads are refused by their configuration.
    """
    from vllm import ModelRegistry

    supported = ModelRegistry.get_supported_archs()
    for name in list_architectures():
        if name not in supported:
            ModelRegistry.register_model(name, BACKEND)
