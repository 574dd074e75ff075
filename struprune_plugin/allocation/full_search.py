"""The full search over temperatures: prune at every one, keep nothing, take the one of least error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from loguru import logger

from struprune_plugin.linalg.ties import argmin_with_ties
from struprune_plugin.pruning.config import UnitAllocation


def search_fully(plan: UnitAllocation, rehearse: Callable[[UnitAllocation], float]) -> UnitAllocation:
    """Rehearse the whole pruning at every temperature of a plan, and return the plan of least error.

    ``L(T) = sum_groups ||Y - W' P||^2`` after the weight update, not normalised: the very errors that the solves minimise, so
    measured against the run's ``reconstruct`` on the pruned path's inputs. ``block`` and ``residual`` compare with the dense
    model, ``residual`` with what a group inherits counted again; ``local`` compares with targets that the allocation
    itself moves. Source: paper, Algorithms 2 and 3, step 5 (R9).

    :param plan: with candidates
    :param rehearse: prunes after a plan, gives the weights back and returns the squared error summed over groups
    """
    errors: dict[tuple[int, ...], float] = {}
    for candidate in plan.candidates:
        if candidate.kept not in errors:  # temperatures far apart may round to the same counts
            errors[candidate.kept] = rehearse(replace(plan, kept=dict(zip(plan.kept, candidate.kept, strict=True))))
        logger.info(f"temperature {candidate.temperature:g}: error {errors[candidate.kept]:.6g}")
    best = plan.candidates[argmin_with_ties([errors[candidate.kept] for candidate in plan.candidates])]
    searched = [
        {"temperature": c.temperature, "error": errors[c.kept], "error_by_moments": c.loss} for c in plan.candidates
    ]
    record = replace(plan.record, search="full", temperature=best.temperature, searched=searched)
    return UnitAllocation(dict(zip(plan.kept, best.kept, strict=True)), record, plan.candidates)
