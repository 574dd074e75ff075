import json
import math

import pytest
import torch
import yaml
from compressed_tensors.offload import offload_module
from datasets import Dataset
from helpers.models import ROOT, make_dataset, make_opt, run_oneshot, save_opt
from helpers.recovery_loop import compress_logits, make_logits, measure_divergence, weights_of
from llmcompressor import oneshot as host_oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, OPTForCausalLM

from struprune_plugin import LoRARecoveryModifier, StruPruneModifier, read_manifest
from struprune_plugin.layerwise.runner import LayerwiseRunner
from struprune_plugin.layerwise.samples import Sample, TeacherTargets, make_micro_batches, read_samples, split_samples
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.recovery.adapters import (
    attach_adapters,
    lift_dispatch,
    match_linears,
    seed_random,
)
from struprune_plugin.recovery.recovery_config import Adapters, Divergence, Schedule
from struprune_plugin.recovery.teacher import LayerwiseTeacher
from struprune_plugin.recovery.training import list_rates
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.storage.resume_store import ResumeStore

CPU = torch.device("cpu")
SOME = Adapters(rank=4, alpha=8.0, dropout=0.1)
FAST = {"learning_rate": 2e-2, "decay": "constant", "warmup_fraction": 0.0}
KL = {"kl": 1.0}


UNTRIED = {"rule": "error_curve", "trial_samples": 0}


def recover(opt, dataset=None, prune=True, **fields):
    """Prune to 0.3 and train; return (model, modifier)."""
    stage = make_stage(**{**fields, "schedule": {"epochs": 1} | fields.get("schedule", {})})
    recipe = [StruPruneModifier(sparsity=0.3, allocation=UNTRIED), stage] if prune else [stage]
    return run_oneshot(opt if isinstance(opt, nn.Module) else str(opt), recipe, dataset), stage


def make_stage(schedule=None, **fields):
    return LoRARecoveryModifier(**({"batch_size": 2, "schedule": FAST | (schedule or {})} | fields))


def changed(first, second):
    assert first.keys() == second.keys()
    return {name for name in first if not torch.equal(first[name], second[name])}


# -- the pure parts -----------------------------------------------------------------------------------------------


def _naive_divergence(student, teacher, temperature, kept=None):
    """T^2 KL(p || q), one distribution at a time; of the outcomes ``kept`` and the rest where given."""
    rows = []
    for z, t in zip(student.reshape(-1, student.shape[-1]), teacher.reshape(-1, teacher.shape[-1]), strict=True):
        p, q = (torch.exp(v / temperature) / torch.exp(v / temperature).sum() for v in (t, z))
        if kept is not None:
            top = t.argsort(descending=True)[:kept]
            rest = [i for i in range(len(t)) if i not in top.tolist()]
            p, q = (torch.cat([v[top], v[rest].sum()[None]]) for v in (p, q))
        rows.append(temperature**2 * sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True)))
    return torch.tensor(rows, dtype=torch.float64).view(student.shape[:-1])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [1, 5, 16, 17, 99])
def test_divergence_equals_the_naive_one(top_k, temperature):
    student, teacher = make_logits(2, 3, 17), make_logits(2, 3, 17, seed=1)
    found = measure_divergence(student, compress_logits(teacher, top_k, temperature), temperature)
    naive = _naive_divergence(student, teacher, temperature, top_k if top_k < 17 else None)
    torch.testing.assert_close(found, naive, rtol=1e-10, atol=1e-12)
    assert (found <= _naive_divergence(student, teacher, temperature) + 1e-12).all(), "merging outcomes adds nothing"


@pytest.mark.parametrize("top_k", [1, 5, 17])
def test_divergence_from_oneself_is_zero(top_k):
    logits = make_logits(2, 3, 17)
    for temperature in (0.5, 2.0):
        found = measure_divergence(logits, compress_logits(logits, top_k, temperature), temperature)
        torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-12)


@pytest.mark.parametrize("top_k", [3, 17])
def test_divergence_has_the_right_gradient(top_k):
    teacher = compress_logits(make_logits(4, 17, seed=1), top_k, 2.0)
    student = make_logits(4, 17).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: measure_divergence(z, teacher, 2.0), (student,))


def test_divergence_renormalises_a_rounded_cache():
    logits = make_logits(64, 500).float()
    kept = compress_logits(logits, 20, 1.0)
    rounded = TeacherTargets(kept.log_probs.half(), kept.indices.int())
    found = measure_divergence(logits, rounded, 1.0)
    assert found.abs().max() < 1e-4
    assert found.min() > -1e-6, "no divergence is negative: both sides sum to one"


@pytest.mark.parametrize("top_k", [10, 2048])
def test_what_a_teacher_says_keeps_the_order_of_samples_of_many_lengths(top_k, tmp_path):
    model = make_opt()
    samples = [Sample(torch.arange(4, 4 + length)) for length in (9, 5, 9, 7, 9)]
    journal = ResumeStore(tmp_path)
    journal.open({})
    teacher = LayerwiseTeacher(LayerwiseRunner(model, DeviceContext(), CPU, torch.float32, vocabulary=300), 2)
    teacher.write_logits(samples, range(5), journal, Divergence(top_k=top_k, temperature=1.5))
    for number, before in enumerate(samples):
        after = teacher.read_logits(number, before)
        assert torch.equal(before.tokens, after.tokens)
        with torch.no_grad():
            logits = model(input_ids=before.tokens[None]).logits[0, :-1]
        assert measure_divergence(logits, after.teacher, 1.5).abs().max() < 1e-4
        assert after.teacher.log_probs.dtype == torch.float16
        assert len(after.teacher.log_probs) == before.num_targets


def test_what_a_teacher_said_of_other_text_or_by_another_teacher_is_not_read(tmp_path, monkeypatch):
    store, asked = ResumeStore(tmp_path), []
    store.open({})
    compute = LayerwiseTeacher._compute_logits
    monkeypatch.setattr(LayerwiseTeacher, "_compute_logits", lambda *args: asked.append(1) or compute(*args))
    for seed, data in ((0, "a"), (0, "a"), (0, "b"), (1, "b")):
        runner = LayerwiseRunner(make_opt(seed), DeviceContext(), CPU, torch.float32, vocabulary=300)
        samples = [Sample(torch.arange(4, 9))]
        LayerwiseTeacher(runner, 2).write_logits(samples, range(1), store, Divergence(), data)
    assert len(asked) == 3


def test_hidden_states_need_as_many_layers_as_the_teacher_s(opt, tmp_path):
    deeper = save_opt(tmp_path / "deeper", num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"loss\.hidden: the model must have the teacher's 4 layers, got 3"):
        recover(opt, loss={"hidden": 1.0, "teacher": str(deeper)})


def test_the_rate_rises_then_follows_its_schedule():
    for decay in ("cosine", "linear", "constant"):
        rates = list_rates(20, 2.0, Schedule(decay=decay, warmup_fraction=0.2))
        assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
        assert len(rates) == 20
        assert min(rates) > 0, "no step is lost"
        assert rates[3:] == sorted(rates[3:], reverse=True)
        assert (rates[-1] < 0.15) == (decay != "constant")
    assert list_rates(3, 1.0, Schedule(decay="constant", warmup_fraction=0.0)) == [1.0] * 3
    assert list_rates(1, 1.0, Schedule()) == [1.0]
    assert list_rates(1, 1.0, Schedule(warmup_fraction=0.0)) == [pytest.approx(0.5)]


def test_read_samples_removes_padding_on_either_side():
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 1, 1], [1, 5, 6, 7, 8], [9, 1, 1, 1, 1]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 0, 0, 0, 0]]),
    }
    samples, largest = read_samples([batch, {"input_ids": torch.tensor([[2, 3]])}], "who")
    assert [sample.tokens.tolist() for sample in samples] == [[5, 6, 7], [5, 6, 7, 8], [2, 3]], (
        "one token predicts none"
    )
    assert largest == 3


def test_split_samples_holds_the_last_ones_out():
    samples = [Sample(torch.arange(2)) for _ in range(10)]
    for fraction, num_held in ((0.0, 0), (0.01, 1), (0.1, 1), (0.25, 2), (0.9, 9)):
        train, held = split_samples(samples, fraction)
        assert len(held) == num_held
        assert train + held == samples


def test_micro_batches_hold_every_sample_once_with_others_of_its_length():
    samples = [Sample(torch.arange(length)) for length in (3, 5, 3, 3, 5, 2)]
    batches = list(make_micro_batches(samples, 2))
    assert sorted(id(s) for batch in batches for s in batch) == sorted(map(id, samples))
    assert all(len(batch) <= 2 and len({len(s.tokens) for s in batch}) == 1 for batch in batches)


# -- the model, lent ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "count", "first"),
    [
        (None, 18, "model.decoder.layers.0.self_attn.q_proj"),
        (["fc1"], 3, "model.decoder.layers.0.fc1"),
        (["self_attn.v_proj", "fc2"], 6, "model.decoder.layers.0.self_attn.v_proj"),
        (["model.decoder.layers.1.fc1"], 1, "model.decoder.layers.1.fc1"),
        ([r"re:.*layers\.[12]\..*proj"], 8, "model.decoder.layers.1.self_attn.q_proj"),
    ],
)
def test_match_linears_reads_every_way_to_name_one(targets, count, first):
    names = match_linears(make_opt(), Adapters(targets=targets))
    assert len(names) == len(set(names)) == count
    assert names[0] == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_merged_untrained_change_nothing(dtype):
    model = make_opt().to(dtype)
    model.lm_head.weight.requires_grad_(False)
    before, modules, shell = weights_of(model), dict(model.named_modules()), set(vars(model))
    parameters = dict(model.named_parameters())
    required = {name: parameter.requires_grad for name, parameter in parameters.items()}
    with attach_adapters(model, match_linears(model, SOME), SOME) as adapters:
        assert {adapter.dtype for adapter in adapters} == {torch.float32}
        assert sum(adapter.requires_grad for adapter in model.parameters()) == len(adapters) == 36
    assert not changed(before, weights_of(model))
    assert set(vars(model)) == shell
    assert all(module is modules[name] for name, module in model.named_modules())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == required


def test_merging_adds_the_scaled_product_and_rounds_once():
    model = make_opt().to(torch.bfloat16)
    before, lora = weights_of(model), Adapters(rank=4, alpha=6.0, targets=["fc1"])
    with attach_adapters(model, match_linears(model, lora), lora), torch.no_grad():
        layer = model.model.decoder.layers[1].fc1
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight.normal_()
    name = "model.decoder.layers.1.fc1.weight"
    assert changed(before, weights_of(model)) == {name}
    wanted = (before[name].float() + 6.0 / 4 * b @ a).bfloat16()
    assert torch.equal(model.get_parameter(name), wanted)


def test_an_error_takes_the_adapters_off_again():
    model = make_opt()
    before, modules = weights_of(model), dict(model.named_modules())

    def fail():
        with attach_adapters(model, match_linears(model, SOME), SOME) as adapters:
            adapters[1].data.fill_(1.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not changed(before, weights_of(model))
    assert all(module is modules[name] for name, module in model.named_modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_seed_random_gives_the_numbers_of_others_back():
    state = torch.get_rng_state()
    with seed_random(3, CPU):
        torch.rand(5)
    assert torch.equal(torch.get_rng_state(), state)


def test_lift_dispatch_leaves_an_undispatched_model_alone():
    model = make_opt()
    weights = dict(model.named_parameters())
    with lift_dispatch(model, CPU):
        assert all(weight is weights[name] for name, weight in model.named_parameters())
    assert type(model.lm_head._parameters) is dict


# -- the stage ----------------------------------------------------------------------------------------------------


def test_training_learns_the_data_by_heart(opt):
    _, stage = recover(opt, make_dataset(4, 16), prune=False, schedule={"epochs": 10}, holdout=None)
    record = stage.record
    first, last = record["train"]["loss"][0], record["train"]["loss"][-1]
    assert last < 0.8 * first
    assert record["merged"] is None
    assert record["best_step"] is None


@pytest.mark.parametrize(
    ("loss", "rate"), [({"cross_entropy": 1.0}, 2e-2), ({"cross_entropy": 0.5, "kl": 0.5}, 2e-2), ({"kl": 1.0}, 1e-3)]
)
def test_training_lowers_the_held_out_loss_and_keeps_the_best_epoch(opt, prune_once, loss, rate):
    rows = make_dataset(2, 24)["input_ids"][:] * 4  # the held-out sample is among the others too
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 24] * 8})
    loss = loss | ({"teacher": str(opt)} if "kl" in loss else {})
    how = {"loss": loss, "schedule": {"epochs": 3, "learning_rate": rate}, "holdout": {"fraction": 0.2}}
    _, stage = recover(prune_once(opt, "value_channels")[1], data, prune=False, **how)
    record = stage.record
    losses = [row["loss"] for row in record["holdout"]]
    assert [row["step"] for row in record["holdout"]] == [0, 3, 6, 9]
    assert min(losses) < 0.95 * losses[0]
    assert record["best_step"] == 3 * losses.index(min(losses))
    assert record["merged"]["loss"] == pytest.approx(min(losses), rel=1e-3)
    assert record["samples"] == {"trained": 6, "held_out": 2}


def test_where_no_epoch_is_better_nothing_changes(opt):
    """Distilled from itself, a model can only get worse."""
    model, stage = recover(opt, prune=False, schedule={"epochs": 3, "learning_rate": 0.1}, loss=KL)
    losses = [row["loss"] for row in stage.record["holdout"]]
    assert min(losses[1:]) > 10 * losses[0]
    assert stage.record["best_step"] == 0
    assert not changed(weights_of(OPTForCausalLM.from_pretrained(opt)), weights_of(model))


def test_only_targets_change(opt, prune_once):
    pruned = prune_once(opt, "value_channels")[0]
    recovered, stage = recover(opt, adapters={"targets": ["fc1"]}, holdout=None)
    names = {f"model.decoder.layers.{i}.fc1.weight" for i in range(3)}
    assert changed(weights_of(pruned), weights_of(recovered)) == names
    assert stage.record["linears"] == 3


@pytest.mark.parametrize("shape", ["pre_norm", "post_norm"])
def test_names_shapes_and_flags_stay(save_shape, shape):
    folder = save_shape(shape)
    pruned = run_oneshot(str(folder), sparsity=0.3)
    recovered, _ = recover(folder, holdout=None)
    assert type(recovered) is type(pruned)
    assert recovered.state_dict().keys() == pruned.state_dict().keys()
    assert not any("lora" in name for name, _ in recovered.named_modules())
    before, after = (dict(m.named_parameters()) for m in (pruned, recovered))
    assert {n: (p.shape, p.dtype, p.requires_grad) for n, p in before.items()} == {
        n: (p.shape, p.dtype, p.requires_grad) for n, p in after.items()
    }
    assert recovered.num_parameters() == pruned.num_parameters()
    assert not any(module.training for module in recovered.modules())


def test_modules_and_parameters_are_the_same_objects_afterwards(opt):
    model = OPTForCausalLM.from_pretrained(opt)
    model.lm_head.weight.requires_grad_(False)
    modules = dict(model.named_modules())
    required = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    before = weights_of(model)
    stage = make_stage(holdout=None)
    assert run_oneshot(model, stage, tokenizer=str(opt)) is model
    assert dict(model.named_modules()) == modules
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == required
    assert {name.split(".")[-1] for name in changed(before, weights_of(model))} == {"weight"}


def test_pruned_and_recovered_model_saves_reloads_and_tells_its_curve(opt, tmp_path):
    model, _ = recover_to(opt, tmp_path / "out", loss=KL)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(4, 30)[None]
    assert torch.equal(model(ids).logits, again(ids).logits)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.groups
    assert abs(manifest.budget.met_sparsity - 0.3) < 0.005
    recovery = manifest.recovery
    assert recovery.settings["adapters"]["rank"] == 8
    assert recovery.steps == 8
    assert {len(values) for values in recovery.train.values()} == {8}
    assert recovery.tokens_seen == recovery.train["tokens_seen"][-1] == 2 * 7 * 31
    assert recovery.train["seconds"] == sorted(recovery.train["seconds"])
    assert [row["step"] for row in recovery.holdout] == [0, 4, 8]
    assert recovery.teacher.keys() == {"name", "parameters", "cache_bytes"}
    assert recovery.teacher["parameters"] == make_opt().num_parameters()
    assert 1 < recovery.teacher["cache_bytes"] / (8 * 31 * (6 * 64 + 2)) < 1.1, "and the headers of its files"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "struprune_opt"


def recover_to(opt, folder, **fields):
    stage = make_stage(**fields)
    recipe = [StruPruneModifier(sparsity=0.3, allocation=UNTRIED), stage]
    return run_oneshot(str(opt), recipe, output_dir=str(folder)), stage


def test_without_pruning_the_stage_saves_and_writes_no_manifest(opt, tmp_path):
    stage = make_stage(holdout=None)
    model = run_oneshot(str(opt), stage, output_dir=str(tmp_path / "out"))
    again = OPTForCausalLM.from_pretrained(tmp_path / "out")
    assert not changed(weights_of(model), weights_of(again))
    assert not (tmp_path / "out" / "struprune.json").exists()


def test_a_pruned_folder_can_be_recovered_from_its_dense_teacher(opt, prune_once, tmp_path):
    stage = make_stage(loss={**KL, "teacher": str(opt)})
    model = run_oneshot(str(prune_once(opt, "value_channels")[1]), stage, output_dir=str(tmp_path / "out"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not changed(weights_of(model), weights_of(again))
    assert stage.record["holdout"][0]["kl"] > 0


def test_quantising_afterwards_in_the_same_recipe_saves_and_reloads(opt, tmp_path):
    recipe = {
        "prune_stage": {"prune_modifiers": {"StruPruneModifier": {"sparsity": 0.3, "allocation": UNTRIED}}},
        "recovery_stage": {
            "recovery_modifiers": {"LoRARecoveryModifier": {"batch_size": 2, "schedule": FAST, "holdout": None}}
        },
        "quantise_stage": {
            "quantise_modifiers": {
                "QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W8A8"}
            }
        },
    }
    run_oneshot(str(opt), yaml.safe_dump(recipe, sort_keys=False), output_dir=str(tmp_path / "out"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert read_manifest(tmp_path / "out").recovery.steps == 8
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    plain, _ = recover(opt, schedule={"epochs": 2}, holdout=None)
    ids = torch.arange(4, 30)[None]
    with torch.no_grad():
        quantised, exact = model(ids).logits, plain(ids).logits
    assert (quantised - exact).norm() < 0.1 * exact.norm(), "scales are those of the merged weights"


def test_held_out_divergence_is_that_of_the_dense_model(opt, prune_once):
    """Epoch 0: a naive whole-vocabulary KL of the pruned from the dense model, up to the float16 cache."""
    pruned, dense = prune_once(opt, "value_channels")[0], OPTForCausalLM.from_pretrained(opt)
    ids = torch.tensor(make_dataset()["input_ids"][-1:])
    with torch.no_grad():
        naive = _naive_divergence(*(m(ids).logits[:, :-1].double() for m in (pruned, dense)), 2.0).mean()
    full, top = (
        recover(opt, loss={"kl": {"temperature": 2.0, "top_k": top_k}}, schedule={"max_steps": 1})[1]
        for top_k in (2048, 32)
    )
    assert full.record["holdout"][0]["kl"] == pytest.approx(naive.item(), rel=1e-2)
    assert 0 < top.record["holdout"][0]["kl"] < naive


def test_the_teacher_itself_has_nothing_to_learn(opt):
    """Distilled from itself at weight 1 the loss is zero."""
    _, stage = recover(opt, prune=False, loss=KL, schedule={"max_steps": 1})
    assert abs(stage.record["train"]["loss"][0]) < 1e-4
    assert abs(stage.record["holdout"][0]["loss"]) < 1e-4


def test_same_seed_same_weights(opt):
    fields = {"adapters": {"dropout": 0.2}, "holdout": None, "prune": False}
    first, again, other = (recover(opt, seed=seed, **fields)[0] for seed in (1, 1, 2))
    assert not changed(weights_of(first), weights_of(again))
    assert changed(weights_of(first), weights_of(other))


def test_one_layer_on_the_device_gives_the_same_weights(opt):
    fields = {"holdout": None, "adapters": {"dropout": 0.2}, "loss": KL}
    whole, layerwise = (recover(opt, memory=memory, **fields)[0] for memory in ("model", "layer"))
    assert not changed(weights_of(whole), weights_of(layerwise))


def test_a_memory_budget_asks_for_one_layer_on_the_device():
    assert LoRARecoveryModifier().memory == "model"
    assert LoRARecoveryModifier(memory_budget=10**9).memory == "layer"


def test_the_short_form_is_a_recovery_with_other_defaults():
    short = LoRARecoveryModifier(adapters={"rank": 4}, optimizer={"weight_decay": 0.1})
    assert (short.adapters.rank, short.loss.weights, short.schedule.epochs) == (4, {"cross_entropy": 1.0}, 2)
    assert (short.optimizer.weight_decay, short.optimizer.clipping) == (0.1, "global"), "what is left out stays"
    assert (short.holdout.fraction, short.holdout.steps) == (0.1, None)


def test_micro_batches_do_not_change_the_losses(opt):
    """Of samples of two lengths; the host's loader would cut every batch to its shortest."""
    rows = [row[: 20 if i % 2 else 32] for i, row in enumerate(make_dataset()["input_ids"])]
    losses = []
    for size in (1, 4):
        batches = [rows[start : start + size] for start in range(0, 8, size)]
        loader = DataLoader(batches, batch_size=None, collate_fn=_pad)
        stage = make_stage(schedule={"learning_rate": 1e-3, "epochs": 2}, batch_size=8, holdout=None)
        run_oneshot(str(opt), stage, loader)
        assert stage.record["tokens_seen"] == 2 * 4 * (19 + 31)
        losses.append(stage.record["train"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def _pad(rows):
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [1] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_keep_their_dtype_and_learn(opt, dtype):
    stage = make_stage(schedule={"epochs": 8}, holdout=None, loss={"cross_entropy": 0.5, "kl": 0.5})
    recipe = [StruPruneModifier(sparsity=0.3, allocation=UNTRIED), stage]
    model = run_oneshot(str(opt), recipe, make_dataset(4, 16), precision=dtype, num_calibration_samples=4)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    losses = stage.record["train"]["loss"]
    assert losses[-1] < 0.8 * losses[0]


def test_max_steps_ends_in_the_midst_of_an_epoch(opt):
    _, stage = recover(opt, prune=False, schedule={"epochs": 3, "max_steps": 5})
    record = stage.record
    assert record["steps"] == 5
    assert [row["step"] for row in record["holdout"]] == [0, 4, 5]


def test_recipe_file_runs(opt, tmp_path):
    recipe = ROOT / "recipes" / "struprune_lora.yaml"
    run_oneshot(str(opt), str(recipe), output_dir=str(tmp_path / "out"))
    manifest = read_manifest(tmp_path / "out")
    assert abs(manifest.budget.met_sparsity - 0.3) < 0.005
    settings = manifest.recovery.settings
    assert load_recipe(str(recipe)).modifiers[1].model_dump(include=set(settings)) == settings
    assert (settings["schedule"]["learning_rate"], settings["loss"]["kl"]["top_k"]) == (1e-3, 64)


def test_changes_reach_the_stage():
    changes = {"batch_size": 3, "sparsity": 0.1, "adapters.rank": 3, "loss.kl.top_k": 5, "optimizer.weight_decay": 0.1}
    pruning, recovery = load_recipe(str(ROOT / "recipes" / "struprune_lora.yaml"), changes).modifiers
    assert pruning.sparsity == 0.1
    assert (recovery.batch_size, recovery.adapters.rank, recovery.adapters.alpha) == (3, 3, 16.0)
    assert recovery.loss.kl.top_k == 5
    assert (recovery.optimizer.weight_decay, recovery.optimizer.clipping) == (0.1, "global"), "the short form's default"


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapters": {"rank": 0}}, "adapters.rank must .*greater than or equal to 1"),
        ({"adapters": {"alpha": 0}}, "adapters.alpha must .*greater than 0"),
        ({"adapters": {"alpha": float("inf")}}, "adapters.alpha must .*finite"),
        ({"adapters": {"targets": []}}, "adapters.targets must .*at least 1"),
        ({"adapters": {"targets": ["re:("]}}, "adapters.targets must hold names or valid patterns"),
        ({"adapters": {"dropout": 1.0}}, "adapters.dropout must .*less than 1"),
        ({"schedule": {"learning_rate": 0}}, "schedule.learning_rate must .*greater than 0"),
        ({"schedule": {"decay": "step"}}, "schedule.decay must .*'cosine', 'linear' or 'constant'"),
        ({"schedule": {"warmup_fraction": 1}}, "schedule.warmup_fraction must .*less than 1"),
        ({"schedule": {"epochs": 0}}, "schedule.epochs must .*greater than or equal to 1"),
        ({"schedule": {"max_steps": 0}}, "schedule.max_steps must .*greater than or equal to 1"),
        ({"optimizer": {"weight_decay": -1}}, "optimizer.weight_decay must .*greater than or equal to 0"),
        ({"optimizer": {"max_grad_norm": 0}}, "optimizer.max_grad_norm must .*greater than 0"),
        ({"batch_size": 0}, "batch_size must .*greater than or equal to 1"),
        ({"holdout": {"fraction": 1.0}}, "holdout.fraction must .*less than 1"),
        ({"loss": {"kl": {"temperature": 0}}}, "loss.kl.temperature must .*greater than 0"),
        ({"loss": {"kl": {"top_k": 0}}}, "loss.kl.top_k must .*greater than or equal to 1"),
        ({"loss": {"cross_entropy": 1.0, "teacher": "a"}}, "`teacher: a` has no effect with cross_entropy alone"),
        ({"start": 0.0}, "start and end have no effect"),
        ({"seeds": 4}, "seeds is not a field of LoRARecoveryModifier. Did you mean seed"),
    ],
)
def test_fields_are_checked(fields, message):
    text = yaml.safe_dump({"x_stage": {"x_modifiers": {"LoRARecoveryModifier": fields}}})
    with pytest.raises(ValueError, match=message):
        load_recipe(text)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        (
            {"adapters": {"targets": ["fc1", "gate_proj"]}},
            {},
            "adapters.targets: must match .* got 'gate_proj' that matches none .18 candidates",
        ),
        ({"adapters": {"targets": ["re:.*lm_head"]}}, {}, "got 're:.*lm_head' that matches none"),
        ({}, {"dataset": make_dataset(4, 1)}, "at least one sequence of two tokens, got none"),
        ({}, {"dataset": make_dataset(1)}, r"must leave a sample to train on, got 0\.1 \(1 of 1"),
        ({"holdout": {"fraction": 0.97}}, {}, r"must leave a sample to train on, got 0\.97 \(8 of 8"),
        ({}, {"dataset": make_dataset(4, 65)}, "at most 64 tokens long, the model's number of positions, got 65"),
        ({"loss": {"kl": 1.0, "teacher": "no/such"}}, {}, "loss.teacher: 'no/such' must be a model folder"),
    ],
)
def test_refused_before_any_work(opt, fields, options, message, tmp_path):
    stage = LoRARecoveryModifier(**fields)
    with pytest.raises(ValueError, match=message):
        run_oneshot(str(opt), stage, output_dir=str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()


def test_refuses_a_run_without_calibration_data(opt):
    with pytest.raises(ValueError, match="dataset: calibration text must be given, got none"):
        host_oneshot(model=str(opt), recipe=LoRARecoveryModifier())


def test_refuses_a_teacher_of_another_vocabulary(opt, tmp_path):
    other = save_opt(tmp_path / "other", vocab_size=100)
    with pytest.raises(ValueError, match="must have the model's vocabulary of 2048 tokens, got 100"):
        recover(opt, loss={**KL, "teacher": str(other)})


def test_refuses_to_come_after_a_quantiser(opt):
    quantiser = QuantizationModifier(targets=["Linear"], ignore=["lm_head"], scheme="W8A8")
    with pytest.raises(ValueError, match=r"must come before every quantiser.*got QuantizationModifier first"):
        run_oneshot(str(opt), [quantiser, LoRARecoveryModifier()])


def test_refuses_a_quantised_model(opt):
    model = OPTForCausalLM.from_pretrained(opt)
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    with pytest.raises(ValueError, match="model: must not be quantised yet"):
        run_oneshot(model, LoRARecoveryModifier(), tokenizer=str(opt))


def test_refuses_weights_on_disk(opt, tmp_path):
    model = OPTForCausalLM.from_pretrained(opt)
    offload_module(model.model.decoder.layers[0].fc1, "cpu", "disk", offload_dir=str(tmp_path))
    with pytest.raises(ValueError, match="model: must be held in memory for LoRARecoveryModifier"):
        run_oneshot(model, LoRARecoveryModifier(), tokenizer=str(opt))


def test_refuses_a_calibration_pass_that_others_share(opt):
    recipe = [LoRARecoveryModifier(), QuantizationModifier(targets=["Linear"], ignore=["lm_head"], scheme="W8A8")]
    with pytest.raises(ValueError, match=r"LoRARecoveryModifier must have a calibration pass of its own"):
        host_oneshot(
            model=str(opt), recipe=recipe, dataset=make_dataset(), pipeline="sequential", num_calibration_samples=8
        )


def test_a_diverging_run_says_so_and_leaves_the_model_whole(opt):
    model = OPTForCausalLM.from_pretrained(opt)
    before, names = weights_of(model), set(dict(model.named_modules()))
    stage = make_stage(schedule={"learning_rate": 1e30, "epochs": 2}, holdout=None)
    with pytest.raises(
        ValueError, match=r"recovery: .* must be finite, got NaN or Inf at step \d+. Lower schedule.learning_rate"
    ):
        run_oneshot(model, stage, tokenizer=str(opt))
    assert not changed(before, weights_of(model))
    assert set(dict(model.named_modules())) == names
