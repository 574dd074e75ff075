"""``struprune plan``: prediction of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from struprune_plugin.cli.console import Screen
from struprune_plugin.cli.options import (
    DEFAULTED_RECIPE,
    Amount,
    Changes,
    Device,
    Dtype,
    Model,
    check_names,
    prepare,
)


@dataclass(frozen=True)
class Question:
    """Settings of the plan."""

    recipe: Annotated[str | None, DEFAULTED_RECIPE] = None
    dtype: Dtype = "auto"
    device: Device = "auto"


def plan(model: Model, question: Question, amount: Amount, changes: Changes, screen: Screen) -> None:
    """Predict the sizes of a pruning run's result and the memory of the run, without pruning.

    Parameters and bytes of the result, the engines that load it, and the bytes that the run holds on the device
    and on the host. The plan needs the model's configuration alone; it loads no weights.
    """
    changed = changes.read()
    check_names(question.device, question.recipe, [model], [])
    prepare(question.device, screen)
    from struprune_plugin.model.structure.finder import find_structure
    from struprune_plugin.recipes.load import load_recipe
    from struprune_plugin.studies import plan as planning

    shapes = planning.read_shapes(model, question.dtype)
    name = question.recipe or "struprune"
    modifiers = load_recipe(name, changes=changed).modifiers
    outline = planning.outline_run(shapes, modifiers)
    work = planning.Workload(amount.count_samples(changed), amount.seq_length, amount.batch_size)
    needs = planning.count_needs(shapes, modifiers, work)
    engines = planning.list_engines(modifiers, find_structure(shapes.model).has_experts)
    layers = planning.list_layer_units(shapes.model)
    record = {"model": model, "recipe": name, **asdict(outline), "engines": engines}
    record |= {"layers": [vars(kind) for kind in layers], "needs": {**vars(needs), "host": needs.host}}
    screen.show(record, *planning.format_plan(f"{model} by {name}", outline, needs, engines, layers))
