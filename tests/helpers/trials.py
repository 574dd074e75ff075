"""Trials of allocations, seen as they are measured."""

import torch

from struprune_plugin.modifiers import planning


def watch_trials(monkeypatch, choose=None):
    """Let trials be seen, and their outcome be chosen; return the list they go to: blocks alone, proposed plans, then a search.

    An entry is a trial, with the text that it read as ``batches``, and its divergences.
    """
    seen = []

    class Watched(planning.Trial):
        def measure(self, batches):
            self.batches, found = batches, super().measure(batches)
            seen.append((self, found))
            return found if choose is None else [float(index != choose) for index in range(len(found))]

    monkeypatch.setattr(planning, "Trial", Watched)
    return seen


def read_texts(seen):
    """Return the tokens that each trial read."""
    return [torch.cat([batch["input_ids"] for batch in trial.batches]) for trial, _ in seen]
