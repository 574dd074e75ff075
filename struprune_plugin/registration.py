"""Everything that importing the package promises: modifiers known to the host, pruned model types to transformers."""

import os
import sys

from loguru import logger

LOG_LEVEL = "LLM_COMPRESSOR_LOG_LEVEL"  # variable of llm-compressor; where it is set, its whole log is shown
LOUD = "llmcompressor.utils.dev"  # says for every module, and while it is imported, that there is no accelerator

if "llmcompressor" not in sys.modules and LOG_LEVEL not in os.environ:
    os.environ[LOG_LEVEL] = "ERROR"
    try:
        import llmcompressor.modifiers.transform  # noqa: F401
        from llmcompressor.logger import LoggerConfig, configure_logger
    finally:
        del os.environ[LOG_LEVEL]
    configure_logger(LoggerConfig())
logger.disable(LOUD)

from llmcompressor.modifiers.factory import ModifierFactory
from llmcompressor.modifiers.transform import awq
from llmcompressor.modifiers.transform.smoothquant import dynamic_mappings, utils

from struprune_plugin import paper, units  # noqa: F401  (registers the paper's methods, and the kinds of units)
from struprune_plugin.entrypoint import oneshot as oneshot
from struprune_plugin.export.classes import register_auto_classes
from struprune_plugin.model.structure.locate import PREFIX
from struprune_plugin.modifiers import MODIFIERS
from struprune_plugin.modifiers import LoRARecoveryModifier as LoRARecoveryModifier
from struprune_plugin.modifiers import SparsityAllocatorModifier as SparsityAllocatorModifier
from struprune_plugin.modifiers import StruPruneModifier as StruPruneModifier
from struprune_plugin.storage.manifest import read_manifest as read_manifest
from struprune_plugin.vocabulary.trim import trim_vocabulary as trim_vocabulary

for name, modifier in MODIFIERS.items():
    ModifierFactory.register(name, modifier)
register_auto_classes()
_STATIC, _DYNAMIC = awq.AWQ_MAPPING_REGISTRY, awq.AWQ_DYNAMIC_MAPPING_REGISTRY
_OTHERS = utils.MAPPINGS_REGISTRY, dynamic_mappings.SMOOTHQUANT_DYNAMIC_MAPPING_REGISTRY
for registry in (_STATIC, _DYNAMIC, *_OTHERS):  # pruned classes are smoothed as their stock classes are
    registry.update({PREFIX + name: known for name, known in registry.items()})  # type: ignore[attr-defined]
