"""Commands around a run: plan it, look at it, compare and choose. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

import argparse
from typing import Any

from struprune_plugin.arguments import (
    HelpFormatter,
    add_calibration,
    add_changes,
    add_device,
    add_dtype,
    add_recipe,
    choose_device,
    number_of_bytes,
    positive,
    read_changes,
    set_logging,
)
from struprune_plugin.console import show
from struprune_plugin.early import check_device, check_model_name, check_recipe_name
from struprune_plugin.shipped import find_default


def add_plan(commands: Any) -> None:
    """Add ``struprune plan``."""
    plan = commands.add_parser(
        "plan",
        help="what a run would leave, take and need, before anything is done",
        description="Tell what pruning MODEL would leave (parameters, bytes, cache, speed), take (seconds, memory) and who runs "
        "the result, from its configuration and half a minute's probe; nothing is calibrated, no weights are loaded. "
        "--fit answers what fits a memory.",
        formatter_class=HelpFormatter,
    )
    plan.add_argument("model", metavar="MODEL", help="a model folder, a config.json's folder, or a hub name")
    add_recipe(plan)
    add_calibration(plan, source=False)
    add_changes(plan)
    add_dtype(plan)
    plan.add_argument("--no-probe", action="store_true", help="leave out time, memory and speed")
    fit = plan.add_argument_group("what fits")
    fit.add_argument("--fit", type=number_of_bytes, metavar="SIZE", help="find sparsity and quantiser for e.g. 6GB")
    fit.add_argument("--context", type=positive, default=2048, metavar="N", help="tokens in the cache")
    add_device(plan)
    plan.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> None:
    """Print the plan of a run, or what fits."""
    changes = read_changes(args)
    check_device(args.device)
    if args.recipe is not None:
        check_recipe_name(args.recipe)
    check_model_name(args.model)
    from struprune_plugin import _register  # noqa: F401
    from struprune_plugin.forecast import plan as planning
    from struprune_plugin.forecast.probe import Workload, measure_start
    from struprune_plugin.forecast.sizes import read_shapes
    from struprune_plugin.recipe import load_recipe

    choose_device(args.device)
    set_logging(args)
    started = None if args.no_probe else measure_start()
    shapes = read_shapes(args.model, args.dtype)
    name = args.recipe or find_default(shapes.config.model_type)
    if args.fit is not None:
        names = {quantiser: recipe or name for quantiser, recipe in planning.FIT_RECIPES.items()}
        loaded = {q: (recipe, load_recipe(recipe, changes=changes).modifiers) for q, recipe in names.items()}
        fits = planning.find_fits(shapes, loaded, args.fit, args.context)
        record = {"model": args.model, "bytes": args.fit, "context": args.context, "fits": [vars(fit) for fit in fits]}
        show(args, record, planning.format_fits(shapes, fits, args.fit, args.context))
        return
    work = Workload(args.num_samples, args.seq_length, args.batch_size)
    plan = planning.make_plan(shapes, name, lambda: load_recipe(name, changes=changes), work, started)
    show(args, plan.to_dict(), planning.format_plan(plan))
