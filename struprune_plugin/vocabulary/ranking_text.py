"""What tokens are ranked by: text of the user, of which a tenth is held out, and a word list of the language."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from struprune_plugin.vocabulary.tokenizer_json import TokenizerJson

WORDS_SHARE = 0.3  # of the counts, that the word list has
RANKS_SHARE = 0.05  # beside the text's tokens, that low ids have
_PIECE, _HELD_OUT, _MOST = 2000, 10, 20_000_000  # characters; every tenth piece is held out; most that are read
_FORMS = (  # of a word, of how many words, and its share
    (" {}", str, 150_000, 0.7),
    (" {}", str.capitalize, 50_000, 0.15),
    ("{}", str.capitalize, 50_000, 0.1),
    ("{}", str, 50_000, 0.05),
)
_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")


def split_texts(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return pieces of the first 20 million characters of some texts: those to rank on, and a tenth that is held out,
    at least the last; one alone is both."""
    pieces: list[str] = []
    left = _MOST
    for text in texts:
        text = text[:left]
        left -= len(text)
        pieces += (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        if left <= 0:
            break
    places = range(_HELD_OUT - 1, len(pieces), _HELD_OUT) or range(len(pieces) - 1, len(pieces))
    ranked = [piece for place, piece in enumerate(pieces) if place not in places]
    return ranked or pieces, [pieces[place] for place in places if place >= 0]


def read_words(language: str | None, words: Path | None) -> dict[str, float]:
    """Return the frequencies of the words of languages, e.g. ``en,de``, or of a file with one ``word`` or ``word count`` per line.

    :raises ValueError: the package wordfreq is not installed or does not know a language; a file without words
    """
    if words is not None:
        try:
            lines = [line.split() for line in words.read_text(encoding="utf-8").splitlines() if line.strip()]
            counts = {line[0]: float(line[1]) if len(line) > 1 else 1.0 for line in lines}
        except (OSError, ValueError) as error:
            raise ValueError(
                f"words: {words} must hold one word, or a word and its count, per line in UTF-8, got: {error}. Correct the file."
            ) from None
        if not counts:
            raise ValueError(f"words: {words} must hold at least one word, got none. Choose another file.")
        return counts
    if language is None:
        return {}
    try:
        import wordfreq
    except ImportError:
        raise ValueError(
            f"language: {language} must have a word list, got no package wordfreq. Run `pip install wordfreq`, or give a file of "
            "words."
        ) from None
    known, total = wordfreq.available_languages(), defaultdict[str, float](float)
    for one in language.split(","):
        if one not in known:
            raise ValueError(f"language: must be among {', '.join(sorted(known))}, got {one!r}. Give a file of words.")
        for word, share in wordfreq.get_frequency_dict(one).items():
            total[word] += share
    return dict(total)


def count_words(tokenizer: TokenizerJson, words: dict[str, float], total: float) -> dict[int, float]:
    """Return the counts of the tokens of a word list, whose sum is such that they are 30 % beside ``total`` tokens of text."""
    counts: dict[int, float] = defaultdict(float)
    usual = sorted(words, key=lambda word: -words[word])
    for form, change, most, share in _FORMS:
        texts = [form.format(change(word)) for word in usual[:most]]
        encoded = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
        for word, one in zip(usual, encoded, strict=False):
            for number in one.ids:
                counts[number] += words[word] * share
    scale = WORDS_SHARE / (1 - WORDS_SHARE) * total / max(sum(counts.values()), 1e-30)
    return {number: scale * count for number, count in counts.items()}


def count_ranks(known: Iterable[int], total: float) -> dict[int, float]:
    """Return counts that fall with the id, 5 % of ``total`` tokens of text.

    Tokenizers give low ids to what is frequent in their own training text, so that white space and code, which the text may
    lack, do not go before rare words that it holds.
    """
    weights = {number: 1 / (number + 1000) for number in known}
    scale = RANKS_SHARE * total / max(sum(weights.values()), 1e-30)
    return {number: scale * weight for number, weight in weights.items()}


def list_template_texts(template: Any) -> list[str]:
    """Return what chat templates write by themselves: their text outside of Jinja's braces, and what is in quotes."""
    several = template.values() if isinstance(template, dict) else [template or ""]
    texts = []
    for one in several:
        texts.append(re.sub(r"\{[%{#].*?[%}#]\}", "\n", one, flags=re.DOTALL))
        texts += ["".join(groups).replace("\\n", "\n") for groups in _QUOTED.findall(one)]
    return texts
