"""Cleaning of an output folder's ``recipe.yaml``, so that it is plain data that loads again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from loguru import logger

RECIPE_NAME = "recipe.yaml"
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # compiled, ten times as fast, where PyYAML has it
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def tidy_recipe(folder: str | Path) -> None:
    """Rewrite a saved recipe in place as plain YAML whose stages are all valid; nothing happens where there is none.

    llm-compressor dumps enumerations as Python objects, which no safe loader reads, and names the stages of a folder that is
    compressed again ``x_stage_0`` and ``x_stage_1``, which it then ignores silently.
    """
    file = Path(folder) / RECIPE_NAME
    if not file.is_file():
        return
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_PlainLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        logger.warning(f"{file} does not load again: {' '.join(str(error).split())}. Keep the recipe that you passed.")
        return
    stages = {re.sub(r"_stage_(\d+)$", r"_\1_stage", name): groups for name, groups in content.items()}
    form: dict[str, Any] = {"allow_unicode": True, "sort_keys": False, "default_flow_style": None, "width": 88}
    text = yaml.dump(stages, Dumper=_SafeDumper, **form)
    file.write_text(text, encoding="utf-8")


class _PlainLoader(_SafeLoader):
    """YAML loader that reads tuples as lists, and an object made from a single plain value (enumeration, device) as that value."""

    def read_sequence(self, node: yaml.Node) -> list[Any]:
        return self.construct_sequence(node, deep=True)  # type: ignore[arg-type]

    def read_object(self, suffix: str, node: yaml.Node) -> Any:
        values = self.read_sequence(node) if isinstance(node, yaml.SequenceNode) else []
        if len(values) != 1 or not isinstance(values[0], str | int | float):
            raise yaml.YAMLError(f"{suffix} cannot be written as plain YAML")
        return values[0]


_PlainLoader.add_constructor("tag:yaml.org,2002:python/tuple", _PlainLoader.read_sequence)
_PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/object/apply:", _PlainLoader.read_object)
