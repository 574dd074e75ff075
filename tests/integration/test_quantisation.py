"""Pruning and what follows it in a recipe: quantisers, AWQ, N:M sparsity; in one run and in two."""

import functools
import json
import os

import pytest
import torch
import yaml
from compressed_tensors.quantization import initialize_module_for_quantization, preset_name_to_scheme
from helpers.families import make_model
from helpers.models import (
    CHEAP,
    COMPRESSING,
    ROOT,
    make_dataset,
    make_opt,
    run_oneshot,
    save_model,
    save_opt,
    save_wide_llama,
    save_wide_opt,
)
from llmcompressor import oneshot as host_oneshot
from llmcompressor.modifiers.factory import ModifierFactory
from llmcompressor.modifiers.transform import awq
from llmcompressor.modifiers.transform.smoothquant import dynamic_mappings as smoothquant
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.groups import find_groups
from struprune_plugin import LoRARecoveryModifier, SparsityAllocatorModifier, StruPruneModifier, read_manifest
from struprune_plugin.cli import main as cli
from struprune_plugin.model.layers import count_parameters, count_prunable_parameters
from struprune_plugin.modifiers.budgets import find_roundings
from struprune_plugin.modifiers.checks import check_weights
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.reporting.tables import summarize_manifest

LINEARS = {"targets": ["Linear"], "ignore": ["lm_head"]}
CASES = [*(("llama", name) for name in COMPRESSING), ("opt", "struprune_awq_w4a16")]  # OPT's mappings are in a comment


def make_modifier(name, **fields):
    if not ModifierFactory._loaded:
        ModifierFactory.refresh()
    return ModifierFactory.create(name, allow_registered=True, allow_experimental=True, **fields)


def quantise(size=None, name="GPTQModifier", ignore=("lm_head",), targets=("Linear",), **scheme):
    """Return a modifier that quantises to 4 bits in groups, or as a scheme says."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size} if size else None
    scheme = {"weights": weights, **scheme, "targets": list(targets)}
    return make_modifier(name, config_groups={"group_0": scheme}, ignore=list(ignore))


def sparsify(name="SparseGPTModifier", ignore=("re:.*lm_head",), targets=("Linear",)):
    return make_modifier(name, sparsity=0.5, mask_structure="2:4", targets=list(targets), ignore=list(ignore))


def read_recipe(name, folder):
    """Return a shipped recipe; for OPT with its mappings for AWQ, which are a comment."""
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    if json.loads((folder / "config.json").read_text())["model_type"] == "opt":
        text = text.replace("AWQModifier: {}", "AWQModifier:").replace("\n#  ", "\n   ")
    return text


def run(model, recipe, out=None, **options):
    out = {} if out is None else {"output_dir": str(out)}
    return run_oneshot(
        str(model), recipe=recipe, dataset=make_dataset(16), num_calibration_samples=16, **out, **options
    )


def generate(model, num_tokens=6):
    options = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    return [model.generate(torch.arange(4, 12)[None], use_cache=cached, **options) for cached in (True, False)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A saved tiny LLaMA, wide enough for the quantisation recipes."""
    return save_wide_llama(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def compress(wide, tmp_path_factory):
    """A function that runs a shipped recipe, once, and returns (its name, the dense folder, the model in memory, its folder)."""

    @functools.cache
    def run_once(model_type, name):
        place = tmp_path_factory.mktemp(name)
        dense = wide if model_type == "llama" else save_wide_opt(place / "dense")
        return name, dense, run(dense, read_recipe(name, dense), place / "out"), place / "out"

    return run_once


@pytest.fixture(params=CASES, ids="-".join)
def compressed(request, compress):
    return compress(*request.param)


def test_a_quantiser_of_the_head_changes_no_plan(wide, tmp_path):
    """Its scales have no values yet where plans are tried."""
    for name, ignore in (("head", []), ("ignored", ["lm_head"])):
        run(wide, [StruPruneModifier(sparsity=0.3), quantise(16, ignore=ignore)], tmp_path / name)
    head, ignored = (read_manifest(tmp_path / name).allocation for name in ("head", "ignored"))
    assert head.tried
    assert head == ignored


def test_mappings_of_another_class_are_refused(tmp_path):
    folder = save_wide_opt(tmp_path / "dense")
    recipe = (ROOT / "recipes" / "struprune_awq_w4a16.yaml").read_text()
    with pytest.raises(ValueError, match="AWQModifier: mappings must name modules of the model, got"):
        run(folder, recipe, tmp_path / "out")


# -- every recipe, end to end -------------------------------------------------------------------------------------


def test_output_folder_is_complete_and_reloads(compressed):
    name, _, model, out = compressed
    expected = {"config.json", "model.safetensors", "recipe.yaml", "struprune.json"}
    assert expected | {"tokenizer.json", "tokenizer_config.json"} <= set(os.listdir(out))
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"].startswith("struprune_")
    assert config.get("quantization_config", {}).get("quant_method") == (
        None if name.endswith("24") else "compressed-tensors"
    )
    told = "not with its CPU kernels" in summarize_manifest(read_manifest(out), out)
    assert told == ("quantization_config" in config)
    again = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(4, 30)[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)
    cached, plain = generate(again)
    assert torch.equal(cached, plain)
    assert AutoTokenizer.from_pretrained(out)("a text").input_ids


def test_saved_recipe_loads_again_with_the_same_modifiers(compressed):
    name, dense, _, out = compressed
    saved, shipped = load_recipe(str(out / "recipe.yaml")), load_recipe(read_recipe(name, dense))
    assert [type(m) for m in saved.modifiers] == [type(m) for m in shipped.modifiers]
    assert saved.modifiers[0].sparsity == shipped.modifiers[0].sparsity
    assert yaml.safe_load((out / "recipe.yaml").read_text())


def test_widths_suit_what_follows_and_the_budget_is_met_to_one_multiple(compressed):
    name, dense, _, out = compressed
    manifest = read_manifest(out)
    multiple = {"struprune_w8a8": 1, "struprune_sparsegpt_24": 4}.get(name, 32)
    budget, groups = manifest.budget, manifest.groups
    columns = {
        group.name: group.columns_per_unit
        for group in find_groups(AutoModelForCausalLM.from_pretrained(dense), "value_channels")
    }
    assert all(group.kept * columns[group.name] % multiple == 0 for group in groups)
    largest = max(multiple, groups[0].num_blocks) * max(group.unit_cost for group in groups)
    assert abs(budget.removed_parameters - budget.asked_sparsity * budget.prunable_parameters) <= largest
    assert {entry.width_multiple for entry in budget.rounding} == ({multiple} if multiple > 1 else set())
    assert sum(len(entry.modules) for entry in budget.rounding) == (len(groups) if multiple > 1 else 0)
    if multiple == 32:
        modules = sum(group.kind == "ffn" for group in groups)
        told = f"ffn in multiples of 32 ({budget.rounding[0].because[0]}), {modules} modules"
        assert told in summarize_manifest(manifest, out)
    bare = manifest.model.parameters_before - manifest.model.parameters_after
    assert bare == budget.removed_parameters


def test_weights_are_small_on_disk(compressed):
    name, folder, _, out = compressed
    tensors, dense = (load_file(path / "model.safetensors") for path in (out, folder))
    linear = next(key.removesuffix(".weight") for key in dense if key.endswith("q_proj.weight"))
    mine = sum(tensor.nbytes for key, tensor in tensors.items() if key.startswith(f"{linear}.weight"))
    share = mine / dense[f"{linear}.weight"].nbytes
    assert share < {"struprune_w8a8": 0.3, "struprune_sparsegpt_24": 1.01}.get(name, 0.17)


def test_eval_counts_the_parameters_that_are_left_not_packed_ones(compress, capsys):
    *_, out = compress("llama", "struprune_w4a16_gptq")
    options = ["--window", "32", "--max-tokens", "256", "--json"]
    assert cli.main(["eval", str(out), *options]) == 0
    (scores,) = json.loads(capsys.readouterr().out)["scores"].values()
    assert scores["parameters"] == read_manifest(out).model.parameters_after


@pytest.mark.parametrize("name", ["SparseGPTModifier", "WandaPruningModifier"])
def test_two_of_four_weights_are_zero(wide, compress, name, tmp_path):
    if name == "SparseGPTModifier":
        *_, out = compress("llama", "struprune_sparsegpt_24")
    else:
        out = tmp_path / "out"
        run(wide, [StruPruneModifier(sparsity=0.23, **CHEAP), sparsify(name)], out)
    model = AutoModelForCausalLM.from_pretrained(out)
    for linear in (m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"):
        zeros = (linear.weight.unflatten(1, (-1, 4)) == 0).sum(-1)
        assert (zeros == 2).all()


# -- widths -------------------------------------------------------------------------------------------------------

BLOCK = {"num_bits": 8, "type": "int", "strategy": "block", "block_structure": [6, 10]}
GROUP = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 12, "dynamic": True}
CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel"}


@pytest.mark.parametrize(
    ("unit", "later", "attention", "ffn"),  # (step in units, width) that is expected
    [
        ("value_channels", [], (4, 4), (1, 1)),
        ("head", [], (1, 6), (1, 1)),
        ("value_channels", [quantise(6)], (12, 12), (6, 6)),  # the same number from each of 4 heads
        ("head", [quantise(8)], (4, 24), (8, 8)),  # heads of 6 columns
        ("value_channels", [quantise(8), quantise(12)], (24, 24), (24, 24)),
        ("value_channels", [quantise(8, ignore=["re:.*fc2"])], (8, 8), (1, 1)),
        ("value_channels", [quantise(8, targets=["re:.*fc1$", "re:.*q_proj"])], (4, 4), (1, 1)),  # their inputs stay
        ("value_channels", [quantise(weights=CHANNEL)], (4, 4), (1, 1)),
        ("value_channels", [quantise(weights=CHANNEL, input_activations=GROUP)], (12, 12), (12, 12)),
        (
            "value_channels",
            [quantise(weights=BLOCK)],
            (60, 60),
            (30, 30),
        ),  # 10 inputs of the consumer, 6 rows of the producers
        ("value_channels", [sparsify()], (4, 4), (4, 4)),
        ("value_channels", [sparsify(targets=[r"re:.*layers\.\d+$"])], (4, 4), (4, 4)),
        ("value_channels", [sparsify(ignore=["re:.*fc2"])], (4, 4), (1, 1)),
        (
            "value_channels",
            [sparsify(ignore=["model.decoder.layers.0.fc2"])],
            (4, 4),
            (4, 4),
        ),  # llm-compressor overlooks plain names
        ("head", [sparsify(), quantise(10, name="QuantizationModifier")], (10, 60), (20, 20)),
    ],
)
def test_find_roundings_gives_the_least_common_multiple(unit, later, attention, ffn):
    model = make_opt()
    groups = find_groups(model, unit)
    found = find_roundings(model, groups, later, width_multiple=1)
    assert [(found[g.name].step, found[g.name].width) for g in groups[:2]] == [attention, ffn]


def test_find_roundings_joins_the_recipes_own_multiple_and_says_who_asks():
    model = make_opt()
    ffn = find_groups(model, "none")[0]
    found = find_roundings(model, [ffn], [quantise(8), sparsify()], width_multiple=12)[ffn.name]
    assert found.step == 24
    assert found.because == (
        "width_multiple: 12",
        "GPTQModifier: weights in groups of 8",
        "SparseGPTModifier: 2:4 sparsity",
    )


@pytest.mark.parametrize(("width", "step"), [(512, 8), (516, 4), (511, 1), (504, 1)])
def test_auto_rounds_wide_ffns_to_what_matrix_units_need(width, step):
    model = make_opt(ffn_dim=width)
    attention, ffn = find_groups(model, "value_channels")[:2]
    found = find_roundings(model, [attention, ffn], [], "auto")
    assert (found[attention.name].step, found[ffn.name].step) == (attention.num_blocks, step)
    assert found[ffn.name].because == (("width_multiple: auto",) if step > 1 else ())


@pytest.mark.parametrize(("unit", "allocation"), [("head", "softmax"), ("value_channels", "stage")])
def test_every_allocation_meets_the_budget_before_a_quantiser(wide, unit, allocation, tmp_path):
    """A quantiser's own parameters, there from the start and without values yet, must not count."""
    fields = {"sparsity": 0.3, "attention_unit": unit}
    stages = [SparsityAllocatorModifier(**fields), StruPruneModifier(attention_unit=unit)]
    if allocation != "stage":
        stages = [StruPruneModifier(allocation=allocation, **fields)]
    run(wide, [*stages, quantise(16)], tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(wide)
    budget = manifest.budget
    assert budget.prunable_parameters == count_prunable_parameters(model)
    assert manifest.model.parameters_before == model.num_parameters()
    step = max(group.unit_cost * (1 if unit == "head" and group.kind == "head" else 16) for group in manifest.groups)
    assert abs(budget.removed_parameters - 0.3 * budget.prunable_parameters) <= step
    columns = {group.name: group.columns_per_unit for group in find_groups(model, unit)}
    kept = [group for group in manifest.groups if group.kind != "head"]
    assert all(group.kept * columns[group.name] % 16 == 0 for group in kept)


def test_parameters_of_a_quantiser_neither_count_nor_need_be_finite():
    model = make_opt()
    before = model.num_parameters()
    scheme = preset_name_to_scheme("W8A8", ["Linear"])
    for layer in model.model.decoder.layers:
        initialize_module_for_quantization(layer.fc1, scheme)
        layer.fc1.weight_scale.data.fill_(torch.nan)
    check_weights(model)
    assert count_parameters(model) == before < model.num_parameters()


def test_widths_that_no_plan_rounds_are_refused(opt, tmp_path):
    with pytest.raises(ValueError, match="not divisible by group_size"):
        run(opt, [StruPruneModifier(sparsity=0.0), quantise(16)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- two runs -----------------------------------------------------------------------------------------------------


def test_one_recipe_gives_what_two_runs_give(wide, tmp_path):
    """So the quantiser is calibrated on the pruned model, and nothing of the dense one is left in it."""
    prune, four_bits = {"sparsity": 0.3, "width_multiple": 16, "attention_unit": "none", **CHEAP}, 16
    run(wide, [StruPruneModifier(**prune), quantise(four_bits)], tmp_path / "one")
    run(wide, StruPruneModifier(**prune), tmp_path / "pruned")
    run(tmp_path / "pruned", quantise(four_bits), tmp_path / "two")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert configs[0]["per_layer_config"] == configs[1]["per_layer_config"]


def test_a_pruned_class_is_smoothed_as_its_stock_class(tmp_path):
    dense = make_model("phi3")
    pruned = run_oneshot(str(save_model(dense, tmp_path / "dense")), sparsity=0.2)
    assert type(pruned).__name__ == "StruPrunePhi3ForCausalLM"
    for read in (awq.get_layer_mappings_from_model, smoothquant.get_layer_mappings_from_model):
        assert read(pruned) == read(dense) != read(make_opt()), "not the default"


@pytest.fixture(scope="module")
def pruned_for_groups(wide, tmp_path_factory):
    """A pruned folder whose widths suit groups of 16, to be read only."""
    out = tmp_path_factory.mktemp("pruned") / "out"
    run(wide, StruPruneModifier(sparsity=0.3, attention_unit="head", width_multiple=16, **CHEAP), out)
    return out


@pytest.mark.parametrize(("oneshot", "scheme"), [(run_oneshot, "W4A16"), (host_oneshot, "W8A8")])
def test_a_pruned_folder_can_be_quantised(pruned_for_groups, oneshot, scheme, tmp_path):
    quantiser = {"W8A8": make_modifier("QuantizationModifier", scheme="W8A8", **LINEARS), "W4A16": quantise(16)}[scheme]
    options = {"dataset": make_dataset(), "output_dir": str(tmp_path / "out"), "num_calibration_samples": 8}
    oneshot(model=str(pruned_for_groups), recipe=quantiser, **options)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    # activations in 8 bits round apart at a near tie, after which a random model's greedy tokens part
    assert torch.equal(*generate(again, num_tokens=3))
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert list((tmp_path / "out").glob("modeling_struprune*.py"))
    if oneshot is run_oneshot:
        assert read_manifest(tmp_path / "out") == read_manifest(pruned_for_groups)
        names = [type(m).__name__ for m in load_recipe(str(tmp_path / "out" / "recipe.yaml")).modifiers]
        assert names == [type(quantiser).__name__]


# -- refusals -----------------------------------------------------------------------------------------------------

CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def eight_bits(**fields):
    return make_modifier("QuantizationModifier", scheme="W8A8", **LINEARS, **fields)


def smooth(name):
    mappings = [[["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*self_attn_layer_norm"]]
    if name == "AWQModifier":
        mappings = [{"smooth_layer": mappings[0][1], "balance_layers": mappings[0][0]}]
    return make_modifier(name, mappings=mappings)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (lambda p: [eight_bits(), p], "sparsity modifiers, got QuantizationModifier first"),
        (lambda p: [quantise(8), p], "sparsity modifiers, got GPTQModifier first"),
        (lambda p: [smooth("AWQModifier"), p, quantise(8)], "sparsity modifiers, got AWQModifier first"),
        (
            lambda p: [smooth("SmoothQuantModifier"), p, eight_bits()],
            "sparsity modifiers, got SmoothQuantModifier first",
        ),
        (lambda p: [sparsify(), p], "sparsity modifiers, got SparseGPTModifier first"),
        (lambda p: [p, eight_bits(kv_cache_scheme=CACHE)], "Cannot determine num_key_value_heads"),
    ],
)
@pytest.mark.parametrize(
    ("ours", "oneshot"),
    [
        (lambda: StruPruneModifier(sparsity=0.3), run_oneshot),
        (lambda: StruPruneModifier(sparsity=0.3), host_oneshot),
        (lambda: LoRARecoveryModifier(adapters={"rank": 2}), run_oneshot),
    ],
)
def test_orders_that_cannot_work_are_refused_before_work(opt, ours, stages, message, oneshot, tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise AssertionError("work started")

    for work in ("layerwise.statistics.LayerStatistics.run_layer", "recovery.training.AdapterTraining.run"):
        monkeypatch.setattr(f"struprune_plugin.{work}", fail)
    options = {"dataset": make_dataset(), "output_dir": str(tmp_path / "out"), "num_calibration_samples": 8}
    with pytest.raises(ValueError, match=message):
        oneshot(model=str(opt), recipe=stages(ours()), **options)
    assert list(tmp_path.iterdir()) == []


def save_opt_with_key_value_heads(folder):
    """OPT as types are whose configuration names the heads of keys and values."""
    save_opt(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
    return folder


def test_quantised_caches_work_with_equal_heads_and_are_refused_with_others(tmp_path):
    model = save_opt_with_key_value_heads(tmp_path / "m")
    cache = {"kv_cache_scheme": CACHE}
    run(model, [StruPruneModifier(sparsity=0.3, **CHEAP), eight_bits(**cache)], tmp_path / "value_channels")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "value_channels")
    assert again.model.decoder.layers[0].self_attn.v_scale > 0
    assert torch.isfinite(again(torch.arange(4, 30)[None]).logits).all()
    heads = StruPruneModifier(sparsity=0.3, attention_unit="head", **CHEAP)
    message = "kv_cache_scheme: llm-compressor reads one number of heads for all layers"
    with pytest.raises(ValueError, match=message):
        run(model, [heads, eight_bits(**cache)], tmp_path / "out")
    run(model, heads, tmp_path / "heads")
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "heads", eight_bits(**cache), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rotations_as_wide_as_heads_are_refused_with_narrower_values(tmp_path):
    model, turned = save_wide_llama(tmp_path / "m"), make_modifier("SpinQuantModifier", rotations=["R2"])
    message = "SpinQuantModifier: rotations: R2 turns blocks as wide as a head, and pruned values are narrower"
    with pytest.raises(ValueError, match=message):
        run(model, [StruPruneModifier(sparsity=0.2, **CHEAP), turned], tmp_path / "out")
    run(model, StruPruneModifier(sparsity=0.2, **CHEAP), tmp_path / "narrow")
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "narrow", make_modifier("SpinQuantModifier", rotations=["R2"]), tmp_path / "out")
    with pytest.raises(ValueError, match="must come before quantisers, their smoothing and rotation"):
        run(model, [make_modifier("SpinQuantModifier"), StruPruneModifier(sparsity=0.2, **CHEAP)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_quantised_caches_work_with_grouped_queries(tmp_path):
    model = save_wide_llama(tmp_path / "m")
    run(model, [StruPruneModifier(sparsity=0.2, **CHEAP), eight_bits(kv_cache_scheme=CACHE)], tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.model.layers[0].self_attn.v_scale > 0
    assert torch.isfinite(again(torch.arange(4, 30)[None]).logits).all()
