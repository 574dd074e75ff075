"""Cost tables of modules: in an engine by kept units, and in a pruned model by its budgets."""

from __future__ import annotations

from typing import Any

from struprune_plugin.reporting.tables import Table
from struprune_plugin.storage.files import format_bytes
from struprune_plugin.storage.limit_record import LimitRecord
from struprune_plugin.storage.manifest import Manifest


def format_costs(table: Any) -> list[Any]:
    """Return a heading and a table per phase: the microseconds of every kind of module at the measured widths.

    :param table: a :class:`~struprune_plugin.allocation.costs.cost_table.CostTable`, whose package is not imported here
    """
    parts: list[Any] = []
    for phase in table.phases:
        parts.append(
            f"{phase.phase}, batch {phase.batch}, length {phase.length}, {table.engine}, {table.dtype}, {table.machine}: dense "
            f"{1e3 * phase.dense:.4g} ms, with pruned modules of all units {1e3 * phase.whole:.4g} ms"
        )
        rows = []
        for known in phase.modules:
            name = known.module.partition(":")[0]
            for units, seconds in zip(known.units, known.seconds, strict=True):
                rows.append(
                    [
                        name,
                        units,
                        f"{1e6 * seconds:.0f}",
                        f"{seconds / known.seconds[-1]:.3f}" if known.seconds[-1] else "",
                    ]
                )
            told = ", ".join(f"{power}: {factor:.2f} ×" for power, factor in known.penalties.items())
            rows.append([name, "", f"± {1e6 * known.error:.0f}", told])
        parts.append(Table(["module of one layer", "units", "µs", "of all; by multiple"], rows))
    return parts


def list_module_costs(manifest: Manifest) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) of the costs of a pruned model's modules under every budget and of their errors, the fixed costs
    first; there are no rows if parameters alone were budgeted."""
    limits, errors = manifest.budget.limits, {group.name: group.error_after for group in manifest.groups}
    kinds = {group.name: "FFN" if group.kind == "ffn" else group.kind.replace("_", " ") for group in manifest.groups}
    header = ["module", *(limit.name for limit in limits), "error, re-solved"]
    if not limits:
        return header, []
    rows = [["all else", *(_show_share(limit, limit.fixed) for limit in limits), ""]]
    for kind in dict.fromkeys(kinds.values()):
        sums = [sum(cost for name, cost in limit.modules.items() if kinds.get(name) == kind) for limit in limits]
        rows.append([f"all of {kind}", *map(_show_share, limits, sums), ""])
    for name in limits[0].modules:
        error = f"{errors[name]:.4f}" if name in errors else ""
        rows.append([name, *(_show_share(limit, limit.modules[name]) for limit in limits), error])
    return header, rows


def _show_share(limit: LimitRecord, cost: float) -> str:
    """Return a cost as text in its own unit, with its share of the pruned model's total."""
    total = limit.fixed + sum(limit.modules.values())
    if limit.name.startswith("speedup"):
        told = f"{1e3 * cost:.3g} ms"
    else:
        told = f"{cost:,.0f}" if limit.name == "parameters" else format_bytes(cost)
    return f"{told} ({cost / total:.1%})" if total > 0 else told
