"""Entire experts of mixtures, from a folder to a folder: what is left gives what masked routing gives."""

import copy
import json

import pytest
import torch
from datasets import Dataset
from helpers.killed_runs import kill_after
from helpers.mixtures import make_mixture, mask_routing
from helpers.models import run_oneshot, save_model
from llmcompressor.modifiers.pruning import REAPPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from loguru import logger
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from eval.coverage import make_config
from struprune_plugin import StruPruneModifier, read_manifest
from struprune_plugin.export.outputs import convert_folder
from struprune_plugin.model.experts import linearize_experts
from struprune_plugin.model.layers import count_parameters, count_prunable_parameters
from struprune_plugin.model.structure.tiny import build_tiny, draw_tokens
from struprune_plugin.modifiers.plan import Workload, plan_run
from struprune_plugin.units.expert_routing import find_routing

TYPES = {  # the plain kind is in tests/families
    "deepseek_v3": "groups of experts, a bias of the choice, a dense layer first",
    "deepseek_v32": "the same behind attention to tokens that an index chooses",
    "gpt_oss": "a router with a bias, experts with biases",
    "ernie4_5_moe": "a bias of the choice in a module of its own",
    "minimax_m2": "a bias of the choice in the block",
    "phimoe": "a router of its own",
    "gemma4_text": "a router beside a dense FFN, scales of experts",
}
ALONE = {"attention_unit": "none", "prune_ffn": False}
PLAIN = {**ALONE, "weight_update": "none", "sensitivity": "none", "output": "uniform"}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def save_mixture(dense, folder):
    """Save a mixture; return what a run takes: its folder, the options of the data, and tokens."""
    save_model(dense, folder / "dense")
    ids = draw_tokens(dense.config, 16, 32, seed=1)
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    return str(folder / "dense"), {"dataset": data, "num_calibration_samples": 16}, ids[:2]


def find_share(dense, num_experts):
    """Return the sparsity that so many of eight experts are."""
    dense = copy.deepcopy(dense)
    linearize_experts(dense)
    every, without = (count_prunable_parameters(dense, mixtures=experts) for experts in (True, False))
    return num_experts / 8 * (every - without) / every


def list_kept(out):
    return {record.name: record.keep for record in read_manifest(out).experts}


@pytest.fixture(scope="module", params=TYPES)
def case(request, tmp_path_factory):
    """A dense mixture, what is left without a quarter of its experts and the folder of that, and tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    dense = make_mixture(request.param)
    model, options, tokens = save_mixture(dense, folder)
    fields = {"experts": "whole", "sparsity": find_share(dense, 2)}
    pruned = run_oneshot(model, output_dir=str(folder / "out"), **fields, **options, **PLAIN)
    return dense, pruned.eval(), folder / "out", tokens


def test_what_is_left_gives_what_masked_routing_gives(case):
    dense, pruned, out, tokens = case
    kept = list_kept(out)
    assert all(len(keep) == 6 for keep in kept.values())
    with mask_routing(dense, kept):
        wanted = dense(tokens).logits
    assert (dense(tokens).logits - wanted).abs().max() > 1e-2  # the experts that are gone did something
    torch.testing.assert_close(pruned(tokens).logits, wanted, **CLOSE)


def test_the_stock_class_loads_it_by_one_number_and_generates(case):
    dense, pruned, out, tokens = case
    stock = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=False).eval()
    assert type(stock).__name__ == type(dense).__name__
    torch.testing.assert_close(stock(tokens).logits, pruned(tokens).logits, rtol=0, atol=2e-5)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (out.parent / "dense", out))
    assert [after[name] for name in before if before[name] != after.get(name)] == [6]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached, uncached = (stock.generate(tokens, use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(cached, uncached)


def test_the_manifest_counts_every_parameter(case):
    dense, pruned, out, _ = case
    manifest = read_manifest(out)
    assert (manifest.model.parameters_before, manifest.model.parameters_after) == (
        count_parameters(dense),
        count_parameters(pruned),
    )
    assert manifest.budget.met_sparsity == pytest.approx(find_share(dense, 2))
    assert manifest.budget.removed_parameters == sum(record.removed_parameters for record in manifest.experts)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A dense mixture with a shared expert, saved."""
    dense = make_mixture("glm4_moe")
    return dense, save_mixture(dense, tmp_path_factory.mktemp("mixture"))


def prune(mixture, out, **fields):
    model, options, _ = mixture[1]
    return run_oneshot(model, output_dir=str(out), **options, **fields).eval()


def test_one_budget_over_experts_ffns_and_values(mixture, tmp_path):
    fields = {"allocation": {"rule": "error_curve", "trial_samples": 4}, "sensitivity": "fisher"}
    pruned, tokens = prune(mixture, tmp_path / "out", experts="whole", sparsity=0.4, **fields), mixture[1][2]
    manifest = read_manifest(tmp_path / "out")
    step = 2 * 8 * 4 * 288  # four channels of every expert
    assert abs(manifest.budget.removed_parameters - 0.4 * manifest.budget.prunable_parameters) < step
    kinds = {record.kind for record in manifest.groups if record.kept < record.num_units}
    assert len({len(record.keep) for record in manifest.experts}) == 1
    assert kinds
    assert "experts" not in kinds
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(again(tokens).logits, pruned(tokens).logits, rtol=0, atol=2e-5)
    (tmp_path / "padded").mkdir()
    convert_folder(tmp_path / "out", "uniform-padded", tmp_path / "padded")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "padded", trust_remote_code=False).eval()
    torch.testing.assert_close(stock(tokens).logits, pruned(tokens).logits, **CLOSE)


def test_the_host_s_criterion_takes_the_experts_that_the_host_takes(mixture, tmp_path):
    model, options, _ = mixture[1]
    share = find_share(mixture[0], 2)
    prune(mixture, tmp_path / "out", experts="whole", sparsity=share, **PLAIN)
    report = tmp_path / "report.json"
    recipe = REAPPruningModifier(sparsity=0.25, report_path=str(report))
    run_oneshot(model, recipe=recipe, moe_calibrate_all_experts=False, **options)
    theirs = json.loads(report.read_text())
    assert {f"{block}.experts": keep for block, keep in theirs.items()} == list_kept(tmp_path / "out")


def test_experts_that_stay_are_solved_on_their_new_tokens(mixture, tmp_path):
    share, tokens = find_share(mixture[0], 4), draw_tokens(mixture[0].config, 16, 32, seed=1)
    wanted, errors = mixture[0](tokens).logits, {}
    for update in ("least_squares", "none"):
        pruned = prune(mixture, tmp_path / update, experts="whole", sparsity=share, weight_update=update, **ALONE)
        errors[update] = float((pruned(tokens).logits - wanted).square().mean())
    assert list_kept(tmp_path / "least_squares") == list_kept(tmp_path / "none")
    assert errors["least_squares"] < 0.9 * errors["none"]


def test_a_killed_run_goes_on(mixture, tmp_path):
    fields = {"experts": "whole", "sparsity": 0.4}
    prune(mixture, tmp_path / "first", **fields)
    assert list_kept(tmp_path / "first")
    first = load_file(tmp_path / "first" / "model.safetensors")
    store = str(tmp_path / "store")
    kill_after(3, lambda: prune(mixture, tmp_path / "killed", checkpoint_dir=store, **fields))  # allocation, two layers
    prune(mixture, tmp_path / "resumed", checkpoint_dir=store, **fields)
    resumed = load_file(tmp_path / "resumed" / "model.safetensors")
    assert all(torch.equal(first[name], resumed[name]) for name in first)


def test_a_quantiser_may_follow(mixture, tmp_path):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 4}
    groups = {"experts": {"targets": ["re:.*experts\\.\\d+\\..*proj$"], "weights": weights}}
    ours = StruPruneModifier(sparsity=find_share(mixture[0], 2), experts="whole", output="uniform", **ALONE)
    quantised = prune(mixture, tmp_path / "out", recipe=[ours, QuantizationModifier(config_groups=groups)])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = mixture[1][2]
    assert again.config.n_routed_experts == 6
    torch.testing.assert_close(again(tokens).logits, quantised(tokens).logits, **CLOSE)


def test_experts_that_a_quantiser_cannot_group_are_refused_before_any_work(mixture):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
    groups = {"experts": {"targets": ["re:.*experts\\.\\d+\\.down_proj$"], "weights": weights}}
    recipe = [StruPruneModifier(sparsity=0.1), QuantizationModifier(config_groups=groups)]
    with pytest.raises(
        ValueError, match=r"experts\.0\.down_proj: the kept width must be a multiple of 8 .*got 52 of 52"
    ):
        plan_run(mixture[1][0], recipe, Workload(16, 32, 8))


def test_more_than_routing_allows_is_refused_before_any_work(mixture, tmp_path):
    message = "sparsity: must be at most 0.4785, at which 2 of 8 experts of a layer stay"
    with pytest.raises(ValueError, match=message):
        prune(mixture, tmp_path / "out", sparsity=0.9, **ALONE)
    assert not (tmp_path / "out").exists()


def test_entire_experts_are_the_default_and_channels_have_a_name(mixture, tmp_path):
    prune(mixture, tmp_path / "default", sparsity=0.4)
    prune(mixture, tmp_path / "named", sparsity=0.4, experts="whole")
    assert list_kept(tmp_path / "default")
    default, named = (load_file(tmp_path / name / "model.safetensors") for name in ("default", "named"))
    assert default.keys() == named.keys()
    assert all(torch.equal(default[name], named[name]) for name in default)
    for fields in ("channels", {"widths": "per_layer"}):
        assert StruPruneModifier(sparsity=0.4, experts=fields).experts.units == "channels"


CANNOT = {
    "left out": ({"ignore": ["re:.*layers\\.2\\..*experts.*"]}, "targets or ignore leave some experts out"),
    "the host's": (
        {"recipe": [REAPPruningModifier(sparsity=0.25), StruPruneModifier(sparsity=0.1)]},
        "REAPPruningModifier removes some",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_channels_go_where_entire_experts_cannot_as_one_line_says(name, mixture, tmp_path):
    fields, reason = CANNOT[name]
    messages = []
    sink = logger.add(messages.append, level="WARNING")
    prune(mixture, tmp_path / "out", **{"sparsity": 0.1, **fields})
    logger.remove(sink)
    assert any(f"experts: their channels go, not entire experts: {reason}" in line for line in messages)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.settings["experts"]["units"] == "channels"
    assert any(record.kind == "experts" and record.kept < record.num_units for record in manifest.groups)
    assert not manifest.experts


def test_experts_whose_numbers_a_table_of_tokens_holds_stay():
    """DeepSeek V4's first layers look the experts of a token up."""
    with pytest.raises(ValueError, match="tid2eid holds whole numbers, which may be those of experts"):
        find_routing(build_tiny(make_config("deepseek_v4", 2)))
