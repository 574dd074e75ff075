"""Modules that shrink by tensors and numbers of their own: exact, saved, loaded, pruned again, refused where a model lacks them."""

import pytest
import torch
from helpers.families import make_model
from helpers.models import CHEAP, run_oneshot, save_model
from transformers import AutoModelForCausalLM

from struprune_plugin.cli import main as cli
from struprune_plugin.storage.manifest import read_manifest

DELTA = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "linear_conv_kernel_dim": 4}
DELTA |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 8}
MAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
TYPES = {  # kind of units, share that goes, and what a tiny model of the type needs
    "lfm2": ("convolution", 0.02, {"layer_types": ["conv", "full_attention"], "conv_bias": True}),
    "qwen3_5_text": ("recurrent_heads", 0.05, DELTA),
    "bamba": ("recurrent_heads", 0.05, MAMBA),  # a norm over all heads
}


@pytest.fixture(scope="module", params=TYPES)
def pruned(request, tmp_path_factory):
    """(kind, dense folder, pruned model in memory, its folder, share that went)."""
    kind, share, changes = TYPES[request.param]
    work = tmp_path_factory.mktemp(request.param)
    folder = save_model(make_model(request.param, **changes), work / "dense")
    fields = {"units": [kind], "sparsity": share, **CHEAP}
    model = run_oneshot(str(folder), **fields, output_dir=str(work / "out")).eval()
    return kind, folder, model, work / "out", share


@torch.no_grad()
def run_with_cache(model, tokens):
    """The logits of a prompt and of the tokens after it, read one by one from a cache; and the cache."""
    made = model(tokens[:, :5], use_cache=True)
    logits = [made.logits]
    for at in range(5, tokens.shape[1]):
        made = model(tokens[:, at : at + 1], past_key_values=made.past_key_values, use_cache=True)
        logits.append(made.logits)
    return torch.cat(logits, 1), made.past_key_values


def count_state(cache):
    held = [vars(layer).get(name) for layer in cache.layers for name in ("conv_states", "recurrent_states")]
    parts = [part for one in held if one is not None for part in (one.values() if isinstance(one, dict) else [one])]
    return sum(part.numel() for part in parts if part is not None)


def test_saved_and_loaded_it_gives_the_same_with_a_smaller_cache(pruned):
    kind, dense, model, out, _ = pruned
    assert {(group.kind, group.kept < group.num_units) for group in read_manifest(out).groups} == {(kind, True)}
    loaded, whole = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (out, dense))
    tokens = torch.arange(4, 20)[None]
    wanted = model(tokens, use_cache=False).logits
    torch.testing.assert_close(loaded(tokens, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-4)
    (found, cache), (_, before) = run_with_cache(loaded, tokens), run_with_cache(whole, tokens)
    torch.testing.assert_close(found, run_with_cache(model, tokens)[0], rtol=1e-4, atol=1e-4)
    assert 0 < count_state(cache) < count_state(before)


def test_it_is_converted_to_the_stock_class_and_pruned_again(pruned, tmp_path):
    kind, _, model, out, share = pruned
    tokens = torch.arange(4, 20)[None]
    assert cli.main(["convert", str(out), "--to", "uniform-padded", "--output", str(tmp_path / "stock")]) == 0
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert type(stock).__module__.startswith("transformers.")
    torch.testing.assert_close(stock(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    again = run_oneshot(str(out), units=[kind], sparsity=share, **CHEAP, output_dir=str(tmp_path / "again")).eval()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(loaded(tokens).logits, again(tokens).logits, rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in again.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["convolution", "recurrent_heads"])
def test_kinds_that_a_model_lacks_are_refused_with_those_that_it_has(kind, save_family, tmp_path):
    with pytest.raises(
        ValueError, match=f"units: must name kinds that 'llama' has, got '{kind}'; it has value_channels, ffn"
    ):
        run_oneshot(str(save_family("llama")), units=["ffn", kind], sparsity=0.1, output_dir=str(tmp_path / "out"))


def test_one_size_for_all_layers_is_refused(pruned, tmp_path):
    kind, dense, *_ = pruned
    fields = {"units": [kind, "ffn"], "output": "uniform", "sparsity": 0.1}
    with pytest.raises(ValueError, match=f"got units: {kind}"):
        run_oneshot(str(dense), **fields, output_dir=str(tmp_path / "out"))
