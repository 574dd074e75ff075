"""``python -m eval.train_moe_model`` on a tiny random LLaMA model: a stock folder, the same each time."""

import shutil

import pytest
import torch
from helpers.families import make_model
from helpers.models import save_model
from transformers import AutoModelForCausalLM

from eval.split_ffn import Sizes, split_ffn
from eval.train_moe_model import CALIBRATION, TESTS, TRAINING, convert, main
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_TEST


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name in (CALIBRATION, TRAINING):
        shutil.copy(DEMO_CALIBRATION, folder / name)
    for name in TESTS.values():
        shutil.copy(DEMO_TEST, folder / name)
    return folder


def test_moe_model_is_stock_and_the_same_each_time(texts, tmp_path, capsys):
    dense = save_model(make_model("llama", tie_word_embeddings=True), tmp_path / "dense")
    sizes = ["--experts", "4", "--active", "2", "--shared", "1", "--calibration", "8", "--steps", "2"]
    for out in ("first", "second"):
        main(["--model", str(dense), "--data", str(texts), "--output", str(tmp_path / out), *sizes])
    assert "as saved" in capsys.readouterr().out
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "first", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for layer in model.model.layers:
        assert layer.mlp.experts.down_proj.shape == (4, 32, 44 // 5)
        assert layer.mlp.gate.e_score_correction_bias.any()
    files = sorted(file.name for file in (tmp_path / "first").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "second").iterdir())
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


@torch.no_grad()
def test_converted_model_computes_what_the_split_one_does():
    sizes = Sizes(experts=4, active=2, shared=1, width=8)
    model = make_model("llama", tie_word_embeddings=True).to(torch.bfloat16).float()  # the output is rounded
    for layer in model.model.layers:
        layer.mlp = split_ffn(layer.mlp, torch.randn(300, 32), sizes)
        layer.mlp.router.copy_(layer.mlp.router.bfloat16())
        layer.mlp.bias.copy_(torch.tensor([0.03, 0.0, -0.02, 0.01]))
    ids = torch.arange(4, 68)[None]
    got = convert(model, sizes).float().eval()(input_ids=ids).logits
    torch.testing.assert_close(got, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
