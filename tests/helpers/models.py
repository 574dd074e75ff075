"""Tiny random models, data and runs that all tests share. Nothing here needs a network."""

import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

from helpers.families import make_model
from struprune_plugin import StruPruneModifier, oneshot
from struprune_plugin.cli import main as cli
from struprune_plugin.evaluation.text import DEMO_MODEL, pack_windows

ROOT = Path(__file__).parents[2]
VOCABULARY = 2048
CHEAP = {"allocation": "uniform", "sensitivity": "none"}  # takes half the time of the default
DEFAULT = {"allocation": {"rule": "error_curve", "trial_samples": 0}, "sensitivity": "fisher"}  # all of it but trials
W8A8 = "quantization_modifiers: {QuantizationModifier: {targets: [Linear], ignore: [lm_head], scheme: W8A8}}"
PRUNED_W8A8 = f"""
pruning_stage:
  pruning_modifiers:
    StruPruneModifier: {{sparsity: 0.3, sensitivity: none, allocation: uniform}}
  {W8A8}
"""
SHAPES = {  # name -> OPT configuration: the usual one, and that of OPT-350m (norms after, embeddings projected)
    "pre_norm": {},
    "post_norm": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "no_bias": {"enable_bias": False},
}


def start_cli(argv: Sequence[str], log: Path) -> multiprocessing.Process:
    """Run the command line in a process of its own, as :func:`start_process`."""
    return start_process(functools.partial(cli.main, argv), log)


def start_process(target: Callable[[], int | None], log: Path) -> multiprocessing.Process:
    """Run a function in a process of its own, a copy of this one: all that a start would import is there already.

    :param log: file that takes what is printed
    """

    def run() -> None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        torch.set_num_threads(1)  # a copy has none of this process' threads, and would wait for them
        sys.exit(target())

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def make_opt(seed: int = 0, **changes) -> OPTForCausalLM:
    torch.manual_seed(seed)
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "word_embed_proj_dim": 24,
        "ffn_dim": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "init_std": 0.2,
    }
    model = OPTForCausalLM(OPTConfig(**(config | changes))).eval()
    with torch.no_grad():  # biases and norms start at constants; give them values that matter
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model


def make_dataset(num_samples: int = 8, length: int = 32, seed: int = 1) -> Dataset:
    ids = torch.randint(4, VOCABULARY, (num_samples, length), generator=torch.Generator().manual_seed(seed))
    return pack_windows(ids)


def run_oneshot(model, recipe=None, dataset=None, **kwargs):
    """Run our oneshot with the options that make it deterministic; ``kwargs`` that it lacks go to the modifier (``precision``
    is oneshot's own, the dtype of loading).

    A modifier made here is :data:`CHEAP` but for what they say.
    """
    ours = CHEAP | {
        k: kwargs.pop(k) for k in list(kwargs) if k in StruPruneModifier.model_fields.keys() - {"precision"}
    }
    options = {"batch_size": 4, "shuffle_calibration_samples": False, "num_calibration_samples": 8} | kwargs
    return oneshot(
        model=model,
        recipe=StruPruneModifier(**ours) if recipe is None else recipe,
        dataset=make_dataset() if dataset is None else dataset,
        **options,
    )


def save_wide_opt(folder: Path) -> Path:
    """Save a tiny model whose widths a quantiser's groups of 32 divide."""
    return save_opt(folder, hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_hidden_layers=2)


def save_wide_llama(folder: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save_model(make_model("llama", **sizes), folder)


def save_opt(folder: Path, **changes) -> Path:
    return save_model(make_opt(**changes), folder)


def save_model(model, folder: Path) -> Path:
    """Save a tiny model with the demo's tokenizer."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)
    return folder


COMPRESSING = [
    "struprune_w8a8",
    "struprune_w4a16_gptq",
    "struprune_awq_w4a16",
    "struprune_lora_w4a16",
    "struprune_sparsegpt_24",
]
