"""LoRA under one layer: equal to the ordinary way, and what the stage promises."""

import copy
import json
from dataclasses import replace

import pytest
import torch
import yaml
from datasets import Dataset
from helpers.families import make_model
from helpers.models import CHEAP, make_dataset, make_opt, run_oneshot
from helpers.recovery_loop import changed, measure_loss, train_plainly, weights_of
from llmcompressor import oneshot as host_oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from loguru import logger
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, OPTForCausalLM

from eval.account import CountedContext
from struprune_plugin import LoRARecoveryModifier, StruPruneModifier, read_manifest
from struprune_plugin.model.layers import find_decoder_layers, find_layouts
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.recovery import training
from struprune_plugin.recovery.training import (
    Adapters,
    AdapterTraining,
    RecoveryConfig,
    Schedule,
    attach_adapters,
    make_micro_batches,
    match_linears,
)
from struprune_plugin.runtime.device_context import DeviceContext

SOME = Adapters(rank=4, alpha=8.0)
FAST = {"learning_rate": 2e-2, "decay": "constant", "warmup_fraction": 0.0}


def recover(opt, dataset=None, prune=True, **fields):
    """Prune to 0.3 and train; return (model, modifier)."""
    stage = make_stage(**{**fields, "schedule": {"epochs": 1} | fields.get("schedule", {})})
    recipe = [StruPruneModifier(sparsity=0.3, **CHEAP), stage] if prune else [stage]
    return run_oneshot(opt if isinstance(opt, nn.Module) else str(opt), recipe, dataset), stage


def make_stage(schedule=None, **fields):
    return LoRARecoveryModifier(**({"batch_size": 2, "schedule": FAST | (schedule or {})} | fields))


# -- equal to a plain loop ----------------------------------------------------------------------------------------


def draw(num_samples, length=12, seed=3, vocabulary=100):
    ids = torch.randint(4, vocabulary, (num_samples, length), generator=torch.Generator().manual_seed(seed))
    return list(ids)


def make_training(model, parameters, context=None, micro_size=2, **fields):
    return AdapterTraining(model, parameters, RecoveryConfig(**fields), micro_size, context or DeviceContext())


TYPES = ["opt", "gemma2", "granite", "phi3", "gpt_neox", "qwen3_moe"]


@pytest.mark.parametrize("model_type", TYPES)
def test_gradients_equal_those_of_the_whole_model(model_type):
    """Float64; soft caps, scaled logits, biases of the head, fused projections, parallel residuals, experts."""
    model = make_opt() if model_type == "opt" else make_model(model_type)
    model = model.double()
    model.config._experts_implementation = "eager"  # the grouped product knows no float64
    samples = [*draw(3), *draw(2, 7)]
    with attach_adapters(model, match_linears(model, SOME), SOME) as adapters:
        for adapter in adapters:
            adapter.data.normal_(0, 0.1)
        wanted_loss = sum(measure_loss(model, sample) for sample in samples)
        wanted = torch.autograd.grad(wanted_loss, adapters, materialize_grads=True)
        training = make_training(model, adapters)
        loss = training.accumulate_gradients(samples)
        assert loss == pytest.approx(wanted_loss.item(), rel=1e-6)
        assert training.measure(samples) == pytest.approx(loss / (3 * 11 + 2 * 6), rel=1e-6)
        for adapter, gradient in zip(adapters, wanted, strict=True):
            found = torch.zeros_like(gradient) if adapter.grad is None else adapter.grad
            error = (found - gradient).abs().max()  # some classes normalise in float32, whatever the dtype
            assert error <= 1e-5 * gradient.abs().max() + 1e-9, model_type


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_ten_steps_equal_the_plain_loop(decay):
    """Float64, micro-batches of two; the first step has a rate above zero."""
    ours = make_opt().double()
    theirs = copy.deepcopy(ours)
    lora, samples = Adapters(rank=3, alpha=6.0), draw(5)
    schedule = Schedule(epochs=5, learning_rate=1e-2, decay=decay, warmup_fraction=0.2)
    config = RecoveryConfig(adapters=lora, schedule=schedule, batch_size=3, holdout=None)
    rates = []
    with attach_adapters(ours, match_linears(ours, lora), lora) as adapters:
        training = AdapterTraining(ours, adapters, config, 2, DeviceContext())
        take = training.take_step

        def watch(chosen, step, moved):
            rates.append(moved.param_groups[0]["lr"])
            batches.append(chosen)
            return take(chosen, step, moved)

        batches, training.take_step = [], watch
        curve = training.run(samples, [])
    with attach_adapters(theirs, match_linears(theirs, lora), lora) as adapters:
        wanted = train_plainly(theirs, adapters, batches, rates)
    assert curve.losses == pytest.approx(wanted, rel=1e-9)
    assert [len(batch) for batch in batches] == [3, 2] * 5
    assert curve.tokens_seen == 5 * 5 * 11
    assert rates[:2] == [0.005, 0.01]
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert min(rates) > 0, "no step is lost"
    assert (rates[-1] < 0.002) == (decay != "constant")
    first, second = weights_of(ours), weights_of(theirs)
    assert max((first[name] - second[name]).abs().max() for name in first) < 1e-8
    assert changed(first, weights_of(make_opt().double())), "they have learnt"


def test_a_step_holds_one_layer_whatever_the_depth_and_the_number_of_sequences():
    peaks = {}
    for layers, num_samples in ((2, 2), (4, 2), (4, 8)):
        sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 512, "num_hidden_layers": layers}
        model = make_opt(**sizes).bfloat16()
        layer = sum(p.numel() * p.element_size() for p in find_decoder_layers(model)[0][1].parameters())
        with CountedContext.open() as context, attach_adapters(model, match_linears(model, SOME), SOME) as adapters:
            training = make_training(model, adapters, context, 1)
            with context.stage("step"):
                training.accumulate_gradients(draw(num_samples, 8))
        peaks[layers, num_samples] = context.stages["step"].peak_bytes / layer
    assert peaks[4, 2] < peaks[2, 2] + 0.5
    assert peaks[4, 8] < 1.01 * peaks[4, 2]


def test_micro_batches_hold_every_sample_once_with_others_of_its_length():
    samples = [torch.full((length,), number) for number, length in enumerate((3, 5, 3, 3, 5, 2))]
    batches = make_micro_batches(samples, 2)
    assert sorted(int(row[0]) for batch in batches for row in batch) == list(range(6))
    assert [batch.shape for batch in batches] == [(2, 3), (1, 3), (2, 5), (1, 2)]


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


def test_a_model_without_such_linears_is_refused_before_any_work(opt, monkeypatch):
    """As Zamba 2, whose layers share their attention and FFNs: its mixers get no adapters."""

    def find_none(model):
        return [(layer, replace(layout, units=())) for layer, layout in find_layouts(model)]

    monkeypatch.setattr(training, "find_layouts", find_none)
    with pytest.raises(ValueError, match="must have attention or FFNs that hold units"):
        run_oneshot(str(opt), LoRARecoveryModifier())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_merged_untrained_change_nothing(dtype):
    model = make_opt().to(dtype)
    model.lm_head.weight.requires_grad_(False)
    names, parameters = match_linears(model, SOME), dict(model.named_parameters())
    before, modules, shell = weights_of(model), dict(model.named_modules()), set(vars(model))
    required = {name: parameter.requires_grad for name, parameter in parameters.items()}
    with attach_adapters(model, names, SOME) as adapters:
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


# -- the stage ----------------------------------------------------------------------------------------------------


def test_training_lowers_the_held_out_loss_and_keeps_the_best_epoch(opt, prune_once):
    rows = make_dataset(2, 24)["input_ids"][:] * 4  # the held-out sample is among the others too
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 24] * 8})
    how = {"schedule": {"epochs": 3}, "holdout": {"fraction": 0.2}}
    model, stage = recover(prune_once(opt, "value_channels")[1], data, prune=False, **how)
    record = stage._record
    losses = [row["loss"] for row in record["holdout"]]
    assert [row["step"] for row in record["holdout"]] == [0, 3, 6, 9]
    assert min(losses) < 0.95 * losses[0]
    assert record["best_step"] == 3 * losses.index(min(losses))
    assert record["samples"] == {"trained": 6, "held_out": 2}
    held_out = torch.tensor(rows[-2:])
    with torch.no_grad():
        merged = sum(measure_loss(model, sample) for sample in held_out) / (2 * 23)
    assert merged.item() == pytest.approx(min(losses), rel=1e-3)


def test_where_no_epoch_is_better_nothing_changes(opt, monkeypatch):
    """The last step, in the midst of an epoch, is measured, too."""
    monkeypatch.setattr(AdapterTraining, "measure", lambda _self, _samples, step: float(step))
    model, stage = recover(opt, prune=False, schedule={"epochs": 3, "max_steps": 5})
    assert stage._record["best_step"] == 0
    assert stage._record["steps"] == 5
    assert [row["step"] for row in stage._record["holdout"]] == [0, 4, 5]
    assert not changed(weights_of(OPTForCausalLM.from_pretrained(opt)), weights_of(model))


def test_pruned_and_recovered_model_saves_reloads_and_tells_its_curve(opt, tmp_path):
    recipe = [StruPruneModifier(sparsity=0.3, **CHEAP), make_stage()]
    model = run_oneshot(str(opt), recipe, output_dir=str(tmp_path / "out"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(4, 30)[None]
    assert torch.equal(model(ids).logits, again(ids).logits)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.groups
    assert abs(manifest.budget.met_sparsity - 0.3) < 0.005
    recovery = manifest.recovery
    assert recovery.settings["adapters"]["rank"] == 8
    assert recovery.steps == 8
    assert len(recovery.losses) == 8
    assert recovery.tokens_seen == 2 * 7 * 31
    assert [row["step"] for row in recovery.holdout] == [0, 4, 8]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "struprune_opt"


@pytest.mark.parametrize("masked", [False, True])
def test_labels_that_leave_tokens_out_are_told_to_have_no_effect(masked, opt):
    ids = torch.stack(draw(4))
    labels = ids.masked_fill(torch.arange(12) < 5, -100) if masked else ids
    loader, said = DataLoader([{"input_ids": ids, "labels": labels}], batch_size=None), []
    handle = logger.add(said.append, level="WARNING", format="{message}")
    recover(opt, loader, prune=False, holdout=None, schedule={"max_steps": 1})
    logger.remove(handle)
    assert any("labels have no effect" in line for line in said) == masked


def test_without_pruning_the_stage_saves_and_writes_no_manifest(opt, tmp_path):
    stage = make_stage(holdout=None)
    model = run_oneshot(str(opt), stage, output_dir=str(tmp_path / "out"))
    again = OPTForCausalLM.from_pretrained(tmp_path / "out")
    assert not changed(weights_of(model), weights_of(again))
    assert not (tmp_path / "out" / "struprune.json").exists()


def test_quantising_afterwards_in_the_same_recipe_saves_and_reloads(opt, tmp_path):
    quantiser = QuantizationModifier(targets=["Linear"], ignore=["lm_head"], scheme="W8A8")
    recipe = [StruPruneModifier(sparsity=0.3, **CHEAP), make_stage(holdout=None), quantiser]
    run_oneshot(str(opt), recipe, output_dir=str(tmp_path / "out"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert read_manifest(tmp_path / "out").recovery.steps == 8
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    plain, _ = recover(opt, schedule={"epochs": 2}, holdout=None)
    ids = torch.arange(4, 30)[None]
    with torch.no_grad():
        quantised, exact = model(ids).logits, plain(ids).logits
    assert (quantised - exact).norm() < 0.1 * exact.norm(), "scales are those of the merged weights"


def test_same_seed_same_weights(opt):
    fields = {"holdout": None, "prune": False}
    first, again, other = (recover(opt, seed=seed, **fields)[0] for seed in (1, 1, 2))
    assert not changed(weights_of(first), weights_of(again))
    assert changed(weights_of(first), weights_of(other))


def test_recovery_of_a_pruned_folder_reaches_its_manifest(opt, tmp_path):
    few = {"num_calibration_samples": 8}
    run_oneshot(str(opt), sparsity=0.3, output_dir=str(tmp_path / "pruned"), **few)
    recovery = LoRARecoveryModifier(adapters={"rank": 2}, schedule={"epochs": 1}, holdout=None)
    run_oneshot(str(tmp_path / "pruned"), recipe=recovery, output_dir=str(tmp_path / "out"), **few)
    before, after = read_manifest(tmp_path / "pruned"), read_manifest(tmp_path / "out")
    assert after.recovery.settings["adapters"]["rank"] == 2
    assert after.groups == before.groups
    assert before.recovery is None


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapters": {"alpha": float("inf")}}, "adapters.alpha must .*finite"),
        ({"adapters": {"targets": ["re:("]}}, "adapters.targets.0 must be a name or a valid pattern"),
        ({"schedule": {"decay": "step"}}, "schedule.decay must .*'cosine', 'linear' or 'constant'"),
        ({"schedule": {"warmup_fraction": 1}}, "schedule.warmup_fraction must .*less than 1"),
        ({"holdout": {"fraction": 1.0}}, "holdout.fraction must .*less than 1"),
        ({"optimizer": {"weight_decay": 0.1}}, "optimizer is not a field"),
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
            "adapters.targets: .* got 'gate_proj' that matches none. Use q_proj",
        ),
        ({"adapters": {"targets": ["re:.*lm_head"]}}, {}, "got 're:.*lm_head' that matches none"),
        ({}, {"dataset": make_dataset(4, 1)}, "must leave a sequence of two tokens to train on, got 0 of them"),
        ({}, {"dataset": make_dataset(1)}, "must leave a sequence .* got 1 of them, 1 held out"),
        ({"holdout": {"fraction": 0.97}}, {}, "must leave a sequence .* got 8 of them, 8 held out"),
        ({}, {"dataset": make_dataset(4, 65)}, "at most 64 tokens long, the model's number of positions, got 65"),
    ],
)
def test_refused_before_any_work(opt, fields, options, message, tmp_path):
    stage = LoRARecoveryModifier(**fields)
    with pytest.raises(ValueError, match=message):
        run_oneshot(str(opt), stage, output_dir=str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "dataset: calibration text must be given, got none"),
        (
            {"dataset": make_dataset(), "pipeline": "sequential", "num_calibration_samples": 8},
            "LoRARecoveryModifier must have a calibration pass of its own",
        ),
    ],
)
def test_the_host_s_own_oneshot_refuses_too(opt, options, message):
    quantiser = QuantizationModifier(targets=["Linear"], ignore=["lm_head"], scheme="W8A8")
    with pytest.raises(ValueError, match=message):
        host_oneshot(model=str(opt), recipe=[LoRARecoveryModifier(), quantiser], **options)


def test_a_diverging_run_says_so_and_leaves_the_model_whole(opt):
    model = OPTForCausalLM.from_pretrained(opt)
    before, names = weights_of(model), set(dict(model.named_modules()))
    stage = make_stage(schedule={"learning_rate": 1e30, "epochs": 2}, holdout=None)
    with pytest.raises(ValueError, match=r"recovery: .* must be finite, .* at step \d+. Lower schedule.learning_rate"):
        run_oneshot(model, stage, tokenizer=str(opt))
    assert not changed(before, weights_of(model))
    assert set(dict(model.named_modules())) == names
