"""SHA-256 of the weights that 13 recipes make of five tiny random models, for changes that should change no result.

OMP_NUM_THREADS=1 python -m eval.bytes --write before.json
OMP_NUM_THREADS=1 python -m eval.bytes --compare before.json    # exit status 1 if a weight differs

The bytes depend on the processor, the threads and the versions of the libraries: compare tables of one machine.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import warnings
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from loguru import logger
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import struprune_plugin
from struprune_plugin import oneshot
from struprune_plugin.reporting.tables import Table

_SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 32}
_SIZES |= {"num_attention_heads": 4, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
_GROUPED = {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "llama": _GROUPED,
    "gpt_neox": {"intermediate_size": 48},
    "qwen3_moe": _GROUPED | _EXPERTS,
    "gemma3_text": _GROUPED | {"sliding_window": 8, "query_pre_attn_scalar": 8},
}
# name -> shipped recipe, its changes; a budget is a share of the weights' bytes
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("struprune", {}),
    "fast": ("struprune", {"effort": "fast", "sparsity": 0.3, "offload": True}),
    "heads": ("struprune", {"attention_unit": "head", "reconstruct": "residual", "experts": {"widths": "per_layer"}}),
    "bytes": ("struprune", {"budget": 0.9, "sparsity": None, "importance": "wanda", "width_multiple": 4}),
    "whole experts": ("struprune", {"experts": "whole", "sparsity": 0.3}),
    "channels of experts": ("struprune", {"experts": "channels"}),
    "uniform": ("struprune_uniform", {"sparsity": 0.25}),
    "softmax": ("struprune_softmax", {}),
    "opt": ("struprune_opt", {}),
    "closed form": ("paper_closed_form", {"experts": "none", "attention_unit": "none"}),
    "snip": ("paper_snip", {"experts": "none"}),
    "distribute": ("paper_asymptotic_distribute", {"experts": "none"}),
    "int8": ("struprune_w8a8", {}),
}
SAMPLES, LENGTH = 16, 24
DEMO_MODEL = Path(struprune_plugin.__file__).parent / "demo" / "model"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--write", type=Path, metavar="FILE", help="JSON file that takes the table")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="JSON file to hold the table against")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logger.remove()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    before = json.loads(args.compare.read_text()) if args.compare else {}
    hashes, rows, differ = {}, [], 0
    for recipe in args.recipes:
        hashes[recipe] = {family: hash_weights(recipe, family) for family in args.families}
        row = [recipe]
        for family, result in hashes[recipe].items():
            is_same = not args.compare or before.get(recipe, {}).get(family) == result
            differ += not is_same
            row.append(result[:12] + ("" if is_same else " differs"))
        rows.append(row)
    print(Table(["recipe", *args.families], rows))
    for recipe, results in hashes.items():
        for family, result in results.items():
            old = before.get(recipe, {}).get(family) if args.compare else result
            if result.startswith("refused") or old != result:
                print(f"{recipe}, {family}: {result}" + ("" if old == result else f"\n    before: {old}"))
    if args.write:
        args.write.write_text(json.dumps(hashes, indent=1) + "\n")
    if args.compare:
        print(f"{differ} of {sum(map(len, hashes.values()))} differ")
    return int(differ > 0)


def hash_weights(recipe: str, family: str) -> str:
    """Return the SHA-256 of all weight files that a run writes, or ``refused:`` and its message."""
    name, changes = RECIPES[recipe]
    ids = torch.randint(4, _SIZES["vocab_size"], (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * LENGTH] * SAMPLES})
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        model = make_model(family)
        model.save_pretrained(f"{folder}/dense")
        AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(f"{folder}/dense")
        if "budget" in changes:
            changes = {**changes, "budget": {"bytes": int(changes["budget"] * 4 * model.num_parameters())}}
        try:
            oneshot(
                model=f"{folder}/dense",
                recipe=name,
                changes=changes,
                dataset=data,
                output_dir=f"{folder}/out",
                num_calibration_samples=SAMPLES,
                max_seq_length=LENGTH,
                batch_size=4,
                shuffle_calibration_samples=False,
            )
        except ValueError as error:
            return f"refused: {' '.join(str(error).split())}"
        for path in sorted(Path(folder, "out").glob("*.safetensors")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def make_model(family: str) -> PreTrainedModel:
    """Return a random decoder in float32, whose biases and norms matter."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(_SIZES | FAMILIES[family]))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if parameter.dim() == 1:
            parameter.data = parameter.data + 0.2 * noise
        elif "embed" not in name:
            parameter.data = noise / parameter.shape[-1] ** 0.5
    return model


if __name__ == "__main__":
    sys.exit(main())
