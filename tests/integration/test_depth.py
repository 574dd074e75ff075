"""Whole sublayers and layers that are free go in a run; what follows a run works without them."""

import json

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from helpers.families import make_model
from helpers.models import make_dataset, make_opt, run_oneshot, save_model
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from struprune_plugin import LoRARecoveryModifier, SparsityAllocatorModifier, StruPruneModifier, read_manifest
from struprune_plugin.export.any_class import list_absent
from struprune_plugin.export.forms import convert_folder
from struprune_plugin.model.layers import find_decoder_layers, find_layouts
from struprune_plugin.reporting.tables import measure_cache_bytes
from struprune_plugin.storage.resume_store import ResumeStore

TYPES = ["opt", "llama", "qwen3", "gemma2", "phi"]
FREE = {
    2: ("attention", "ffn"),
    3: ("attention",),
    4: ("ffn",),
}  # of six layers: what adds nothing to the stream, or next to it
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CURVE = {"rule": "error_curve", "trial_samples": 2}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
GENERATE = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}


class Killed(BaseException):
    pass


def make_free(name, folder, scale=1e-3, **changes):
    """Save a model with more layers than it has use for."""
    make = make_opt if name == "opt" else lambda **sizes: make_model(name, **sizes)
    model = make(num_hidden_layers=6, **changes)
    for index, (layer, layout) in enumerate(find_layouts(model)):
        parts = {"attention": [layout.attention], "ffn": layout.ffns}
        for module in (module for kind in FREE.get(index, ()) for module in parts[kind]):
            for parameter in layer.get_submodule(module.output).parameters():
                parameter.data *= scale
            if name.startswith("gemma"):  # norms behind would make much of little
                for norm in ("post_attention_layernorm", "post_feedforward_layernorm"):
                    if (norm == "post_attention_layernorm") == (module is layout.attention):
                        layer.get_submodule(norm).weight.data = torch.full_like(layer.get_submodule(norm).weight, -1.0)
    return save_model(model, folder)


@pytest.fixture(scope="module")
def make_once(tmp_path_factory):
    """A function that saves a model with free sublayers and prunes it, once: (its folder, the pruned model, its folder)."""
    known = {}

    def make(name):
        if name not in known:
            folder = make_free(name, tmp_path_factory.mktemp("free"))
            out = tmp_path_factory.mktemp("pruned") / "out"
            model = run_oneshot(str(folder), sparsity=0.5, sublayers="both", allocation=CURVE, output_dir=str(out))
            known[name] = folder, model.eval(), out
        return known[name]

    return make


@pytest.fixture
def prompts():
    return torch.randint(4, 2048, (2, 9), generator=torch.Generator().manual_seed(3))


def list_gone(folder):
    return {(record.layer, record.kind) for record in read_manifest(folder).groups if not record.kept}


@pytest.mark.parametrize("name", TYPES)
def test_what_is_free_goes_and_what_is_left_loads(make_once, name, prompts):
    folder, model, out = make_once(name)
    dense, manifest = AutoModelForCausalLM.from_pretrained(folder), read_manifest(out)
    names = {"attention": "value_channels", "ffn": "ffn"}
    assert {(layer, names[kind]) for layer, kinds in FREE.items() for kind in kinds} <= list_gone(out)
    assert not manifest.allocation.taken.endswith("all sublayers")
    assert manifest.allocation.tried["error_curve"] < manifest.allocation.tried["error_curve, all sublayers"]
    budget = manifest.budget
    step = max(group.unit_cost * group.num_blocks for group in manifest.groups)
    assert 0 <= budget.removed_parameters - 0.5 * budget.prunable_parameters < step
    again = AutoModelForCausalLM.from_pretrained(out).eval()
    counts = [sum(p.numel() for p in each.parameters()) for each in (dense, again)]
    assert counts == [manifest.model.parameters_before, manifest.model.parameters_after]
    shared = 64 if name == "phi" else 0  # one norm before attention and the FFN
    assert counts[0] - counts[1] == budget.removed_parameters + shared
    assert torch.equal(again(prompts).logits, model(prompts).logits)
    assert len(find_decoder_layers(again)) == 5
    assert again.config.num_hidden_layers == 5
    assert torch.equal(again.generate(prompts, **GENERATE), again.generate(prompts, use_cache=False, **GENERATE))


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_sublayers_that_are_not_free_stay(name, tmp_path):
    """Ten percent are found elsewhere; none is asked to go where it costs more than single units do."""
    folder = make_free(name, tmp_path / "m", scale=1.0)
    run_oneshot(str(folder), sparsity=0.1, sublayers="both", allocation=CURVE, output_dir=str(tmp_path / "out"))
    run_oneshot(str(folder), sparsity=0.1, allocation=CURVE, output_dir=str(tmp_path / "plain"))
    assert not list_gone(tmp_path / "out")
    first, second = (load_file(tmp_path / out / "model.safetensors") for out in ("out", "plain"))
    assert all(torch.equal(first[key], second[key]) for key in second)


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_what_follows_repairs_what_a_sublayer_gave(name, tmp_path):
    """Sublayers that matter go; solves towards the dense stream behind them come nearer to the dense model."""
    folder, found = make_free(name, tmp_path / "m", scale=0.3), {}
    ids = torch.tensor(make_dataset()["input_ids"])
    dense = torch.log_softmax(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, -1)
    for reconstruct in ("residual", "block"):
        options = {"allocation": {"rule": "error_curve", "trial_samples": 0}, "reconstruct": reconstruct}
        out = tmp_path / reconstruct
        model = run_oneshot(str(folder), sparsity=0.4, sublayers="both", output_dir=str(out), **options)
        assert list_gone(out)
        logits = torch.log_softmax(model(ids).logits, -1)
        found[reconstruct] = float(torch.nn.functional.kl_div(logits, dense, log_target=True, reduction="sum"))
    assert found["residual"] < found["block"]


@pytest.mark.parametrize("name", ["opt", "llama", "gemma2"])
def test_an_output_without_sublayers_is_pruned_again(make_once, name, prompts, tmp_path):
    _, first, out = make_once(name)
    model = run_oneshot(str(out), sparsity=0.2, sublayers="both", allocation=CURVE, output_dir=str(tmp_path / "out"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(again(prompts).logits, model.eval()(prompts).logits)
    assert torch.equal(again.generate(prompts, **GENERATE), again.generate(prompts, use_cache=False, **GENERATE))
    before, after = ([{*list_absent(layer)} for _, layer in find_decoder_layers(m)] for m in (first, again))
    assert len(after) <= len(before)
    assert sum(p.numel() for p in again.parameters()) < sum(p.numel() for p in first.parameters())
    plain = run_oneshot(str(out), sparsity=0.2, attention_unit="head", output_dir=str(tmp_path / "heads"))
    assert [{*list_absent(layer)} for _, layer in find_decoder_layers(plain)] == before


def test_a_replay_gives_the_same_bytes(make_once, tmp_path):
    folder, _, out = make_once("llama")
    run_oneshot(str(folder), replay=str(out), output_dir=str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_a_run_that_died_goes_on(make_once, name, tmp_path, monkeypatch):
    folder, _, out = make_once(name)
    options = {"sparsity": 0.5, "sublayers": "both", "allocation": CURVE, "checkpoint_dir": tmp_path / "c"}
    written, inner = [], ResumeStore.write

    def write(self, part, *args):
        inner(self, part, *args)
        written.append(part)
        if part == "layer-00003":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ResumeStore, "write", write)
        with pytest.raises(Killed):
            run_oneshot(str(folder), output_dir=str(tmp_path / "out"), **options)
    assert written[-1] == "layer-00003"
    run_oneshot(str(folder), output_dir=str(tmp_path / "out"), **options)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["opt", "llama", "gemma2"])
def test_an_allocator_stage_lets_sublayers_go(name, tmp_path):
    folder = make_free(name, tmp_path / "m")
    stage = SparsityAllocatorModifier(sparsity=0.5, allocation="error_curve", sublayers="both")
    recipe = [stage, StruPruneModifier(sublayers="both")]
    run_oneshot(str(folder), recipe=recipe, output_dir=str(tmp_path / "out"))
    assert len(list_gone(tmp_path / "out")) >= 4


@pytest.mark.parametrize("trials", [0, 2])
@pytest.mark.parametrize("name", ["opt", "llama", "gemma3_text"])
def test_whole_layers_leave_a_checkpoint_of_the_stock_class(name, trials, prompts, tmp_path):
    folder, out = make_free(name, tmp_path / "m"), tmp_path / "out"
    rule = {"rule": "whole_layers", "trial_samples": trials}
    model = run_oneshot(
        str(folder), sparsity=0.3, sublayers="both", allocation=rule, output="uniform", output_dir=str(out)
    )
    dense, again = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (folder, out))
    assert type(again) is type(dense)
    assert not (out / "modeling_struprune.py").exists()
    assert {2} <= {layer for layer, _ in list_gone(out)}
    assert len(find_decoder_layers(again)) == 6 - len(list_gone(out)) // 2
    assert torch.equal(again(prompts).logits, model.eval()(prompts).logits)
    assert torch.equal(again.generate(prompts, **GENERATE), again.generate(prompts, use_cache=False, **GENERATE))
    manifest = read_manifest(out)
    channels = sum(record.unit_cost for record in manifest.groups if record.kind == "ffn")
    assert abs(manifest.budget.removed_parameters - 0.3 * manifest.budget.prunable_parameters) <= channels
    run_oneshot(str(folder), replay=str(out), output_dir=str(tmp_path / "replayed"))
    assert (tmp_path / "replayed" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


# -- other forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["uniform-padded", "static", "block_configs"])
@pytest.mark.parametrize("name", ["opt", "llama", "gemma2"])
def test_other_forms_keep_the_function(make_once, name, form, prompts, tmp_path):
    folder, model, out = make_once(name)
    if form == "block_configs" and name != "llama":
        return
    convert_folder(out, form, tmp_path)
    made = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    torch.testing.assert_close(made(prompts).logits, model(prompts).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(made.generate(prompts, **GENERATE), model.generate(prompts, **GENERATE))
    if form == "uniform-padded":
        assert type(made) is type(AutoModelForCausalLM.from_pretrained(folder))
        assert made.config.num_hidden_layers == 5
    else:
        assert made.num_parameters() <= model.num_parameters() * (1.1 if form == "block_configs" else 1)
    if form == "block_configs":
        blocks = json.loads((tmp_path / "config.json").read_text())["block_configs"]
        layers = [layer for _, layer in find_decoder_layers(model)]
        assert [block["attention"]["no_op"] for block in blocks] == ["self_attn" in list_absent(x) for x in layers]
        assert [block["ffn"]["no_op"] for block in blocks] == ["mlp" in list_absent(x) for x in layers]


def test_masked_is_refused_by_name(make_once, tmp_path):
    with pytest.raises(ValueError, match="masked: must start from a model that has all its sublayers"):
        convert_folder(make_once("llama")[2], "masked", tmp_path)


def test_gguf_says_which_layers_have_no_attention(make_once, tmp_path):
    gguf = pytest.importorskip("gguf")
    _, model, out = make_once("llama")
    convert_folder(out, "gguf", tmp_path)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    heads = reader.get_field("deci.attention.head_count").contents()
    widths = reader.get_field("deci.feed_forward_length").contents()
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    for index, (_, layer) in enumerate(find_decoder_layers(model)):
        absent = list_absent(layer)
        assert (heads[index] == 0) == ("self_attn" in absent) == (f"blk.{index}.attn_q.weight" not in tensors)
        assert ("mlp" in absent) == (not tensors[f"blk.{index}.ffn_down.weight"].any())
        assert tensors[f"blk.{index}.ffn_down.weight"].shape[1] == widths[index]


# -- what follows in a recipe -------------------------------------------------------------------------------------------


def _quantise(kind=QuantizationModifier, **fields):
    made = preset_name_to_scheme("W8A8", ["Linear"]).model_dump()
    return kind(config_groups={"group_0": made}, ignore=["lm_head"], **fields)


@pytest.mark.parametrize(
    "later",
    [
        lambda: [_quantise(kv_cache_scheme=CACHE)],
        lambda: [_quantise(GPTQModifier)],
        lambda: [LoRARecoveryModifier(adapters={"rank": 2}, schedule={"epochs": 1})],
    ],
    ids=["quantised cache", "GPTQ", "LoRA"],
)
def test_what_follows_in_a_recipe_works_without_sublayers(later, prompts, tmp_path):
    folder, out = make_free("qwen3", tmp_path / "m", **WIDE), tmp_path / "out"
    untried = {"rule": "error_curve", "trial_samples": 0}
    recipe = [StruPruneModifier(sparsity=0.5, sublayers="both", allocation=untried), *later()]
    run_oneshot(str(folder), recipe=recipe, dataset=make_dataset(16), num_calibration_samples=16, output_dir=str(out))
    assert len(list_gone(out)) >= 4
    again = AutoModelForCausalLM.from_pretrained(out).eval()
    if (recovery := read_manifest(out).recovery) is not None:
        assert recovery.linears == sum(part.dim() == 2 for part in again.model.layers.state_dict().values())
    assert torch.isfinite(again(prompts).logits).all()
    assert torch.equal(again.generate(prompts, **GENERATE), again.generate(prompts, use_cache=False, **GENERATE))


# -- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", ["uniform", "softmax"])
def test_rules_that_leave_something_everywhere_are_refused(allocation):
    with pytest.raises(ValueError, match="`sublayers: both` has no effect with `allocation: "):
        StruPruneModifier(sparsity=0.3, sublayers="both", allocation=allocation)
    with pytest.raises(
        ValueError, match="`allocation: whole_layers` requires `sublayers: both`, got `sublayers: none`"
    ):
        StruPruneModifier(sparsity=0.3, allocation="whole_layers")


# -- what is told -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["opt", "llama", "gemma2", "phi"])
def test_the_cache_that_is_told_is_the_one_that_is_held(make_once, name, prompts):
    folder, model, out = make_once(name)
    told = measure_cache_bytes(out, read_manifest(out))

    def measure(one):
        layers = one(prompts[:, :6], use_cache=True).past_key_values.layers
        held = [part for layer in layers for part in (getattr(layer, "keys", None), getattr(layer, "values", None))]
        return sum(part.nbytes for part in held if part is not None) // prompts[:, :6].numel()

    assert told == (measure(AutoModelForCausalLM.from_pretrained(folder)), measure(model))
