"""Whole experts of mixtures, from a folder to a folder: what is left gives what masked routing gives."""

import pytest
import torch
from datasets import Dataset
from helpers.mixtures import make_mixture, mask_routing
from helpers.models import run_oneshot, save_model

from struprune_plugin import read_manifest
from struprune_plugin.model.structure.tiny import draw_tokens

TYPES = {
    "qwen3_moe": "the plain kind",
    "olmoe": "norms across heads",
    "mixtral": "weights normed anew",
    "deepseek_v3": "groups of experts, a bias of the choice, a dense layer first",
    "gpt_oss": "a router with a bias, experts with biases",
    "qwen2_moe": "a shared expert",
    "qwen3_5_moe_text": "linear attention beside",
    "granitemoe": "factors on every output",
    "glm4_moe": "a bias of the choice",
    "ernie4_5_moe": "a bias of the choice in a module of its own",
    "minimax_m2": "a bias of the choice in the block",
    "phimoe": "a router of its own",
    "gemma4_text": "a router beside a dense FFN, scales of experts",
    "jamba": "layers of a state space between",
}
PLAIN = {"weight_update": "none", "attention_unit": "none", "prune_ffn": False, "sensitivity": "none"}


@pytest.fixture(scope="module", params=TYPES)
def case(request, tmp_path_factory):
    """A dense mixture, the folder of it without a quarter of its experts, and tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    dense = make_mixture(request.param)
    save_model(dense, folder / "dense")
    ids = draw_tokens(dense.config, 16, 32, seed=1)
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    options = {"dataset": data, "num_calibration_samples": 16, "output_dir": str(folder / "out")}
    pruned = (
        run_oneshot(str(folder / "dense"), experts="whole", sparsity=0.0, **options, **PLAIN)
        if 0
        else run_oneshot(str(folder / "dense"), experts="whole", sparsity=find_share(dense), **options, **PLAIN)
    )
    return dense, pruned.eval(), folder / "out", ids[:2]


def find_share(dense):
    """Return the sparsity that two of eight experts are."""
    import copy

    from struprune_plugin.model.experts import take_apart
    from struprune_plugin.model.layers import count_prunable_parameters

    copied = copy.deepcopy(dense)
    take_apart(copied)
    every, without = (count_prunable_parameters(copied, experts=whole) for whole in (True, False))
    return 0.25 * (every - without) / every


def test_what_is_left_gives_what_masked_routing_gives(case):
    dense, pruned, out, tokens = case
    kept = {record.name: record.keep for record in read_manifest(out).experts}
    assert all(len(keep) == 6 for keep in kept.values())
    with mask_routing(dense, kept):
        wanted = dense(tokens).logits
    assert (dense(tokens).logits - wanted).abs().max() > 1e-2  # the experts that are gone did something
    torch.testing.assert_close(pruned(tokens).logits, wanted, rtol=1e-4, atol=1e-4)
