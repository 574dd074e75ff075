"""``struprune plan``: prediction of a run."""

from __future__ import annotations

from dataclasses import asdict

from struprune_plugin.cli import options as opt
from struprune_plugin.cli.console import Screen


def plan(
    model: opt.Model,
    recipe: opt.RecipeName = "struprune",
    dtype: opt.Dtype = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
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

    Parameters and bytes of the result, and the bytes that the run holds on the device and on the host. The plan needs the
    model's configuration alone; it loads no weights.
    """
    screen = Screen(as_json, quiet)
    changes = opt.read_changes(settings, sparsity=sparsity, budget=budget, effort=effort)
    opt.check_names(recipe, [model])
    opt.prepare("auto", screen)
    from struprune_plugin.recipes.load import load_recipe
    from struprune_plugin.studies.plan import Workload, format_plan, plan_run

    modifiers = load_recipe(recipe, changes=changes).modifiers
    work = Workload(opt.count_samples(num_samples, changes), seq_length, batch_size)
    found = plan_run(model, modifiers, work, dtype, trust_remote_code)
    record = {"model": model, "recipe": recipe, **asdict(found)}
    screen.show(record, f"{model} by {recipe}, sparsity {found.sparsity:g}", *format_plan(found))
