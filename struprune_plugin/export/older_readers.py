"""What an output takes over from its source for readers older than transformers 5: keys of the configuration, tokenizer files."""

import copy
import json
import logging
import os
import shutil
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import logging as transformers_logging

from struprune_plugin.storage.checkpoint import find_checkpoint
from struprune_plugin.storage.files import write_whole
from struprune_plugin.storage.output_folder import CARRIED, TEMPLATES, copy_templates

_ROPE, _TOKENIZER = "rope_parameters", "tokenizer_config.json"
_NOT_KEPT = {"architectures", "auto_map", "quantization_config", "torch_dtype", "transformers_version", "_name_or_path"}
_NOT_KEPT |= {"layout", "per_layer_config"}  # of a pruned source


# -- configuration --------------------------------------------------------------------------------------------------


def keep_old_keys(source: Path, output: Path, config: PreTrainedConfig, is_stock: bool) -> None:
    """Add the keys of a source's ``config.json`` that the output's lacks: transformers 5 reads ``rope_theta``, ``rope_scaling`` and
    ``torch_dtype`` and writes others, which older readers pass over without a word.

    Only keys that still hold are added: the configuration is read as it is without them, and those of rotary embeddings alone
    mean what ``rope_parameters`` says.

    :param config: the output's configuration
    :param is_stock: whether stock classes load the output; if so, the keys of rotary embeddings and dtype are derived where the
        source lacks them
    """
    old, written = _read_json(source / "config.json"), _read_json(output / "config.json")
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)  # readings are compared, not used
    try:
        changed = _add_keys(written, old, config, is_stock)
    finally:
        transformers_logging.set_verbosity(level)
    if changed != written:
        write_whole(output / "config.json", json.dumps(changed, indent=2) + "\n")


def _add_keys(written: dict[str, Any], source: dict[str, Any], config: Any, is_stock: bool) -> dict[str, Any]:
    """Return a configuration's file, or a part of it, with the source's other keys that still hold."""

    def read(values: dict[str, Any]) -> dict[str, Any]:
        return type(config).from_dict(copy.deepcopy(values)).to_dict()

    try:
        now = read(written)
    except Exception:  # a class that cannot be made from its own file
        return written

    def are_true(keys: dict[str, Any], without: str = "") -> bool:
        try:
            values = read({name: value for name, value in written.items() if name != without} | keys)
        except Exception:  # values that the class refuses
            return False
        return all(name in values and values[name] == value for name, value in now.items())

    added: dict[str, Any] = {}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig) and isinstance(inner := written.get(name), dict):
            before = source.get(name)
            added[name] = _add_keys(inner, before if isinstance(before, dict) else {}, part, is_stock)
    missing = {name: value for name, value in source.items() if name not in _NOT_KEPT | written.keys()}
    rope = {name: missing.pop(name) for name in [*missing] if "rope" in name or "rotary" in name}
    spellings: list[dict[str, Any]] = [rope] if rope else []
    spellings += [_spell_old(written[_ROPE])] if is_stock and isinstance(written.get(_ROPE), dict) else []
    added |= next((each for each in spellings if are_true(each) and are_true(each, without=_ROPE)), {})
    added |= {name: value for name, value in missing.items() if are_true({name: value})}
    if "dtype" in written and (is_stock or "torch_dtype" in source):
        added["torch_dtype"] = written["dtype"]
    return dict(sorted({**written, **added}.items()))


def _spell_old(rope: dict[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters`` as older readers know them; two kinds of layers as Gemma 3 has them."""
    rope, local = rope.get("full_attention", rope), rope.get("sliding_attention")
    rest = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    old = {"rope_theta": rope.get("rope_theta"), "rope_scaling": None if rest == {"rope_type": "default"} else rest}
    old |= {name: rope[name] for name in ("partial_rotary_factor",) if name in rope}
    return old | ({"rope_local_base_freq": local.get("rope_theta")} if local else {})


# -- tokenizer ------------------------------------------------------------------------------------------------------


def find_origin(processor: Any, trust_remote_code: bool) -> str | None:
    """Return the folder or hub name of a tokenizer or processor, passed by name or loaded; None where it was changed since."""
    if isinstance(processor, (str, os.PathLike)):
        return os.fspath(processor)
    is_tokenizer = isinstance(processor, PreTrainedTokenizerBase)
    origin = getattr(processor if is_tokenizer else getattr(processor, "tokenizer", None), "name_or_path", None)
    if not origin:
        return None
    auto: Any = AutoTokenizer if is_tokenizer else AutoProcessor
    try:
        loaded = auto.from_pretrained(origin, trust_remote_code=trust_remote_code, local_files_only=True)
        return origin if _list_saved(loaded) == _list_saved(processor) else None
    except Exception:  # files that are gone, or a class with a way of its own: it is saved as it is
        return None


def keep_tokenizer(origin: str | None, source: str, output: Path, revision: str = "main") -> None:
    """Replace the files of a saved tokenizer by those of its origin; of a changed one, replace the name of its class.

    :param origin: as :func:`find_origin` returns it
    :param source: folder or hub name of the model
    """
    used = _read_json(output / _TOKENIZER).get("tokenizer_class")
    folder = find_checkpoint(origin, revision if origin == source else "main") if origin else None
    if folder:
        _restore_files(folder, output)
    elif source and (folder := find_checkpoint(source, revision)):
        _restore_class(folder, output)
    if used:
        _name_class(output, used)


def _name_class(output: Path, used: str) -> None:
    """Name the class of a tokenizer in its file where AutoTokenizer takes another one. For some types of models (GPT-2, Mistral,
    Phi 3) it takes a class of its own and not the named one, which would split text otherwise; a pruned model's type is none of
    them."""
    said = _read_json(output / _TOKENIZER)
    if "auto_map" in said:
        return
    try:
        taken = type(AutoTokenizer.from_pretrained(output, trust_remote_code=False)).__name__
    except Exception:  # files that the named class cannot read
        taken = ""
    if taken.removesuffix("Fast") != used.removesuffix("Fast"):
        said["tokenizer_class"] = "PreTrainedTokenizerFast" if used == "TokenizersBackend" else used  # its older name
        _write_json(output / _TOKENIZER, said)


def _list_saved(processor: Any) -> dict[str, Any]:
    """Return the content of the files that a tokenizer or processor saves, by name."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        processor.save_pretrained(folder)
        files = {str(file.relative_to(folder)): file for file in Path(folder).rglob("*") if file.is_file()}
        content: dict[str, Any] = {name: _read_json(file) or file.read_bytes() for name, file in files.items()}
    for said in content.values():
        for name in ("is_local", "local_files_only") if isinstance(said, dict) else ():
            said.pop(name, None)  # of how it was loaded
    return content


def _restore_files(origin: Path, output: Path) -> None:
    """Replace the files of a tokenizer and processor that was not changed by those that it was loaded from."""
    files = [file.name for file in origin.iterdir() if _is_carried(file)]
    if _TOKENIZER not in files and "tokenizer.json" not in files:
        return
    has_template = "chat_template.jinja" in files or "chat_template" in _read_json(origin / _TOKENIZER)
    # the processor's, see load_tokenizer
    added = "" if has_template or "chat_template.json" not in files else "chat_template.jinja"
    for file in [file for file in output.iterdir() if _is_carried(file) and file.name != added]:
        file.unlink()
    shutil.rmtree(output / TEMPLATES, ignore_errors=True)
    copy_carried(origin, output)


def _restore_class(source: Path, output: Path) -> None:
    """Name the source's class of tokenizer in the file of a changed tokenizer, where transformers 5 names one that is new."""
    file, before = output / _TOKENIZER, _read_json(source / _TOKENIZER).get("tokenizer_class")
    said = _read_json(file)
    if said.get("tokenizer_class") == "TokenizersBackend" != before and before:
        said["tokenizer_class"] = before
        if isinstance(tokens := said.get("extra_special_tokens"), list):
            said["additional_special_tokens"] = tokens
            del said["extra_special_tokens"]
        _write_json(file, said)


def copy_carried(folder: Path, output: Path) -> None:
    """Copy the files of tokenizer and processor that the output folder does not have yet, and what their code imports."""
    files = [file for file in folder.iterdir() if _is_carried(file)]
    imported = [Path(each) for file in files if file.suffix == ".py" for each in get_relative_import_files(file)]
    for file in {*files, *imported}:
        if not (output / file.name).exists():
            shutil.copyfile(file, output / file.name)
    if not (output / TEMPLATES).exists():
        copy_templates(folder, output)


def _is_carried(file: Path) -> bool:
    return file.is_file() and any(fnmatch(file.name, name) for name in CARRIED)


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file; empty where there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    write_whole(file, json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
