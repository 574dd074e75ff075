"""Trials of allocations, seen as they are measured."""

import torch

from struprune_plugin.modifiers import allocation_pass


def watch_trials(monkeypatch, choose=None):
    """Let trials be seen, and their outcome be chosen; return the list they go to: blocks alone, then proposed plans.

    An entry is a trial, the batches that it tried, and its divergences.
    """
    seen = []

    class Watched(allocation_pass.Trial):
        def measure(self, fit, held):
            found = super().measure(fit, held)
            seen.append((self, held, found))
            return found if choose is None else [float(index != choose) for index in range(len(found))]

    monkeypatch.setattr(allocation_pass, "Trial", Watched)
    return seen


def read_texts(seen):
    """Return the tokens that each trial read."""
    return [torch.cat([batch["input_ids"] for batch in held]) for _, held, _ in seen]
