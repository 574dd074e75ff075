"""Longer or wider training of an output: transformers.Trainer with peft, resumed, merged, saved, and pruned again."""

import pytest
import torch
from helpers.models import WIDE_MODELS, make_dataset, run_oneshot
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from struprune_plugin.storage.manifest import read_manifest


def make_trainer(model, folder, num_steps):
    rows = [{"input_ids": row, "labels": row} for row in make_dataset(8, 16)["input_ids"]]
    settings = {"per_device_train_batch_size": 2, "save_steps": 2, "learning_rate": 1e-2, "use_cpu": True}
    arguments = TrainingArguments(str(folder), max_steps=num_steps, report_to=[], disable_tqdm=True, **settings)
    return Trainer(model, arguments, train_dataset=rows)


def adapt(folder):
    targets = ["q_proj", "v_proj", "fc1", "fc2", "up_proj", "down_proj"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))


@pytest.mark.parametrize("kind", WIDE_MODELS)
def test_an_output_is_trained_resumed_merged_and_pruned_again(kind, tmp_path):
    folder, out = WIDE_MODELS[kind](tmp_path / "dense"), tmp_path / "out"
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
