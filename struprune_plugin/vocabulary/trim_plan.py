"""Which tokens of a model go: checks, ranking, the curve of sizes and the size that is taken. Nothing is written."""

import math
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download
from tokenizers import Tokenizer
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from struprune_plugin.evaluation.text import stream_texts
from struprune_plugin.model.structure.shrinking import find_vocabulary
from struprune_plugin.storage.checkpoint import find_custom_class, load_tokenizer, read_config
from struprune_plugin.storage.files import shorten_error
from struprune_plugin.storage.output_folder import CARRIED
from struprune_plugin.storage.vocabulary_record import CurvePoint
from struprune_plugin.vocabulary.order import find_script, grow_counts, order_tokens
from struprune_plugin.vocabulary.ranking_text import (
    count_ranks,
    count_words,
    list_template_texts,
    read_words,
    split_texts,
)
from struprune_plugin.vocabulary.tensor_rows import Stored, find_copies, find_row_tensors, match_rows, read_headers
from struprune_plugin.vocabulary.token_ids import change_sizes, list_named, read_settings, resize_config
from struprune_plugin.vocabulary.tokenizer_json import TokenizerJson, read_tokenizer_json

MULTIPLE = 64  # of rows: engines pad to it
_RESERVED = re.compile(r"unused|reserved|^\W*(extra|special)_?\d", re.IGNORECASE)
_SHARES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # of the rows, in the curve


@dataclass(frozen=True)
class Ranking:
    """What tokens are ranked by, and how far they may go.

    :param text: a JSON-lines file, a folder's name on the hub, ``c4`` or ``wikitext2``: text like that which the model will read
    :param vocabulary: share of the rows, or their number, that stays; ``auto`` takes the smallest within ``limit``
    :param language: languages whose words count beside the text, e.g. ``en`` or ``en,de``
    :param words: a file of words in place of the language's list
    :param limit: for ``auto``: estimated growth of the held-out text's bits
    :param reserved: whether added tokens for later use, e.g. ``<unused12>``, stay
    """

    text: str | os.PathLike
    vocabulary: float | Literal["auto"] = "auto"
    text_column: str = "text"
    language: str | None = None
    words: str | os.PathLike | None = None
    limit: float = 0.005
    reserved: Literal["keep", "drop"] = "keep"

    def __post_init__(self) -> None:
        size = self.vocabulary
        if size != "auto" and (isinstance(size, str) or not size > 0 or (size > 1 and size % 1)):
            raise ValueError(
                f"vocabulary: must be auto, a share of the rows in (0, 1) or a number of rows, got {size!r}. Write 0.5, for half."
            )
        if not 0 < self.limit < 1:
            raise ValueError(f"limit: must be in (0, 1), got {self.limit}. For half a percent, write 0.005.")
        if self.reserved not in ("keep", "drop"):
            raise ValueError(f"reserved: must be keep or drop, got {self.reserved!r}. Correct it.")


@dataclass(frozen=True)
class Source:
    """A model whose vocabulary can be trimmed: it has passed all checks that need no text.

    :param settings: contents of the configuration files by name
    :param rows: names of the tensors with a row per token
    :param copies: names of those that are tied to another, which is stored, too
    :param fixed: ids that stay
    :param dropped: ids of reserved tokens that go
    """

    name: str
    folder: Path
    num_rows: int
    loaded: PreTrainedTokenizerBase
    tokenizer: TokenizerJson
    settings: dict[str, dict[str, Any]]
    stored: dict[str, Stored]
    rows: list[str]
    copies: list[str]
    fixed: set[int]
    dropped: set[int]

    @property
    def num_parameters(self) -> int:
        """Number of parameters, as stored; tied ones count once."""
        return sum(tensor.count for name, tensor in self.stored.items() if name not in self.copies)

    def count_row(self, left_out: Collection[str] = ()) -> int:
        """Return the number of parameters in a row of all tensors together, tied ones once, without those that are left out."""
        counted = [self.stored[name] for name in self.rows if name not in self.copies and name not in left_out]
        return sum(tensor.count // tensor.shape[0] for tensor in counted)

    @property
    def base(self) -> str:
        """The folder, whole, or the hub name."""
        return os.path.abspath(self.name) if os.path.isdir(self.name) else self.name


@dataclass(frozen=True)
class TrimPlan:
    """What goes.

    :param order: ids in the order in which they would go, of all that can
    :param growth: share of tokens more in the held-out text, after each of them
    """

    source: Source
    order: list[int]
    growth: list[float]
    least: int  # rows
    size: int  # rows
    held_out: list[str]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have a row; the other rows go first."""
        return sum(number < self.source.num_rows for number in self.source.tokenizer.tokens)

    @property
    def kept(self) -> list[int]:
        """Sorted ids of the tokens that stay."""
        gone = {*self.order[: self.num_tokens - self.size]}
        return sorted(number for number in self.source.tokenizer.tokens if number not in gone)

    @property
    def num_removed(self) -> int:
        """Number of parameters that go, as stored; tied ones count once."""
        return self.count_removed()

    def count_removed(self, left_out: Collection[str] = ()) -> int:
        """Return the number of parameters that go, without those of some tensors."""
        return self.source.count_row(left_out) * (self.source.num_rows - self.size)

    def resize(self, config: PretrainedConfig) -> PretrainedConfig:
        """Return the configuration of the model with the kept rows alone."""
        kept = self.kept
        new_ids = {old: new for new, old in enumerate(kept)}
        return resize_config(config, lambda rows: bisect_left(kept, rows), new_ids)

    def estimate(self, size: int) -> CurvePoint:
        """Return what a size is estimated to cost."""
        gone = self.num_tokens - size
        more = self.growth[gone - 1] if gone > 0 else 0.0
        left = self.source.num_parameters - self.source.count_row() * (self.source.num_rows - size)
        return CurvePoint(size, left, more)

    def draw_curve(self) -> list[CurvePoint]:
        """Return the sizes of a curve, the largest first, with the planned one."""
        sizes = {self.size, *(_round(share * self.source.num_rows) for share in _SHARES)}
        return [self.estimate(size) for size in sorted(sizes, reverse=True) if self.least <= size <= self.num_tokens]


def check_source(model: str, reserved: str = "keep", trusts: bool = False, revision: str = "main") -> Source:
    """Return a model whose vocabulary can be trimmed; runs tiny instances of its class, and reads no weights but tied ones.

    :param model: a folder or hub name
    :param reserved: as in :class:`Ranking`
    :raises ValueError: it cannot; docs/vocabulary.md lists why
    """
    config = read_config(model, revision, trusts)
    folder, num_rows = _find_folder(model, revision), find_vocabulary(config)
    tokenizer, settings = read_tokenizer_json(folder), read_settings(folder, config)
    change_sizes(settings["config.json"], num_rows, int)  # raises
    stored = read_headers(folder)
    rows = match_rows(stored, find_row_tensors(config, find_custom_class(model, config, revision)), num_rows)
    parts = config, config.get_text_config(decoder=True)
    is_tied = any(getattr(part, "tie_word_embeddings", False) for part in parts)
    copies = find_copies(folder, stored, rows) if is_tied else []
    loaded = load_tokenizer(folder, revision, trusts)
    backend = getattr(loaded, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer) and loaded.get_vocab().keys() > {*tokenizer.tokens.values()}:
        tokenizer = tokenizer.add_missing(backend)
    if strange := loaded.get_vocab().keys() ^ {*tokenizer.tokens.values()}:
        raise ValueError(
            f"tokenizer: tokenizer.json must hold the tokens that AutoTokenizer loads, got {sorted(strange)[0]!r} in one of them. "
            "Load the tokenizer and save it into the folder with save_pretrained."
        )
    named = set[int]().union(*map(list_named, settings.values()))
    template = tokenizer.count(list_template_texts(loaded.chat_template))
    fixed = tokenizer.list_fixed() | {number for number in named if number in tokenizer.tokens} | {*template}
    if rowless := sorted(number for number in named - tokenizer.tokens.keys() if number < num_rows):
        raise ValueError(
            f"config.json: token ids must be tokens of the tokenizer, got {rowless[0]}, which it lacks. Correct the id."
        )
    reservable = {number for number in fixed - named - {*template} if _RESERVED.search(tokenizer.tokens[number])}
    dropped = {n for n in reservable if tokenizer.tokens[n] in tokenizer.added} if reserved == "drop" else set[int]()
    return Source(model, folder, num_rows, loaded, tokenizer, settings, stored, rows, copies, fixed - dropped, dropped)


def _find_folder(model: str, revision: str) -> Path:
    """Return a model's folder, or that of the hub's cache, with all its files."""
    if Path(model).is_dir():
        return Path(model)
    try:
        patterns = [*CARRIED, "*.json", "*.py", "model*.safetensors"]
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # of many classes
        raise ValueError(
            f"model: {model!r} must be complete on the hub or in its cache, got: {shorten_error(error)}. Download it first."
        ) from None


def plan_trim(source: Source, ranking: Ranking) -> TrimPlan:
    """Return which tokens go.

    :raises ValueError: text or words that cannot be read or hold no token; a size that cannot be met
    """
    tokenizer, num_rows = source.tokenizer, source.num_rows
    texts = stream_texts(ranking.text, ranking.text_column, tokenizer=source.loaded)
    words = read_words(ranking.language, None if ranking.words is None else Path(ranking.words))
    ranked, held_out = split_texts(texts)
    counts: Counter[Any] = tokenizer.count(ranked)
    held = tokenizer.count(held_out)
    if not counts or not held:
        raise ValueError(f"text: {os.fspath(ranking.text)!r} must hold tokens of the model, got none. Give more text.")
    least = math.ceil(2 / ranking.limit)  # of held-out tokens, so that one more is within the limit
    if ranking.vocabulary == "auto" and held.total() < least:
        raise ValueError(
            f"text: the held-out tenth must have at least {least} tokens for `vocabulary: auto`, got {held.total()}. Give more "
            "text, or a size."
        )
    parts = {number: pieces for number, pieces in tokenizer.find_parts().items() if number < num_rows}
    parts |= dict.fromkeys(source.dropped)
    scripts, total = {number: find_script(tokenizer.show(number)) for number in parts}, counts.total()
    counts.update(count_words(tokenizer, words, total))
    used = {scripts[number] for number in counts if number in scripts}
    known = {number for number in parts if scripts[number] in used}
    counts.update(count_ranks(known, total))
    order = order_tokens(parts, counts, source.fixed, known)
    growth = [more / held.total() for more in grow_counts(order, parts, held)]
    whole = TrimPlan(source, order, growth, 0, 0, held_out)
    least = _round(whole.num_tokens - len(order))
    size = _choose_size(replace(whole, least=least), ranking)
    return replace(whole, least=least, size=size)


def _round(size: float) -> int:
    return math.ceil(size / MULTIPLE) * MULTIPLE


def _choose_size(plan: TrimPlan, ranking: Ranking) -> int:
    wanted, rows = ranking.vocabulary, plan.source.num_rows
    most = plan.num_tokens // MULTIPLE * MULTIPLE
    if wanted == "auto":
        sizes = range(plan.least, min(most, rows - 1) + 1, MULTIPLE)
        fits = (size for size in sizes if plan.estimate(size).bits_more <= ranking.limit)
        if (smallest := next(fits, None)) is None:
            raise ValueError(f"limit: must let some rows go, got {ranking.limit}, which keeps all {rows}. Raise it.")
        return smallest
    asked = wanted * rows if wanted <= 1 else wanted
    size = min(_round(asked), most)
    if asked >= rows or size == rows:
        raise ValueError(f"vocabulary: must be below the model's {rows} rows, got {wanted:g}. Lower it, or write auto.")
    if size < plan.least:
        remedy = ", or let reserved tokens go (--reserved drop)" if ranking.reserved == "keep" else ""
        raise ValueError(
            f"vocabulary: must be at least {plan.least} rows, which must stay, got {size} of {rows}. Raise it{remedy}."
        )
    return size
