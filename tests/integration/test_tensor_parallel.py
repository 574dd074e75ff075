"""Outputs loaded by two processes, each with its part of the heads and widths (`tp_plan`), against one process with all of it."""

import json
import os
import socket
from functools import partial

import pytest
import torch
from helpers.cuts import cut_units
from helpers.families import make_model
from helpers.models import start_process
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from struprune_plugin.export.convert import adopt_config

TYPES = {"llama": {}, "qwen3": {}, "qwen3_moe": {}, "phi3": {}, "gpt_neox": {"num_attention_heads": 4}}
UNITS = {**dict.fromkeys(TYPES, "value_channels"), "uneven": "value_channels", "heads": "head"}
IDS = torch.arange(5, 16)[None]
TOLERANCE = 1e-5  # of the largest value, in float32
VALUES = ("v_proj.weight", "qkv_proj.weight", "query_key_value.weight")


def save(name, folder):
    """Save a model that keeps two thirds of its channels, 32 of its FFNs'; ``uneven``: 29; ``heads``: 5 of 8 heads."""
    sizes = {"intermediate_size": 44 if name == "uneven" else 48, **TYPES.get(name, {})}
    sizes |= {"num_key_value_heads": 8} if name == "heads" else {}
    model = make_model(name if name in TYPES else "llama", **sizes)
    cut_units(model, UNITS[name])
    adopt_config(model)
    model.save_pretrained(folder)


def run_rank(rank, port, folders, answers):
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    distributed.init_process_group("gloo")
    found = {}
    for name, folder in folders.items():
        whole = AutoModelForCausalLM.from_pretrained(folder).eval()
        try:
            parts = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2)).eval()
        except ValueError as error:
            found[name] = str(error)
            continue
        with torch.no_grad():
            logits, wanted = (model(input_ids=IDS).logits for model in (parts, whole))
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
        tokens = [model.generate(IDS, **options).tolist() for model in (parts, whole)]
        gradients = []
        for model in (parts, whole):
            model(input_ids=IDS, labels=IDS).loss.backward()
            gradients.append(next(p.grad for n, p in model.named_parameters() if n.endswith(VALUES)))
        found[name] = [measure(logits, wanted), measure(*gradients), tokens[0] == tokens[1]]
    distributed.barrier()
    distributed.destroy_process_group()
    (answers / f"{rank}").write_text(json.dumps(found))


def measure(value, wanted):
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return ((value - wanted).abs().max() / wanted.abs().max()).item()


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each of two processes found, by name of the model."""
    folders = {name: tmp_path_factory.mktemp(name) for name in UNITS}
    for name, folder in folders.items():
        save(name, folder)
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    log = tmp_path_factory.mktemp("logs")
    told = tmp_path_factory.mktemp("answers")
    processes = [start_process(partial(run_rank, rank, port, folders, told), log / f"{rank}") for rank in range(2)]
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0], (log / "0").read_text() + (log / "1").read_text()
    return [json.loads((told / f"{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", TYPES)
def test_two_processes_give_what_one_gives(answers, name):
    for found in answers:
        logits, gradient, same = found[name]
        assert logits <= TOLERANCE
        assert gradient <= TOLERANCE
        assert same, "tokens"


@pytest.mark.parametrize(
    ("name", "linear", "size"), [("uneven", "mlp.down_proj", 29), ("heads", "self_attn.k_proj", 5)]
)
def test_what_two_processes_cannot_share_is_refused(answers, name, linear, size):
    wanted = f"model.layers.0.{linear}: must have heads or channels that tp_size=2 divides, got {size}. Choose another"
    assert all(found[name].startswith(wanted) for found in answers), answers
