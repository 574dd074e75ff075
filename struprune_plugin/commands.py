"""Commands around a run: plan it, look at it, compare and choose. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
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
    read_pick,
    read_sparsities,
    seed,
    set_logging,
)
from struprune_plugin.console import show
from struprune_plugin.contents import write_whole
from struprune_plugin.early import check_device, check_model_name, check_recipe_name, check_text_file
from struprune_plugin.manifest import read_manifest
from struprune_plugin.shipped import find_default
from struprune_plugin.verify import check_undamaged


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
    probed = (
        args if started is not None else argparse.Namespace(verbose=True)
    )  # without a probe there is nothing to wait for
    with draw_progress(probed, load_recipe(name, changes=changes), "probe: "):
        plan = planning.make_plan(shapes, name, lambda: load_recipe(name, changes=changes), work, started)
    show(args, plan.to_dict(), planning.format_plan(plan))


def add_report(commands: Any) -> None:
    """Add ``struprune report``."""
    report = commands.add_parser(
        "report",
        help="one HTML page on what was cut and what it cost",
        description="Write a page on a pruned folder: its layers to scale, errors, allocation, quality, what dense and pruned "
        "model write, the recipe. One file, no scripts, nothing from the network.",
        formatter_class=HelpFormatter,
    )
    report.add_argument("path", metavar="OUT", type=Path, help="a pruned folder")
    report.add_argument(
        "--output", metavar="FILE", type=Path, help="page to write; OUT.html beside the folder if unset"
    )
    report.add_argument("--picture", metavar="FILE", type=Path, help="write the picture of the layers here too, as SVG")
    report.add_argument("--prompt", action="append", metavar="TEXT", help="what samples begin with; may be repeated")
    report.add_argument("--tokens", type=positive, default=40, metavar="N", help="of a sample")
    report.add_argument("--no-samples", action="store_true", help="load no model")
    report.add_argument("--overwrite", action="store_true", help="replace earlier files of that name")
    add_device(report)
    report.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> None:
    """Write the page on an output."""
    check_device(args.device)
    folder = args.path
    if not folder.is_dir():
        raise ValueError(f"{folder}: must be a pruned folder, got none. Correct the path.")
    manifest = read_manifest(folder)
    page = args.output or folder.resolve().with_name(f"{folder.resolve().name}.html")
    for file in filter(None, (page, args.picture)):
        check_new_file(file, args.overwrite)
    samples = []
    if not args.no_samples:
        check_undamaged(folder)
        samples = _write_samples(args, manifest["model"]["base"])
    from struprune_plugin.page import make_page
    from struprune_plugin.picture import draw_layers

    write_whole(page, make_page(folder, manifest, samples))
    if args.picture is not None:
        write_whole(args.picture, draw_layers(manifest) + "\n")
    record = {"page": str(page), "picture": None if args.picture is None else str(args.picture)}
    show(args, record, "\n".join(f"wrote {file}" for file in record.values() if file))


def _write_samples(args: argparse.Namespace, base: str) -> list[Any]:
    """Let the dense model, where it is here, and the pruned one write after the same prompts."""
    from struprune_plugin import _register  # noqa: F401
    from struprune_plugin.evaluation import continue_texts, load_checkpoint
    from struprune_plugin.page import PROMPTS, Sample

    choose_device(args.device)
    set_logging(args)
    prompts = args.prompt or list(PROMPTS)
    pruned = continue_texts(*load_checkpoint(str(args.path)), prompts, args.tokens)
    dense: list[str] | list[None] = [None] * len(prompts)
    if Path(base).is_dir():
        dense = continue_texts(*load_checkpoint(base), prompts, args.tokens)
    return [Sample(*parts) for parts in zip(prompts, dense, pruned, strict=True)]


def check_new_file(file: Path, overwrite: bool) -> None:
    """Refuse to write over a file, or where no file can be.

    :raises ValueError: the same
    """
    if file.is_dir() or (file.exists() and not overwrite):
        raise ValueError(
            f"--output: {file} must be absent, it is there already. Choose another path, or pass --overwrite."
        )
    if not file.parent.is_dir():
        raise ValueError(
            f"--output: {file.parent} must be an existing folder, got none. Make it, or choose another path."
        )


def add_compare(commands: Any) -> None:
    """Add ``struprune compare``."""
    compare = commands.add_parser(
        "compare",
        help="two or more outputs side by side",
        description="Show where pruned folders differ: kept units, size, time, quality.",
        formatter_class=HelpFormatter,
    )
    compare.add_argument("paths", metavar="OUT", type=Path, nargs="+", help="pruned folders, two or more")
    compare.add_argument("--all", action="store_true", help="every module, alike ones too")
    compare.set_defaults(run=run_compare)


def run_compare(args: argparse.Namespace) -> None:
    """Print outputs side by side."""
    if len(args.paths) < 2:
        raise ValueError(f"compare: must be given two or more outputs, got {len(args.paths)}. Name another.")
    from struprune_plugin.compare import compare_outputs, format_comparison

    found = compare_outputs(args.paths)
    show(args, found, format_comparison(found, args.all))


def add_sweep(commands: Any) -> None:
    """Add ``struprune sweep``."""
    sweep = commands.add_parser(
        "sweep",
        help="several sparsities and methods: a table, a curve, a choice",
        description="Prune MODEL at several sparsities, by several methods, and measure each: one calibration, one sensitivity and "
        "one set of error curves serve all. DIR keeps what is finished; the same command goes on there.",
        formatter_class=HelpFormatter,
    )
    sweep.add_argument("model", metavar="MODEL", help="a model folder or a hub name")
    sweep.add_argument("--output", required=True, metavar="DIR", type=Path, help="folder for table, JSON and pictures")
    sweep.add_argument(
        "--sparsity", dest="sparsities", default="0.1:0.6:0.1", metavar="A:B:STEP", help="or a list: 0.2,0.4"
    )
    sweep.add_argument(
        "--methods",
        default="default",
        metavar="a,b",
        help="default, allocations (uniform, softmax, …) or names of recipes",
    )
    add_recipe(sweep)
    sweep.add_argument(
        "--set", action="append", default=[], dest="changes", metavar="FIELD=VALUE", help="for all methods"
    )
    add_calibration(sweep)
    judged = sweep.add_argument_group("how points are judged")
    judged.add_argument("--text", type=Path, metavar="FILE.jsonl", help="text to score; the package's own if unset")
    judged.add_argument("--window", type=positive, default=256, metavar="N", help="context length in tokens")
    judged.add_argument("--max-tokens", type=positive, metavar="N", help="score the first N tokens")
    judged.add_argument("--tasks", metavar="a,b", help="lm-eval tasks")
    judged.add_argument("--include-path", metavar="DIR", help="folder with lm-eval task files")
    judged.add_argument("--limit", type=positive, metavar="N", help="examples a task")
    judged.add_argument(
        "--pick", metavar="LOSS", help="write the smallest model within it, e.g. '+5%% perplexity' or '-1%% arc_easy'"
    )
    judged.add_argument("--picked", type=Path, metavar="OUT", help="where to; DIR/picked if unset")
    sweep.add_argument("--seed", type=seed, default=0, help="seed of every random choice")
    add_dtype(sweep)
    add_device(sweep)
    sweep.set_defaults(run=run_sweep, sparsity=None, memory_budget=None)


def run_sweep(args: argparse.Namespace) -> None:
    """Run a sweep, show its table, and write the point that is picked."""
    changes, sparsities = read_changes(args), read_sparsities(args.sparsities)
    wanted = None if args.pick is None else read_pick(args.pick)
    check_device(args.device)
    if args.recipe is not None:
        check_recipe_name(args.recipe)
    for file in (args.data, args.text):
        check_text_file(file)
    check_model_name(args.model)
    from struprune_plugin import _register  # noqa: F401
    from struprune_plugin import sweep as sweeping
    from struprune_plugin.checkpoint import read_config
    from struprune_plugin.data import DEMO_CALIBRATION, DEMO_TEST

    choose_device(args.device)
    set_logging(args)
    sweep = sweeping.Sweep(
        model=args.model,
        recipe=args.recipe or find_default(read_config(args.model).model_type),
        changes=changes,
        methods=list(dict.fromkeys(name.strip() for name in args.methods.split(","))),
        sparsities=sparsities,
        calibration=sweeping.Calibration(
            args.data or str(DEMO_CALIBRATION), args.text_column, args.num_samples, args.seq_length, args.batch_size
        ),
        scoring=sweeping.Scoring(
            text=args.text or DEMO_TEST,
            text_column=args.text_column,
            window=args.window,
            max_tokens=args.max_tokens,
            tasks=[name.strip() for name in args.tasks.split(",")] if args.tasks else [],
            include_path=args.include_path,
            limit=args.limit,
            batch=args.batch_size,
        ),
        seed=args.seed,
        dtype=args.dtype,
    )
    picked = args.picked or args.output / "picked"
    if wanted is not None:
        sweeping.check_picked(picked, args.output)
    record = sweeping.run_sweep(sweep, args.output, lambda name, recipe: draw_progress(args, recipe, f"{name}: "))
    for name, drawn in sweeping.draw_sweep(record).items():
        write_whole(args.output / name, drawn + "\n")
    table = sweeping.format_sweep(record)
    write_whole(args.output / "sweep.md", f"# {Path(args.model).name}\n\n```\n{table}\n```\n")
    told = [table, f"wrote {args.output}"]
    if wanted is not None:
        name = sweeping.pick_point(record, wanted)
        point = record["points"][name]
        recipe = sweep.load(point["method"], point["sparsity"])
        store = sweeping.open_store(sweep, args.output)
        with draw_progress(args, recipe, f"{name}: "):
            sweeping.prune_point(sweep, recipe, None, store, picked, overwrite=picked.exists())
        record = {**record, "picked": {"point": name, "output": str(picked)}}
        told.append(f"picked {name}: wrote {picked}")
    show(args, {name: part for name, part in record.items() if name != "identity"}, "\n\n".join(told))


def draw_progress(args: argparse.Namespace, recipe: Any, prefix: str = "") -> AbstractContextManager[object]:
    """Draw one bar for a whole run, but under --verbose, whose lines the host's own bars belong to."""
    from struprune_plugin.modifiers.outline import list_stages
    from struprune_plugin.progress import Stage, draw_one_bar

    stages = [Stage(f"{prefix}{name}", weight, bar) for name, weight, bar in list_stages(recipe.modifiers)]
    return nullcontext() if getattr(args, "verbose", False) or args.quiet else draw_one_bar(stages)
