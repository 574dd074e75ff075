"""``struprune plan``: prediction of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from struprune_plugin.cli.console import Screen
from struprune_plugin.cli.options import (
    DEFAULTED_RECIPE,
    Amount,
    Changes,
    Device,
    Dtype,
    Model,
    check_names,
    flag,
    num_bytes,
    prepare,
    whole,
)
from struprune_plugin.recipes.shipped import find_default


@dataclass(frozen=True)
class Question:
    """Settings of the plan."""

    recipe: Annotated[str | None, DEFAULTED_RECIPE] = None
    no_probe: Annotated[bool, flag("--no-probe", "skip the probe, and with it time, memory and speed")] = False
    fit: Annotated[int | None, num_bytes("find the least sparsity per quantiser that fits this memory, e.g. 6GB")] = (
        None
    )
    context: Annotated[int, whole("tokens in the key-value cache, for --fit")] = 2048
    dtype: Dtype = "auto"
    device: Device = "auto"


def _check_fit(question: Question, amount: Amount, changed: Mapping[str, Any]) -> None:
    """Raise if an option would have no effect beside ``--fit``.

    :param changed: changed fields of the recipe
    """
    given = {"--sparsity": "sparsity" in changed, "--budget": "budget" in changed, "--no-probe": question.no_probe}
    for name, is_given in (given | {"--num-samples": amount.num_samples is not None}).items():
        if question.fit is not None and is_given:
            raise ValueError(f"{name}: has no effect with --fit. Remove one of the two.")


def plan(model: Model, question: Question, amount: Amount, changes: Changes, screen: Screen) -> None:
    """Predict the result and the cost of a pruning run, without pruning.

    The result: parameters, bytes, key-value cache, speed and the engines that load it. The cost: time and memory. The plan needs
    the model's configuration and a probe of half a minute; it loads no weights.
    """
    changed = changes.read()
    _check_fit(question, amount, changed)
    check_names(question.device, question.recipe, [model], [])
    prepare(question.device, screen)
    from struprune_plugin.model.structure.finder import find_structure
    from struprune_plugin.recipes.load import load_recipe
    from struprune_plugin.studies import plan as planning
    from struprune_plugin.studies.needs import count_needs
    from struprune_plugin.studies.probe import Workload, probe_costs
    from struprune_plugin.studies.sizes import outline_run, read_shapes

    shapes = read_shapes(model, question.dtype)
    name = question.recipe or find_default(shapes.config.model_type)
    if question.fit is not None:
        names = {quantiser: recipe or name for quantiser, recipe in planning.FIT_RECIPES.items()}
        loaded = {q: (recipe, load_recipe(recipe, changes=changed).modifiers) for q, recipe in names.items()}
        fits = planning.find_fits(shapes, loaded, question.fit, question.context)
        record = {"model": model, "bytes": question.fit, "context": question.context}
        parts = planning.format_fits(shapes, fits, question.fit, question.context)
        screen.show({**record, "fits": [vars(fit) for fit in fits]}, *parts)
        return
    modifiers = load_recipe(name, changes=changed).modifiers
    outline, work, costs = (
        outline_run(shapes, modifiers),
        Workload(**vars(amount) | {"num_samples": amount.count_samples(changed)}),
        None,
    )
    needs, obstacle = count_needs(shapes, modifiers, work), planning.find_obstacle(shapes)
    if not question.no_probe and not obstacle:
        costs = probe_costs(shapes, outline.sparsity, load_recipe(name, changes=changed), work)
    engines = planning.list_engines(modifiers, find_structure(shapes.model).has_experts)
    layers = planning.list_layer_units(shapes.model)
    record = {"model": model, "recipe": name, **asdict(outline), "costs": costs and vars(costs), "engines": engines}
    record |= {"layers": [vars(kind) for kind in layers], "needs": {**vars(needs), "host": needs.host}}
    told = costs or ("--no-probe" if question.no_probe else obstacle)
    screen.show(record, *planning.format_plan(f"{model} by {name}", outline, told, needs, engines, layers))
