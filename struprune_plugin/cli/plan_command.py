"""``struprune plan``: prediction of a run."""

from __future__ import annotations

from dataclasses import asdict

from struprune_plugin.cli import options as opt
from struprune_plugin.cli.console import Screen


def plan(
    model: opt.Model,
    recipe: opt.DefaultedRecipe = None,
    dtype: opt.Dtype = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    device: opt.Device = "auto",
    num_samples: opt.NumSamples = None,
    seq_length: opt.SeqLength = 256,
    batch_size: opt.BatchSize = 8,
    settings: opt.Settings = None,
    sparsity: opt.Sparsity = None,
    budget: opt.Budget = None,
    effort: opt.Effort = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Predict the sizes of a pruning run's result and the memory of the run, without pruning.

    Parameters and bytes of the result, the engines that load it, and the bytes that the run holds on the device
    and on the host. The plan needs the model's configuration alone; it loads no weights.
    """
    screen = Screen(as_json, quiet)
    changes = opt.read_changes(settings, sparsity=sparsity, budget=budget, effort=effort)
    opt.check_names(device, recipe, [model], [])
    opt.prepare(device, screen)
    from struprune_plugin.model.structure.finder import find_structure
    from struprune_plugin.recipes.load import load_recipe
    from struprune_plugin.studies import plan as planning

    shapes = planning.read_shapes(model, dtype, trust_remote_code)
    name = recipe or "struprune"
    modifiers = load_recipe(name, changes=changes).modifiers
    outline = planning.outline_run(shapes, modifiers)
    work = planning.Workload(opt.count_samples(num_samples, changes), seq_length, batch_size)
    needs = planning.count_needs(shapes, modifiers, work)
    engines = planning.list_engines(modifiers, find_structure(shapes.model).has_experts)
    layers = planning.list_layer_units(shapes.model)
    record = {"model": model, "recipe": name, **asdict(outline), "engines": engines}
    record |= {"layers": [vars(kind) for kind in layers], "needs": {**vars(needs), "host": needs.host}}
    screen.show(record, *planning.format_plan(f"{model} by {name}", outline, needs, engines, layers))
