"""Loaded models in any state, and what is no such model: the folder's bytes, or one line before work."""

import functools
import json
import types

import llmcompressor
import pytest
import torch
from helpers.families import make_model
from helpers.mixtures import make_mixture
from helpers.models import make_dataset, make_opt, run_oneshot, save_model
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers import AutoModel as AnyModel

from struprune_plugin import StruPruneModifier
from struprune_plugin.cli import main as cli

FIELDS = {"sparsity": 0.3, "sensitivity": "fisher", "allocation": {"rule": "error_curve", "trial_samples": 0}}


def train_mode(model):
    model.train()


def some_in_train_mode(model):
    model.model.decoder.layers[1].train()


def checkpointing(model):
    model.gradient_checkpointing_enable()
    model.train()


def reentrant_checkpointing(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model.train()
    model.config.use_cache = False


def frozen(model):
    model.requires_grad_(False)
    model.model.decoder.layers[0].fc1.weight.requires_grad_(True)


def hooked(model):
    model.model.decoder.layers[0].register_forward_hook(lambda module, args, output: output * 2)
    model.model.decoder.layers[1].fc1.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.lm_head.register_full_backward_hook(lambda module, above, below: tuple(2 * each for each in above))


def wrapped(model):
    cast = torch.autocast("cpu", dtype=torch.bfloat16)
    model.forward = types.MethodType(cast(model.forward.__func__), model)
    head = model.lm_head
    head.forward = functools.wraps(head.forward)(lambda *args: nn.Linear.forward(head, *args) * 3)


STATES = [train_mode, some_in_train_mode, checkpointing, reentrant_checkpointing, frozen, hooked, wrapped]


def describe(model):
    """What a caller has set on a model: modes, checkpointing, what learns, hooks and functions."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return (
        {name: module.training for name, module in model.named_modules()},
        {name: vars(module).get("gradient_checkpointing") for name, module in model.named_modules()},
        {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        {name: [dict(getattr(module, kind)) for kind in kinds] for name, module in model.named_modules()},
        model.config.use_cache,
    )


@pytest.fixture(scope="module")
def dropping(tmp_path_factory):
    """A model that drops out, and what its folder gives."""
    folder = save_model(
        make_opt(dropout=0.3, attention_dropout=0.2, layerdrop=0.2), tmp_path_factory.mktemp("dropping")
    )
    return folder, run_oneshot(str(folder), **FIELDS).state_dict()


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("change", STATES)
def test_the_state_of_a_loaded_model_changes_nothing_and_comes_back(change, dropping):
    folder, wanted = dropping
    model = AutoModelForCausalLM.from_pretrained(folder)
    change(model)
    before = describe(model)
    found = run_oneshot(model, **FIELDS)
    assert found is model
    assert_equal(found.state_dict(), wanted)
    assert describe(model) == before
    if change is wrapped:
        torch.testing.assert_close(found.lm_head(torch.ones(24)), 3 * wanted["lm_head.weight"].sum(1))
        assert found.model(torch.arange(4, 9)[None]).last_hidden_state.isfinite().all()
        assert "autocast" in str(found._original_forward_func.__wrapped__.__globals__["__name__"])


@pytest.mark.parametrize("change", [checkpointing, hooked])
def test_the_host_s_own_oneshot_takes_any_state_too(change, dropping):
    folder, wanted = dropping
    model = AutoModelForCausalLM.from_pretrained(folder)
    change(model)
    before = describe(model)
    options = {"batch_size": 4, "shuffle_calibration_samples": False, "num_calibration_samples": 8}
    llmcompressor.oneshot(model=model, recipe=StruPruneModifier(**FIELDS), dataset=make_dataset(), **options)
    assert_equal(model.state_dict(), wanted)
    assert describe(model) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_buffers_are_those_that_the_folder_gives(dtype, save_family, tmp_path):
    """``model.to(dtype)`` also rounds the frequencies of rotary embeddings, which no folder holds."""
    model = AutoModelForCausalLM.from_pretrained(save_family("llama")).to(dtype)
    assert model.model.rotary_emb.inv_freq.dtype == dtype
    save_model(model, tmp_path / "rounded")
    assert_equal(
        run_oneshot(model, **FIELDS).state_dict(), run_oneshot(str(tmp_path / "rounded"), **FIELDS).state_dict()
    )


def test_a_mixture_that_was_trained_with_its_routers_loss_gives_what_it_gives_without(tmp_path):
    dense = save_model(make_mixture("qwen3_moe", vocab_size=2048), tmp_path / "dense")
    wanted = run_oneshot(str(dense), **FIELDS).state_dict()
    model = AutoModelForCausalLM.from_pretrained(dense, output_router_logits=True)
    found = run_oneshot(model, output_dir=str(tmp_path / "out"), **FIELDS)
    assert_equal(found.state_dict(), wanted)
    assert found.config.output_router_logits
    assert json.loads((tmp_path / "out" / "config.json").read_text())["output_router_logits"]
    assert cli.main(["plan", str(tmp_path / "out"), "--sparsity", "0.1", "--quiet"]) == 0


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


def test_a_model_straight_from_a_trainer_gives_what_its_saved_folder_gives(dropping, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(dropping[0])
    rows = [{"input_ids": row, "labels": row} for row in make_dataset(4, 16)["input_ids"]]
    settings = {"use_cpu": True, "bf16": True, "gradient_checkpointing": True, "report_to": [], "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path / "run"), max_steps=2, disable_tqdm=True, **settings)
    Trainer(model, arguments, train_dataset=rows, callbacks=[Stop()]).train()
    save_model(model, tmp_path / "trained")
    before = describe(model)
    found = run_oneshot(model, **FIELDS)
    assert_equal(found.state_dict(), run_oneshot(str(tmp_path / "trained"), **FIELDS).state_dict())
    assert describe(model) == before
    assert model.training


def test_a_failed_run_gives_the_state_back(dropping, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(dropping[0])
    reentrant_checkpointing(model)
    before = describe(model)

    def fail(*_args, **_kwargs):
        raise RuntimeError("solver broke")

    monkeypatch.setattr("struprune_plugin.pruning.reconstruction.solve_kept_weights", fail)
    with pytest.raises(RuntimeError, match="solver broke"):
        run_oneshot(model, **FIELDS)
    assert describe(model) == before


def replace_by_lambda(model):
    model.model.layers[1].mlp.forward = lambda hidden: hidden
    return r"model.layers.1.mlp.forward must be its class', got another function, <lambda>"


def replace_by_partial(model):
    model.model.layers[0].self_attn.forward = functools.partial(lambda scale, hidden, **_: (hidden, None), 2)
    return r"model.layers.0.self_attn.forward must be its class', got another function, partial"


def replace_on_the_model(model):
    def run(*args, **kwargs):
        return None

    model.forward = run
    return r"LlamaForCausalLM.forward must be its class', got another function, run"


@pytest.mark.parametrize("change", [replace_by_lambda, replace_by_partial, replace_on_the_model])
def test_a_forward_that_is_a_plain_function_is_refused_by_its_module(change, save_family):
    model = AutoModelForCausalLM.from_pretrained(save_family("llama"))
    with pytest.raises(ValueError, match=change(model)):
        run_oneshot(model, sparsity=0.3)


# -- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A dense folder and its pruned output."""
    place = tmp_path_factory.mktemp("outputs")
    dense = save_model(make_model("llama"), place / "dense")
    run_oneshot(str(dense), sparsity=0.3, output_dir=str(place / "out"))
    return {"dense": dense, "pruned": place / "out"}


def inject(model, config):
    model.add_adapter(config, "mine")
    return model


@pytest.mark.parametrize("kind", ["dense", "pruned"])
@pytest.mark.parametrize(
    ("adapt", "told"),
    [
        (inject, r"must carry no adapters, got mine on .*q_proj.*merge_and_unload"),
        (lambda model, config: get_peft_model(model, config, "mine"), r"no adapters, got mine\. .*merge_and_unload"),
        (lambda model, config: get_peft_model(model, config, "mine").base_model.model, r"got mine on .*q_proj"),
    ],
)
def test_a_model_that_carries_an_adapter_is_refused_by_its_name(adapt, told, kind, outputs):
    model = AutoModelForCausalLM.from_pretrained(outputs[kind])
    with pytest.raises(ValueError, match=told):
        run_oneshot(adapt(model, LoraConfig(target_modules=["q_proj"])), sparsity=0.2)


@pytest.mark.parametrize("kind", ["dense", "pruned"])
def test_an_adapter_beside_the_weights_is_refused_by_every_command(kind, outputs, tmp_path, capsys):
    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_pretrained(outputs[kind])
    save_model(model, folder)
    inject(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    for command in (
        ["plan", str(folder), "--sparsity", "0.3"],
        ["prune", str(folder), "--recipe", "struprune_uniform", "--output", str(tmp_path / "out")],
        ["eval", str(folder)],
        ["convert", str(folder), "--to", "uniform-padded", "--output", str(tmp_path / "out")],
        ["sweep", str(folder), "--output", str(tmp_path / "out")],
    ):
        assert cli.main(command) == 2
        told = capsys.readouterr().err
        assert "adapter_config.json" in told
        assert "merge_and_unload" in told
    assert not (tmp_path / "out").exists()
    options = {"model": str(folder), "dataset": make_dataset(), "num_calibration_samples": 8}
    with pytest.raises(ValueError, match="must carry no adapters"):
        llmcompressor.oneshot(recipe=StruPruneModifier(sparsity=0.3), output_dir=str(tmp_path / "out"), **options)


# -- other architectures ---------------------------------------------------------------------------------------------


OTHERS = {
    "BertForMaskedLM": ("bert", {}),
    "BertModel": ("bert", {}),
    "BartForConditionalGeneration": ("bart", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}),
    "T5ForConditionalGeneration": ("t5", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1}),
    "WhisperForConditionalGeneration": ("whisper", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}),
    "LlamaForSequenceClassification": ("llama", {"tie_word_embeddings": True}),
    "GemmaForTokenClassification": ("gemma", {}),
    "Qwen3Model": ("qwen3", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_causal_language_model_is_refused_by_its_name_before_its_weights(name, tmp_path, capsys):
    model_type, sizes = OTHERS[name]
    AutoConfig.for_model(model_type, architectures=[name], **sizes).save_pretrained(tmp_path / "model")  # no weights
    for command in (["plan"], ["prune", "--output", str(tmp_path / "out")], ["eval"]):
        assert cli.main([command[0], str(tmp_path / "model"), *command[1:]]) == 2
        assert f"must be a causal language model, got {name} (architectures" in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["bart", "roberta", "mt5", "clip"])
def test_a_folder_that_names_no_class_is_judged_by_its_type(model_type, tmp_path, capsys):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    assert cli.main(["plan", str(tmp_path)]) == 2
    told = f"must be a causal language model, got one of the type {model_type} without architectures"
    assert told in capsys.readouterr().err


def test_a_loaded_model_of_another_task_is_refused_by_its_class(outputs):
    for folder in outputs.values():
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        with pytest.raises(ValueError, match="must be a causal language model, got LlamaForSequenceClassification"):
            run_oneshot(model, sparsity=0.2)
    with pytest.raises(ValueError, match="must be a causal language model, got LlamaModel "):
        run_oneshot(AnyModel.from_pretrained(outputs["dense"]), sparsity=0.2)


@pytest.mark.parametrize(
    "names", [None, [], ["LLaMAForCausalLM"], ["LlamaModel", "LlamaForCausalLM"], ["MistralForCausalLM"]]
)
def test_names_that_say_nothing_against_a_model_pass(names, outputs, tmp_path):
    config = json.loads((outputs["dense"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": names}))
    assert cli.main(["plan", str(tmp_path), "--sparsity", "0.3", "--quiet"]) == 0


# -- outputs that were changed in memory -----------------------------------------------------------------------------


def resize_the_head(model):
    model.lm_head = nn.Linear(32, 100, bias=False)
    return r"lm_head.weight must have the shape \[2048, 32\] that .*got \[100, 32\]"


def drop_a_layer(model):
    model.model.layers = model.model.layers[:1]
    return r"model.layers.1.* must have the shape .*got None"


def widen_a_linear(model):
    linear = model.model.layers[0].mlp.down_proj
    linear.weight = nn.Parameter(torch.zeros(32, linear.in_features + 1))
    return r"model.layers.0.mlp.down_proj.weight must have the shape"


def cut_a_norm(model):
    model.model.norm.weight = nn.Parameter(torch.ones(16))
    return r"model.norm.weight must have the shape \[32\]"


@pytest.mark.parametrize("kind", ["dense", "pruned"])
@pytest.mark.parametrize("change", [resize_the_head, drop_a_layer, widen_a_linear, cut_a_norm])
def test_an_output_changed_in_memory_is_refused_as_a_dense_model_is(change, kind, outputs):
    model = AutoModelForCausalLM.from_pretrained(outputs[kind])
    with pytest.raises(ValueError, match=change(model)):
        run_oneshot(model, sparsity=0.2)
