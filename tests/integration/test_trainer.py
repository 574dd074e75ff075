"""Longer or wider training of an output: transformers.Trainer with peft, resumed, merged, saved, and pruned again."""

import pytest
import torch
from helpers.cuts import save_pruned
from helpers.models import make_dataset, run_oneshot, save_wide_llama
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

from struprune_plugin.model.structure.tiny import draw_tokens
from struprune_plugin.storage.manifest import read_manifest


def make_trainer(model, folder, num_steps):
    rows = [{"input_ids": row, "labels": row} for row in make_dataset(8, 16)["input_ids"]]
    settings = {"per_device_train_batch_size": 2, "save_steps": 2, "learning_rate": 1e-2, "use_cpu": True}
    arguments = TrainingArguments(str(folder), max_steps=num_steps, report_to=[], disable_tqdm=True, **settings)
    return Trainer(model, arguments, train_dataset=rows)


def adapt(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM"))  # peft finds the modules


def test_an_output_is_trained_resumed_merged_and_pruned_again(tmp_path):
    folder, out = save_wide_llama(tmp_path / "dense"), tmp_path / "out"
    run_oneshot(str(folder), sparsity=0.3, output_dir=str(out))
    make_trainer(adapt(out), tmp_path / "run", 2).train()
    trainer = make_trainer(adapt(out), tmp_path / "run", 6)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    losses = [row["train_loss"] for row in trainer.state.log_history if "train_loss" in row]
    assert trainer.state.global_step == 6
    assert all(torch.isfinite(torch.tensor(losses)))

    trainer.model.save_pretrained(tmp_path / "adapters")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(out), tmp_path / "adapters").eval()
    ids = torch.arange(4, 30)[None]
    with torch.no_grad():
        wanted, plain = loaded(input_ids=ids).logits, AutoModelForCausalLM.from_pretrained(out)(input_ids=ids).logits
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)
    assert (wanted - plain).norm() > 1e-2 * plain.norm(), "something was learnt"

    merged.save_pretrained(tmp_path / "merged")
    trainer_out = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(trainer_out(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)
    options = {"tokenizer": str(folder), "output_dir": str(tmp_path / "again")}
    run_oneshot(str(tmp_path / "merged"), sparsity=0.2, **options)
    assert abs(read_manifest(tmp_path / "again").budget.met_sparsity - 0.2) < 0.02
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.num_parameters() < merged.num_parameters()
    assert torch.isfinite(again(input_ids=ids).logits).all()


@pytest.mark.parametrize("model_type", ["gpt2", "falcon", "gpt_neox", "gemma2"])
def test_peft_finds_trains_and_merges_modules_as_of_the_dense_type(model_type, tmp_path):
    model = save_pruned(model_type, tmp_path / "out")
    ids = draw_tokens(model.config, 2, 12)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    adapted(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in adapted.parameters() if p.requires_grad)
    adapted.save_pretrained(tmp_path / "adapters")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = adapted.eval()(input_ids=ids).logits
        merged = PeftModel.from_pretrained(loaded, tmp_path / "adapters").merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)
        merged.save_pretrained(tmp_path / "merged")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
        assert torch.equal(again(input_ids=ids).logits, merged(input_ids=ids).logits)


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_heads_for_other_tasks_are_put_on_the_pruned_trunk(auto, model_type, tmp_path):
    model = save_pruned(model_type, tmp_path / "out")
    made = auto.from_pretrained(tmp_path / "out", num_labels=3).eval()
    made.config.pad_token_id = 1
    ids = draw_tokens(model.config, 2, 12)
    with torch.no_grad():
        assert made(input_ids=ids).logits.shape == (
            (2, 3) if auto is AutoModelForSequenceClassification else (2, 12, 3)
        )
        hidden = [each(input_ids=ids).last_hidden_state for each in (made.base_model, model.base_model)]
    torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-5)
