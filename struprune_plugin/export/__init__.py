"""From a model sliced in memory to a checkpoint that loads: per-layer config, modelling code, manifest.

Names are looked up when asked for: what an engine needs (``classes.py``, the modelling files) must load where transformers is
installed and llm-compressor is not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from struprune_plugin.export.classes import register_auto_classes
    from struprune_plugin.export.convert import (
        adopt_attention,
        adopt_config,
        adopt_stock,
        can_hold_heads,
        make_uniform_config,
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

_MODULES = {
    "classes": ["register_auto_classes"],
    "convert": [
        *["adopt_attention", "adopt_config", "adopt_stock", "can_hold_heads", "make_uniform_config", "wrap_save"],
    ],
    "manifest": [
        *["MANIFEST_NAME", "BudgetRecord", "Manifest", "ModelRecord"],
        *["describe_versions", "read_manifest", "write_manifest"],
    ],
    "recipe": ["tidy_recipe"],
}

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


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
