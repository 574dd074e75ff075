"""What users do with a trimmed folder: lm-eval, adapters, pruning with a quantiser, GGUF."""

import pytest
import torch
from helpers.models import PRUNED_W8A8, ROOT
from helpers.tokenizers import make_tokenizer, save_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from struprune_plugin import oneshot, trim_vocabulary
from struprune_plugin.cli import main as cli
from struprune_plugin.evaluation.scoring import check_tasks, load_checkpoint, run_tasks
from struprune_plugin.evaluation.text import DEMO_CALIBRATION
from struprune_plugin.storage.vocabulary_record import read_record

FAST = {"pruning_stage": {"pruning_modifiers": {"StruPruneModifier": {"sparsity": 0.3, "sensitivity": "none"}}}}
TEXT = {"dataset": DEMO_CALIBRATION, "num_calibration_samples": 8, "max_seq_length": 32}


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    whole = save_model(folder / "whole", make_tokenizer("byte_level", 600), hidden_size=64, intermediate_size=128)
    trim_vocabulary(whole, folder / "small", DEMO_CALIBRATION, vocabulary=448)
    return folder / "small"


def test_lm_eval_scores_it(trimmed, monkeypatch):
    monkeypatch.chdir(ROOT)
    tasks = ["struprune_demo_text"]
    results = run_tasks(
        *load_checkpoint(str(trimmed)), tasks, check_tasks(tasks, ROOT / "eval" / "tasks", False), limit=1
    )
    assert 0 < results[tasks[0]]["bits_per_byte,none"] < 20


def test_adapters_train_on_it(trimmed):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(trimmed), LoraConfig(task_type="CAUSAL_LM"))
    ids = torch.arange(5, 17).view(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_it_is_pruned_and_quantised(trimmed, tmp_path):
    oneshot(trimmed, PRUNED_W8A8, tmp_path / "out", **TEXT)
    assert read_record(tmp_path / "out") == read_record(trimmed)
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("the ship", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.quantization_config
    assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize("pruned", [False, True])
def test_gguf_holds_the_tokens_that_stay(trimmed, pruned, tmp_path):
    gguf = pytest.importorskip("gguf")
    if pruned:
        oneshot(trimmed, FAST, tmp_path / "out", **TEXT)
    source = tmp_path / "out" if pruned else trimmed
    assert cli.main(["convert", str(source), "--to", "gguf", "--output", str(tmp_path / "gguf")]) == 0
    reader, tokenizer = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf"), AutoTokenizer.from_pretrained(trimmed)
    written = reader.get_field("tokenizer.ggml.tokens").contents()
    assert written == tokenizer.convert_ids_to_tokens(range(448))
    assert reader.get_field("tokenizer.ggml.eos_token_id").contents() == tokenizer.eos_token_id
    (table,) = (tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    assert [*table.shape] == [64, 448]
    assert "vocabulary" in (tmp_path / "gguf" / "README.md").read_text()
