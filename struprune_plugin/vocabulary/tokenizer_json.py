"""``tokenizer.json``: what its tokens are made of, and the same file with fewer of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from struprune_plugin.storage.files import shorten_error

FILE_NAME = "tokenizer.json"
BYTES = [f"<0x{number:02X}>" for number in range(256)]  # tokens of byte fallback
_ALPHABET = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level BPE shows as themselves
_OTHERS = sorted({*range(256)} - {*_ALPHABET})
_SHOWN = {chr(byte): byte for byte in _ALPHABET} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}


@dataclass(frozen=True)
class TokenizerJson:
    """Content of a ``tokenizer.json`` that can be made smaller.

    :param content: the parsed file
    :param text: the file
    """

    content: dict[str, Any]
    text: str

    @cached_property
    def backend(self) -> Tokenizer:
        """The library's tokenizer, which neither cuts nor pads texts, whatever lengths the file was saved with."""
        tokenizer = Tokenizer.from_str(self.text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids of the model's tokens by text; where a Unigram has a piece twice, the last."""
        model = self.content["model"]
        if model["type"] == "BPE":
            return model["vocab"]
        return {piece: number for number, (piece, _) in enumerate(model["vocab"])}

    @cached_property
    def tokens(self) -> dict[int, str]:
        """Texts of all tokens by id, as the file holds them; those added have the ids that the library gives them."""
        vocabulary = self.content["model"]["vocab"]
        is_map = isinstance(vocabulary, dict)  # of BPE; a Unigram has pairs of a piece and its score
        tokens = (
            {n: text for text, n in vocabulary.items()} if is_map else {n: p for n, (p, _) in enumerate(vocabulary)}
        )
        return tokens | {self.backend.token_to_id(content): content for content in self.added}

    @cached_property
    def added(self) -> list[str]:
        return [token["content"] for token in self.content.get("added_tokens") or []]

    @cached_property
    def falls_back(self) -> bool:
        """Whether a character without a token is written in bytes."""
        return bool(self.content["model"].get("byte_fallback")) and all(byte in self.ids for byte in BYTES)

    @cached_property
    def is_byte_level(self) -> bool:
        steps = self.content.get("pre_tokenizer") or {}
        kinds = {step.get("type") for step in (steps, *steps.get("pretokenizers", ()))}
        normal = self.content.get("normalizer") or {}
        return "ByteLevel" in kinds | {step.get("type") for step in (normal, *normal.get("normalizers", ()))}

    def add_missing(self, loaded: Tokenizer) -> TokenizerJson:
        """Return the content with the tokens that a loaded one has besides: ``tokenizer_config.json`` or the class names them."""
        content = self.content | {"added_tokens": json.loads(loaded.to_str())["added_tokens"]}
        return TokenizerJson(content, json.dumps(content))

    def show(self, number: int) -> str:
        """Return the text that a token stands for; what are not whole characters is left out."""
        text = self.tokens[number]
        if self.is_byte_level and text not in self.added and all(char in _SHOWN for char in text):
            return bytes(_SHOWN[char] for char in text).decode("utf-8", errors="ignore")
        return text.replace("▁", " ")

    def count(self, texts: Sequence[str]) -> Counter[int]:
        """Return how often each token is in some texts, without special tokens around them."""
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return Counter(number for one in encoded for number in one.ids)

    def list_fixed(self) -> set[int]:
        """Return the ids of tokens without which some text could not be written, or would be cut otherwise."""
        model, fixed = self.content["model"], {self.backend.token_to_id(token) or 0 for token in self.added}
        fixed |= {self.ids[byte] for byte in BYTES if byte in self.ids} if model.get("byte_fallback") else set()
        characters = (text for text in self.ids if len(text) == 1)
        fixed |= {self.ids[one] for one in characters if not self.falls_back or " " <= one <= "~" or one == "▁"}
        if model["type"] == "BPE":
            return fixed | {self.ids[model["unk_token"]]} if model.get("unk_token") in self.ids else fixed
        pieces = [piece for piece, _ in model["vocab"]]
        twice = {piece for piece, number in Counter(pieces).items() if number > 1}
        fixed |= {number for number, piece in enumerate(pieces) if piece in twice}
        fixed.add(min(range(len(pieces)), key=lambda n: model["vocab"][n][1]))  # the unknown's penalty is below it
        if not self.falls_back:  # a piece with a character that no piece is alone
            fixed |= {self.ids[piece] for piece in pieces if any(char not in self.ids for char in piece)}
        return fixed if model.get("unk_id") is None else fixed | {model["unk_id"]}

    def find_parts(self) -> dict[int, tuple[int, ...] | None]:
        """Return, by token of the model, the tokens that say its text without it: in BPE the two that its last merge joins.

        Empty for single characters. None for a token that no text gives.
        """
        model = self.content["model"]
        split = _split_pieces(model["vocab"], self.ids) if model["type"] == "Unigram" else self._split_merges()
        return {number: split(text) for text, number in self.ids.items() if text not in BYTES}

    def _split_merges(self) -> Callable[[str], tuple[int, ...] | None]:
        """Return a function that applies BPE to a token's characters and returns what its last merge joins."""
        ranks = {pair: rank for rank, pair in reversed([*enumerate(self._list_merges())])}
        whole = self.content["model"].get("ignore_merges")

        def split(text: str) -> tuple[int, ...] | None:
            parts = [*text]
            if any(part not in self.ids for part in parts):
                return () if whole else None
            last: tuple[str, ...] = ()
            while len(parts) > 1:
                first = min((ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairwise(parts)))
                if first[0] == len(ranks):  # it is not what BPE makes of its characters
                    return tuple(self.ids[part] for part in parts) if whole else None
                at = first[1]
                last = (parts[at], parts[at + 1])
                parts[at : at + 2] = ["".join(last)]
            return tuple(self.ids[part] for part in last)

        return split

    def _list_merges(self) -> Iterator[tuple[str, str]]:
        for pair in self.content["model"]["merges"]:
            left, right = pair.split(" ") if isinstance(pair, str) else pair
            yield left, right

    def make_smaller(self, new_ids: dict[int, int]) -> str:
        """Return the file with the tokens that stay alone.

        :param new_ids: new ids by old ids, of all that stay, in the same order
        """
        content = json.loads(json.dumps(self.content))
        model = content["model"]
        if model["type"] == "BPE":
            model["vocab"] = {text: new_ids[number] for text, number in self.ids.items() if number in new_ids}
            pairs = zip(model["merges"], self._list_merges(), strict=True)
            model["merges"] = [pair for pair, (a, b) in pairs if {a, b, a + b} <= model["vocab"].keys()]
        else:
            model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if number in new_ids]
            model["unk_id"] = None if model.get("unk_id") is None else new_ids[model["unk_id"]]
        added = [(self.backend.token_to_id(token["content"]), token) for token in content.get("added_tokens") or []]
        content["added_tokens"] = [token | {"id": new_ids[number]} for number, token in added if number in new_ids]
        if padding := content.get("padding"):
            padding["pad_id"] = new_ids[padding["pad_id"]]
        _renumber_processor(content.get("post_processor") or {}, new_ids)
        return json.dumps(content, ensure_ascii=False, indent=2)


def _split_pieces(vocabulary: Any, ids: dict[str, int]) -> Callable[[str], tuple[int, ...] | None]:
    """Return a function that returns the likeliest other pieces of a Unigram's piece; characters without a piece are left out."""
    scores = dict(vocabulary)
    longest, least = max(map(len, scores)), min(scores.values()) - 10

    def split(text: str) -> tuple[int, ...] | None:
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for end in range(1, len(text) + 1):
            options = []
            for start in range(max(0, end - longest), end):
                piece = text[start:end]
                if piece in scores and piece != text:
                    options.append((best[start][0] + scores[piece], (*best[start][1], ids[piece])))
                elif end - start == 1:
                    options.append((best[start][0] + least, best[start][1]))
            best.append(max(options, key=lambda option: option[0]))
        return best[-1][1]

    return split


def _renumber_processor(node: dict[str, Any], new_ids: dict[int, int]) -> None:
    for part in node.get("processors", ()):
        _renumber_processor(part, new_ids)
    for name in ("sep", "cls"):  # of BERT and RoBERTa
        if name in node:
            node[name][1] = new_ids[node[name][1]]
    if node.get("type") == "TemplateProcessing":
        for token in node["special_tokens"].values():
            token["ids"] = [new_ids[number] for number in token["ids"]]


def read_tokenizer_json(folder: Path) -> TokenizerJson:
    """Read the ``tokenizer.json`` of a folder.

    :raises ValueError: there is none; it is of a kind that cannot be made smaller
    """
    file, remedy = folder / FILE_NAME, "Prune this model without trimming its vocabulary."
    if not file.is_file():
        raise ValueError(
            f"tokenizer: {folder} must hold a {FILE_NAME}, got none. Load the tokenizer with AutoTokenizer and save it "
            "into a copy of the folder with save_pretrained."
        )
    try:
        content = json.loads(text := file.read_text(encoding="utf-8"))
        model = content["model"]
        kind = model.get("type") or ("BPE" if "merges" in model else "WordPiece")
        model["type"] = kind
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"tokenizer: {file} must be a readable tokenizer, got: {shorten_error(error)}. Copy it again."
        ) from None
    if kind not in ("BPE", "Unigram"):
        raise ValueError(f"tokenizer: must be BPE or Unigram, whose tokens can go, got {kind}. {remedy}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):  # the library fails on wrong ones
        if model.get(name):
            raise ValueError(f"tokenizer: must have no {name}, got {model[name]!r}. {remedy}")
    tokenizer = TokenizerJson(content, text)
    try:
        tokenizer.backend  # noqa: B018  (the library reads it)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"tokenizer: {file} must be a readable tokenizer, got: {shorten_error(error)}. Copy it again."
        ) from None
    return tokenizer
