"""Budgets of the clock: asked, planned and measured speed, and perplexity beside a budget of parameters at equal measured speed.

    struprune costs MODEL --dtype float32 --output tf.json
    struprune costs MODEL --dtype float32 --engine llama.cpp --python .venv-llama/bin/python --output llama.json
    struprune costs MODEL --dtype float32 --engine vllm --python .venv-vllm/bin/python --output vllm.json
    python -m eval.clock --model MODEL --data DATA --tables tf.json,llama.json,vllm.json \
        --python .venv-llama/bin/python --vllm-python .venv-vllm/bin/python --output results/clock

``--rows speeds`` plans every speed-up of every table on one set of error curves (with ``--allocation uniform`` on none), and times
the planned sizes, of the whole model, in every engine whose Python is named: a speed depends on sizes alone. ``--rows quality``
prunes, scores and times: by parameters, and by the clock. Finished rows are read back. Writes rows.json, speeds.md, quality.md and
a picture per engine and phase: perplexity against measured tokens a second.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.ledger import EVAL, Ledger, Turn, describe_code, digest_text, identify_model, identify_text
from struprune_plugin import StruPruneModifier, oneshot, read_manifest
from struprune_plugin.allocation.cache import MeasurementCache
from struprune_plugin.allocation.costs.cost_table import PHASES, CostTable, read_table
from struprune_plugin.allocation.costs.llama_cpp_engine import time_files
from struprune_plugin.allocation.costs.measure_costs import Run
from struprune_plugin.allocation.costs.transformers_engine import time_pair
from struprune_plugin.allocation.costs.vllm_engine import time_folders, write_pruned, write_stock
from struprune_plugin.allocation.rules.rule import GroupStatistics, tie_statistics
from struprune_plugin.evaluation.calibration import make_calibration_dataset
from struprune_plugin.evaluation.scoring import load_checkpoint, measure_perplexity
from struprune_plugin.evaluation.text import read_texts, tokenize_texts
from struprune_plugin.export.convert import adopt_attention
from struprune_plugin.export.random_gguf import write_random_gguf
from struprune_plugin.export.stock_config import list_sizes
from struprune_plugin.linalg.rounding import expand_counts
from struprune_plugin.model.layers import count_prunable_parameters
from struprune_plugin.model.structure.tiny import draw_tokens
from struprune_plugin.model.surgery import cut_units
from struprune_plugin.model.units import find_groups
from struprune_plugin.modifiers.targets import find_targets
from struprune_plugin.modifiers.widths import find_roundings, measure_groups
from struprune_plugin.reporting.svg import draw_points
from struprune_plugin.reporting.tables import format_table
from struprune_plugin.storage.resume_store import ResumeStore

TEXTS = {"books": "books_test.jsonl", "WikiText-2": "wikitext2_test.jsonl"}
_TURNS = 2  # measurements of one pair of models
Kept = Mapping[str, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with books_calibration.jsonl and the texts to score"
    )
    parser.add_argument("--tables", required=True, help="files of struprune costs, with commas between them")
    parser.add_argument("--speedups", default="1.2,1.4,1.6")
    parser.add_argument("--sparsity", default="0.15,0.3,0.45", help="of the rows by parameters")
    parser.add_argument("--rows", choices=("speeds", "quality", "all"), default="all")
    parser.add_argument(
        "--allocation",
        choices=("error_curve", "uniform"),
        default="error_curve",
        help="of the planned sizes of --rows speeds; uniform needs no calibration",
    )
    parser.add_argument("--only", default="", help="rows of quality whose name holds this")
    parser.add_argument("--python", default="", help="a Python with llama-cpp-python; without it llama.cpp is left out")
    parser.add_argument("--vllm-python", default="", help="a Python with vLLM; without it vLLM is left out")
    parser.add_argument("--attention-unit", choices=("value_channels", "head", "none"), default="value_channels")
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=6000, help="scored of every text")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further row after so many")
    parser.add_argument("--output", type=Path, default=Path("results/clock"))
    study = Study(parser.parse_args())
    if study.args.rows != "quality":
        study.tell("speeds", format_speeds(study.run_speeds()))
    if study.args.rows != "speeds":
        rows = study.run_quality()
        study.tell("quality", format_quality(rows))
        for name, picture in draw_rows(rows).items():
            (study.args.output / f"{name}.svg").write_text(picture + "\n", encoding="utf-8")
    study.turn.tell()
    return int(study.turn.left > 0)


class Study:
    """All rows of one model."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.turn = args, Turn(args.seconds)
        args.output.mkdir(parents=True, exist_ok=True)
        self._tables: dict[str, CostTable] = {path: read_table(path) for path in args.tables.split(",")}
        self._tokenizer = AutoTokenizer.from_pretrained(args.model)
        calibration = args.data / "books_calibration.jsonl"
        self._dataset = make_calibration_dataset(str(calibration), self._tokenizer, args.num_samples, args.seq_length)
        settings = {"samples": args.num_samples, "length": args.seq_length, "tokens": args.max_tokens}
        self._how = {
            "code": describe_code(EVAL / "clock.py"),
            "model": identify_model(args.model),
            "texts": [identify_text(str(args.data / file)) for file in ("books_calibration.jsonl", *TEXTS.values())],
            "tables": [digest_text(table.model_dump_json()) for table in self._tables.values()],
        }
        self.ledger = Ledger(args.output / "rows.json", settings)
        store = ResumeStore(args.output / "evidence")
        store.open({name: self._how[name] for name in ("model", "texts")})
        self._cache = MeasurementCache(store)
        self._dense = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()

    def tell(self, name: str, table: str) -> None:
        """Print a table and keep it."""
        print(table)
        (self.args.output / f"{name}.md").write_text(table + "\n", encoding="utf-8")

    def list_budgets(self) -> dict[str, dict[str, Any]]:
        """Return budgets of the clock by their names."""
        found = {}
        for path, table in self._tables.items():
            for phase in table.phases:
                for speedup in map(float, self.args.speedups.split(",")):
                    asked = {"speedup": speedup, "phase": phase.phase, "batch": phase.batch, "length": phase.length}
                    found[f"{table.engine}, {phase.phase}, {speedup:g} ×"] = {**asked, "engine": path}
        return found

    def run_speeds(self) -> dict[str, dict[str, Any]]:
        """Plan every budget of the clock by error curves, and time the planned sizes."""
        rows = {}
        for name, budget in self.list_budgets().items():
            how = self._how | {"speed": budget, "allocation": self.args.allocation, "unit": self.args.attention_unit}
            if self.turn.takes(self.ledger.find(f"speed | {name}", how)):
                rows[name] = self.ledger.finish(f"speed | {name}", how, lambda b=budget: self._measure_plan(b))  # type: ignore[misc]
        return rows

    def run_quality(self) -> dict[str, dict[str, Any]]:
        """Prune by parameters and by the clock, score and time."""
        fields: dict[str, dict[str, Any]] = {"dense": {}}
        fields |= {f"parameters {value}": {"sparsity": float(value)} for value in self.args.sparsity.split(",")}
        fields |= {name: {"budget": [budget]} for name, budget in self.list_budgets().items()}
        rows = {}
        for name, own in fields.items():
            how = self._how | {"fields": own, "unit": self.args.attention_unit}
            found = self.ledger.find(f"quality | {name}", how)
            if found is None and self.args.only not in name and name != "dense":
                continue
            if self.turn.takes(found):
                rows[name] = self.ledger.finish(
                    f"quality | {name}",
                    how,
                    lambda f=own, n=name: self._prune_and_score(f, *_read_clock(n)),  # type: ignore[misc]
                )
        return rows

    def _prune(self, fields: Mapping[str, Any], out: Path) -> None:
        modifier = StruPruneModifier(**fields, attention_unit=self.args.attention_unit)
        modifier.set_cache(self._cache)
        oneshot(
            model=self.args.model,
            recipe=modifier,
            output_dir=out,
            dataset=self._dataset,
            batch_size=8,
            num_calibration_samples=self.args.num_samples,
            shuffle_calibration_samples=False,
            precision="float32",
        )

    def _measure_plan(self, budget: dict[str, Any]) -> dict[str, Any]:
        rule, unit, model = self.args.allocation, self.args.attention_unit, self._dense
        modifier = StruPruneModifier(budget=[budget], allocation=rule, attention_unit=unit)
        groups = modifier.find_groups(model)
        sizes = measure_groups(groups, find_roundings(model, groups, (), 1))
        targets = find_targets(modifier, model, groups, sizes, (), torch.float32)
        asked = modifier.make_budget(count_prunable_parameters(model), 0.0, [target.limit for target in targets])
        measured = tie_statistics(sizes, self._take_curves(modifier)) if modifier.allocation.measures else {}
        plan = modifier.allocation.decide(sizes, measured, asked)
        counts = [plan.kept[size.name] for size in sizes]
        total = targets[0].fixed + targets[0].limit.add_up(counts)
        kept = expand_counts(sizes, counts)
        left = sum(count * size.unit_cost for count, size in zip(counts, sizes, strict=True))
        removed = sum(size.num_parameters for size in sizes) - left
        shares = {kind: _mean_kept([g for g in groups if g.kind == kind], kept) for kind in {g.kind for g in groups}}
        run = Run((budget["phase"],), budget["batch"], budget["length"], self.args.python)
        told = {"asked": budget["speedup"], "planned": targets[0].tell(total), "kept": shares}
        return told | {"removed": removed / asked.num_prunable, "measured": self._time(kept, run)}

    def _take_curves(self, modifier: StruPruneModifier) -> dict[str, GroupStatistics]:
        """Return the error curves of the recipe, from an earlier run or measured now."""
        if self._cache.take_curves(modifier.dump_fields()) is None:
            with tempfile.TemporaryDirectory() as scratch:
                rule = {"rule": "error_curve", "trial_samples": 0}
                self._prune({"sparsity": 0.3, "allocation": rule}, Path(scratch) / "out")
        measured = self._cache.take_curves(modifier.dump_fields())
        assert measured is not None
        return measured

    def _time(self, kept: Kept, run: Run, engine: str = "") -> dict[str, dict[str, tuple[float, float]]]:
        """Return, by engine and phase, seconds of the dense model and of one of the kept sizes.

        :param engine: the only one; all where empty
        """
        cut = self._cut(kept)
        tokens = draw_tokens(self._dense.config, run.batch, run.length)
        found: dict[str, Any] = {}
        if engine in ("", "transformers"):
            found["transformers"] = _time_again(lambda: time_pair(self._dense, cut, run, tokens))
        if run.python and engine in ("", "llama.cpp"):
            with tempfile.TemporaryDirectory() as scratch:
                dense, changed = Path(scratch) / "dense.gguf", Path(scratch) / "cut.gguf"
                for file, model in ((dense, self._dense), (changed, cut)):
                    write_random_gguf(model.config, list_sizes(model), torch.float32, file)
                found["llama.cpp"] = _time_again(lambda: time_files(dense, changed, run))
        if self.args.vllm_python and engine in ("", "vllm"):
            there = replace(run, python=self.args.vllm_python)
            with tempfile.TemporaryDirectory() as scratch:
                folders = [Path(scratch) / "dense", Path(scratch) / "cut"]
                write_stock(self._dense, folders[0])
                write_pruned(cut, folders[1])
                found["vllm"] = _time_again(lambda: time_folders(folders, self._dense.config, torch.float32, there)[0])
        return found

    def _cut(self, kept: Kept) -> Any:
        """Return the dense model cut to sizes, in the classes that pruned models have, its weights without meaning."""
        cut = AutoModelForCausalLM.from_pretrained(self.args.model, dtype=torch.float32).eval()
        groups = [group for group in find_groups(cut, self.args.attention_unit) if group.name in kept]
        adopt_attention(cut, groups)
        cut_units(cut, groups, kept)
        return cut

    def _prune_and_score(self, fields: Mapping[str, Any], engine: str, phase: str) -> dict[str, Any]:
        """Return a row of quality.

        :param engine: to time it in; all where empty
        :param phase: the same
        """
        told: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as scratch:
            folder: str | Path = self.args.model
            if fields:
                folder = Path(scratch) / "out"
                self._prune(fields, folder)
                manifest = read_manifest(folder)
                kept = {group.name: group.kept for group in manifest.groups}
                told["removed"] = manifest.budget.met_sparsity
                told["planned"] = [limit.planned for limit in manifest.budget.limits]
                told["taken"] = manifest.allocation.taken
            else:
                kept = {group.name: group.num_units for group in find_groups(self._dense, self.args.attention_unit)}
            model = load_checkpoint(str(folder))[0].float()
            told["perplexity"] = {
                name: measure_perplexity(
                    model,
                    tokenize_texts(self._tokenizer, read_texts(self.args.data / file), self.args.max_tokens),
                    self.args.seq_length,
                )
                for name, file in TEXTS.items()
            }
        run = Run((phase,) if phase else PHASES, 1, 512, self.args.python)  # type: ignore[arg-type]
        return told | {"measured": self._time(kept, run, engine)}


def _read_clock(name: str) -> tuple[str, str]:
    """Return engine and phase of a row's budget; empty ones where that is no clock's."""
    engine, phase, *_ = [*name.split(", "), ""]
    return (engine, phase) if phase else ("", "")


def _time_again(measure: Callable[[], dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Return, by phase, the least seconds of the dense model, and those of the other by the mean ratio of several measurements."""
    found = [measure() for _ in range(_TURNS)]
    times = {}
    for phase in found[0]:
        dense = min(one[phase][0] for one in found)
        times[phase] = (dense, dense * statistics.mean(one[phase][1] / one[phase][0] for one in found))
    return times


def _mean_kept(groups: Sequence[Any], kept: Kept) -> float:
    return sum(kept[group.name] / group.num_units for group in groups) / len(groups)


def format_speeds(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line per budget: asked, planned, measured in its engine, how far off; other engines' beside it."""
    cells = []
    for name, row in rows.items():
        engine, phase, _ = name.split(", ")
        speeds = {key: part[phase][0] / part[phase][1] for key, part in row["measured"].items()}
        own = speeds.pop(engine, math.nan)
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in sorted(row["kept"].items()))
        other = ", ".join(f"{key} {value:.3f}" for key, value in speeds.items())
        numbers = [f"{row['asked']:.1f}", f"{row['planned']:.3f}", f"{own:.3f}", f"{own / row['asked'] - 1:+.1%}"]
        cells.append([name, *numbers, f"{row['removed']:.1%}", shares, other])
    return format_table(["budget", "asked", "planned", "measured", "off", "removed", "kept", "elsewhere"], cells)


def read_speed(rows: Mapping[str, Mapping[str, Any]], name: str, engine: str, phase: str) -> float:
    """Return the tokens a second of a row's model: the dense row's, times the ratio to the dense model that it ran in turn with."""
    dense, own = (rows[key]["measured"][engine][phase] for key in ("dense", name))
    return (512 if phase == "prompt" else 1) / dense[0] * (own[0] / own[1] if name != "dense" else 1.0)


def find_equal(rows: Mapping[str, Mapping[str, Any]], engine: str, phase: str, speed: float, text: str) -> float:
    """Return the perplexity of a budget of parameters at a speed: its logarithm between rows, on a line; nan beyond them."""
    points = sorted(
        (read_speed(rows, name, engine, phase), math.log(row["perplexity"][text]))
        for name, row in rows.items()
        if name == "dense" or name.startswith("parameters")
    )
    for (x, y), (to_x, to_y) in itertools.pairwise(points):
        if x <= speed <= to_x:
            return math.exp(y + (to_y - y) * (speed - x) / (to_x - x))
    return math.nan


def format_quality(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line per row: what went, measured speeds against dense, perplexities, those of parameters at equal speed."""
    cells, dense = [], rows["dense"]
    for name, row in rows.items():
        speeds = [_show_speed(row, engine, phase) for engine in dense["measured"] for phase in PHASES]
        line = [
            name,
            f"{row.get('removed', 0.0):.1%}",
            *speeds,
            *(f"{value:.2f}" for value in row["perplexity"].values()),
        ]
        for text in TEXTS:
            told = ""
            if ", " in name:
                engine, phase, _ = name.split(", ")
                equal = find_equal(rows, engine, phase, read_speed(rows, name, engine, phase), text)
                increase = row["perplexity"][text] - dense["perplexity"][text]
                told = f"{equal:.2f} ({increase / (equal - dense['perplexity'][text]) - 1:+.1%})"
                told = "beyond the rows" if math.isnan(equal) else told
            line.append(told)
        cells.append(line)
    engines = [f"{key}, {phase}" for key in dense["measured"] for phase in PHASES]
    header = [
        "budget",
        "removed",
        *engines,
        *TEXTS,
        *(f"{text}, parameters at equal speed (increase)" for text in TEXTS),
    ]
    return format_table(header, cells)


def _show_speed(row: Mapping[str, Any], engine: str, phase: str) -> str:
    """Return how many times as fast as the dense model a row's is; nothing where it was not timed."""
    pair = row["measured"].get(engine, {}).get(phase)
    return f"{pair[0] / pair[1]:.3f}" if pair else ""


def draw_rows(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return pictures by name: perplexity against measured tokens a second, a budget of parameters beside one of the clock."""
    pictures = {}
    for engine in rows["dense"]["measured"]:
        for phase in PHASES:
            series: dict[str, list[tuple[float, float, str]]] = {}
            for name, row in rows.items():
                kind = "parameters" if not name.startswith(f"{engine}, {phase}") else "clock"
                if kind == "clock" or name == "dense" or name.startswith("parameters"):
                    speed, value = read_speed(rows, name, engine, phase), row["perplexity"]["books"]
                    told = f"{name}: {value:.2f} at {speed:.1f} tokens a second"
                    for one in ("parameters", "clock") if name == "dense" else (kind,):
                        series.setdefault(one, []).append((speed, value, told))
            ordered = {kind: sorted(part) for kind, part in series.items()}
            title = f"Perplexity against speed, {phase} in {engine}"
            labels = (f"tokens a second, {phase}", "perplexity on books")
            pictures[f"{engine.replace('.', '_')}-{phase}"] = draw_points(title, ordered, labels, lines=True)
    return pictures


if __name__ == "__main__":
    raise SystemExit(main())
