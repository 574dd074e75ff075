import copy
import json

import pytest
import torch
import yaml
from conftest import make_dataset, make_opt, run_oneshot, save_opt
from transformers import AutoModelForCausalLM, OPTForCausalLM

from struprune_plugin import SparsityAllocatorModifier, StruPruneModifier, read_manifest
from struprune_plugin.modifiers.capture import find_tokens
from struprune_plugin.surgery import mask_group
from struprune_plugin.topology import find_groups

ALL = {"targets": ["re:.*"], "batch_size": 4}


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(first, second):
    first, second = weights_of(first), weights_of(second)
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name


@pytest.mark.parametrize("unit", ["head", "vo", "none"])
def test_pruned_model_equals_the_dense_one_masked_with_the_same_indices(opt_folder, unit, tmp_path):
    out = tmp_path / "out"
    pruned = run_oneshot(str(opt_folder), sparsity=0.3, attention_unit=unit, output_dir=str(out))
    masked = OPTForCausalLM.from_pretrained(opt_folder).eval()
    entries = {entry["name"]: entry for entry in read_manifest(out)["groups"]}
    for group in find_groups(masked, unit):
        consumer = pruned.get_submodule(group.name)
        bias = torch.zeros(consumer.out_features) if consumer.bias is None else consumer.bias
        weight = torch.cat([consumer.weight, bias[:, None]], 1).detach()
        mask_group(masked.get_submodule(group.layer_name), group, torch.tensor(entries[group.name]["keep"]), weight)
    ids = torch.randint(4, 2048, (3, 20), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(pruned(ids).logits, masked(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("target", ["residual", "block", "local"])
def test_zero_sparsity_is_the_identity(opt, target, tmp_path):
    dense = OPTForCausalLM.from_pretrained(opt)
    pruned = run_oneshot(str(opt), sparsity=0.0, target=target, output_dir=str(tmp_path / "out"))
    assert_same_weights(dense, pruned)
    assert_same_weights(dense, AutoModelForCausalLM.from_pretrained(tmp_path / "out"))


def _naive_ffn_targets(dense, pruned, layer, ids, target):
    """(inputs, targets) of one FFN's consumer, method.md section 2, from whole-model forward passes with hooks."""
    seen = {}

    def watch(model, key):
        block = model.model.decoder.layers[layer]
        block.fc2.register_forward_hook(lambda _, args, out: seen.update({(key, "in"): args[0], (key, "out"): out}))
        block.final_layer_norm.register_forward_pre_hook(lambda _, args: seen.update({(key, "stream"): args[0]}))

    watch(dense, "dense")
    watch(pruned, "pruned")
    dense(ids)
    pruned(ids)
    inputs, stream = seen["pruned", "in"], seen["pruned", "stream"]
    wanted = {
        "residual": seen["dense", "stream"] + seen["dense", "out"] - stream,
        "block": seen["dense", "out"],
        "local": None,
    }[target]
    return inputs, wanted


@pytest.mark.parametrize("target", ["residual", "block", "local"])
def test_a_solve_without_bias_never_does_worse_than_deletion(target, tmp_path):
    """A bias solved for and then dropped would."""
    folder = save_opt(tmp_path / "m", enable_bias=False)
    run_oneshot(str(folder), sparsity=0.4, target=target, output_dir=str(tmp_path / "out"))
    for entry in read_manifest(tmp_path / "out")["groups"]:
        assert entry["error_after"] < entry["error_before"], entry["name"]


@pytest.mark.parametrize("target", ["residual", "block"])
def test_last_ffn_is_the_ridge_solution_for_its_target(opt, target):
    """The whole chain (dense path, streams, damping, solve) against one naive solve on whole-model activations."""
    dense = OPTForCausalLM.from_pretrained(opt).eval()
    pruned = run_oneshot(str(opt), sparsity=0.3, target=target, damping=0.05)
    ids = torch.tensor(make_dataset()["input_ids"])
    with torch.no_grad():
        # give the pruned model's last FFN inputs; its own output does not matter to them
        inputs, wanted = _naive_ffn_targets(copy.deepcopy(dense), copy.deepcopy(pruned), 2, ids, target)
    x, y = inputs.flatten(0, -2).double(), wanted.flatten(0, -2).double()
    consumer = pruned.model.decoder.layers[2].fc2
    # the damping counts all dense inputs, also those cut: recompute them from the dense fc1 on the same stream
    stream = {}
    block = pruned.model.decoder.layers[2]
    block.fc1.register_forward_pre_hook(lambda _, args: stream.update(x=args[0]))
    with torch.no_grad():
        pruned(ids)
        full = torch.relu(dense.model.decoder.layers[2].fc1(stream["x"])).flatten(0, -2).double()
    kept = [int((full - column[:, None]).abs().sum(0).argmin()) for column in x.T]
    strength = 0.05 * full.square().sum(0).mean()
    ones = torch.ones(len(x), 1, dtype=torch.float64)
    p = torch.cat([x, ones], 1)
    prior = dense.model.decoder.layers[2].fc2.weight.double()[:, kept]
    ridge = torch.diag(torch.cat([strength.expand(x.shape[1]), torch.zeros(1, dtype=torch.float64)]))
    right = y.T @ p
    right[:, :-1] += strength * prior
    naive = right @ torch.linalg.inv(p.T @ p + ridge)
    torch.testing.assert_close(consumer.weight.double(), naive[:, :-1], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(consumer.bias.double(), naive[:, -1], rtol=1e-3, atol=1e-4)


def test_batch_size_does_not_change_the_result(opt):
    one, many = (run_oneshot(str(opt), sparsity=0.3, batch_size=size) for size in (1, 8))
    for name, weight in weights_of(one).items():
        torch.testing.assert_close(weight, weights_of(many)[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("importance", ["obs", "wanda", "wanda_l2", "magnitude"])
@pytest.mark.parametrize("restoration", ["least_squares", "none"])
def test_every_importance_runs_with_and_without_correction(opt, importance, restoration, tmp_path):
    out = tmp_path / "out"
    run_oneshot(str(opt), sparsity=0.3, importance=importance, restoration=restoration, output_dir=str(out))
    manifest = read_manifest(out)
    assert abs(manifest["budget"]["met_sparsity"] - 0.3) < 0.005
    for group in manifest["groups"]:
        if restoration == "none":
            assert group["error_after"] == group["error_before"]
        else:
            assert group["error_after"] < group["error_before"]


def test_restoration_none_only_deletes(opt, tmp_path):
    dense = OPTForCausalLM.from_pretrained(opt)
    pruned = run_oneshot(str(opt), sparsity=0.3, restoration="none", output_dir=str(tmp_path / "out"))
    for entry in read_manifest(tmp_path / "out")["groups"]:
        assert torch.equal(
            pruned.get_submodule(entry["name"]).weight, dense.get_submodule(entry["name"]).weight[:, entry["keep"]]
        )


@pytest.mark.parametrize("allocation", ["softmax", "softmax_inverse"])
def test_allocator_stage_and_own_allocation_pass_agree(opt, allocation, tmp_path):
    fields = {"sparsity": 0.3, "temperature": [0.5, 4.0]}
    run_oneshot(str(opt), allocation=allocation, **fields, output_dir=str(tmp_path / "own"))
    stages = [SparsityAllocatorModifier(allocation=allocation, **fields), StruPruneModifier()]
    run_oneshot(str(opt), recipe=stages, output_dir=str(tmp_path / "stage"))
    own, stage = read_manifest(tmp_path / "own"), read_manifest(tmp_path / "stage")
    assert own["groups"] == stage["groups"]
    assert own["allocation"] == stage["allocation"]
    assert own["allocation"]["method"] == allocation
    assert [row["temperature"] for row in own["allocation"]["searched"]] == [0.5, 4.0]
    assert len({group["kept"] for group in own["groups"] if group["kind"] == "ffn"}) > 1, "not uniform"
    assert abs(own["budget"]["met_sparsity"] - 0.3) < 0.005


def test_allocator_error_is_that_of_the_plan(opt, tmp_path):
    """R9: the loss of a temperature, read off the moments, is the error of pruning the dense layers so."""
    fields = {"sparsity": 0.3, "temperature": 1.0, "target": "local", "importance": "wanda", "restoration": "none"}
    run_oneshot(str(opt), allocation="softmax", **fields, output_dir=str(tmp_path / "out"))
    manifest = read_manifest(tmp_path / "out")
    first = manifest["groups"][0]  # only the first module sees the dense inputs
    assert manifest["allocation"]["searched"][0]["error"] > 0
    assert first["error_before"] > 0


def test_allocation_as_printed_misses_the_budget_and_the_manifest_says_so(opt, tmp_path):
    run_oneshot(
        str(opt),
        sparsity=0.5,
        attention_unit="head",
        allocation="softmax",
        temperature=0.1,
        as_printed=True,
        output_dir=str(tmp_path / "out"),
    )
    budget = read_manifest(tmp_path / "out")["budget"]
    assert budget["asked_sparsity"] == 0.5
    assert budget["met_sparsity"] < 0.45


def test_replay_gives_bit_identical_weights(opt, tmp_path):
    first = run_oneshot(str(opt), sparsity=0.3, damping=0.02, output_dir=str(tmp_path / "first"))
    second = run_oneshot(
        str(opt), replay=str(tmp_path / "first" / "struprune.json"), output_dir=str(tmp_path / "second")
    )
    assert_same_weights(first, second)
    names = ("groups", "budget", "calibration", "allocation")
    drop = [
        {**m, "groups": [{**g, "scores": None} for g in m["groups"]]} for m in map(read_manifest, tmp_path.iterdir())
    ]
    assert {n: drop[0][n] for n in names} == {n: drop[1][n] for n in names}


def test_replay_on_other_calibration_data_is_refused(opt, tmp_path):
    run_oneshot(str(opt), sparsity=0.3, output_dir=str(tmp_path / "first"))
    with pytest.raises(ValueError, match=r"replay: the calibration tokens must be those of .*first"):
        run_oneshot(
            str(opt), replay=str(tmp_path / "first"), dataset=make_dataset(seed=9), output_dir=str(tmp_path / "x")
        )
    assert not (tmp_path / "x").exists()


def test_replay_with_a_contradicting_field_is_refused(opt, tmp_path):
    run_oneshot(str(opt), sparsity=0.3, output_dir=str(tmp_path / "first"))
    with pytest.raises(ValueError, match=r"replay: damping must be 0\.01 as in .*got 0\.5"):
        StruPruneModifier(replay=str(tmp_path / "first"), damping=0.5)


def test_saved_recipe_reloads_and_repeats(opt, tmp_path):
    first = run_oneshot(str(opt), sparsity=0.25, attention_unit="head", output_dir=str(tmp_path / "first"))
    again = run_oneshot(str(opt), recipe=str(tmp_path / "first" / "recipe.yaml"))
    assert_same_weights(first, again)


def test_same_seed_same_bytes(opt, tmp_path):
    for name in "ab":
        run_oneshot(str(opt), sparsity=0.3, output_dir=str(tmp_path / name))
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_channel_multiple_is_kept(opt, tmp_path):
    run_oneshot(str(opt), sparsity=0.3, channel_multiple=8, output_dir=str(tmp_path / "out"))
    ffn = [group["kept"] for group in read_manifest(tmp_path / "out")["groups"] if group["kind"] == "ffn"]
    assert all(width % 8 == 0 for width in ffn)


def test_targets_limit_what_is_pruned(opt):
    pruned = run_oneshot(str(opt), sparsity=0.1, targets=["re:.*fc2"], ignore=["re:.*layers\\.0\\..*"])
    sizes = [(layer.fc2.in_features, layer.self_attn.out_proj.in_features) for layer in pruned.model.decoder.layers]
    assert sizes[0] == (40, 24)
    assert all(width < 40 and attention == 24 for width, attention in sizes[1:])


def test_a_pruned_folder_can_be_pruned_again(opt, tmp_path):
    run_oneshot(str(opt), sparsity=0.2, attention_unit="head", output_dir=str(tmp_path / "once"))
    twice = run_oneshot(str(tmp_path / "once"), sparsity=0.2, attention_unit="vo", output_dir=str(tmp_path / "twice"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "twice")
    ids = torch.arange(4, 30)[None]
    assert torch.equal(twice(ids).logits, again(ids).logits)
    first, second = (read_manifest(tmp_path / name)["model"] for name in ("once", "twice"))
    assert second["parameters_before"] == first["parameters_after"] > second["parameters_after"]


def test_padding_tokens_do_not_count(opt, tmp_path):
    """A padded batch gives the moments of its real tokens alone."""
    data = make_dataset(4, 32)
    ids = [row[:20] for row in data["input_ids"]]
    from datasets import Dataset

    short = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 20] * 4})
    padded = Dataset.from_dict(
        {"input_ids": [row + [1] * 7 for row in ids], "attention_mask": [[1] * 20 + [0] * 7] * 4},
    )
    plain, other = (run_oneshot(str(opt), sparsity=0.3, dataset=d, num_calibration_samples=4) for d in (short, padded))
    for name, weight in weights_of(plain).items():
        torch.testing.assert_close(weight, weights_of(other)[name], rtol=1e-3, atol=1e-4, msg=name)


def test_find_tokens_reads_padding_off_the_diagonal():
    mask = torch.zeros(2, 1, 3, 3)
    assert find_tokens(None) is None
    assert find_tokens(mask) is None
    mask[1, 0, :, 0] = torch.finfo(torch.float32).min
    assert find_tokens(mask).tolist() == [0, 1, 2, 4, 5]


def test_quantising_in_the_same_recipe_saves_and_reloads(opt, tmp_path):
    recipe = yaml.safe_dump(
        {
            "prune_stage": {"prune_modifiers": {"StruPruneModifier": {"sparsity": 0.3}}},
            "quantise_stage": {
                "quantise_modifiers": {
                    "QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W8A8"}
                }
            },
        }
    )
    run_oneshot(str(opt), recipe=recipe, output_dir=str(tmp_path / "out"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == "struprune_opt"
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model(torch.arange(4, 30)[None]).logits.isfinite().all()
    assert (tmp_path / "out/tokenizer.json").exists()


def test_an_in_memory_model_can_be_pruned(opt):
    model = OPTForCausalLM.from_pretrained(opt)
    before = model.num_parameters()
    pruned = run_oneshot(model, sparsity=0.3, tokenizer=str(opt))
    assert pruned is model
    assert pruned.num_parameters() < before


def test_aborted_run_leaves_the_host_usable(opt, tmp_path):
    with pytest.raises(ValueError, match="at least"):
        run_oneshot(str(opt), sparsity=0.3, dataset=make_dataset(1, 8))
    assert run_oneshot(str(opt), sparsity=0.3).num_parameters() < make_opt().num_parameters()


@pytest.mark.parametrize("shape", [{"num_hidden_layers": 1}, {"num_attention_heads": 1}])
def test_smallest_models_prune(shape, tmp_path):
    folder = save_opt(tmp_path / "m", **shape)
    for unit in ("head", "vo"):
        assert (
            run_oneshot(str(folder), sparsity=0.2, attention_unit=unit).num_parameters()
            < make_opt(**shape).num_parameters()
        )
