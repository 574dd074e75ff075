"""The order in which tokens go: one pass that gives closed sets of every size, each in the next larger one."""

import heapq
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

Parts = Mapping[int, Sequence[int] | None]


def order_tokens(
    parts: Parts, counts: Mapping[int, float], fixed: Collection[int], known: Collection[int] = ()
) -> list[int]:
    """Return the tokens that can go, first those that are part of no other, cheapest first; a count goes on to the parts.

    A token is said by its parts once it is gone, which costs as many tokens more as it has parts, less one, each time. So no
    part goes before all that it is in, and every set of tokens left holds the parts of all its tokens.

    :param parts: parts by token; None for tokens that no text gives, which go first
    :param counts: how often each token is in the text
    :param fixed: tokens that stay, with all their parts
    :param known: tokens that go last among those of equal cost, then the lower id
    """
    stays, stack = set[int](), [*fixed]
    while stack:
        if (token := stack.pop()) not in stays:
            stays.add(token)
            stack += parts.get(token) or ()
    known, left, uses = set(known), defaultdict[int, float](float, counts), Counter[int]()
    for token, pieces in parts.items():
        if token not in stays:
            uses.update({*(pieces or ())} - {token})

    def price(token: int) -> tuple[float, bool, int]:
        pieces = parts[token]
        cost = -1.0 if pieces is None else left[token] * max(len(pieces) - 1, 1)
        return cost, token in known, -token

    heap = [price(token) for token in parts if token not in stays and not uses[token]]
    heapq.heapify(heap)
    order = []
    while heap:
        token = -heapq.heappop(heap)[2]
        order.append(token)
        for part in parts[token] or ():
            left[part] += left[token]
        for part in {*(parts[token] or ())}:
            uses[part] -= 1
            if part not in stays and not uses[part]:
                heapq.heappush(heap, price(part))
    return order


def grow_counts(order: Sequence[int], parts: Parts, counts: Mapping[int, float]) -> list[float]:
    """Return, after each token that goes in an order, the tokens more that a text takes: an upper bound, which BPE may beat."""
    left, total, growth = defaultdict[int, float](float, counts), 0.0, []
    for token in order:
        pieces = parts[token] or ()
        total += left[token] * max(len(pieces) - 1, 1)
        for part in pieces:
            left[part] += left[token]
        growth.append(total)
    return growth


def find_script(text: str) -> str:
    """Return the script of a text's first letter, by the Unicode name, e.g. LATIN or CJK; empty where there is no letter."""
    letter = next((char for char in text if char.isalpha()), "")
    return unicodedata.name(letter, "").split(" ")[0].split("-")[0] if letter else ""
