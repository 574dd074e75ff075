"""What cannot be run is refused by ``struprune plan`` and by a run alike, before any work."""

import pytest
from helpers.models import make_dataset

from struprune_plugin import oneshot
from struprune_plugin.modifiers.needs import Workload
from struprune_plugin.modifiers.plan import plan_run
from struprune_plugin.recipes.load import load_recipe

WHOLE = {"attention_unit": "none", "output": "uniform"}
FIELDS = [
    ({"output": "uniform"}, "`output: uniform` needs values as wide as queries and keys"),
    ({**WHOLE, "allocation": "error_curve"}, "gives all layers one size, got `allocation: error_curve`"),
    ({**WHOLE, "targets": ["re:.*fc2"]}, "must cover all decoder layers"),
    ({"importance": "snip", "offload": True}, "offload: must be false with `importance: snip`"),
    ({"weight_update": "admm", "offload": True}, "offload: must be false with `weight_update: admm`"),
    ({"weight_update": "admm", "attention_unit": "none", "targets": ["re:.*out_proj"]}, "targets"),
    ({"allocation": {"rule": "error_curve", "max_sparsity": 0.1}}, "max_sparsity: must be at least"),
    ({"allocation": "global_threshold"}, "global_threshold"),
    ({"sparsity": None}, "gives neither sparsity nor budget"),
    ({"sparsity": 0.99}, "Lower sparsity to at most"),
    ({"sparsity": None, "budget": {"bytes": 5000}}, "budget.bytes: must be at least"),
    ({"sparsity": None, "budget": {"bytes": 10**6}, "importance": "l0"}, "budget: `importance: l0` needs sparsity"),
    ({"width_multiple": 64}, "kept widths must be multiples of 64"),
    ({"targets": ["nothing"]}, "targets"),
]
ALLOCATOR = {"SparsityAllocatorModifier": {"sparsity": 0.2}}
ZEROS = {"ConstantPruningModifier": {"targets": ["Linear"], "start": 0, "end": 1}}
MAPPING = {"smooth_layer": "nothing", "balance_layers": ["re:.*fc1"]}
QUANTISER = {"QuantizationModifier": {"scheme": "W8A8", "targets": ["Linear"], "ignore": ["lm_head"]}}
STAGES = [
    (
        [ALLOCATOR, {"StruPruneModifier": WHOLE}],
        "`output: uniform` gives all layers one size, got `allocation: softmax`",
    ),
    ([ALLOCATOR, {"StruPruneModifier": {"sparsity": 0.3}}], "sparsity must be left out, or as in the"),
    ([{"StruPruneModifier": {"sparsity": 0.3}}, ALLOCATOR], "exactly one SparsityAllocatorModifier must come before"),
    ([ALLOCATOR, ALLOCATOR, {"StruPruneModifier": {}}], "exactly one SparsityAllocatorModifier must come before"),
    ([ZEROS, {"StruPruneModifier": {"sparsity": 0.3}}], "must come before quantisers"),
    (
        [{"StruPruneModifier": {"sparsity": 0.3}}, {"AWQModifier": {"mappings": [MAPPING]}}, QUANTISER],
        "AWQModifier: mappings must",
    ),
    ([{"StruPruneModifier": {"sparsity": 0.3}}, {"SpinQuantModifier": {"rotations": ["R2"]}}], "SpinQuantModifier: "),
]
CASES = [([{"StruPruneModifier": {"sparsity": 0.2, **fields}}], message) for fields, message in FIELDS] + STAGES


@pytest.mark.parametrize(("modifiers", "message"), CASES, ids=[str(index) for index in range(len(CASES))])
def test_plan_and_run_refuse_the_same(opt, tmp_path, modifiers, message):
    recipe = {f"s{place}_stage": {f"s{place}_modifiers": each} for place, each in enumerate(modifiers)}
    with pytest.raises(ValueError, match=message.replace("(", "[(]")) as planned:
        plan_run(str(opt), load_recipe(recipe).modifiers, Workload(8, 32, 8))
    options = {"num_calibration_samples": 8, "shuffle_calibration_samples": False}
    with pytest.raises(ValueError, match=message.replace("(", "[(]")) as refused:
        oneshot(str(opt), recipe, tmp_path / "out", dataset=make_dataset(), **options)
    assert str(planned.value) == str(refused.value)
    assert not (tmp_path / "out").exists()
