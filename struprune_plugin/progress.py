"""One progress bar for a whole run, with the time that is left, in place of a hundred short ones."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm.std import tqdm

_PASS = "Preparing cache"  # the bar that the host begins every pass over the layers with
_STEP = re.compile(r"\((\d+)/(\d+)\): (.*)")  # the bars within a pass
_PARTS = {"Calibrating": (0.0, 0.4), "Propagating": (0.8, 1.0)}  # of a layer's share of a pass; statistics lie between
_STEPS = 1000
_LOG_SECONDS = 15.0  # between lines of a bar that goes to a file


@dataclass(frozen=True)
class Stage:
    """One part of a run.

    :param name: for people
    :param weight: its share of the time, roughly
    :param bar: what the bar that tells of it is called; empty for a pass over the layers
    """

    name: str
    weight: float
    bar: str = ""


class RunProgress:
    """How far a run is, as its many short bars tell.

    :param stages: in order
    :ivar fraction: of the whole run that is done
    :ivar label: what is going on
    """

    def __init__(self, stages: Sequence[Stage]):
        self._stages = stages
        self._current = -1
        self.fraction = 0.0
        self.label = "loading"

    def see(self, bar: str, done: float, total: float | None) -> None:
        """Take in the state of one short bar."""
        share = min(1.0, done / total) if total else 0.0
        if bar == _PASS:
            if done == 0:
                self._enter("")
            return
        if found := _STEP.match(bar):
            index, count = int(found[1]), int(found[2])
            first, last = _PARTS.get(found[3], (0.4, 0.8))
            self._move((index - 1 + first + (last - first) * share) / count, f"step {min(index, count)}/{count}")
        elif any(stage.bar == bar for stage in self._stages):
            if self._current < 0 or self._stages[self._current].bar != bar:
                self._enter(bar)
            self._move(share, "")

    def _enter(self, bar: str) -> None:
        """Go to the next stage that such a bar tells of; stay where there is none."""
        later = range(self._current + 1, len(self._stages))
        self._current = next((i for i in later if self._stages[i].bar == bar), self._current)
        self._move(0.0, "")

    def _move(self, share: float, detail: str) -> None:
        if self._current < 0:
            return
        weights = [stage.weight for stage in self._stages]
        here = sum(weights[: self._current]) + share * weights[self._current]
        self.fraction = max(self.fraction, min(1.0, here / sum(weights)))  # never back
        self.label = f"{self._stages[self._current].name} {detail}".rstrip()


@contextmanager
def draw_one_bar(stages: Sequence[Stage]) -> Iterator[None]:
    """Draw one bar with the time left, on stderr, while the block lasts; what others draw moves it and stays unseen."""
    progress, inner_init, inner_display = RunProgress(stages), tqdm.__init__, tqdm.display
    terminal = sys.stderr.isatty()
    bar = tqdm(
        total=_STEPS,
        desc=progress.label,
        smoothing=0,
        miniters=0,
        mininterval=0.2 if terminal else _LOG_SECONDS,
        bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left",
        ascii=None if terminal else " #",
        ncols=None if terminal else 100,
        file=sys.stderr,
    )
    if bar.disable:
        yield
        return

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        inner_init(self, *args, **{**kwargs, "file": io.StringIO(), "mininterval": 0.2})

    def display(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is bar:
            return inner_display(self, *args, **kwargs)
        progress.see((self.desc or "").removesuffix(": "), self.n, self.total)
        bar.set_description_str(progress.label, refresh=False)
        bar.update(round(_STEPS * progress.fraction) - bar.n)
        return True

    tqdm.__init__, tqdm.display = init, display  # type: ignore[method-assign]
    try:
        yield
        bar.set_description_str("done", refresh=False)
        bar.update(_STEPS - bar.n)
    finally:
        tqdm.__init__, tqdm.display = inner_init, inner_display  # type: ignore[method-assign]
        bar.close()
