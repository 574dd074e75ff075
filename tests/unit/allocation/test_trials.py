"""Plans that are tried before one is taken."""

import copy

import pytest
import torch
from helpers.models import make_dataset, run_oneshot
from helpers.trials import watch_trials
from transformers import AutoModelForCausalLM

from eval.groups import find_groups
from struprune_plugin import StruPruneModifier, read_manifest
from struprune_plugin.allocation.curves import can_keep_moments, hold_batches
from struprune_plugin.linalg.elimination import keep_last, unit_columns
from struprune_plugin.linalg.error_curves import solve_nested_weights
from struprune_plugin.linalg.second_moments import accumulate_moments, make_moments, with_bias_index
from struprune_plugin.linalg.solve import damp_moments, solve_kept_weights
from struprune_plugin.model.layers import find_linear
from struprune_plugin.modifiers import allocation_pass

SAMPLES = 12  # of which a quarter is tried


@pytest.mark.parametrize("width", [1, 3])
def test_nested_weights_are_those_of_a_solve_for_every_number_kept(width):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(90, n, generator=generator, dtype=torch.float64) for n in (12, 5))
    weight = torch.randn(5, 13, generator=generator).double()
    moments = make_moments(weight)
    accumulate_moments(moments, inputs, targets)
    damped = damp_moments(moments, weight, 0.01)
    order = torch.randperm(12 // width, generator=generator)
    found = dict(solve_nested_weights(damped, order, width, [1, 2, 12 // width], "w"))
    for count, nested in found.items():
        keep = keep_last(order, 12 // width, count)
        columns = unit_columns(keep, width)
        rows = with_bias_index(columns, 12)
        torch.testing.assert_close(nested[:, rows], solve_kept_weights(damped, columns, "w")[0])
        assert int((nested != 0).any(0).sum()) == len(rows)


def test_hold_batches_takes_the_last_sequences_and_no_more_than_a_quarter():
    loader = [{"input_ids": torch.arange(start, start + 4)[:, None]} for start in (0, 4, 8)]
    for asked, held in ((0, 0), (2, 2), (8, 3)):
        parts = hold_batches(loader, asked)
        rows = [torch.cat([part["input_ids"] for part in side]).flatten().tolist() if side else [] for side in parts]
        assert rows == [list(range(12 - held)), list(range(12 - held, 12))]


def prune(folder, output=None, **fields):
    recipe = StruPruneModifier(**{"sparsity": 0.3, "allocation": {"rule": "error_curve", "trial_samples": 4}} | fields)
    kwargs = {} if output is None else {"output_dir": str(output)}
    return run_oneshot(str(folder), recipe, make_dataset(SAMPLES), num_calibration_samples=SAMPLES, **kwargs)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_divergence_is_that_of_the_model_with_these_columns_gone(family, save_family, monkeypatch):
    """Without a solve, so that the weights are plain."""
    folder, seen = save_family(family), watch_trials(monkeypatch)
    prune(
        folder,
        rotate_values=False,
        sensitivity="none",
        weight_update="none",
        allocation={"rule": "error_curve", "trial_samples": 3},
    )
    trial, held, found = seen[1]
    assert len(found) > 1
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    (batch,) = held
    assert len(batch["input_ids"]) == 2  # of three held out the first is for blocks of modules
    for kept, divergence in zip(trial.candidates, found, strict=True):
        pruned = copy.deepcopy(dense)
        for group in trial.groups:
            linear = find_linear(pruned.get_submodule(group.layer_name), group.consumer)
            order = trial.measured.statistics[group.name].order[: group.num_units - kept[group.name]]
            weight = group.to_unit_order(linear.weight.data)
            gone = unit_columns(order, group.columns_per_unit)
            linear.weight.data = group.to_module_order(weight.index_fill(1, gone, 0))
        assert divergence == pytest.approx(measure_divergence(dense, pruned, batch), rel=1e-3)
        assert divergence > 0


@torch.no_grad()
def measure_divergence(dense, pruned, batch):
    wanted, found = (model(**batch).logits.double().log_softmax(-1) for model in (dense, pruned))
    tokens = (wanted.exp() * (wanted - found)).sum(-1)
    return float(tokens[batch["attention_mask"].bool()].mean())


def test_the_plan_of_least_divergence_is_taken_and_the_manifest_says_so(opt, tmp_path, monkeypatch):
    seen = watch_trials(monkeypatch, choose=1)
    prune(opt, tmp_path / "out")
    trial, _, _ = seen[1]
    record = read_manifest(tmp_path / "out")
    names = list(record.allocation.tried)
    assert (names[0], record.allocation.taken) == ("error_curve", names[1])
    assert {group.name: group.kept for group in record.groups} == dict(trial.candidates[1])
    uniform = trial.candidates[names.index("uniform")]
    for kind in ("ffn", "value_channels"):  # what the rounding leaves over goes to the first
        assert len({uniform[group.name] for group in trial.groups if group.kind == kind}) <= 2


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_moments_kept_from_the_allocation_pass_give_what_a_pass_anew_gives(family, save_family, monkeypatch):
    folder, seen = save_family(family), watch_trials(monkeypatch)
    for keeps in (True, False):
        monkeypatch.setattr(allocation_pass.curves, "can_keep_moments", lambda *_, keeps=keeps: keeps)
        prune(folder)
    for (kept, _, found), (anew, _, again) in zip(seen[: len(seen) // 2], seen[len(seen) // 2 :], strict=True):
        assert found == again
        assert kept.measured.moments
        assert anew.measured.moments is None


def test_moments_are_kept_only_where_the_host_has_room(opt):
    groups = find_groups(AutoModelForCausalLM.from_pretrained(opt), "value_channels")
    assert can_keep_moments(groups, 24)
    assert not can_keep_moments(groups, 1 << 40)
