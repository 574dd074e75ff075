"""Tables of costs: what is measured of an engine, how it is read between, and what is refused."""

import json

import pytest
import torch
from helpers.families import make_model
from helpers.models import make_opt, run_oneshot, save_wide_llama

from struprune_plugin import StruPruneModifier, read_manifest
from struprune_plugin.allocation.costs.cost_table import (
    CostTable,
    ModuleCosts,
    PhaseCosts,
    describe_module,
    describe_shapes,
    find_costs,
    read_table,
    write_table,
)
from struprune_plugin.allocation.costs.engines import find_table, list_kinds, list_units
from struprune_plugin.allocation.costs.measure_costs import Engine, Run, check_measurable, measure_costs
from struprune_plugin.allocation.costs.transformers_engine import TransformersEngine
from struprune_plugin.allocation.costs.whole_model import can_hold, scale_to_whole
from struprune_plugin.export.any_class import replace_conv1d
from struprune_plugin.linalg.cost_curves import fit_penalties, fit_rising, fit_smooth, interpolate, weigh_alignment
from struprune_plugin.studies.plan import outline_run, read_shapes

SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def search_rising(values):
    """The same by the formula: the largest over starts of the least over ends of the means between."""
    n = len(values)
    means = [[sum(values[i : j + 1]) / (j + 1 - i) if j >= i else None for j in range(n)] for i in range(n)]
    return [max(min(means[i][j] for j in range(k, n)) for i in range(k + 1)) for k in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_fit_rising_is_the_nearest_that_never_falls(seed):
    values = torch.rand(9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert fit_rising(values).tolist() == pytest.approx(search_rising(values.tolist()))


@pytest.mark.parametrize("seed", range(5))
def test_fit_smooth_takes_noise_off_a_straight_line(seed):
    points = [256, 384, 512, 768, 1024, 1152, 1280, 1536]
    truth = torch.tensor(points, dtype=torch.float64) / 1536
    noise = 0.03 * torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    line, error = fit_smooth(points, truth + noise)
    assert (line - truth).square().sum() < 0.7 * noise.square().sum()
    assert 0.01 < error < 0.1


def test_fit_smooth_keeps_a_step_that_is_no_noise():
    values = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0], dtype=torch.float64)
    line, _ = fit_smooth([1, 2, 3, 4, 5, 6, 7, 8], values)
    assert (line - values).abs().max() < 0.3


def test_fit_smooth_says_what_it_makes_of_points_that_it_has_not_seen():
    points, values = [1, 2, 4, 8, 9], torch.tensor([1.0, 2.5, 3.9, 8.3, 8.9], dtype=torch.float64)
    line, error = fit_smooth(points, values)
    slope, offset = torch.linalg.lstsq(
        torch.tensor([[x, 1.0] for x in points], dtype=torch.float64), values[:, None]
    ).solution.flatten()
    assert line.tolist() == pytest.approx([float(slope * x + offset) for x in points], abs=0.1)
    assert error > float((line - values).square().mean().sqrt()), "points that were seen are nearer"
    few = torch.tensor([1.0, 5.0, 2.0])
    assert fit_smooth([1, 2, 3], few)[0].tolist() == few.tolist()


def test_fit_penalties_takes_noise_for_what_it_is():
    assert fit_penalties({1: 2.0, 4: 1.4, 8: 1.05, 16: 0.98}, 0.03) == {1: 2.0, 4: 1.4, 8: 1.0, 16: 1.0}
    assert fit_penalties({1: 1.2, 4: 1.4, 8: 1.0}, 0.01) == {1: pytest.approx(1.3), 4: pytest.approx(1.3), 8: 1.0}
    assert fit_penalties({}, 0.1) == {}


def test_interpolate_goes_through_its_points_and_vanishes_at_zero():
    line = interpolate([2, 4, 8], torch.tensor([3.0, 5.0, 5.0]), 8)
    assert line.tolist() == [0.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0, 5.0]


def test_weigh_alignment_takes_the_largest_power_that_was_measured():
    factors = weigh_alignment(24, 1, {1: 1.5, 4: 1.2, 16: 1.0})
    assert [float(factors[k]) for k in (1, 2, 4, 8, 12, 16, 17)] == [1.5, 1.5, 1.2, 1.2, 1.2, 1.0, 1.5]
    per_head = weigh_alignment(24, 3, {1: 1.5, 4: 1.0})
    assert [float(per_head[k]) for k in (3, 12, 15, 24)] == [1.5, 1.0, 1.5, 1.0]


class Played(Engine):
    """An engine whose seconds are known: an FFN channel takes 2, a value channel 3, each module 10 more, all else 1000."""

    name, machine, dtype, num_layers = "played", "a test", "float32", 2

    def __init__(self, penalty=1.0, num_whole=0, num_layers=2, extra=0.0):
        self.penalty, self.num_whole, self.num_layers, self.extra = penalty, num_whole, num_layers, extra

    def seconds(self, kind, units):
        per_block = units // 2 if kind == "value_channels" else units
        factor = self.penalty if per_block % 8 else 1.0
        each = (1 + self.extra) * {"ffn": 2, "value_channels": 3}[kind]
        return (10 + each * units) * factor if units else 0.0

    def compare(self, changes):
        layer = self.seconds("ffn", 256) + self.seconds("value_channels", 32)
        changed = 0.0
        if changes is not None:
            units = {"ffn": 256, "value_channels": 32} | {change.group.kind: change.units for change in changes}
            changed = sum(self.seconds(kind, count) for kind, count in units.items())
        lost = self.num_whole if changes is None or not all(change.units for change in changes) else 0
        times = (1000 + self.num_layers * layer, 1000 + lost * layer + (self.num_layers - lost) * changed)
        return {"prompt": times, "token": tuple(time / 100 for time in times)}


@pytest.fixture(scope="module")
def llama():
    return make_model("llama", **SIZES, num_hidden_layers=4)


@pytest.mark.parametrize("num_whole", [0, 1])
def test_measure_costs_finds_what_an_engine_takes(llama, num_whole):
    groups = list_kinds(llama, ["ffn", "value_channels"])
    table = measure_costs(Played(num_whole=num_whole), llama, groups, Run(("prompt", "token"), 1, 64))
    prompt, token = table.phases
    assert prompt.dense == prompt.whole == pytest.approx(1000 + 4 * (522 + 106))
    for phase, scale in ((prompt, 1), (token, 100)):
        ffn, values = (find_costs(phase, llama, group, "it") * scale for group in groups)
        assert ffn[1:].tolist() == pytest.approx([10 + 2 * k for k in range(1, 257)])
        assert values[1:].tolist() == pytest.approx([10 + 3 * k for k in range(1, 33)])
        assert ffn[0] == values[0] == 0
        assert all(module.error < 1e-9 for module in phase.modules)


@pytest.mark.parametrize("extra", [0.0, 0.5])
def test_lines_are_scaled_to_what_the_whole_model_saves(llama, extra):
    groups, run = list_kinds(llama, ["ffn", "value_channels"]), Run(("prompt", "token"), 1, 64)
    table = measure_costs(Played(), llama, groups, run)
    told = []
    scaled = scale_to_whole(table, Played(num_layers=4, extra=extra), llama, groups, told.append)
    assert len(told) == 6
    for phase, before, scale in zip(scaled.phases, table.phases, (1, 100), strict=True):
        assert phase.dense * scale == pytest.approx(phase.whole * scale)
        assert phase.dense * scale == pytest.approx(1000 + 4 * (522 + 106 + extra * (2 * 256 + 3 * 32)))
        ffn, values = (find_costs(phase, llama, group, "it") for group in groups)
        old_ffn, old_values = (find_costs(before, llama, group, "it") for group in groups)
        assert ffn.tolist() == pytest.approx(((1 + extra) * old_ffn).tolist())
        assert values.tolist() == pytest.approx(((1 + extra) * old_values).tolist())


def test_widths_that_kernels_do_not_like_cost_more(llama):
    (group,) = list_kinds(llama, ["ffn"])
    costs = find_costs(
        measure_costs(Played(1.25), llama, [group], Run(("prompt",), 1, 64)).phases[0], llama, group, "it"
    )
    assert float(costs[136]) == pytest.approx(282)
    assert float(costs[135]) == pytest.approx(1.25 * 280)
    assert costs[128] < costs[127], "nobody should keep 127"


def test_a_table_survives_its_file_and_refuses_other_models(llama, tmp_path):
    table = measure_costs(Played(), llama, list_kinds(llama, ["ffn"]), Run(("token",), 1, 64))
    write_table(table, tmp_path / "costs.json")
    assert read_table(tmp_path / "costs.json") == table
    table.check_model(llama, "it")
    with pytest.raises(
        ValueError, match=r"it must be of this model's shapes, got 4 × 'self_attn.q_proj 64x64', here 3"
    ):
        table.check_model(make_model("llama", **SIZES, num_hidden_layers=3), "it")
    with pytest.raises(ValueError, match="must hold a prompt of batch 1, length 64, got token of batch 1"):
        table.find_phase("prompt", 1, 64, "it")
    with pytest.raises(ValueError, match=r"must hold 'head 2: .*', got ffn 256: .*with these units among --units"):
        find_costs(table.phases[0], llama, list_kinds(llama, ["head"])[0], "it")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: c["phases"][0]["modules"][0].update(units=[4, 2]), "units must rise"),
        (lambda c: c["phases"][0]["modules"][0]["seconds"].__setitem__(0, -1.0), "at least 0"),
        (lambda c: c["phases"][0]["modules"][0].update(penalties={"3": 1.0}), "powers of two"),
        (lambda c: c["phases"][0].update(dense=0.0), "above 0"),
        (lambda c: c.pop("engine"), "engine: Field required"),
        (lambda c: c.update(format_version=2), "format_version"),
        (lambda c: c.update(other=2), "other"),
    ],
)
def test_a_file_that_is_no_table_is_refused(llama, tmp_path, change, told):
    table = measure_costs(Played(), llama, list_kinds(llama, ["ffn"]), Run(("token",), 1, 64))
    content = json.loads(table.model_dump_json())
    change(content)
    (tmp_path / "costs.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"must be a table that struprune costs wrote, got .*{told}.*Make it anew"):
        read_table(tmp_path / "costs.json")


def test_files_that_are_none(tmp_path):
    with pytest.raises(
        ValueError, match=r"must be transformers, llama.cpp or vllm, the .* or a file of struprune costs, got 'no.json'"
    ):
        read_table("no.json")
    (tmp_path / "junk.json").write_text("{")
    with pytest.raises(ValueError, match="must be a table"):
        read_table(tmp_path / "junk.json")


@pytest.mark.parametrize("model", ["llama", "opt", "gpt2"])
def test_transformers_runs_every_kind_at_every_width(model):
    dense = make_opt() if model == "opt" else make_model(model)
    replace_conv1d(dense)
    run = Run(("prompt", "token"), 2, 12)
    units = list_units(dense)
    engine, groups = TransformersEngine(dense, torch.float32, run, 2), list_kinds(dense, units)
    table = scale_to_whole(measure_costs(engine, dense, groups, run), engine, dense, groups)
    assert [module.module.partition(" ")[0] for module in table.phases[0].modules] == units
    assert {phase.phase for phase in table.phases} == {"prompt", "token"}
    assert table.model == describe_shapes(dense)


def test_models_of_several_kinds_of_layers_are_refused():
    with pytest.raises(ValueError, match="layers that are all alike, without experts"):
        check_measurable(make_model("mixtral"), Run(("token",), 1, 8))
    with pytest.raises(ValueError, match=r"^length: must be at most 32 for this model's 64 positions, got 60"):
        check_measurable(make_opt(), Run(("token",), 1, 60))


def save_played(model, file, flat_values=False):
    """Write a table in which FFN channels take all the time, or nearly."""
    modules = []
    for group in list_kinds(model, ["ffn", "value_channels"]):
        each = 1e-3 if group.kind == "ffn" else 0.0 if flat_values else 2e-3
        seconds = [1e-2 + each * k for k in (1, group.num_units)]
        modules.append(ModuleCosts(describe_module(model, group), [1, group.num_units], seconds, {}, 0.0))
    whole = 0.05 + len(model.model.layers) * sum(module.seconds[-1] for module in modules)
    phase = PhaseCosts("token", 1, 512, whole, whole, modules)
    write_table(
        CostTable(engine="played", machine="a test", dtype="float32", model=describe_shapes(model), phases=[phase]),
        file,
    )


@pytest.mark.parametrize("flat", [False, True])
def test_a_speedup_is_met_by_the_table(tmp_path, flat):
    from transformers import AutoModelForCausalLM

    folder, file = save_wide_llama(tmp_path / "model"), tmp_path / "costs.json"
    save_played(AutoModelForCausalLM.from_pretrained(folder), file, flat)
    budget = {"speedup": 1.2, "engine": str(file)}
    rule = {"rule": "error_curve", "trial_samples": 2}
    run_oneshot(str(folder), budget=budget, allocation=rule, output_dir=str(tmp_path / "out"))
    manifest = read_manifest(tmp_path / "out")
    (record,) = manifest.budget.limits
    assert record.name == "speedup, token, played"
    assert 1.2 <= record.planned < 1.22
    assert record.met is None
    total = record.fixed + sum(record.modules.values())
    assert record.dense / total == pytest.approx(record.planned)
    values = [group for group in manifest.groups if group.kind == "value_channels"]
    assert all(group.kept == group.num_units for group in values) == flat, "what frees no time stays"
    outline = outline_run(read_shapes(str(folder)), [StruPruneModifier(budget=budget)])
    assert outline.limits[0].planned >= 1.2
    assert 0 < outline.sparsity < 1
    with pytest.raises(ValueError, match=r"budget: speedup, token, played must be at most \d\.\d+"):
        outline_run(read_shapes(str(folder)), [StruPruneModifier(budget=budget | {"speedup": 900})])


def test_an_engine_that_is_timed_in_the_run_is_timed_once(llama, monkeypatch):
    import struprune_plugin.allocation.costs.engines as engines

    made = []
    monkeypatch.setitem(
        engines.ENGINES, "transformers", lambda *args: made.append(args[-1]) or Played(num_layers=args[-1])
    )
    monkeypatch.setattr(engines, "choose_layers", lambda model, item: 2)
    run = Run(("token",), 3, 17)
    first, second = (find_table("transformers", llama, torch.float32, ["ffn"], run) for _ in range(2))
    assert first is second
    assert made == [2, 4], "a few layers, then all"


def test_a_model_that_memory_cannot_hold_is_not_timed_whole(llama, monkeypatch):
    import struprune_plugin.allocation.costs.whole_model as whole_model

    held = 4 * sum(parameter.numel() for parameter in llama.parameters())
    for free, fits in ((4 * held, True), (4 * held - 1, False)):
        monkeypatch.setattr(whole_model, "find_free_bytes", lambda free=free: free)
        assert can_hold(llama, torch.float32) == fits
