"""Check that a pruned folder equals the dense model with zeros in place of the removed units, and is exact when saved again.

python -m eval.equivalence --dense MODEL --pruned out/opt-lab-30
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from struprune_plugin import read_manifest
from struprune_plugin.linalg.second_moments import append_bias
from struprune_plugin.model.experts import pack_experts, take_apart
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import mask_group, read_consumer, read_weight
from struprune_plugin.model.units import find_groups
from struprune_plugin.reporting.tables import format_table
from struprune_plugin.storage.manifest import Manifest


def mask_dense(dense: PreTrainedModel, pruned: PreTrainedModel, manifest: Manifest) -> None:
    """Give the dense model the pruned one's weights at the manifest's indices, and zeros elsewhere."""
    sliced = dict(pruned.named_parameters())
    for name, parameter in dense.named_parameters():
        if name in sliced and parameter.shape == sliced[name].shape:  # queries and keys: what ADMM may have changed
            parameter.data.copy_(sliced[name].data)
    keep = {record.name: torch.tensor(record.keep) for record in manifest.groups}
    kinds = [record.kind for record in manifest.groups]
    unit: Any = next((kind for kind in kinds if kind not in ("ffn", "experts")), "none")
    if "experts" in kinds:
        take_apart(dense)
        take_apart(pruned)
    pairs = [find_groups(m, unit, "ffn" in kinds, prune_experts="experts" in kinds) for m in (dense, pruned)]
    for group, smaller in zip(*pairs, strict=True):
        if group.name not in keep:
            continue
        source = pruned.get_submodule(group.layer_name)
        new = {name: append_bias(*read_weight(find_linear(source, name))) for name in group.producers}
        layer = dense.get_submodule(group.layer_name)
        mask_group(layer, group, keep[group.name], read_consumer(source, smaller), new)
    pack_experts(pruned)


@torch.no_grad()
def compare(dense_path: str, pruned_path: str) -> list[list[str]]:
    def load(path: str, **options: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()

    pruned, masked = load(pruned_path), load(dense_path)
    mask_dense(masked, pruned, read_manifest(pruned_path))
    ids = torch.randint(4, pruned.config.vocab_size, (4, 200), generator=torch.Generator().manual_seed(0))
    logits = pruned(ids).logits

    def difference(other: PreTrainedModel) -> str:
        return f"{(logits - other(ids).logits).abs().max():.2e}"

    rows = [["against zero masks, largest logit difference", difference(masked)]]
    with tempfile.TemporaryDirectory() as scratch:
        pruned.save_pretrained(scratch)
        rows.append(["saved and reloaded, largest logit difference", difference(load(scratch))])
    rows.append(
        ["sdpa against eager, largest logit difference", difference(load(pruned_path, attn_implementation="eager"))]
    )
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    cached, plain = (pruned.generate(ids[:, :32], use_cache=use, **options) for use in (True, False))
    rows.append(["generate with and without cache", "identical" if torch.equal(cached, plain) else "DIFFERENT"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", required=True)
    parser.add_argument("--pruned", required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(format_table([args.pruned, "result"], compare(args.dense, args.pruned)))


if __name__ == "__main__":
    main()
