"""Channels of experts of mixtures, from a folder to a folder: widths, few tokens, quantisers, resume."""

import json

import pytest
import torch
from datasets import Dataset
from helpers.models import DEFAULT, make_dataset, make_model, run_oneshot, save_model
from llmcompressor.modifiers.pruning import REAPPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from loguru import logger
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LongcatFlashConfig

from eval.coverage import make_config
from eval.groups import find_groups
from struprune_plugin import SparsityAllocatorModifier, StruPruneModifier, read_manifest
from struprune_plugin.export import rehearsal
from struprune_plugin.export.outputs import convert_folder
from struprune_plugin.model.experts import linearize_experts
from struprune_plugin.model.structure.tiny import build_tiny, draw_tokens
from struprune_plugin.modifiers.checks import check_later
from struprune_plugin.modifiers.plan import Workload, plan_run
from struprune_plugin.paper.snip import SNIP


def save_mixture(model_type, folder, samples, layers=2):
    """Save a tiny mixture; return its folder, calibration data, and ids for comparisons."""
    model = build_tiny(make_config(model_type, layers))
    ids = draw_tokens(model.config, samples, 32, seed=1)
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    return save_model(model, folder), data, ids[:2]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return save_mixture("mixtral", tmp_path_factory.mktemp("mixture") / "dense", 32)


def prune(mixture, out, **fields):
    folder, data, _ = mixture
    fields = {"experts": "channels", "sparsity": 0.3, "output_dir": str(out), "num_calibration_samples": 32} | fields
    return run_oneshot(str(folder), dataset=data, **fields).eval()


def list_widths(out):
    layers = {}
    for group in read_manifest(out).groups:
        if group.kind == "experts":
            layers.setdefault(group.layer, set()).add(group.kept)
    return layers


def test_widths_are_one_for_the_model_or_one_per_layer(mixture, tmp_path):
    prune(mixture, tmp_path / "same", **DEFAULT)
    widths = list_widths(tmp_path / "same")
    assert len(set.union(*widths.values())) == 1
    (rounding,) = read_manifest(tmp_path / "same").budget.rounding
    assert rounding.modules == [f"model.layers.{i}.mlp.experts.*.down_proj" for i in range(2)]
    prune(mixture, tmp_path / "layers", experts={"widths": "per_layer"}, width_multiple=1, **DEFAULT)
    widths = list_widths(tmp_path / "layers")
    assert all(len(kept) == 1 and kept.pop() % 8 == 0 for kept in widths.values())


def test_a_size_that_coarse_steps_miss_is_named(mixture, tmp_path):
    messages = []
    sink = logger.add(messages.append, level="WARNING")
    prune(mixture, tmp_path / "out", sparsity=0.27, attention_unit="none")
    logger.remove(sink)
    assert any("sparsity: 30.0% go in place of 27.0%" in line for line in messages)


def test_whole_experts_leave_before_channels_do(mixture, tmp_path):
    prune(mixture, tmp_path / "channels")
    with pytest.raises(ValueError, match="REAPPruningModifier: its output would not load, since the channels of these"):
        run_oneshot(str(tmp_path / "channels"), REAPPruningModifier(sparsity=0.25), output_dir=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_layer_s_own_width_is_saved_and_padded(mixture, tmp_path):
    fields = {"attention_unit": "none", "experts": {"widths": "per_layer"}, "ignore": ["re:.*layers\\.0\\..*"]}
    pruned = prune(mixture, tmp_path / "out", **fields)
    shapes = [layer.mlp.experts.down_proj.shape[-1] for layer in pruned.model.layers]
    assert shapes[1] < shapes[0] == 112
    tokens = mixture[2]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(again(tokens).logits, pruned(tokens).logits, rtol=0, atol=2e-5)
    (tmp_path / "padded").mkdir()
    convert_folder(tmp_path / "out", "uniform-padded", tmp_path / "padded")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "padded", trust_remote_code=False).eval()
    assert type(stock).__name__ == "MixtralForCausalLM"
    torch.testing.assert_close(stock(tokens).logits, pruned(tokens).logits, rtol=1e-4, atol=1e-4)


def test_padded_experts_are_aligned_beside_a_wider_ffn_of_the_same_dense_width(tmp_path):
    mixture = save_mixture("deepseek_v3", tmp_path / "dense", 16, layers=4)
    fields = {"sparsity": 0.08, "attention_unit": "none", "width_multiple": 1, "num_calibration_samples": 16}
    pruned = prune(mixture, tmp_path / "out", **fields)
    experts, shared = pruned.model.layers[3].mlp.experts, pruned.model.layers[3].mlp.shared_experts
    assert experts.down_proj.shape[-1] < shared.down_proj.in_features == 47
    (tmp_path / "padded").mkdir()
    convert_folder(tmp_path / "out", "uniform-padded", tmp_path / "padded")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "padded", trust_remote_code=False).eval()
    torch.testing.assert_close(stock(mixture[2]).logits, pruned(mixture[2]).logits, rtol=1e-4, atol=1e-4)


def test_uniform_output_refuses_experts_of_several_widths_before_any_work(mixture, tmp_path):
    widths = {"attention_unit": "none", "experts": {"widths": "per_layer"}, "ignore": ["re:.*layers\\.0\\..*"]}
    prune(mixture, tmp_path / "one", **widths)
    for experts in ("whole", "channels"):
        fields = {"sparsity": 0.02, "output": "uniform", "attention_unit": "none", "experts": experts}
        with pytest.raises(ValueError, match="needs layers that are all the same"):
            plan_run(str(tmp_path / "one"), [StruPruneModifier(**fields)], Workload(16, 32, 8))


def check_loads(pruned, out):
    tokens = torch.arange(4, 36)[None]
    again = AutoModelForCausalLM.from_pretrained(out).eval()
    torch.testing.assert_close(again(tokens).logits, pruned(tokens).logits, rtol=0, atol=2e-5)


def test_a_second_run_may_make_the_widths_equal(tmp_path):
    folder = save_model(make_model("qwen3_moe", mlp_only_layers=[], moe_intermediate_size=24), tmp_path / "dense")
    fields = {"attention_unit": "none", "experts": {"widths": "per_layer"}, "dataset": make_dataset(16)}
    run_oneshot(folder, sparsity=0.1, targets=["re:.*layers\\.0\\..*"], output_dir=str(tmp_path / "one"), **fields)
    pruned = run_oneshot(str(tmp_path / "one"), sparsity=1 / 3, output_dir=str(tmp_path / "two"), **fields)
    assert len({layer.mlp.experts.down_proj.shape for layer in pruned.model.layers}) == 1
    check_loads(pruned, tmp_path / "two")
    more = {
        "sparsity": 0.25,
        "attention_unit": "none",
        "experts": "channels",
    }  # by default one width for all layers, which these do not have
    pruned = run_oneshot(str(tmp_path / "one"), dataset=make_dataset(16), output_dir=str(tmp_path / "three"), **more)
    check_loads(pruned, tmp_path / "three")
    planned = plan_run(str(tmp_path / "one"), [StruPruneModifier(**more)], Workload(16, 32, 8))
    assert planned.parameters[1] == pytest.approx(pruned.num_parameters(), rel=0.05)


def test_an_expert_that_saw_too_few_tokens_is_scaled_and_the_manifest_says_so(mixture, tmp_path):
    prune(
        mixture, tmp_path / "few", num_calibration_samples=5
    )  # 160 tokens, two of four experts each: some see under 112
    prune(mixture, tmp_path / "enough")
    few, enough = (
        [g for g in read_manifest(tmp_path / name).groups if g.kind == "experts"] for name in ("few", "enough")
    )
    assert any(group.scale is not None for group in few)
    assert all(0.5 <= group.scale <= 2 and group.condition_number is None for group in few if group.scale is not None)
    assert all(group.scale is None and group.error_after < group.error_before for group in enough)


def test_experts_stay_whole_where_the_recipe_says_so(mixture, tmp_path):
    pruned = prune(mixture, tmp_path / "out", experts="none", sparsity=0.1)
    assert all(layer.mlp.experts.down_proj.shape[-1] == 112 for layer in pruned.model.layers)
    assert not list_widths(tmp_path / "out")


def test_experts_that_fail_the_rehearsal_stay_whole_in_an_allocator_stage_too(mixture, tmp_path, monkeypatch):
    def fail(_model):
        raise RuntimeError("another order")

    monkeypatch.setattr("struprune_plugin.model.structure.tiny._PROVED", {})
    monkeypatch.setattr(rehearsal, "linearize_experts", fail)
    recipe = [SparsityAllocatorModifier(sparsity=0.1), StruPruneModifier()]
    folder, data, _ = mixture
    options = {"dataset": data, "num_calibration_samples": 32, "output_dir": str(tmp_path / "out")}
    pruned = run_oneshot(str(folder), recipe=recipe, **options)
    assert all(layer.mlp.experts.down_proj.shape[-1] == 112 for layer in pruned.model.layers)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.settings["experts"] is None
    assert {group.kind for group in manifest.groups} == {"value_channels"}


def test_an_importance_that_is_not_defined_for_experts_is_refused(mixture, tmp_path):
    with pytest.raises(ValueError, match="`importance: closed_form` is not defined for the experts of a mixture"):
        prune(mixture, tmp_path / "out", importance="closed_form", attention_unit="none")
    assert not (tmp_path / "out").exists()


def test_a_quantiser_may_follow(tmp_path):
    dense, data, ids = save_mixture("qwen3_moe", tmp_path / "dense", 16)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 4}
    quantiser = QuantizationModifier(
        config_groups={"experts": {"targets": ["re:.*experts\\.\\d+\\..*proj$"], "weights": weights}}
    )
    fields = {"attention_unit": "none", "experts": "channels", "output": "uniform", "sensitivity": "none"}
    recipe = [StruPruneModifier(sparsity=0.3, **fields), quantiser]
    options = {"dataset": data, "num_calibration_samples": 16, "output_dir": str(tmp_path / "out")}
    quantised = run_oneshot(str(dense), recipe=recipe, **options)
    kept = json.loads((tmp_path / "out" / "config.json").read_text())["moe_intermediate_size"]
    assert kept < 52
    assert kept % 4 == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.mlp.experts.0.down_proj.weight_shape"].tolist() == [96, kept]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(again(ids).logits, quantised(ids).logits, rtol=1e-4, atol=1e-4)


def test_quantisers_of_a_mixture_are_warned_of_where_its_experts_stay_whole():
    """transformers loads LongCat Flash's experts, which llm-compressor does not split, as random numbers."""
    model, told = build_tiny(LongcatFlashConfig(num_layers=1, num_hidden_layers=2)), list[str]()
    sink = logger.add(told.append, level="WARNING")
    check_later([QuantizationModifier(scheme="W8A8", targets=["Linear"])], model)
    logger.remove(sink)
    assert "transformers may load a quantised mixture wrongly" in told[0]


def test_snip_scores_experts_that_see_no_token_of_a_batch(mixture, tmp_path):
    folder, data, _ = mixture
    model = AutoModelForCausalLM.from_pretrained(folder)
    linearize_experts(model)
    batch = [{"input_ids": torch.tensor(data["input_ids"][:1])[:, :2], "attention_mask": torch.ones(1, 2)}] * 2
    groups = find_groups(model, "none", prune_experts=True)
    scores = SNIP().measure(model, batch, groups)  # two tokens choose four of the eight experts of two layers at most
    assert {bool(score.any()) for score in scores.values()} == {True, False}


def test_a_shared_expert_is_solved_again(tmp_path):
    mixture = save_mixture("glm4_moe", tmp_path / "dense", 32)
    model = prune(mixture, tmp_path / "out", sparsity=0.2, weight_update={"method": "admm", "steps": 1})
    assert torch.isfinite(model(mixture[2]).logits).all()


def test_targets_may_name_attention_beside_experts(mixture, tmp_path):
    name = "model.layers.0.self_attn.o_proj"
    prune(mixture, tmp_path / "out", ignore=[name])
    assert name not in {group.name for group in read_manifest(tmp_path / "out").groups}
    with pytest.raises(ValueError, match="ignore: 'nothing' must match the consuming linear"):
        prune(mixture, tmp_path / "none", ignore=["nothing"])


def test_a_width_multiple_holds_for_experts_alone(mixture, tmp_path):
    prune(mixture, tmp_path / "out", prune_ffn=False, width_multiple=16)
    assert all(count % 16 == 0 for counts in list_widths(tmp_path / "out").values() for count in counts)
