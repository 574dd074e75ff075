"""The plan of a run: what it will leave, take and need, and who can run the result; and what fits a given memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmcompressor.modifiers import Modifier
from llmcompressor.recipe import Recipe

from struprune_plugin.forecast.probe import Costs, Workload, probe_costs
from struprune_plugin.forecast.sizes import Outline, Shapes, find_pruning, outline_run
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.recovery_stage import RecoveryStage
from struprune_plugin.report import format_bytes, format_table

_MOST = 0.9  # sparsity that is looked at for a fit
_STEPS = 100  # of sparsity
FIT_RECIPES = {"none": "", "8-bit weights (W8A8)": "struprune_w8a8", "4-bit weights (W4A16)": "struprune_w4a16_gptq"}


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    :param costs: None without a probe
    :param engines: (engine, whether and how it runs the result)
    """

    model: str
    recipe: str
    outline: Outline
    costs: Costs | None
    engines: list[tuple[str, str]]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON has it."""
        return {
            "model": self.model,
            "recipe": self.recipe,
            "sparsity": self.outline.sparsity,
            "before": asdict(self.outline.before),
            "after": asdict(self.outline.after),
            "rounding": self.outline.rounding,
            "costs": None if self.costs is None else asdict(self.costs),
            "engines": dict(self.engines),
        }


def make_plan(shapes: Shapes, name: str, load: Callable[[], Recipe], work: Workload, started: float | None) -> Plan:
    """Plan a run.

    :param name: of the recipe
    :param load: gives a fresh recipe
    :param started: as :func:`~struprune_plugin.forecast.probe.probe_costs` takes it; None for no probe
    :raises ValueError: what the run would refuse of shapes and budget
    """
    modifiers = load().modifiers
    outline = outline_run(shapes, modifiers)
    costs = None if started is None else probe_costs(shapes, outline, load, work, started)
    return Plan(shapes.name, name, outline, costs, list_engines(modifiers))


def list_engines(modifiers: Sequence[Modifier]) -> list[tuple[str, str]]:
    """Return which engines run what a recipe leaves, and how."""
    _, pruning = find_pruning(modifiers)
    own = (StructuredModifier, RecoveryStage)
    packed = any(not isinstance(modifier, own) for modifier in modifiers)
    needs = " with compressed-tensors" if packed else ""
    if pruning.output == "uniform":
        stock = f"yes{needs}, as its stock class"
        return [("transformers", stock), ("lm-eval", stock), ("vLLM", f"yes{needs}, as its own class")]
    own_code = f"yes{needs}, with trust_remote_code=True or after `import struprune_plugin`"
    heads = pruning.attention_unit == "head"
    vllm = (
        "no: heads differ from layer to layer; convert --to uniform-padded"
        if heads
        else "by its Transformers backend; see docs/models.md, or convert --to uniform-padded"
    )
    return [("transformers", own_code), ("lm-eval", "yes, trust_remote_code=True"), ("vLLM", vllm)]


def format_plan(plan: Plan) -> str:
    """Return a plan as a table of before and after, and lines below."""
    before, after, costs = plan.outline.before, plan.outline.after, plan.costs
    rows = [
        ["parameters", f"{before.parameters:,}", f"{after.parameters:,}", _change(before.parameters, after.parameters)],
        ["weights on disk", format_bytes(before.bytes), format_bytes(after.bytes), _change(before.bytes, after.bytes)],
        ["cache a token", format_bytes(before.cache), format_bytes(after.cache), _change(before.cache, after.cache)],
    ]
    if costs is not None:
        rows.append(["speed, prompt", "1 ×", f"{costs.prefill:.2f} ×", ""])
        rows.append(["speed, one token", "1 ×", f"{costs.decode:.2f} ×", ""])
    lines = [
        f"{plan.model} by {plan.recipe}, sparsity {plan.outline.sparsity:g}",
        format_table(["", "now", "after", "change"], rows),
        "",
    ]
    facts: list[tuple[str, str]] = []
    if costs is not None:
        facts.append(("the run takes", f"about {format_seconds(costs.seconds)} here (probe: {costs.probe})"))
        device = f", {format_bytes(costs.device_bytes)} on the device" if costs.device_bytes else ""
        facts.append(("and needs", f"about {format_bytes(costs.peak_bytes)} of memory{device}"))
    for entry in plan.outline.rounding:
        because = ", ".join(entry["because"])
        facts.append(("widths", f"{entry['kind']} in multiples of {entry['width_multiple']} ({because})"))
    facts += [
        (f"runs on {engine}" if not index else f"        {engine}", how)
        for index, (engine, how) in enumerate(plan.engines)
    ]
    width = max(len(name) for name, _ in facts)
    return "\n".join([*lines, *(f"{name.ljust(width)}  {told}" for name, told in facts)])


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ""


def format_seconds(seconds: float) -> str:
    """Return a duration in the unit that fits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# -- what fits a memory ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """One way to fit a memory.

    :param sparsity: the least that fits; None where none does
    :param total: bytes of weights and cache then
    :param recipe: what to run
    """

    quantiser: str
    sparsity: float | None
    total: int
    recipe: str


def find_fits(
    shapes: Shapes, recipes: dict[str, tuple[str, Sequence[Modifier]]], limit: int, context: int
) -> list[Fit]:
    """Return the least sparsity, by quantiser, at which weights and cache fit a memory.

    :param recipes: by quantiser: name and modifiers
    :param context: tokens in the cache
    """
    fits = []
    for quantiser, (name, modifiers) in recipes.items():

        def total(step: int, modifiers: Sequence[Modifier] = modifiers) -> int:
            try:
                after = outline_run(shapes, modifiers, step / _STEPS).after
            except ValueError:  # the units hold no more than that
                return 0
            return after.bytes + context * after.cache

        found = next((step for step in range(int(_MOST * _STEPS) + 1) if 0 < total(step) <= limit), None)
        taken = total(found) if found is not None else 0
        fits.append(Fit(quantiser, None if found is None else found / _STEPS, taken, name))
    return fits


def choose_fit(fits: Sequence[Fit]) -> Fit | None:
    """Return the fit that prunes least, and of several the one of most bits, which come first; None where nothing fits."""
    possible = [fit for fit in fits if fit.sparsity is not None]
    return min(possible, key=lambda fit: fit.sparsity or 0.0, default=None)


def format_fits(shapes: Shapes, fits: Sequence[Fit], limit: int, context: int) -> str:
    """Return a line a quantiser, and the choice."""
    rows = [
        [
            fit.quantiser,
            "does not fit" if fit.sparsity is None else f"{fit.sparsity:.0%}",
            format_bytes(fit.total) if fit.total else "",
            fit.recipe,
        ]
        for fit in fits
    ]
    best = choose_fit(fits)
    table = format_table(["quantiser", "least sparsity", "weights + cache", "recipe"], rows)
    heading = f"{shapes.name} in {format_bytes(limit)}, with {context:,} tokens of context"
    if best is None:
        return f"{heading}\n{table}\n\nNothing fits: choose a smaller model, a shorter --context or more memory."
    chosen = f"least pruned: {best.quantiser}, sparsity {best.sparsity:g}"
    if not best.sparsity:
        return f"{heading}\n{table}\n\n{chosen}: the recipe's quantiser alone is enough" + (
            ", nothing need be done." if best.quantiser == "none" else "."
        )
    command = f"struprune prune {shapes.name} --recipe {best.recipe} --sparsity {best.sparsity:g} --output OUT"
    return f"{heading}\n{table}\n\n{chosen}: {command}"
