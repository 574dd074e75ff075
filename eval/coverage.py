"""Check which causal-LM types of transformers are pruned correctly: one row per type, on tiny random instances of its class.

python -m eval.coverage                                   # every type, on the CPU
python -m eval.coverage --only llama gpt_oss --markdown   # rows for a page

A row has these stages: an instance is built and runs; its units are found; 30 % are removed, of the FFN alone and of all units;
the pruned model equals the dense one with zeros in the same places; the saved folder loads to the same function, in our
class and, with ``output: uniform``, in transformers' own; it generates the same tokens with a cache as without; it is
pruned again. The error of a stage is the row's verdict.
"""

import argparse
import io
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eval.hybrids import count_state
from struprune_plugin import StruPruneModifier, oneshot, read_manifest
from struprune_plugin.evaluation.text import DEMO_MODEL, pack_windows
from struprune_plugin.export.any_class import replace_conv1d
from struprune_plugin.linalg.second_moments import append_bias
from struprune_plugin.model.experts import linearize_experts, pack_experts
from struprune_plugin.model.groups import list_groups
from struprune_plugin.model.layers import count_prunable_parameters, find_linear
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.tiny import build_tiny, draw_tokens, find_class
from struprune_plugin.model.surgery import blank_group, mask_group, read_consumer, read_weight, set_weight
from struprune_plugin.model.unit_kind import list_kinds
from struprune_plugin.reporting.tables import Table
from struprune_plugin.storage.manifest import Manifest

LAYERS = 8
SPARSITY, FEW = 0.3, 0.05
QUICK: dict[str, Any] = {"allocation": "uniform", "sensitivity": "none"}
_NOT_DECODERS = {  # of today's kind -> types
    "encoder": "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod xlm xlnet",
    "decoder half of an encoder–decoder": "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus "
    "plbart prophetnet trocr whisper",
    "state space or recurrence alone": "mamba mamba2 falcon_mamba rwkv xlstm",
    "no plain path from text to text": "musicgen musicgen_melody git blt",
    "drafts from another model's cache": "gemma4_assistant gemma4_unified_assistant",
    "hashed attention over positions in two axes": "reformer",
}
NOT_DECODERS = {name: kind for kind, names in _NOT_DECODERS.items() for name in names.split()}
EXTRA = ("mistral3",)  # known to AutoModelForImageTextToText alone

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_COMPASS = _ROPE | {"mrope_section": [22, 22, 20]}
_QSA: dict[str, Any] = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048}
_QSA |= {"indexer_compress_ratio": 4, "eos_token_id": 248044, "ple_layer_ids": [2]}
_QSA |= {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}}
# what default configurations leave open, or only say for their own number of layers
OPEN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [3, 7]},
    "cohere_compass_text": {"rope_parameters": {f"{kind}_attention": {**_COMPASS} for kind in ("full", "sliding")}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "deepseek_v2": {
        **{"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
        "first_k_dense_replace": 1,
    },
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6, "<|visual token 000000|>": 7}},
    "gemma3n_text": {"num_kv_shared_layers": 3},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "mamba", "attention"] * (LAYERS // 4)},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * (LAYERS // 4)},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * (LAYERS // 4)},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"] * (LAYERS // 4)},
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "zamba": {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba"] * (LAYERS // 4)},
    "zamba2": {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba"] * (LAYERS // 4)},
}


def make_config(model_type: str, layers: int = LAYERS) -> PreTrainedConfig:
    """Return a type's configuration in its default sizes, with few layers where it takes any number.

    :raises ValueError: and others, as the class refuses it
    """
    kind, changes = CONFIG_MAPPING[model_type], OPEN.get(model_type, {})
    name = kind.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    fewer = {**changes, name: layers}
    if "text_config" in kind.sub_configs:
        text = dict(changes.get("text_config", {}))
        fewer = {**changes, "text_config": {**OPEN.get(f"{model_type}_text", {}), **text, "num_hidden_layers": layers}}
    try:
        return kind(**fewer)
    except Exception:
        return kind(**changes)


class Case:
    """One type on its way through the stages."""

    def __init__(self, model_type: str, work: Path, layers: int = LAYERS) -> None:
        self.work = work
        self.config = make_config(model_type, layers)
        self.dense = work / "dense"
        known = type(self.config) in MODEL_FOR_CAUSAL_LM_MAPPING
        self.auto: Any = AutoModelForCausalLM if known else AutoModelForImageTextToText

    @cached_property
    def tiny(self) -> Any:
        """The instance, saved in :attr:`dense`: of the wrapper's class, read as text, where its text class is not to be loaded."""
        is_wrapped = (
            self.auto is AutoModelForCausalLM and type(find_class(self.config)[1]) not in self.auto._model_mapping
        )
        kind = AutoModelForImageTextToText._model_mapping[type(self.config)] if is_wrapped else None
        model = build_tiny(self.config, model_class=kind)
        model.save_pretrained(self.dense)
        AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(self.dense)
        return self.load(self.dense) if is_wrapped else model

    @cached_property
    def tokens(self) -> Tensor:
        return draw_tokens(self.tiny.config, 2, 12, seed=7)

    def load(self, folder: Path, **options: Any) -> Any:
        return self.auto.from_pretrained(folder, dtype=torch.float32, **options).eval()

    @torch.no_grad()
    def run(self, model: Any) -> Tensor:
        return model(input_ids=self.tokens.to(model.device), use_cache=False).logits.cpu()

    def prune(self, source: Path, name: str, sparsity: float = SPARSITY, **fields: Any) -> Any:
        """Prune a folder into ``work/name``; return the model in memory. Where units hold too little, a few per cent go.

        Only :attr:`pruned` takes the default's time. Of mixtures channels go, whose layout is what differs between types.
        """
        fields = fields if "units" in fields else {"experts": "channels", **fields}
        try:
            return self.prune_to(sparsity, source, name, **fields)
        except ValueError as error:
            if "Lower sparsity" not in str(error):
                raise
            return self.prune_to(FEW, source, name, **fields)

    def prune_to(self, sparsity: float, source: Path, name: str, **fields: Any) -> Any:
        ids = draw_tokens(self.tiny.config, 16, 32, seed=1)
        data = pack_windows(ids)
        return oneshot(
            model=str(source),
            recipe=StruPruneModifier(sparsity=sparsity, **fields),
            dataset=data,
            output_dir=str(self.work / name),
            batch_size=4,
            num_calibration_samples=16,
            shuffle_calibration_samples=False,
        ).eval()

    @cached_property
    def unit(self) -> Any:
        """The attention unit, ``none`` where no unit of a mixer can go."""
        replace_conv1d(self.tiny)
        if find_structure(self.tiny).has_mixtures:
            linearize_experts(self.tiny)
        mixers = [
            kind for kind in list_kinds() if kind.by_default or kind.short_form == ("attention_unit", "value_channels")
        ]
        try:
            list_groups(self.tiny, mixers)
        except ValueError:
            return "none"
        return "value_channels"

    @cached_property
    def groups(self) -> list[Any]:
        kinds = list_kinds(attention_unit=self.unit, prune_ffn=True, prune_experts=True)
        kinds += [kind for kind in list_kinds() if kind.by_default and self.unit != "none"]
        return list_groups(self.tiny, kinds)

    @cached_property
    def kinds(self) -> set[str]:
        return {group.kind for group in self.groups}

    @cached_property
    def pruned(self) -> Any:
        return self.prune(self.dense, "all", attention_unit=self.unit)


def build(case: Case) -> str:
    start = time.perf_counter()
    count = sum(weight.numel() for weight in case.tiny.parameters())
    seconds = time.perf_counter() - start
    check(bool(case.run(case.tiny).isfinite().all()), "logits are not finite")
    check_close(
        case.run(case.load(case.dense)), case.run(case.tiny), "transformers' own class, saved and loaded, differs"
    )
    return f"{count / 1e6:.1f}M, {seconds:.1f} s"


def find_units(case: Case) -> str:
    """Return units per kind of layer, and how many layers are of that kind."""
    layers: dict[int, list[str]] = {}
    for group in case.groups:
        layers.setdefault(group.layer_index, []).append(f"{group.kind} {group.num_units}")
    total = case.tiny.config.get_text_config().num_hidden_layers
    counts = Counter(" + ".join(dict.fromkeys(units)) for units in layers.values())
    counts["none"] = total - len(layers)
    return "; ".join(f"{units} ({count})" for units, count in counts.items() if count)


def prune_ffn(case: Case) -> str:
    if "ffn" not in case.kinds:
        return "none"
    pruned = case.prune(case.dense, "ffn", attention_unit="none", experts="none", **QUICK)
    check_equal(case, pruned, case.work / "ffn")
    return describe_size(case, pruned)


def prune_all(case: Case) -> str:
    return describe_size(case, case.pruned) + (", FFN only" if case.unit == "none" else "")


def check_masked(case: Case) -> str:
    return check_equal(case, case.pruned, case.work / "all")


def reload(case: Case) -> str:
    return check_close(case.run(case.load(case.work / "all")), case.run(case.pruned), "the loaded model differs")


def reload_stock(case: Case) -> str:
    """Save with one width for all layers, and load with code of transformers alone."""
    if not {"ffn", "experts"} & case.kinds:
        return "none"
    pruned = case.prune(case.dense, "uniform", output="uniform", attention_unit="none", **QUICK)
    stock = case.load(case.work / "uniform", trust_remote_code=False)
    check(type(stock).__module__.startswith("transformers."), f"loaded as {type(stock).__name__}")
    return check_close(case.run(stock), case.run(pruned), "the stock class differs")


def agree_with_cache(case: Case, model: Any) -> bool:
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cached, plain = (model.generate(case.tokens, use_cache=use, **options) for use in (True, False))
    return torch.equal(cached, plain)


def generate(case: Case) -> str:
    if agree_with_cache(case, case.load(case.work / "all")):
        return "same"
    check(not agree_with_cache(case, case.tiny), "other tokens with a cache than without, unlike the dense model")
    return "differs, as the dense model's"


def prune_named(case: Case) -> str:
    """Remove units of the kinds that a recipe has to name, and no others; check as above."""
    found = {unit.kind for unit in find_structure(case.tiny).list_units() if unit.by_name}
    if not found:
        return "none"
    kinds = [kind for kind in list_kinds() if kind.kind in found]
    held = sum(group.unit_cost * group.num_units for group in list_groups(case.tiny, kinds))
    share = 0.5 * held / count_prunable_parameters(case.tiny, named=found)  # half of these units
    pruned = case.prune_to(share, case.dense, "named", units=kinds, allocation="uniform")
    loaded, masked = case.load(case.work / "named"), case.load(case.dense)
    check_close(case.run(loaded), case.run(pruned), "the loaded model differs")
    keep = {record.name: torch.tensor(record.keep) for record in read_manifest(case.work / "named").groups}
    pairs = [list_groups(model, kinds) for model in (masked, pruned)]
    for group, smaller in zip(*pairs, strict=True):
        layer, source = (model.get_submodule(group.layer_name) for model in (masked, pruned))
        blank_group(layer, group, keep[group.name])
        mask_group(layer, group, keep[group.name], read_consumer(source, smaller))
    check_close(case.run(pruned), case.run(masked), "differs from the masked dense model")
    check(agree_with_cache(case, loaded) or not agree_with_cache(case, case.tiny), "other tokens with a cache")
    return f"{', '.join(sorted(found))} {describe_size(case, pruned)}, state {count_state(case.tiny):,} → {count_state(loaded):,}"


def prune_again(case: Case) -> str:
    again = case.prune(case.work / "all", "again", sparsity=0.2, attention_unit=case.unit, **QUICK)
    check_close(case.run(case.load(case.work / "again")), case.run(again), "the loaded model differs")
    return describe_size(case, again)


STAGES: dict[str, Callable[[Case], str]] = {
    "builds": build,
    "units (layers)": find_units,
    "FFN": prune_ffn,
    "all": prune_all,
    "masked": check_masked,
    "reloaded": reload,
    "stock class": reload_stock,
    "cache": generate,
    "named": prune_named,
    "again": prune_again,
}
NEEDS = {"masked": "all", "reloaded": "all", "cache": "reloaded", "again": "reloaded"}


def check(is_right: bool, message: str) -> None:
    if not is_right:
        raise AssertionError(message)


def check_close(found: Tensor, expected: Tensor, what: str) -> str:
    """Return the largest difference, relative to the largest logit; raise where it is no rounding."""
    difference = ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()
    check(difference < 1e-4, f"{what} by {difference:.0e}")
    return f"{difference:.0e}"


def check_equal(case: Case, pruned: Any, folder: Path) -> str:
    masked = case.load(case.dense)
    replace_conv1d(masked)
    mask_dense(masked, pruned, read_manifest(folder))
    return check_close(case.run(pruned), case.run(masked), "differs from the masked dense model")


def mask_dense(dense: PreTrainedModel, pruned: PreTrainedModel, manifest: Manifest) -> None:
    """Give the dense model the pruned one's weights at the manifest's indices, and zeros elsewhere."""
    sliced = dict(pruned.named_parameters())
    for name, parameter in dense.named_parameters():
        if name in sliced and parameter.shape == sliced[name].shape:  # queries and keys: what ADMM may have changed
            parameter.data.copy_(sliced[name].data)
    keep = {record.name: torch.tensor(record.keep) for record in manifest.groups}
    kinds = {record.kind for record in manifest.groups}
    if "experts" in kinds:
        linearize_experts(dense)
        linearize_experts(pruned)
    pairs = [list_groups(model, [kind for kind in list_kinds() if kind.kind in kinds]) for model in (dense, pruned)]
    for group, smaller in zip(*pairs, strict=True):
        if group.name not in keep:
            continue
        source = pruned.get_submodule(group.layer_name)
        layer = dense.get_submodule(group.layer_name)
        if group.tensors:
            blank_group(layer, group, keep[group.name])
        for name in group.producers if not group.tensors else ():
            whole, cut = (append_bias(*read_weight(find_linear(each, name))) for each in (layer, source))
            whole[group.find_kept_rows(name, keep[group.name])] = cut
            set_weight(find_linear(layer, name), whole)
        mask_group(layer, group, keep[group.name], read_consumer(source, smaller))
    pack_experts(pruned)


def describe_size(case: Case, model: Any) -> str:
    before, after = (sum(weight.numel() for weight in one.parameters()) for one in (case.tiny, model))
    check(after < before, "nothing was removed")
    return f"−{1 - after / before:.0%}"


def run_type(model_type: str, layers: int = LAYERS, is_forced: bool = False) -> dict[str, str]:
    """Return a type's row: an outcome by stage, and the verdict."""
    row = {"type": model_type, **dict.fromkeys(STAGES, "")}
    if model_type in NOT_DECODERS and not is_forced:
        return row | {"verdict": f"no decoder: {NOT_DECODERS[model_type]}"}
    work = Path(tempfile.mkdtemp())
    failed: dict[str, str] = {}
    try:
        case = Case(model_type, work, layers)
        for name, stage in STAGES.items():
            if NEEDS.get(name) in failed:
                continue
            try:
                row[name] = stage(case)
            except Exception as error:
                row[name], failed[name] = "✗", tell(error)
            if name in failed and name in ("builds", "units (layers)"):
                break
    except Exception as error:
        failed["builds"] = tell(error)
    finally:
        shutil.rmtree(work)
    return row | {"verdict": judge(failed)}


def tell(error: Exception) -> str:
    """Return the kind of an error, unless it is a refusal, and the first line of what it says."""
    line = next((line for line in str(error).splitlines() if line.strip()), "").strip()
    return line if isinstance(error, (ValueError, AssertionError)) else f"{type(error).__name__}: {line}"


def judge(failed: dict[str, str]) -> str:
    if not failed:
        return "pruned"
    first = next(iter(failed))
    words = {"builds": "not built", "units (layers)": "refused", "stock class": "pruned, but stock class"}
    return f"{words.get(first, first)}: {failed[first]}"


def format_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a page's tables: what is pruned, what is not and why, and what is no decoder."""
    pruned = [row for row in rows if row["verdict"].startswith("pruned")]
    others = [row for row in rows if row not in pruned and not row["verdict"].startswith("no decoder")]
    loads = {"✗": "refused"}
    lines = [[r["type"], r["units (layers)"], r["all"], loads.get(r["stock class"], "loads")] for r in pruned]
    parts = [format_lines(["type", "units per layer (layers)", "parameters", "`output: uniform`"], lines)]
    if others:
        parts.append(format_lines(["type", "why not"], [[row["type"], shorten(row["verdict"])] for row in others]))
    kinds: dict[str, list[str]] = {}
    for row in rows:
        if row not in pruned and row not in others:
            kinds.setdefault(row["verdict"].partition(": ")[2], []).append(row["type"])
    parts += [f"- {kind}: {', '.join(types)}" for kind, types in kinds.items()]
    return "\n\n".join(parts[:2]) + "\n\n" + "\n".join(parts[2:])


def format_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def shorten(verdict: str) -> str:
    """Return a verdict without what every message says."""
    return verdict.rpartition("got none: ")[2].removesuffix("Choose another model.").strip().rstrip(".")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", default=[], help="model types to check, decoders or not")
    parser.add_argument("--layers", type=int, default=LAYERS, help="decoder layers of an instance")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the rows, written after every type")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/coverage.md")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logger.remove()
    rows: list[dict[str, str]] = []
    for model_type in args.only or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *EXTRA]:
        start = time.perf_counter()
        with redirect_stderr(io.StringIO()):  # progress bars
            rows.append(run_type(model_type, args.layers, is_forced=bool(args.only)))
        seconds = time.perf_counter() - start
        print(f"{model_type:26} {seconds:5.1f} s  {rows[-1]['verdict'][:160]}", file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if args.markdown:
        print(format_markdown(rows))
    else:
        print(Table(list(rows[0]), [list(row.values()) for row in rows]))
    verdicts = Counter(row["verdict"].split(":")[0] for row in rows)
    print("; ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
