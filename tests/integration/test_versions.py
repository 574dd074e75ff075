"""Saved outputs in other versions of transformers: the logits of the version that wrote them, the same tokens by every cache."""

import json
import os
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from helpers.check_outputs import SAME, TOLERANCE, WAYS, is_right, load
from helpers.models import PRUNED_W8A8, ROOT, make_dataset, run_oneshot, save_model, save_wide_llama
from helpers.tokenizers import make_tokenizer
from helpers.tokenizers import save_model as save_tokenized
from safetensors.torch import save_file

from eval.coverage import make_config
from struprune_plugin import trim_vocabulary
from struprune_plugin.evaluation.text import DEMO_CALIBRATION
from struprune_plugin.model.structure.tiny import build_tiny, draw_tokens

FIXED = ("5.15.0", "5.20.2", "5.24.0")  # `make test` installs them beside the environment's own
NEWEST = os.environ.get("STRUPRUNE_NEWEST_PYTHON")  # `make newest-test`: the Python of an environment without pins
OUTPUTS = {
    "phi3 heads": ("phi3", "head"),
    **{name: (name, "value_channels") for name in ("opt", "llama", "gpt2", "falcon", "olmo2", "qwen3_5_text")},
    **{name: (name, "value_channels") for name in ("qwen3_moe", "gpt_oss", "gemma3", "lfm2", "falcon_h1")},
}
DEEP = {"qwen3_5_text": 4, "gemma3": 4, "lfm2": 8}  # layers of two kinds, of which the second comes late
QUANTISED, TRIMMED = "llama quantised", "llama trimmed"
FAST = {"importance": "magnitude", "weight_update": "none", "allocation": "uniform", "sensitivity": "none"}


@pytest.fixture(scope="session")
def outputs(tmp_path_factory):
    """name -> (folder of the dense model, folder of the pruned one), each with what this environment's transformers says."""
    place, made = tmp_path_factory.mktemp("versions"), {}
    for name, (model_type, unit) in OUTPUTS.items():
        dense, out = place / f"{model_type} dense", place / name
        model = build_tiny(make_config(model_type, DEEP.get(model_type, 2)))
        save_model(model, dense)  # the same one for each unit
        ids = draw_tokens(model.config, 8, 32)
        data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
        run_oneshot(str(dense), sparsity=0.3, attention_unit=unit, dataset=data, output_dir=str(out), **FAST)
        made[name] = dense, out
        remember(dense, out, ids[:1, :11])
    dense, out = save_wide_llama(place / "wide"), place / QUANTISED
    run_oneshot(str(dense), PRUNED_W8A8, dataset=make_dataset(8), output_dir=str(out))
    remember(dense, out, torch.arange(5, 16)[None])
    whole = save_tokenized(place / "whole", make_tokenizer("byte_level", 600))
    trim_vocabulary(whole, place / TRIMMED, DEMO_CALIBRATION, vocabulary=448)
    remember(whole, place / TRIMMED, torch.arange(5, 16)[None])
    return {**made, QUANTISED: (dense, out), TRIMMED: (whole, place / TRIMMED)}


@torch.no_grad()
def remember(dense, out, ids):
    for folder in (dense, out):
        logits = load(folder)(input_ids=ids).logits.contiguous()
        save_file({"ids": ids, "logits": logits}, folder / "expected.safetensors")


@pytest.fixture(scope="session", params=[*FIXED, "newest"])
def answers(request, outputs, tmp_path_factory):
    """What a version says of every output, by name."""
    if request.param in FIXED:
        python, place = sys.executable, ROOT / ".venv-versions" / request.param
        if not place.is_dir():
            pytest.skip(f"transformers {request.param} is not installed: run `make versions`")
    else:
        python, place = NEWEST, ROOT / "tests"
        if not NEWEST:
            pytest.skip("the newest versions are not installed: run `make newest-test`")
    own = {"PYTHONPATH": str(place), "HF_MODULES_CACHE": str(tmp_path_factory.mktemp("modules"))}
    folders = [str(folder) for pair in outputs.values() for folder in pair]
    command = [python, "-P", str(ROOT / "tests/helpers/check_outputs.py"), *folders]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert request.param not in FIXED or {each["version"] for each in said} == {request.param}
    return dict(zip(outputs, said, strict=True))


@pytest.mark.parametrize("name", [*OUTPUTS, QUANTISED, TRIMMED])
def test_outputs_are_right_in_this_version(answers, name):
    pruned = answers[name]
    if is_right(pruned):
        return
    dense = pruned["dense"]
    if "failed" in dense:
        pytest.skip(f"the dense model does not load: {dense['failed']}")
    assert "failed" not in pruned, pruned
    assert pruned["logits"] <= max(TOLERANCE, 10 * dense["logits"])
    for way in WAYS:  # a way that the dense class lacks is not asked of the pruned one
        assert isinstance(pruned[way], list) or not isinstance(dense[way], list), pruned[way]
    for way, plain in SAME:
        if isinstance(pruned[way], list) and dense[way] == dense[plain]:
            assert pruned[way] == pruned[plain], way
