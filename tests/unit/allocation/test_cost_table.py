"""Cost tables: how they are read, what is refused, and that a speed-up is met by one."""

import json

import pytest
import torch
from helpers.families import make_model
from helpers.models import make_opt, run_oneshot, save_wide_llama
from transformers import AutoModelForCausalLM

from eval.costs import measure
from struprune_plugin import read_manifest
from struprune_plugin.allocation.cost_table import CostTable, ModuleCosts, describe_module, describe_shapes, read_table
from struprune_plugin.model.units import find_groups


def write_table(model, file, flat_values=False, change=lambda content: None):
    """Write a table in which FFN channels take 1 ms each, and value channels 2 ms or nothing."""
    modules = []
    for group in find_groups(model, "value_channels"):
        each = 1e-3 if group.kind == "ffn" else 0.0 if flat_values else 2e-3
        if group.layer_index == 0:
            units = [1, group.num_units // 2, group.num_units]
            modules.append(
                ModuleCosts(module=describe_module(model, group), units=units, seconds=[each * k for k in units])
            )
    dense = 0.05 + len(model.model.layers) * sum(module.seconds[-1] for module in modules)
    table = CostTable(about="a test", dense=dense, rest=0.05, shapes=describe_shapes(model), modules=modules)
    content = json.loads(table.model_dump_json())
    change(content)
    file.write_text(json.dumps(content))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_wide_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llama(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def test_costs_are_interpolated_and_constant_below_the_first():
    costs = ModuleCosts(module="ffn", units=[2, 4, 8], seconds=[3.0, 5.0, 5.0]).list_costs(8)
    assert costs.tolist() == [3.0, 3.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    assert ModuleCosts(module="ffn", units=[3], seconds=[2.0]).list_costs(3).tolist() == [2.0] * 4


CHANGES = {
    "falling units": (lambda c: c["modules"][0].update(units=[4, 2, 8]), "units must rise"),
    "no seconds": (lambda c: c["modules"][0]["seconds"].__setitem__(0, -1.0), "greater than or equal to 0"),
    "no time": (lambda c: c.update(dense=0.0), "dense must be greater than 0"),
    "a field less": (lambda c: c.pop("rest"), "rest"),
    "a field more": (lambda c: c.update(other=2), "other is not a field"),
    "another version": (lambda c: c.update(format_version=1), "format_version"),
    "other shapes": (lambda c: c["shapes"].update({"mlp.up_proj 1x1": 3}), r"got 3 × 'mlp.up_proj 1x1', here 0"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_is_no_table_of_the_model_is_refused(name, llama, tmp_path):
    change, told = CHANGES[name]
    with pytest.raises(ValueError, match=rf"^budget.costs: .*costs.json must .*{told}.* Make it anew with python -m"):
        read_table(str(write_table(llama, tmp_path / "costs.json", change=change)), llama)


def test_files_that_are_none_and_units_that_were_not_timed_are_refused(llama, tmp_path):
    with pytest.raises(ValueError, match=r"no.json must hold a cost table, got .*No such file"):
        read_table("no.json", llama)
    (tmp_path / "junk.json").write_text("{")
    with pytest.raises(ValueError, match="must hold a cost table"):
        read_table(str(tmp_path / "junk.json"), llama)
    table = read_table(str(write_table(llama, tmp_path / "costs.json")), llama)
    (head, *_) = find_groups(llama, "head", prune_ffn=False)
    with pytest.raises(ValueError, match=r"^budget.costs: must hold 'head \d+: .*', got value_.*Time these units"):
        table.list_costs(llama, head)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("rule", ["error_curve", "uniform"])
def test_a_speedup_is_met_by_the_table(folder, llama, tmp_path, rule, flat):
    file = write_table(llama, tmp_path / "costs.json", flat)
    budget = {"speedup": 1.2, "costs": str(file)}
    allocation = {"rule": rule, "trial_samples": 2} if rule == "error_curve" else rule
    run_oneshot(str(folder), budget=budget, allocation=allocation, output_dir=str(tmp_path / "out"))
    manifest, table = read_manifest(tmp_path / "out"), read_table(str(file), llama)
    assert manifest.budget.limit.asked == 1.2
    assert 1.2 <= manifest.budget.limit.planned < 1.25
    kept = {group.name: group.kept for group in manifest.groups}
    seconds = sum(
        float(table.list_costs(llama, group)[kept[group.name]]) for group in find_groups(llama, "value_channels")
    )
    assert table.dense / (table.rest + seconds) == pytest.approx(manifest.budget.limit.planned)
    if flat and rule == "error_curve":
        whole = [group for group in manifest.groups if group.kind == "value_channels"]
        assert all(group.kept == group.num_units for group in whole), "what frees no time stays"


@pytest.mark.parametrize("fields", [{"attention_unit": "none"}, {"prune_ffn": False}, {"ignore": ["re:.*layers.1.*"]}])
def test_what_is_not_pruned_keeps_its_seconds(folder, llama, tmp_path, fields):
    budget = {"speedup": 1.1, "costs": str(write_table(llama, tmp_path / "costs.json"))}
    run_oneshot(str(folder), budget=budget, **fields, output_dir=str(tmp_path / "out"))
    manifest, table = read_manifest(tmp_path / "out"), read_table(budget["costs"], llama)
    kept = {group.name: group.kept for group in manifest.groups}
    groups = find_groups(llama, "value_channels")
    seconds = sum(float(table.list_costs(llama, one)[kept.get(one.name, one.num_units)]) for one in groups)
    assert table.dense / (table.rest + seconds) == pytest.approx(manifest.budget.limit.planned)
    assert 1.1 <= manifest.budget.limit.planned < 1.15


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"budget": {"speedup": 900}}, "budget: the fewest units that may stay must cost at most"),
        ({"allocation": "softmax"}, "budget: `allocation: softmax` cannot meet a speedup"),
        ({"importance": "l0"}, "budget: `importance: l0` needs sparsity"),
    ],
)
def test_what_cannot_be_met_is_refused_before_any_work(folder, llama, tmp_path, fields, told):
    file = write_table(llama, tmp_path / "costs.json")
    budget = {"speedup": 1.2, "costs": str(file), **fields.pop("budget", {})}
    with pytest.raises(ValueError, match=told):
        run_oneshot(str(folder), budget=budget, output_dir=str(tmp_path / "out"), **fields)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("phase", ["prompt", "token"])
def test_the_tool_times_every_kind_of_module(phase, monkeypatch, tmp_path):
    monkeypatch.setattr("eval.costs.ROUNDS", {"prompt": 1, "token": 1})
    model = make_opt().eval()
    table = measure(model, "value_channels", phase, 2, 12)
    assert [module.module.partition(" ")[0] for module in table.modules] == ["value_channels", "ffn"]
    (tmp_path / "costs.json").write_text(table.model_dump_json())
    assert read_table(str(tmp_path / "costs.json"), make_opt()) == table
    assert all(torch.isfinite(module.list_costs(module.units[-1])).all() for module in table.modules)
    with pytest.raises(ValueError, match="all layers must be alike, without experts"):
        measure(make_model("mixtral"), "none", phase, 1, 8)
