"""Feed broken recipes, configurations and manifests to their readers: each must be accepted, or refused by a one-line message.

    python -m eval.fuzz --examples 10000

Recipes: modifiers of StruPrune and llm-compressor with random fields and values; shipped recipes with characters changed.
Manifests: of a pruned model, with parts changed, moved or removed, signed again or not. Configurations: a tiny model's, changed
likewise. Prints one row per kind; the exit status is 1 if an error is not a ValueError with a one-line message.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from llmcompressor.modifiers import Modifier
from pydantic import BaseModel
from transformers.utils import logging as transformers_logging

from struprune_plugin import LoRARecoveryModifier, RecoveryModifier, SparsityAllocatorModifier, StruPruneModifier
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.recipes.shipped import list_recipes
from struprune_plugin.reporting.tables import format_table, summarize_layers, summarize_manifest
from struprune_plugin.storage.checkpoint import check_checkpoint
from struprune_plugin.storage.manifest import digest_manifest, read_manifest

_FORM = re.compile(r".+( must .+|[.):] [A-Z`].+[.?])")  # in one line: a dot matches no line break
_SHARES = {"recipes": 0.55, "manifests": 0.35, "configs": 0.1}
_OURS = {
    kind.__name__: kind
    for kind in (StruPruneModifier, SparsityAllocatorModifier, RecoveryModifier, LoRARecoveryModifier)
}
_HOSTS = (
    "QuantizationModifier",
    "GPTQModifier",
    "SparseGPTModifier",
    "WandaPruningModifier",
    "SmoothQuantModifier",
    "AWQModifier",
)


@dataclass
class Tally:
    """What became of the examples of one kind.

    :param crashes: what came back in another form -> how often, with one example each in ``told``
    """

    accepted: int = 0
    refused: int = 0
    crashes: Counter[str] = field(default_factory=Counter)
    told: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.accepted + self.refused + self.crashes.total()


_PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 7, 10**9, 10**18, 10**30, 10**400]),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["re:(", "re:.*", "re:(a+)+", "vo", "none", "auto", "softmax", "fisher", "1e400", "2020-13-45", "..", "\ud800"]
    ),
)
_JUNK = st.recursive(
    _PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def _draw_value(draw: Any, kind: type[Modifier], name: str) -> Any:
    """Draw a value of a field: nonsense, the default, or one of a few that may pass."""
    default = kind.model_fields[name].get_default(call_default_factory=True)
    nested = default.model_dump() if isinstance(default, BaseModel) else {}
    return draw(
        (_JUNK | make_content(nested) if nested else _JUNK)
        | st.just(nested or default)
        | st.sampled_from([0.3, 0.5, 1, 2, 8, True, False, "head", "wanda", "admm", "uniform"])
    )


@st.composite
def make_recipe(draw: Any) -> str:
    """A recipe of stages whose names, fields and values may make no sense."""
    content: dict[Any, Any] = {}
    for place in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*_OURS, *_OURS, *_HOSTS]) | st.text(max_size=8))
        kind = _OURS.get(name)
        if kind is not None:
            names = draw(st.lists(st.sampled_from(sorted(kind.model_fields)), max_size=4, unique=True))
            fields = {one: _draw_value(draw, kind, one) for one in names}
            if draw(st.booleans()):
                fields.setdefault(*(("sparsity", 0.3) if "sparsity" in kind.model_fields else ("batch_size", 4)))
        else:
            keys = st.sampled_from(
                ["scheme", "targets", "ignore", "sparsity", "mask_structure", "mappings", "config_groups"]
            )
            fields = draw(st.dictionaries(keys, _JUNK, max_size=3))
        if draw(st.integers(0, 9)) == 0:
            fields[draw(st.text(max_size=6) | st.integers())] = draw(_JUNK)
        stage = (
            draw(st.just(f"s{place}_stage") | st.text(max_size=6))
            if draw(st.integers(0, 9)) == 0
            else f"s{place}_stage"
        )
        group = draw(_JUNK) if draw(st.integers(0, 14)) == 0 else {name: fields}
        content[stage] = {"s_modifiers": group} if draw(st.integers(0, 14)) else draw(_JUNK)
    try:
        return yaml.safe_dump(content, allow_unicode=True) + "\n"
    except (yaml.YAMLError, UnicodeError, ValueError):  # a surrogate, a number too long to write
        return f"{content.keys()}\n"


@st.composite
def make_text(draw: Any, texts: list[str]) -> str:
    """One of some texts with characters taken away, put in or changed."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 4))):
        at, gone = draw(st.integers(0, len(text))), draw(st.integers(0, 6))
        put = draw(
            st.text(max_size=4)
            | st.sampled_from(["{", "[", ": ", "\n", "  ", "&a ", "*a", "<<: ", "!!int ", "- ", '"', "NaN", "-"])
        )
        text = text[:at] + put + text[at + gone :]
    return text


@st.composite
def make_content(draw: Any, content: dict[str, Any]) -> dict[str, Any]:
    """A mapping of mappings and lists with a few of its parts changed, moved or taken away."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        holder: Any = content
        for _ in range(draw(st.integers(0, 4))):
            inner = [
                part
                for part in (holder.values() if isinstance(holder, dict) else holder)
                if isinstance(part, (dict, list)) and part
            ]
            if not inner:
                break
            holder = draw(st.sampled_from(inner))
        if not holder:
            continue
        key = draw(st.sampled_from(sorted(holder)) if isinstance(holder, dict) else st.integers(0, len(holder) - 1))
        action = draw(st.sampled_from(["set", "set", "number", "drop", "turn", "twice"]))
        if action == "set":
            holder[key] = draw(_JUNK)
        elif action == "number":
            holder[key] = draw(st.integers(-2, 9))
        elif action == "drop":
            del holder[key]
        elif action == "turn" and isinstance(holder, list):
            holder.reverse()
        elif isinstance(holder, list):
            holder.append(holder[key])
    return content


def fuzz_recipes(num_examples: int, work: Path, start: int) -> Tally:
    """Let every recipe be read."""
    shipped = [file.read_text(encoding="utf-8") for file in list_recipes().values()]
    examples = make_recipe() | make_text(shipped).map(lambda text: text + "\n")
    changes = st.dictionaries(
        st.sampled_from(
            ["sparsity", "targets", "x", "StruPruneModifier.dampening_frac", "allocation.temperature", "."]
        ),
        _JUNK,
        max_size=1,
    )
    return _run(lambda pair: load_recipe(pair[0], pair[1]), st.tuples(examples, changes), num_examples, start)


def fuzz_manifests(num_examples: int, work: Path, start: int) -> Tally:
    """Let every manifest be read, told of, and replayed as far as that goes without a model."""
    file, good = work / "struprune.json", make_manifest()
    signed = {**good, "sha256": digest_manifest(good)}
    examples = st.tuples(make_content(signed), st.booleans()) | make_text([json.dumps(signed, indent=1)])

    def read(example: Any) -> None:
        if isinstance(example, str):
            file.write_text(example, encoding="utf-8", errors="surrogatepass")
        else:
            content, signs = example
            if signs:
                content["sha256"] = digest_manifest(content)
            file.write_text(json.dumps(content), encoding="utf-8")
        manifest = read_manifest(file)
        assert json.loads(json.dumps(manifest.model_dump())) == good or not isinstance(example, tuple) or example[1], (
            "no change is silent"
        )
        summarize_layers(manifest)
        summarize_manifest(manifest, work)
        load_recipe(yaml.safe_dump({"s_stage": {"s_modifiers": {"StruPruneModifier": {"replay": str(file)}}}}))

    return _run(read, examples, num_examples, start)


def fuzz_configs(num_examples: int, work: Path, start: int) -> Tally:
    """Let every configuration be held against the weights of a tiny model."""
    from eval.identity import save_model

    transformers_logging.set_verbosity(transformers_logging.CRITICAL)  # which has a word to say on most of them
    folders = [work / name for name in ("opt", "llama")]
    for folder in folders:
        save_model(folder.name, folder)
    good = {folder: json.loads((folder / "config.json").read_text()) for folder in folders}
    contents: list[Any] = [st.tuples(st.just(folder), make_content(config)) for folder, config in good.items()]
    contents += [
        st.tuples(st.just(folder), make_text([json.dumps(config, indent=1)])) for folder, config in good.items()
    ]

    def check(example: tuple[Path, Any]) -> None:
        folder, content = example
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "config.json").write_text(text, encoding="utf-8", errors="surrogatepass")
        check_checkpoint(str(folder))

    return _run(check, st.one_of(*contents), num_examples, start)


def make_manifest() -> dict[str, Any]:
    """Return a manifest as a run writes it, of two layers."""
    solve = {"target_energy": 2.0, "error_before": 0.2, "error_after": 0.1, "damping": 0.01, "admm": None}
    groups = [
        {
            **{
                "name": f"model.layers.{layer}.{name}",
                "layer": layer,
                "kind": kind,
                "num_units": units,
                "num_blocks": blocks,
            },
            **{"unit_cost": 9, "kept": len(keep), "sparsity": 1 - len(keep) / units, "scores": None, **solve},
            **{"condition_number": 10.0, "scale": None, "rest": 0, "keep": keep},
        }
        for layer in range(2)
        for name, kind, units, blocks, keep in (
            ("self_attn.o_proj", "value_channels", 8, 2, [0, 2, 5, 6]),
            ("mlp.down_proj", "ffn", 6, 1, [1, 2, 5]),
        )
    ]
    return {
        "format_version": 1,
        "versions": {"torch": "2.13.0"},
        "model": {"base": "m", "type": "t", "weights_sha256": "0", "parameters_before": 200, "parameters_after": 100},
        "settings": StruPruneModifier(sparsity=0.3).dump_fields(),
        "seed": 0,
        "calibration": {"num_sequences": 8, "num_tokens": 256, "sha256": "0"},
        "budget": {
            **{"prunable_parameters": 180, "asked_sparsity": 0.3, "removed_parameters": 54, "met_sparsity": 0.3},
            "rounding": [{"kind": "ffn", "width_multiple": 2, "because": ["x"], "modules": ["y"]}],
            "limits": [
                {
                    "name": "bytes",
                    "asked": 4e2,
                    "planned": 399.5,
                    "met": 399.5,
                    "dense": 8e2,
                    "fixed": 99.5,
                    "modules": {"y": 3e2},
                }
            ],
        },
        "allocation": {"method": "softmax", "temperature": 1.0, "searched": [{"temperature": 1.0, "error": 0.1}]},
        "memory_measure": "none",
        "stages": [{"name": "solve", "seconds": 0.1, "peak_bytes": None}],
        "sensitivity": {},
        "tuning": {},
        "groups": groups,
        "experts": [
            {
                "name": "model.layers.0.mlp.experts",
                "layer": 0,
                "num_experts": 4,
                "keep": [0, 2],
                "removed_parameters": 9,
            }
        ],
        "recovery": {"settings": {"rank": 8}, "steps": 3, "tokens_seen": 9, "seconds": 0.1},
    }


def _run(read: Callable[[Any], object], examples: Any, num_examples: int, start: int) -> Tally:
    """Read every example; count what became of it."""
    tally = Tally()

    @seed(start)
    @settings(max_examples=num_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(examples)
    def try_one(example: Any) -> None:
        try:
            read(example)
            tally.accepted += 1
        except ValueError as error:
            if _FORM.fullmatch(str(error)) and not isinstance(error, UnicodeError):
                tally.refused += 1
            else:
                _note(tally, error, example)
        except Exception as error:  # what this tool is for
            _note(tally, error, example)

    try_one()
    return tally


def _note(tally: Tally, error: Exception, example: Any) -> None:
    last = traceback.extract_tb(error.__traceback__)[-1]
    name = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {' '.join(str(error).split())[:160]}"
    key = re.sub(r"'[^']*'|\d+", "…", name)
    tally.crashes[key] += 1
    tally.told.setdefault(key, f"{name}\n    of {example!r:.600}")


_KINDS = {"recipes": fuzz_recipes, "manifests": fuzz_manifests, "configs": fuzz_configs}


def fuzz(kind: str, num_examples: int, start: int = 0) -> Tally:
    """Fuzz one kind of input.

    :param kind: recipes, manifests or configs
    :param start: seed of the examples
    """
    with tempfile.TemporaryDirectory() as folder:
        return _KINDS[kind](num_examples, Path(folder), start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000, metavar="N", help="number of examples, over all kinds")
    parser.add_argument("--only", choices=_KINDS, help="run one kind only")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")
    rows, crashes = [], 0
    for kind in [args.only] if args.only else _KINDS:
        tally = fuzz(kind, args.examples if args.only else round(args.examples * _SHARES[kind]), args.seed)
        rows.append([kind, tally.total, tally.accepted, tally.refused, tally.crashes.total()])
        crashes += tally.crashes.total()
        for key, count in tally.crashes.most_common():
            print(f"{count} x {tally.told[key]}")
    print(format_table(["input", "examples", "accepted", "refused", "crashed"], rows))
    return int(bool(crashes))


if __name__ == "__main__":
    sys.exit(main())
