"""From a model sliced in memory to a checkpoint that loads: per-layer config, modelling code, manifest."""

from struprune_plugin.export.convert import (
    adopt_attention,
    adopt_config,
    adopt_stock,
    can_hold_heads,
    make_uniform_config,
    register_auto_classes,
    wrap_save,
)
from struprune_plugin.export.manifest import (
    MANIFEST_NAME,
    BudgetRecord,
    Manifest,
    ModelRecord,
    describe_versions,
    read_manifest,
    write_manifest,
)
from struprune_plugin.export.recipe import tidy_recipe

__all__ = [
    "MANIFEST_NAME",
    "BudgetRecord",
    "Manifest",
    "ModelRecord",
    "adopt_attention",
    "adopt_config",
    "adopt_stock",
    "can_hold_heads",
    "describe_versions",
    "make_uniform_config",
    "read_manifest",
    "register_auto_classes",
    "tidy_recipe",
    "wrap_save",
    "write_manifest",
]
