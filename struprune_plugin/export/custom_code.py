"""Pruned classes of models whose code came with their checkpoint (``trust_remote_code``)."""

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

from struprune_plugin.export import modeling_struprune as modeling
from struprune_plugin.model.structure.locate import find_stock

FILE_NAME = "modeling_struprune_custom"


def is_custom(model: PreTrainedModel) -> bool:
    """Return whether a model's dense class is defined outside transformers."""
    return not find_stock(type(model)).__module__.startswith("transformers.")


def derive_beside(model: PreTrainedModel) -> tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, str]]:
    """Write the module that derives a model's pruned classes next to transformers' cached copy of the model's own module.

    Saving the model then copies it and the files that it imports, unchanged. Return the classes of configuration and model, and the
    configuration's ``auto_map``.

    :raises ValueError: the classes did not come with a checkpoint
    """
    stock, config, base = (find_stock(type(each)) for each in (model, model.config, model.base_model))
    package = stock.__module__.rpartition(".")[0]
    classes = [config, stock] + [base] * (base is not stock and base.__module__.rpartition(".")[0] == package)
    for each in classes:
        if not each.__module__.startswith(("transformers.", "transformers_modules.")):
            raise ValueError(
                f"{each.__module__}.{each.__name__}: the class must come with its checkpoint, loaded with trust_remote_code, or "
                "be one of transformers, got neither. Save a checkpoint with its code first (register_for_auto_class)."
            )
    folder = Path(str(sys.modules[stock.__module__].__file__)).parent
    file = Path(str(sys.modules[config.__module__].__file__))
    if (
        "transformers_modules" in file.parts and not (folder / file.name).exists()
    ):  # the model's module does not import it
        for each in (file, *map(Path, get_relative_import_files(file))):
            shutil.copyfile(each, folder / each.name)
    shutil.copyfile(modeling.__file__, folder / Path(modeling.__file__).name)
    lines = ['"""The pruned classes of the code beside this file, made by struprune_plugin."""', ""]
    lines += [f"from {_name_source(each)} import {each.__name__}" for each in classes]
    lines += ["from .modeling_struprune import derive_custom", ""]
    lines += [f"{_name(config)} = derive_custom({config.__name__}, __name__)"]
    lines += [f"{_name(each)} = derive_custom({each.__name__}, __name__, {_name(config)})" for each in classes[1:]]
    (folder / f"{FILE_NAME}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    importlib.invalidate_caches()
    module: Any = importlib.import_module(f"{package}.{FILE_NAME}")
    return _register(module, classes, getattr(model.config, "auto_map", None) or {})


def _register(module: Any, classes: list[Any], old: dict[str, str]) -> tuple[Any, Any, dict[str, str]]:
    """Register the derived classes, so that saving saves their code; return them and their ``auto_map``, tokenizers kept."""
    config, stock, *bases = classes
    autos = [name for name, said in old.items() if str(said).rpartition(".")[2] in (stock.__name__, _name(stock))]
    named = {"AutoConfig": config, **dict.fromkeys([*autos, "AutoModelForCausalLM"], stock)}
    if bases:
        named["AutoModel"] = bases[0]
    for name, each in named.items():
        getattr(module, _name(each)).register_for_auto_class(name)
    auto_map = {name: said for name, said in old.items() if not name.startswith(("AutoModel", "AutoConfig"))}
    auto_map |= {name: f"{FILE_NAME}.{_name(each)}" for name, each in named.items()}
    model_class = getattr(module, _name(stock))
    if issubclass(stock, GenerationMixin):  # loading adds the mixin where the code does not
        model_class = add_generation_mixin_to_remote_model(model_class)
    return getattr(module, _name(config)), model_class, auto_map


def _name(stock: type) -> str:
    return modeling.PREFIX + stock.__name__


def _name_source(stock: type) -> str:
    return "transformers" if stock.__module__.startswith("transformers.") else f".{stock.__module__.rpartition('.')[2]}"
