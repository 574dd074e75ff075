"""``trim_vocabulary``: a model's folder with fewer tokens in its tokenizer, its configuration files and its weights."""

import json
import os
import shutil
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from struprune_plugin.reporting.pages import write_card
from struprune_plugin.runtime.torch_state import reset_torch
from struprune_plugin.storage.checkpoint import load_tokenizer
from struprune_plugin.storage.files import check_place, check_room, measure_weight_bytes, write_whole
from struprune_plugin.storage.manifest import MANIFEST_NAME, Manifest, carry_manifest, read_manifest, write_manifest
from struprune_plugin.storage.output_folder import CARRIED, check_output, copy_templates, write_folder
from struprune_plugin.storage.vocabulary_record import VocabularyRecord, read_record, write_record
from struprune_plugin.vocabulary.order import find_script
from struprune_plugin.vocabulary.tensor_rows import copy_tensors
from struprune_plugin.vocabulary.token_ids import change_sizes, renumber
from struprune_plugin.vocabulary.tokenizer_json import FILE_NAME, TokenizerJson
from struprune_plugin.vocabulary.trim_plan import Ranking, TrimPlan, check_source, plan_trim

_OLD = "vocab.json vocab.txt merges.txt added_tokens.json bpe.codes dict.txt *.model *.spm *.tiktoken tekken.json"
_FEW = 20  # tokens that a script must have to be told


@reset_torch()
def trim_vocabulary(
    model: str | os.PathLike,
    output_dir: str | os.PathLike | None,
    text: str | os.PathLike,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    revision: str = "main",
    **ranking: Any,
) -> VocabularyRecord:
    """Write a model's folder with fewer tokens: a stock folder of the same class, with the same logits of the tokens that stay.

    :param model: a folder or hub name
    :param output_dir: folder to write, which appears when it is complete, or not at all. None writes nothing
    :param text: text like that which the model will read: a JSON-lines file, ``c4``, ``wikitext2`` or a hub name
    :param overwrite: let ``output_dir`` replace an earlier output of StruPrune
    :param trust_remote_code: run the code that comes with the model
    :param revision: branch, tag or commit on the hub
    :param ranking: other fields of :class:`struprune_plugin.vocabulary.trim_plan.Ranking`: ``vocabulary``, ``language`` and so on
    :return: what goes, and its estimated cost
    :raises ValueError: bad input, before anything is written
    """
    settings, name = Ranking(text, **ranking), os.fspath(model)
    inputs = [path for path in (name, text, ranking.get("words")) if path is not None]
    if output_dir is not None:
        check_output(Path(output_dir), overwrite, inputs)
    plan = plan_trim(check_source(name, settings.reserved, trust_remote_code, revision), settings)
    if output_dir is None:
        return describe_trim(plan)
    with write_folder(Path(output_dir), overwrite, inputs) as folder:
        return write_trim(plan, folder)


@contextmanager
def trim_first(
    model: str, output: Path, overwrite: bool, trusts: bool, others: Sequence[Path | None], **ranking: Any
) -> Iterator[tuple[str, Path]]:
    """Yield a trimmed copy of a model, and the folder into which the block prunes it; that folder then becomes the output.

    The copy goes at the end, and the output names the model itself. The output of a recipe that prunes nothing keeps its source's
    manifest, if there is one.

    :param others: what the block reads or writes besides
    :param ranking: as of :func:`trim_vocabulary`, with ``text``
    """
    inputs = [path for path in (model, ranking["text"], ranking["words"], *others) if path is not None]
    with write_folder(output, overwrite, inputs) as folder:
        shutil.rmtree(copy := folder.with_name("trimmed"), ignore_errors=True)  # of a killed run
        try:
            with reset_torch():
                plan = plan_trim(check_source(model, trusts=trusts), Ranking(**ranking))
                copy.mkdir()
                write_trim(plan, copy)
            yield str(copy), folder
            manifest = read_manifest(folder) if (folder / MANIFEST_NAME).is_file() else None
            if manifest is not None and manifest.model.base == str(copy):
                _name_whole(manifest, plan, folder)
        finally:
            shutil.rmtree(copy, ignore_errors=True)


def _name_whole(manifest: Manifest, plan: TrimPlan, folder: Path) -> None:
    """Let the manifest of an output tell the model before rows of its vocabulary went."""
    whole = manifest.model.parameters_before + plan.count_removed(manifest.model.left_out)
    gone = 1 - manifest.model.parameters_after / whole
    named = replace(manifest.model, base=plan.source.base, parameters_before=whole, removed_share=gone)
    write_manifest(manifest.model_copy(update={"model": named}), folder)
    write_card(folder)


def write_trim(plan: TrimPlan, folder: Path) -> VocabularyRecord:
    """Write a trimmed model into an empty folder: the small files, which are checked, then its weights."""
    source, kept = plan.source, plan.kept
    check_room([("output_dir", folder, measure_weight_bytes(source.folder))])
    new_ids = {old: new for new, old in enumerate(kept)}
    changed = [*_OLD.split(), FILE_NAME, *source.settings]
    for file in sorted(source.folder.iterdir()):
        is_carried, is_changed = (any(fnmatch(file.name, n) for n in names) for names in ([*CARRIED, "*.py"], changed))
        if file.is_file() and is_carried and not is_changed:
            shutil.copyfile(file, folder / file.name)
    copy_templates(source.folder, folder)
    for name, content in source.settings.items():
        if name == "config.json":
            content = change_sizes(content, source.num_rows, lambda size: bisect_left(kept, size))
        write_whole(folder / name, json.dumps(renumber(content, new_ids), ensure_ascii=False, indent=2) + "\n")
    write_whole(folder / FILE_NAME, source.tokenizer.make_smaller(new_ids))
    _check_tokenizer(plan, folder, new_ids)
    copy_tensors(source.folder, folder, source.stored, source.rows, kept)
    record = describe_trim(plan)
    carry_manifest(source.folder, folder)
    if (folder / MANIFEST_NAME).is_file():
        manifest = read_manifest(folder)
        left = manifest.model.parameters_after - plan.num_removed
        gone = 1 - left / manifest.model.parameters_before
        named = replace(manifest.model, parameters_after=left, removed_share=gone)
        write_manifest(manifest.model_copy(update={"model": named}), folder)
    write_record(record, folder)
    write_card(folder)
    return record


def _check_tokenizer(plan: TrimPlan, folder: Path, new_ids: dict[int, int]) -> None:
    """Raise if the written tokenizer gives a token another id, or the held-out text another content."""
    source, written = plan.source, load_tokenizer(folder, trust_remote_code=False)
    wanted = {source.tokenizer.tokens[old]: new for old, new in new_ids.items()}
    ids = written.get_vocab()
    wrong = [token for token, number in wanted.items() if ids.get(token) not in (number, None)]
    wrong += [*(ids.keys() ^ wanted.keys())]
    for text in () if wrong else plan.held_out:
        decoded = [
            each.decode(each(text, add_special_tokens=False, verbose=False).input_ids)
            for each in (source.loaded, written)
        ]
        wrong += [decoded[1]] if decoded[0] != decoded[1] else []
    if wrong:
        raise ValueError(
            f"tokenizer: {source.name} must give the same text with fewer tokens, got {wrong[0][:80]!r} wrong. Prune it without "
            "trimming its vocabulary."
        )


def describe_trim(plan: TrimPlan) -> VocabularyRecord:
    """Return the record of a trimming, and of those before it: from the first model's vocabulary to this one."""
    source, kept = plan.source, plan.kept
    smaller = TokenizerJson({}, source.tokenizer.make_smaller({old: new for new, old in enumerate(kept)}))
    scripts = {number: find_script(source.tokenizer.show(number)) for number in source.tokenizer.tokens}
    before, after = Counter(scripts.values()), Counter(scripts[number] for number in kept)
    record = VocabularyRecord(
        base=source.base,
        rows_before=source.num_rows,
        rows_after=plan.size,
        parameters_before=source.num_parameters,
        parameters_after=source.num_parameters - plan.num_removed,
        held_out_bytes=sum(len(text.encode("utf-8", "replace")) for text in plan.held_out),
        held_out_tokens_before=source.tokenizer.count(plan.held_out).total(),
        held_out_tokens_after=smaller.count(plan.held_out).total(),
        scripts={name: (count, after[name]) for name, count in before.items() if name and count >= _FEW},
        curve=plan.draw_curve(),
        kept=kept,
    )
    if (earlier := read_record(source.folder)) is None:
        return record
    units = earlier.parameters_after - source.num_parameters  # that went in between
    changes = {
        **{name: getattr(earlier, name) for name in ("base", "rows_before", "parameters_before")},
        "parameters_after": record.parameters_after + units,
        "scripts": {name: (count, after[name]) for name, (count, _) in earlier.scripts.items()},
        "curve": [replace(point, parameters=point.parameters + units) for point in record.curve],
        "kept": [earlier.kept[old] for old in kept],
    }
    return record.model_copy(update=changes)


def check_plot(file: Path) -> None:
    """Raise if :func:`draw_curve` cannot draw into a file."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError("--plot: needs matplotlib, got none. Run `pip install matplotlib`.") from None
    if file.suffix[1:] not in FigureCanvasBase.get_supported_filetypes():
        raise ValueError(f"--plot: must end in .svg, .png or .pdf, got {file}. Correct the name.")
    check_place("--plot", file.parent)


def draw_curve(record: VocabularyRecord, file: Path) -> None:
    """Draw the estimated growth of the held-out text's bits and tokens against the share of the whole model that is left."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).add_subplot()
    left = [100 * point.parameters / record.parameters_before for point in record.curve]
    axes.plot(left, [100 * point.bits_more for point in record.curve], marker="o", label="bits per byte, estimated")
    axes.plot(left, [100 * point.tokens_more for point in record.curve], marker=".", label="tokens, at most")
    axes.axvline(100 * record.parameters_after / record.parameters_before, color="gray", linestyle=":", label="planned")
    axes.set(xlabel="parameters of the whole model left, %", ylabel="more in held-out text, %", ylim=(0, 5))
    axes.legend()
    axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
