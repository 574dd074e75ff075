"""One conformance suite for tiny models of several types: one more is a name in families.MODEL_TYPES, and a line in CHANGES."""

import json
import os
import pty
import re
import subprocess
import sys

import lm_eval.tasks.manager
import pytest
import torch
from helpers.cuts import cut_units, save_pruned
from helpers.families import MODEL_TYPES, make_model
from helpers.models import DEFAULT, ROOT, make_dataset, run_oneshot, save_wide_llama
from helpers.own_code import save_own
from llmcompressor.modifiers.pruning import REAPPruningModifier
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, StaticCache

from eval.account import count_memory
from eval.coverage import mask_dense
from eval.groups import find_groups
from struprune_plugin import StruPruneModifier, read_manifest
from struprune_plugin.cli import main as cli
from struprune_plugin.export.convert import adopt_config
from struprune_plugin.export.outputs import convert_folder
from struprune_plugin.model.layers import count_prunable_parameters, find_layouts, measure_layer

PROMPTS = torch.randint(4, 2048, (2, 12), generator=torch.Generator().manual_seed(7))
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
DIFFERENT = ["llama", "phi3", "gpt_neox", "qwen3_moe"]  # plain, fused one after the other, fused by heads, experts
HEADS = ["opt", *DIFFERENT]  # whole heads go from the others as from LLaMA
PAIRS = [*((name, "value_channels") for name in MODEL_TYPES), *((name, "head") for name in HEADS)]


def of_types(names, units=("value_channels",)):
    """Ask only for these types."""
    return pytest.mark.parametrize("pair", [(n, unit) for n in names for unit in units], indirect=True, ids="-".join)


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(request):
    """(type, attention unit)"""
    return request.param


@pytest.fixture(scope="module")
def dense(pair, save_family):
    return save_family(pair[0])


@pytest.fixture(scope="module")
def whole(dense):
    """The dense model, loaded, to be read only."""
    return load(dense)


@pytest.fixture(scope="module")
def saved(dense, pair, prune_once):
    """(dense folder, model pruned in memory, its folder), for every test to read and none to change."""
    return dense, *prune_once(dense, pair[1])


@pytest.fixture(scope="module")
def again(saved):
    """The pruned model, loaded from its folder, to be read only."""
    return load(saved[2])


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def test_budget_is_exact_and_sizes_are_what_the_manifest_says(saved, whole):
    _, model, out = saved
    manifest = read_manifest(out)
    before, after = (count_prunable_parameters(each, mixtures=True) for each in (whole, model))
    tied = 8 * sum(group.unit_cost for group in manifest.groups if group.kind == "experts")
    unit = max(tied, *(group.unit_cost * group.num_blocks for group in manifest.groups))
    assert abs(before - after - 0.3 * before) < unit
    for group in manifest.groups:
        layer, layout = find_layouts(model)[group.layer]
        sizes = measure_layer(layout, layer)
        kept = {
            "ffn": sizes.width,
            "head": sizes.num_key_value_heads,
            "value_channels": sizes.num_key_value_heads * sizes.value_head_dim,
            "experts": model.config.layout.get("parameters", [{}] * 9)[group.layer].get("mlp.experts.down_proj", [0])[
                -1
            ],
        }
        assert kept[group.kind] == group.kept == len(group.keep)


def test_masked_model_equals_pruned_model(saved):
    folder, model, out = saved
    masked = load(folder)
    mask_dense(masked, model, read_manifest(out))
    torch.testing.assert_close(model(PROMPTS).logits, masked(PROMPTS).logits, **CLOSE)


def test_save_reload_is_exact(saved, again, tmp_path):
    model = saved[1]
    torch.testing.assert_close(model(PROMPTS).logits, again(PROMPTS).logits, rtol=0, atol=2e-5)  # eager against sdpa
    again.save_pretrained(tmp_path)
    assert torch.equal(again(PROMPTS).logits, load(tmp_path)(PROMPTS).logits)
    weights = dict(again.named_parameters())
    for name, weight in model.named_parameters():
        assert ".experts." in name or torch.equal(weight, weights[name]), name  # llm-compressor linearizes experts


def test_generate_with_and_without_cache_is_identical(again):
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    cached, plain = (again.generate(PROMPTS, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)
    assert cached.shape == (2, 24)


def test_static_cache_gives_the_same_logits(again):
    cache = StaticCache(config=again.config, max_cache_len=32)
    steps = [again(part, past_key_values=cache).logits for part in (PROMPTS[:, :8], PROMPTS[:, 8:])]
    torch.testing.assert_close(torch.cat(steps, 1), again(PROMPTS).logits, **CLOSE)


@of_types(["opt", *DIFFERENT])
def test_sdpa_equals_eager(saved):
    logits = [load(saved[2], attn_implementation=kind)(PROMPTS).logits for kind in ("sdpa", "eager")]
    torch.testing.assert_close(*logits, **CLOSE)


def test_left_padding_changes_nothing(again):
    padded = torch.cat([torch.ones(2, 5, dtype=torch.int64), PROMPTS], 1)
    mask = (torch.arange(17) >= 5).long().expand(2, -1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    options = {} if "OPT" in type(again).__name__ else {"position_ids": positions}
    logits = again(padded, attention_mask=mask, **options).logits[:, 5:]
    torch.testing.assert_close(logits, again(PROMPTS).logits, **CLOSE)


@of_types(["opt", *DIFFERENT])
def test_gradients_flow_to_every_kept_weight(saved):
    model = load(saved[2]).train()
    model(PROMPTS, labels=PROMPTS).loss.backward()
    sliced = [p for n, p in model.named_parameters() if "expert" not in n]
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in sliced)


@of_types(DIFFERENT)
def test_pruned_model_is_pruned_again_and_padded(pair, saved, tmp_path):
    out = tmp_path / "out"
    model = run_oneshot(str(saved[2]), sparsity=0.2, attention_unit=pair[1], output_dir=str(out))
    assert count_prunable_parameters(model) < count_prunable_parameters(saved[1])
    torch.testing.assert_close(load(out)(PROMPTS).logits, model(PROMPTS).logits, rtol=0, atol=2e-5)
    convert_folder(out, "uniform-padded", tmp_path / "padded")
    torch.testing.assert_close(load(tmp_path / "padded")(PROMPTS).logits, model(PROMPTS).logits, **CLOSE)


@of_types(["qwen3_moe"])
def test_zero_sparsity_is_the_identity(dense, whole, tmp_path):
    pruned = run_oneshot(str(dense), sparsity=0.0, output_dir=str(tmp_path / "out"))
    assert torch.equal(load(tmp_path / "out")(PROMPTS).logits, whole(PROMPTS).logits)
    assert count_prunable_parameters(pruned) == count_prunable_parameters(whole)


@of_types(["phi3", "qwen3_moe"])
def test_the_papers_allocation_and_update_run(dense, tmp_path):
    """Algorithm 3's weight norms, ADMM on gated FFNs."""
    options = {"allocation": {"rule": "softmax_inverse", "temperature": 4.0}, "sparsity": 0.2}
    run_oneshot(str(dense), weight_update={"method": "admm", "steps": 1}, output_dir=str(tmp_path / "out"), **options)
    assert any(group.admm for group in read_manifest(tmp_path / "out").groups)


@pytest.mark.parametrize("model_type", [*HEADS, "phi", "gemma2"])
@pytest.mark.parametrize("unit", ["head", "value_channels"])
def test_slicing_and_masking_agree_for_any_units(model_type, unit):
    """Random units go, one group after the other; fused, grouped and gated projections must lose the right rows."""
    sliced = make_model(model_type)
    groups, before = find_groups(sliced, unit), count_prunable_parameters(sliced)
    masked = cut_units(sliced, unit)
    left = {group.name: group.num_units for group in find_groups(sliced, unit)}
    freed = sum((group.num_units - left[group.name]) * group.unit_cost for group in groups)
    assert before - count_prunable_parameters(sliced) == freed
    adopt_config(sliced)
    torch.testing.assert_close(sliced(PROMPTS).logits, masked(PROMPTS).logits, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("pair", "unit"),
    [
        *((("qwen3_moe", "value_channels"), unit) for unit in ("head", "none")),
        *(((name, "value_channels"), "head") for name in ("opt", "llama")),
        (("phi3", "value_channels"), "none"),
    ],
    indirect=["pair"],
)
def test_uniform_output_is_a_stock_model(dense, whole, unit, tmp_path):
    model_type = whole.config.model_type
    options = {"sparsity": 0.2, "attention_unit": unit, "output": "uniform", "output_dir": str(tmp_path / "out")}
    if unit == "head" and model_type in ("opt", "gpt_neox"):
        with pytest.raises(ValueError, match="`output: uniform` needs all heads"):
            run_oneshot(str(dense), **options)
        return
    if unit == "none" and model_type == "qwen3_moe":
        options["sparsity"] = 0.05  # one layer of three has an FFN
    pruned = run_oneshot(str(dense), **options)
    again = load(tmp_path / "out")
    assert type(again) is type(pruned) is type(whole)
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not list((tmp_path / "out").glob("*.py"))
    torch.testing.assert_close(again(PROMPTS).logits, pruned(PROMPTS).logits, rtol=0, atol=2e-5)
    before, after = (count_prunable_parameters(each, mixtures=True) for each in (whole, again))
    finest = {}
    for group in find_groups(whole, unit):
        finest[group.kind] = finest.get(group.kind, 0) + group.unit_cost
    assert abs(before - after - options["sparsity"] * before) <= min(finest.values())
    sizes = {measure_layer(layout, layer) for layer, layout in find_layouts(again)}
    assert len(sizes) == (2 if model_type == "qwen3_moe" else 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"attention_unit": "none", **DEFAULT}, {"attention_unit": "head", "prune_ffn": False}),
        ({"attention_unit": "value_channels"}, {"attention_unit": "none"}),
    ],
)
def test_uniform_output_refuses_layers_that_an_earlier_run_made_different(first, second, save_family, tmp_path):
    folder = save_family("llama")
    run_oneshot(str(folder), sparsity=0.2, output_dir=str(tmp_path / "first"), **first)
    with pytest.raises(ValueError, match="`output: uniform` needs layers that are all the same"):
        run_oneshot(str(tmp_path / "first"), sparsity=0.05, output="uniform", output_dir=str(tmp_path / "x"), **second)
    assert not (tmp_path / "x").exists()


def test_uniform_output_may_be_pruned_again(save_family, tmp_path):
    for source, target in ((save_family("llama"), tmp_path / "a"), (tmp_path / "a", tmp_path / "b")):
        run_oneshot(str(source), sparsity=0.2, attention_unit="none", output="uniform", output_dir=str(target))
    assert type(load(tmp_path / "b")).__name__ == "LlamaForCausalLM"
    assert count_prunable_parameters(load(tmp_path / "b")) < count_prunable_parameters(load(tmp_path / "a"))


def test_converted_folders_keep_the_function_and_load_by_stock_classes(saved, whole, again, tmp_path):
    convert_folder(saved[2], "uniform-padded", tmp_path)
    made = load(tmp_path)
    assert type(made) is type(whole)
    torch.testing.assert_close(made(PROMPTS).logits, again(PROMPTS).logits, **CLOSE)
    assert again.num_parameters() <= made.num_parameters() <= whole.num_parameters()
    assert AutoTokenizer.from_pretrained(tmp_path)("a")


def test_base_model_loads_without_its_head(saved, again):
    hidden = AutoModel.from_pretrained(saved[2]).eval()(PROMPTS).last_hidden_state
    expected = again.base_model(PROMPTS).last_hidden_state
    assert torch.equal(hidden, expected)


@pytest.mark.parametrize("first", ["reap", "struprune"])
def test_experts_pruned_by_the_host_compose_with_ours_in_one_recipe(first, save_family, tmp_path):
    folder = save_family("qwen3_moe")
    stages = {
        "reap": REAPPruningModifier(sparsity=0.5),
        "struprune": StruPruneModifier(sparsity=0.2, experts="channels"),
    }
    recipe = [stages.pop(first), *stages.values()]
    pruned = run_oneshot(str(folder), recipe=recipe, output_dir=str(tmp_path / "out"))
    again = load(tmp_path / "out")
    assert again.config.num_experts == 2
    assert again.model.layers[1].mlp.gate.weight.shape[0] == 2
    budget = read_manifest(tmp_path / "out").budget
    assert budget.removed_parameters == pytest.approx(0.2 * budget.prunable_parameters, rel=0.25)
    assert again.model.layers[1].mlp.experts.down_proj.shape[-1] < 24
    torch.testing.assert_close(again(PROMPTS).logits, pruned(PROMPTS).logits, rtol=0, atol=2e-5)


def test_offload_changes_no_choice(save_family, prune_once, tmp_path):
    folder = save_family("qwen3_moe")
    _, whole = prune_once(folder, "value_channels")
    with count_memory():
        fields = {"sparsity": 0.3, "experts": "channels", "offload": True, **DEFAULT}
        run_oneshot(str(folder), output_dir=str(tmp_path / "out"), **fields)
    told = [read_manifest(path).groups for path in (whole, tmp_path / "out")]
    assert [group.keep for group in told[0]] == [group.keep for group in told[1]]


# -- in a process that never imports the plugin: one for all, its start is what takes time --------------------------------


SCRIPT = """
import contextlib, io, json, os, sys, torch
from lm_eval import simple_evaluate
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager, manager
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

sys.modules["struprune_plugin"] = None  # importing it fails, as where it is not installed
job = json.loads(sys.argv[1])
terminal, nobody, ids = os.dup(0), os.open(os.devnull, os.O_RDONLY), []
for asked, options in ((nobody, {}), (terminal, {}), (terminal, {"trust_remote_code": False})):
    os.dup2(asked, 0)
    ids.append(AutoTokenizer.from_pretrained(job["folders"]["opt-vo"], **options)("one two").input_ids)
manager.__file__ = job["tasks"]
prompts, logits, accuracy, written = torch.load(job["prompts"]), {}, {}, {}
for name, out in job["folders"].items():
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    logits[name] = model(prompts % model.config.get_text_config().vocab_size).logits.detach()
for name in job["others"]:
    assert not AutoModel.from_pretrained(job["folders"][name], trust_remote_code=True).get_output_embeddings()
for name, (folder, code) in job["cards"].items():
    os.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    written[name] = printed.getvalue()
os.chdir(job["root"])
options = {"tasks": ["struprune_demo_word_order"], "device": "cpu", "limit": 4, "bootstrap_iters": 0}
options["task_manager"] = TaskManager(include_path="eval/tasks", include_defaults=False)
for name in job["scored"]:
    args = f"pretrained={job['folders'][name]},trust_remote_code=True"
    results = simple_evaluate(model="hf", model_args=args, **options)["results"]
    accuracy[name] = results["struprune_demo_word_order"]["acc,none"]
torch.save({"logits": logits, "accuracy": accuracy, "written": written, "ids": ids}, job["results"])
sys.argv = ["lm_eval", *job["command"]]  # the README's line
cli_evaluate()
"""
PRUNED = [*(f"{model_type}-vo" for model_type in MODEL_TYPES), "opt-post_norm"]
QUANTISED = ["quantised-llama"]
OTHERS = [
    "gpt2",
    "gemma3",
    "falcon_h1",
    "own",
]  # transposed linears, a wrapper, buffers in no file, a checkpoint's code
SCORED = ["llama-vo", *QUANTISED]


@pytest.fixture(scope="module")
def folders(save_family, save_shape, prune_once, tmp_path_factory):
    """name -> an output folder: every type, OPT-350m's shape, what a shipped recipe prunes and quantises, and others."""
    found = {f"{name}-vo": prune_once(save_family(name), "value_channels")[1] for name in MODEL_TYPES}
    found["opt-post_norm"] = prune_once(save_shape("post_norm"), "head", 0.4)[1]
    recipe = str(ROOT / "recipes" / "struprune_w4a16_gptq.yaml")
    options = {"dataset": make_dataset(16), "num_calibration_samples": 16}
    place = tmp_path_factory.mktemp("quantised")
    found["quantised-llama"] = place / "out"
    run_oneshot(str(save_wide_llama(place / "dense")), recipe, output_dir=str(place / "out"), **options)
    found |= {name: place / name for name in OTHERS}
    for name in OTHERS[:-1]:
        save_pruned(name, found[name])
    own = save_own(place / "dense_own")
    run_oneshot(str(own), sparsity=0.3, output_dir=str(found["own"]), trust_remote_code_model=True)
    return found


@pytest.fixture(scope="module")
def cards(folders, tmp_path_factory):
    """name -> a folder and the Python of its card: of what is pruned, and of what a conversion makes of it."""
    found = {"pruned": folders["llama-vo"], "padded": tmp_path_factory.mktemp("padded") / "out"}
    assert cli.main(["convert", str(found["pruned"]), "--to", "uniform-padded", "--output", str(found["padded"])]) == 0
    return {
        n: (f, re.search(r"```python\n(.*?)```", (f / "README.md").read_text(), re.DOTALL)[1]) for n, f in found.items()
    }


@pytest.fixture(scope="module")
def stock(folders, cards, tmp_path_factory):
    """Logits by name of folder, accuracy by name, what the cards' snippets print, from the process without the plugin."""
    place = tmp_path_factory.mktemp("stock")
    torch.save(PROMPTS, place / "prompts.pt")
    job = {"folders": folders, "scored": SCORED, "prompts": place / "prompts.pt", "results": place / "results.pt"}
    job |= {"cards": cards, "root": ROOT, "others": OTHERS}
    command = f"--model hf --model_args pretrained={folders['llama-vo']},trust_remote_code=True --device cpu --limit 4"
    told = f"--tasks struprune_demo_word_order --include_path eval/tasks --output_path {place}"
    job["tasks"] = lm_eval.tasks.manager.__file__
    job["command"] = [*command.split(), *told.split()]
    environment = os.environ | {"HF_MODULES_CACHE": str(place / "modules")}
    command = [sys.executable, "-c", SCRIPT, json.dumps(job, default=str)]
    ours, theirs = pty.openpty()
    os.write(ours, b"n\n")  # waits in the terminal until it is asked for
    options = {"stdin": theirs, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, env=environment, cwd=ROOT, **options)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0, done.stdout + done.stderr
    (scores,) = place.rglob("results_*.json")
    told = json.loads(scores.read_text())["results"]["struprune_demo_word_order"]["acc,none"]
    return {**torch.load(place / "results.pt"), "told": told, "printed": done.stdout}


def test_at_a_terminal_transformers_asks_once(stock, save_family):
    """Stock transformers reads the model's configuration before the tokenizer's, and asks whether to trust it."""
    assert stock["ids"] == [AutoTokenizer.from_pretrained(save_family("opt"))("one two").input_ids] * 3
    assert stock["printed"].count("Do you wish to run the custom code?") == 2, "the first question goes unheard"


@pytest.mark.parametrize("name", [*PRUNED, *QUANTISED, *OTHERS])
def test_stock_transformers_loads_with_trust_and_gives_the_same_logits(stock, folders, name):
    config = json.loads((folders[name] / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"].startswith("modeling_struprune")
    ours = load(folders[name], trust_remote_code=name == "own")
    assert torch.equal(stock["logits"][name], ours(PROMPTS % ours.config.get_text_config().vocab_size).logits)


@pytest.mark.parametrize("name", SCORED)
def test_stock_lm_eval_scores_the_output(stock, name):
    assert 0 <= stock["accuracy"][name] <= 1


def test_the_stock_command_scores_the_output_the_same(stock):
    assert stock["told"] == stock["accuracy"]["llama-vo"]


def test_the_snippets_on_the_cards_run(stock, cards):
    assert {name: "trust_remote_code" in code for name, (_, code) in cards.items()} == {"pruned": True, "padded": False}
    assert all("Once upon a time" in text for text in stock["written"].values())
