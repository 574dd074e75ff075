"""Try common uses of a model in transformers on pruned folders: whether they run, whether outputs agree, and the gain.

    python -m eval.uses --pruned OUT --dense MODEL --data TEXT --output results/uses --seconds 300
    python -m eval.uses --pruned OUT --dense MODEL --data TEXT --only assisted

``assisted`` lets the pruned model draft for its dense parent: the share of drafted tokens that the parent accepts, and the speed-up
over the parent alone. Finished rows are read back; a use that fails is a row, too. With one thread on a CPU, seconds are CPU time
of the process. ``quantised cache`` needs optimum-quanto, ``adapters`` peft.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, QuantizedCache, pipeline

from eval.ledger import Ledger, Turn, describe_code, identify_model, identify_text, read_names
from eval.measure import count_own_seconds
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_MODEL, read_texts, tokenize_texts
from struprune_plugin.reporting.tables import format_table

TOLERANCE = 1e-4  # of logits in float32, where kernels add up in another order
PROMPT = 32  # tokens


@dataclass(frozen=True)
class Work:
    """What the uses share."""

    pruned: Path
    dense: str
    data: str
    new_tokens: int
    prompts: int

    def load(self) -> tuple[PreTrainedModel, Any]:
        return load_checkpoint(str(self.pruned))

    def make_prompts(self) -> list[torch.Tensor]:
        tokens = tokenize_texts(self.load()[1], read_texts(self.data), 8 * PROMPT * self.prompts)
        return list(tokens[: len(tokens) // (8 * PROMPT) * 8 * PROMPT].view(-1, 1, 8 * PROMPT)[..., :PROMPT])

    def write(self, model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the new tokens, the likeliest each time."""
        given = {"max_new_tokens": self.new_tokens, "min_new_tokens": self.new_tokens, "do_sample": False}
        made = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **given, **options)
        return made[0, ids.shape[1] :]


def try_pipeline(work: Work) -> str:
    """Text generation writes what ``generate`` writes."""
    model, tokenizer = work.load()
    (ids, *_) = work.make_prompts()
    text = tokenizer.decode(ids[0])
    again = tokenizer(text, return_tensors="pt").input_ids
    expected = tokenizer.decode(work.write(model, again), skip_special_tokens=True)
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {
        "max_new_tokens": work.new_tokens,
        "min_new_tokens": work.new_tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }
    got = writer(text, return_full_text=False, **options)[0]["generated_text"]
    return say(got == expected, "the text of generate", f"another text than generate: {got[:40]!r}")


def try_static_cache(work: Work) -> str:
    """A cache of a fixed length gives the same tokens."""
    model, _ = work.load()
    pairs = [
        (work.write(model, ids), work.write(model, ids, cache_implementation="static")) for ids in work.make_prompts()
    ]
    return count_same(pairs)


@torch.no_grad()
def try_quantised_cache(work: Work) -> str:
    """A cache of 4 bits by optimum-quanto: how far the next tokens' distributions are from the whole cache's, dense beside."""
    (model, _), (dense, _) = work.load(), load_checkpoint(work.dense)
    options = {"nbits": 4, "axis_key": 0, "axis_value": 0, "residual_length": 16}
    told = []
    for group in (64, None):  # numbers that share a scale; as many as there are, where None
        try:
            off = [_measure_cache(each, work, options | {"q_group_size": group}) for each in (model, dense)]
            told.append(f"groups of {group}: {off[0]:.1e} nats, the dense model {off[1]:.1e}")
        except ValueError as error:
            told.append(f"groups of {group}: {shorten(error)}")
    return "; ".join(told)


def _measure_cache(model: PreTrainedModel, work: Work, options: dict[str, Any]) -> float:
    """Return the mean KL divergence, in nats, that a quantised cache makes, token by token after half of each prompt."""
    found, half = [], PROMPT // 2
    for ids in work.make_prompts():
        cache = QuantizedCache("quanto", model.config, **options)
        expected = model(ids).logits[0, half:].log_softmax(-1)
        model(ids[:, :half], past_key_values=cache)
        steps = [model(ids[:, at : at + 1], past_key_values=cache).logits[0, 0] for at in range(half, PROMPT)]
        got = torch.stack(steps).log_softmax(-1)
        found.append((expected.exp() * (expected - got)).sum(-1).mean().item())
    return sum(found) / len(found)


@torch.no_grad()
def try_compile(work: Work) -> str:
    """``torch.compile`` of the whole model: the same logits, and what it gains on a window of 256 tokens."""
    model, _ = work.load()
    ids = torch.randint(4, model.config.vocab_size, (1, min(256, model.config.max_position_embeddings)))
    plain = model(ids, use_cache=False).logits
    made = torch.compile(model)
    begin = time.monotonic()
    off = (made(ids, use_cache=False).logits - plain).abs().max().item()
    compiling = time.monotonic() - begin
    eager, fast = (clock(partial(called, ids, use_cache=False)) for called in (model, made))
    same = say(off <= TOLERANCE * plain.abs().max().item(), "the same logits", f"logits off by {off:.1e}")
    return f"{same}; {compiling:.0f} s to compile, then {eager / fast:.2f} × as fast"


def try_assisted(work: Work) -> str:
    """The pruned model drafts, its dense parent decides: the parent's tokens, and the seconds of both against its own."""
    draft, _ = work.load()
    dense, _ = load_checkpoint(work.dense)
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    lengths: list[int] = []
    seconds = [0.0, 0.0]
    pairs, calls, drafted = [], 0, 0
    for ids in work.make_prompts():
        work.write(dense, ids[:, :8])  # warms up
        begin = time.perf_counter()
        alone = work.write(dense, ids)
        seconds[0] += time.perf_counter() - begin
        lengths.clear()
        hook = dense.register_forward_pre_hook(
            lambda _, args, kwargs: lengths.append((args[0] if args else kwargs["input_ids"]).shape[1]),
            with_kwargs=True,
        )
        begin = time.perf_counter()
        both = work.write(dense, ids, assistant_model=draft)
        seconds[1] += time.perf_counter() - begin
        hook.remove()
        pairs.append((alone, both))
        calls += len(lengths)
        drafted += sum(lengths) - ids.shape[1] - (len(lengths) - 1)
    written = len(pairs) * work.new_tokens
    accepted = (written - calls) / max(1, drafted)
    return (
        f"{count_same(pairs)}; {accepted:.0%} of {drafted} drafted tokens accepted, {written / calls:.1f} tokens a step of the "
        f"parent, {seconds[0] / seconds[1]:.2f} × as fast as the parent alone"
    )


STOCK = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
import torch
assert "struprune_plugin" not in sys.modules
model = AutoModelForCausalLM.from_pretrained("me/pruned", trust_remote_code=True, dtype="float32")
assert type(model).__module__.startswith("transformers_modules."), type(model)
AutoTokenizer.from_pretrained("me/pruned", trust_remote_code=False)
with torch.no_grad():
    print(model(torch.arange(4, 20)[None]).logits.double().sum().item())
"""


@torch.no_grad()
def try_hub(work: Work) -> str:
    """A folder laid out as a download from the Hub leaves it, read by its Hub name by transformers alone."""
    model, _ = work.load()
    expected = model(torch.arange(4, 20)[None]).logits.double().sum().item()
    with tempfile.TemporaryDirectory() as home:
        repository = Path(home) / "hub" / "models--me--pruned"
        commit = "0" * 40
        shutil.copytree(work.pruned, repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        environment = os.environ | {"HF_HOME": home, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": f"{home}/modules"}
        environment.pop("HF_HUB_CACHE", None)
        done = subprocess.run(
            [sys.executable, "-c", STOCK],
            env=environment,
            cwd=home,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    off = abs(float(done.stdout.strip().splitlines()[-1]) - expected)
    return say(
        off <= TOLERANCE * abs(expected), "the same logits by transformers alone, trusted", f"logits off by {off:.1e}"
    )


def try_adapters(work: Work) -> str:
    """LoRA adapters of peft: trained for a step, saved, loaded onto the pruned folder, and merged into a folder of its own."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model, _ = work.load()
    ids = torch.cat(work.make_prompts())
    torch.manual_seed(0)
    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0))
    optimiser = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = adapted(ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    adapted.eval()
    with torch.no_grad(), tempfile.TemporaryDirectory() as home:
        expected = adapted(ids).logits
        adapted.save_pretrained(f"{home}/adapter")
        loaded = PeftModel.from_pretrained(work.load()[0], f"{home}/adapter")(ids).logits
        merged = adapted.merge_and_unload()
        merged.save_pretrained(f"{home}/merged")
        again = AutoModelForCausalLM.from_pretrained(f"{home}/merged", dtype="float32").eval()(ids).logits
        off = max((other - expected).abs().max().item() for other in (loaded, again)) / expected.abs().max().item()
    learnt = say(losses[-1] < losses[0], "learns", "does not learn")
    return f"{learnt}; " + say(off <= TOLERANCE, "loaded and merged, the same logits", f"logits off by {off:.1e}")


def say(good: bool, yes: str, no: str) -> str:
    return yes if good else f"OTHER: {no}"


def count_same(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Return how many tokens of two runs are the same up to where each pair first parts."""
    same = sum(int((a == b).int().cumprod(0).sum()) for a, b in pairs)
    return f"{same} of {sum(len(a) for a, _ in pairs)} tokens the same"


def clock(run: Callable[[], object], rounds: int = 3) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def shorten(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"


USES: dict[str, Callable[[Work], str]] = {
    "pipeline": try_pipeline,
    "static cache": try_static_cache,
    "quantised cache": try_quantised_cache,
    "compile": try_compile,
    "assisted": try_assisted,
    "hub": try_hub,
    "adapters": try_adapters,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pruned", nargs="+", required=True, help="pruned folders")
    parser.add_argument("--dense", default=str(DEMO_MODEL), help="dense model of all pruned folders")
    parser.add_argument("--data", default=str(DEMO_CALIBRATION), help="JSON-lines file with the prompts")
    parser.add_argument("--only", default=",".join(USES))
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no further row after this number of seconds"
    )
    parser.add_argument("--output", type=Path, default=Path("results/uses"))
    args = parser.parse_args()
    uses = read_names(parser, "--only", args.only, USES)
    warnings.filterwarnings("ignore")
    ledger = Ledger(args.output / "rows.json", {"new_tokens": args.new_tokens, "prompts": args.prompts})
    turn, cells = Turn(args.seconds), []
    with count_own_seconds():
        for folder in args.pruned:
            work = Work(Path(folder), args.dense, args.data, args.new_tokens, args.prompts)
            for use in uses:
                how = describe_row(work, use)
                key = f"{work.pruned.name} | {use}"
                if turn.takes(ledger.find(key, how)):
                    cells.append([work.pruned.name, use, ledger.finish(key, how, partial(run_use, use, work))["told"]])
    table = format_table(["model", "use", "what happened"], cells)
    print(table)
    (args.output / "uses.md").write_text(table + "\n", encoding="utf-8")
    turn.tell()


def describe_row(work: Work, use: str) -> dict[str, Any]:
    return {
        "code": describe_code(Path(__file__)),
        "models": [identify_model(str(work.pruned)), identify_model(work.dense)],
        "text": identify_text(work.data),
        "use": use,
    }


def run_use(use: str, work: Work) -> dict[str, Any]:
    """Try one use; what it raises is the result."""
    try:
        told = USES[use](work)
    except Exception as error:  # whatever a library cannot do with a pruned model
        told = f"failed: {shorten(error)}"
    print(f"{work.pruned.name} | {use}: {told}", flush=True)
    return {"told": told}


if __name__ == "__main__":
    main()
