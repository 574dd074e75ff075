"""Costs of modules in a real vLLM, where its environment is: named by STRUPRUNE_VLLM_PYTHON, or made by `make serve-test`."""

import os
from pathlib import Path

import pytest
import torch
from helpers.families import make_model
from helpers.models import ROOT

from struprune_plugin.allocation.costs.engines import list_kinds
from struprune_plugin.allocation.costs.measure_costs import Change, Run
from struprune_plugin.allocation.costs.vllm_engine import VLLMEngine

PYTHON = Path(os.environ.get("STRUPRUNE_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
SIZES = {"hidden_size": 128, "intermediate_size": 4096, "num_attention_heads": 4, "num_key_value_heads": 2}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.is_file(), reason=f"vLLM is not here ({PYTHON.name} of its environment); make serve-test gets it"
    ),
]


def test_vllm_runs_every_kind_of_change_and_a_narrow_ffn_is_faster():
    model = make_model("llama", **SIZES, num_hidden_layers=2, max_position_embeddings=256)
    ffn, values, heads = list_kinds(model, ["ffn", "value_channels", "head"])
    engine = VLLMEngine(model, torch.float32, Run(("prompt", "token"), 2, 128, str(PYTHON)), 2)
    found = {
        name: engine.compare(change)
        for name, change in {
            "narrow": [Change(ffn, 512)],
            "values": [Change(values, 32)],
            "heads": [Change(heads, 1)],
            "none": [Change(ffn, 0)],
            "empty": None,
        }.items()
    }
    assert all(seconds > 0 for times in found.values() for pair in times.values() for seconds in pair)
    dense, narrow = found["narrow"]["prompt"]
    assert narrow < dense
    assert "vllm" in engine.machine
