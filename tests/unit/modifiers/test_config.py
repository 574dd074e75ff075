"""No field of a recipe is passed over in silence."""

from typing import ClassVar, Literal

import pytest
import torch
from helpers.models import make_dataset, run_oneshot
from llmcompressor import oneshot as host_oneshot

from struprune_plugin import SparsityAllocatorModifier, StruPruneModifier, read_manifest
from struprune_plugin.allocation.rounding import expand_counts, round_kept_counts
from struprune_plugin.allocation.rules import RULES, AllocationRule
from struprune_plugin.evaluation.text import DEMO_CALIBRATION
from struprune_plugin.modifiers.allocator import complete_recipe
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.pruning.importance import IMPORTANCES, Importance
from struprune_plugin.storage.manifest import AllocationRecord

UNUSED = [  # fields, what their refusal says, and what makes them count
    (
        {"allocation": {"rule": "softmax", "gamma": 0.5}},
        "softmax has no field gamma",
        {"allocation": "softmax_inverse"},
    ),
    ({"weight_update": {"method": "least_squares", "steps": 2}}, "no field steps", {"weight_update": "admm"}),
    ({"importance": {"method": "wanda", "steps": 7}}, "wanda has no field steps", {"importance": "obs"}),
]


@pytest.mark.parametrize(("fields", "message", "uses"), UNUSED, ids=[message for _, message, _ in UNUSED])
def test_a_field_without_use_is_refused_by_name(fields, message, uses):
    with pytest.raises(ValueError, match=message):
        StruPruneModifier(sparsity=0.3, **fields)
    StruPruneModifier(sparsity=0.3, **fields | uses)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("allocation", "sofmax", "must be a known rule .*, got 'sofmax'. Did you mean softmax"),
        ("experts", {"widths": "per_expert"}, "should be 'same' or 'per_layer'"),
        (
            "experts",
            {"units": "whole", "widths": "per_layer"},
            "is of channels, got `units: whole`. Set `units: channels`",
        ),
        ("experts", {"units": "whole", "criterion": "reap"}, "experts has no field criterion. Its fields are"),
        ("allocation", 3, "must be a known rule or a mapping with it, got 3. The names are"),
        ("allocation", {"temperature": 2.0}, "must be a known rule or a mapping with it"),
        ("importance", {"method": "closed_form", "step": 2}, "closed_form has no field step. Did you mean steps"),
        ("importance", {"method": "closed_form", "steps": -1}, "importance.steps"),
        ("weight_update", "adm", "Did you mean admm"),
    ],
)
def test_a_method_s_settings_are_checked(field, value, message):
    with pytest.raises(ValueError, match=message):
        StruPruneModifier(sparsity=0.3, **{field: value})


def test_a_name_is_short_for_a_method_s_defaults():
    short = StruPruneModifier(sparsity=0.3, allocation="softmax", importance="obs", weight_update="admm")
    spelled = StruPruneModifier(
        sparsity=0.3,
        allocation={"rule": "softmax", "as_printed": False},
        importance={"method": "obs"},
        weight_update={"method": "admm", "steps": 4},
    )
    assert short.dump_fields() == spelled.dump_fields()
    assert StruPruneModifier(**short.dump_fields()).dump_fields() == short.dump_fields()


class FirstUnits(Importance):
    """An importance as a third party would write it: units go by index."""

    method: Literal["first_units"] = "first_units"

    def score(self, problem, columns):
        return torch.arange(len(columns), dtype=torch.float64, device=problem.weight.device)


class Faulty(FirstUnits):
    """An importance whose scores are of a wrong shape, or not numbers."""

    method: Literal["faulty"] = "faulty"
    shape: bool = False

    def score(self, problem, columns):
        return problem.weight if self.shape else super().score(problem, columns) / 0 * 0


class Unfinished(Importance):
    """An importance that cannot rank."""

    method: Literal["unfinished"] = "unfinished"


def test_what_a_third_partys_score_must_be_is_told(opt, request):
    for kind in (Faulty, Unfinished):
        name = kind.model_fields["method"].default
        IMPORTANCES.register(kind)
        request.addfinalizer(lambda name=name: IMPORTANCES.pop(name))
    fields = {"sparsity": 0.2, "attention_unit": "none"}
    with pytest.raises(ValueError, match=r"unfinished must define score\(\) or rank\(\)"):
        run_oneshot(str(opt), importance="unfinished", **fields)
    for shape, problem in ((True, r"shape \[40\], got shape \[24, 41\] for"), (False, r"with NaN or Inf for")):
        with pytest.raises(ValueError, match=f"faulty must give a finite score per unit, .*{problem}"):
            run_oneshot(str(opt), importance={"method": "faulty", "shape": shape}, **fields)


class Visitor(Importance):
    """An importance that reads activations and does not say so."""

    method: Literal["visitor"] = "visitor"

    def score(self, problem, columns):
        seen = [visit.inputs.square().sum(0) for visit in problem.module.visit_batches()]
        return sum(seen)[columns].sum(1).double()


def test_an_importance_that_visits_batches_must_say_so(opt, request):
    IMPORTANCES.register(Visitor)
    request.addfinalizer(lambda: IMPORTANCES.pop("visitor"))
    fields = {"sparsity": 0.2, "attention_unit": "none", "importance": "visitor"}
    with pytest.raises(ValueError, match="importance: must set `revisits = True` to visit the batches of a group"):
        run_oneshot(str(opt), **fields)
    Visitor.revisits = True
    run_oneshot(str(opt), **fields)


class LastLayers(AllocationRule):
    """A rule as a third party would write it: the later a layer, the more it loses."""

    measures: ClassVar[bool] = False
    rule: Literal["last_layers"] = "last_layers"

    def decide(self, sizes, statistics, budget):
        shares = [2 * budget.share * (index + 1) / (len(sizes) + 1) for index in range(len(sizes))]
        return UnitAllocation(expand_counts(sizes, round_kept_counts(sizes, shares)), AllocationRecord("last_layers"))


def test_a_third_party_registers_methods_as_we_do(opt, tmp_path, request):
    """One decorator each; a recipe then names them."""
    for registry, name in ((IMPORTANCES, "first_units"), (RULES, "last_layers")):
        request.addfinalizer(lambda registry=registry, name=name: registry.pop(name))
    IMPORTANCES.register(FirstUnits)
    RULES.register(LastLayers)
    run_oneshot(
        str(opt),
        sparsity=0.2,
        attention_unit="none",
        importance="first_units",
        allocation="last_layers",
        output_dir=tmp_path / "o",
    )
    groups = read_manifest(tmp_path / "o").groups
    assert [group.keep[-1] for group in groups] == [group.num_units - 1 for group in groups]
    assert groups[0].kept > groups[-1].kept
    with pytest.raises(ValueError, match=r"must have a new name as default, .* got 'first_units'"):
        IMPORTANCES.register(FirstUnits)


def test_the_host_s_own_oneshot_refuses_too(opt):
    """What only the model tells is refused by the modifier itself."""
    with pytest.raises(ValueError, match=r"closed_form for allocation: global_threshold"):
        host_oneshot(
            model=str(opt),
            recipe=StruPruneModifier(sparsity=0.3, allocation="global_threshold"),
            dataset=make_dataset(),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int3"}, "precision: must be auto, .*, got 'int3'"),
        ({"dataset": str(DEMO_CALIBRATION), "splits": "train"}, "splits: has no effect on this dataset"),
        ({"splits": {"calibration": "train"}}, "splits: has no effect on this dataset"),
        ({"dataset": ["x"]}, "dataset: must be .*, got list"),
        ({"dataset": 3}, "dataset: must be .*, got int"),
    ],
)
def test_arguments_that_the_host_would_pass_over_are_refused(opt, options, message):
    with pytest.raises(ValueError, match=message):
        run_oneshot(str(opt), sparsity=0.3, **options)


# -- stages that must agree ---------------------------------------------------------------------------------------


CONTRADICTIONS = [  # fields of the allocator stage, of the pruning stage, and the name in the refusal
    ({}, {"allocation": "uniform"}, "allocation"),
    ({}, {"allocation": {"rule": "softmax", "temperature": 2.0}}, "allocation"),
    ({"allocation": "error_curve"}, {"allocation": {"rule": "error_curve", "trial_samples": 3}}, "allocation"),
    ({}, {"sparsity": 0.2}, "sparsity"),
]


@pytest.mark.parametrize(("stage", "fields", "name"), CONTRADICTIONS)
def test_fields_that_contradict_the_allocator_stage_are_refused(opt, stage, fields, name):
    stages = [SparsityAllocatorModifier(sparsity=0.3, **stage), StruPruneModifier(**fields)]
    with pytest.raises(
        ValueError, match=rf"{name} must be left out, or as in the SparsityAllocatorModifier stage before"
    ):
        run_oneshot(str(opt), recipe=stages, num_calibration_samples=8)


def test_the_allocator_stage_gives_the_other_fields_that_the_pruning_stage_leaves_out():
    stages = [
        SparsityAllocatorModifier(sparsity=0.3, importance="wanda", rotate_values=False),
        StruPruneModifier(rotate_values=True),
    ]
    before = stages[1].model_dump()
    complete = complete_recipe(stages[1], stages[:1])
    assert (complete.importance.method, complete.rotate_values, complete.sparsity) == ("wanda", True, 0.3)
    assert stages[1].model_dump() == before, "the user's recipe stays as it is"


def test_admm_after_a_least_squares_allocator_is_no_contradiction_and_the_manifest_names_the_stage(opt, tmp_path):
    stage = SparsityAllocatorModifier(
        sparsity=0.3, allocation={"rule": "softmax_inverse", "gamma": 0.8}, attention_unit="none"
    )
    fields = {"attention_unit": "none", "sensitivity": "fisher", "weight_update": {"method": "admm", "steps": 1}}
    run_oneshot(
        str(opt),
        recipe=[stage, StruPruneModifier(**fields)],
        output_dir=str(tmp_path / "out"),
        num_calibration_samples=8,
    )
    manifest = read_manifest(tmp_path / "out")
    assert manifest.settings["allocation"]["rule"] == manifest.allocation.method == "softmax_inverse"
    assert manifest.settings["allocation"]["gamma"] == 0.8
