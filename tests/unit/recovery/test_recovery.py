"""Recovery under one layer: equal to the ordinary way, within its memory, and over again after a kill."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers.families import make_model
from helpers.models import ROOT, VOCABULARY, make_dataset, make_opt, run_oneshot, save_model
from helpers.recovery_loop import (
    CPU,
    compress_logits,
    find_distance,
    make_batches,
    make_config,
    make_logits,
    make_stepper,
    measure_divergence,
    train_layerwise,
    train_plainly,
    twins,
    weights_of,
)
from transformers import AutoModelForCausalLM

from eval.account import CountedContext, count_memory
from struprune_plugin import RecoveryModifier, StruPruneModifier, read_manifest
from struprune_plugin.layerwise.head import Head, compress_head, measure_head
from struprune_plugin.layerwise.logits import LogitShape
from struprune_plugin.layerwise.runner import LayerwiseRunner
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.recovery.adapters import attach_adapters, match_linears
from struprune_plugin.recovery.memory import RecoverySizes, place_recovery
from struprune_plugin.recovery.recovery_config import Adapters, Divergence, Loss, Optimizer
from struprune_plugin.recovery.states import TrainedStates, round_randomly
from struprune_plugin.recovery.teacher import LayerwiseTeacher
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.storage.resume_store import ResumeStore

FAST = {"batch_size": 2, "micro_batch_size": 1}
STEADY = {"learning_rate": 2e-2, "decay": "constant", "warmup_fraction": 0.0}
TEXT = {"loss": {"cross_entropy": 1.0}}


# -- pure parts ---------------------------------------------------------------------------------------------------


def test_a_state_moves_as_torch_s_adamw_moves_a_parameter():
    generator = torch.Generator().manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(7, 5, generator=generator))
    theirs = ours.detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.03, foreach=False)
    states = TrainedStates({"a": ours}, Optimizer(weight_decay=0.03))
    for step in range(1, 6):
        theirs.grad = torch.randn(7, 5, generator=generator)
        optimizer.step()
        states.update("a", theirs.grad, step, 0.1)
        assert torch.equal(ours, theirs)


def test_random_rounding_is_right_on_average_and_exact_where_it_can_be():
    generator = torch.Generator().manual_seed(0)
    value = torch.tensor([1.001, -3.3, 1e-20, 0.0, 2.5]).repeat(20_000, 1)
    rounded = round_randomly(value, generator).float()
    assert (rounded.mean(0) - value[0]).abs().max() < 1e-4 * 3.3
    assert (rounded[:, 3:] == value[:, 3:]).all()
    assert ((rounded - value).abs() <= value.abs() / 128).all(), "to one of the two neighbours"


def make_head(vocabulary, width, rows, **changes):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64)

    def split():
        for start in range(0, vocabulary, rows):
            yield start, weight[start : start + rows], bias[start : start + rows]

    return Head(split, LogitShape(**changes), vocabulary), weight, bias


@pytest.mark.parametrize("rows", [1, 7, 23, 99])
@pytest.mark.parametrize(("top_k", "temperature"), [(4, 1.0), (4, 2.5), (23, 1.5), (22, 1.0)])
@pytest.mark.parametrize("changes", [{}, {"scale": 3.0, "cap": 4.0}])
def test_losses_in_pieces_are_those_of_autograd(rows, top_k, temperature, changes):
    head, weight, bias = make_head(23, 6, rows, **changes)
    hidden = make_logits(9, 6).requires_grad_()
    labels = torch.arange(9) * 2
    teacher = compress_logits(make_logits(9, 23, seed=4), top_k, temperature)
    logits = (hidden @ weight.T + bias) / changes.get("scale", 1.0)
    logits = 4.0 * torch.tanh(logits / 4.0) if "cap" in changes else logits
    entropy = F.cross_entropy(logits, labels, reduction="sum")
    divergence = measure_divergence(logits, teacher, temperature).sum()
    (wanted,) = torch.autograd.grad(0.3 * entropy + 0.7 * divergence, hidden)
    found = measure_head(hidden.detach(), labels, teacher, head, temperature, (0.3, 0.7))
    assert found.cross_entropy == pytest.approx(entropy.item(), rel=1e-12)
    assert found.divergence == pytest.approx(divergence.item(), rel=1e-10)
    torch.testing.assert_close(found.gradient, wanted, rtol=1e-9, atol=1e-11)
    alone = measure_head(hidden.detach(), labels, None, head, temperature, None)
    assert (alone.cross_entropy, alone.divergence, alone.gradient) == (found.cross_entropy, 0.0, None)


@pytest.mark.parametrize("rows", [3, 10, 99])
@pytest.mark.parametrize("top_k", [1, 5, 23, 40])
def test_a_teacher_in_pieces_says_the_same(rows, top_k):
    head, weight, bias = make_head(23, 6, rows)
    hidden = make_logits(9, 6)
    found, wanted = compress_head(hidden, head, top_k, 1.5), compress_logits(hidden @ weight.T + bias, top_k, 1.5)
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-10, atol=1e-10)
    assert (found.indices is None) == (wanted.indices is None)
    if wanted.indices is not None:
        assert torch.equal(found.indices, wanted.indices)


# -- equal to a plain loop ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["all", "norms_and_biases"])
@pytest.mark.parametrize("clipping", ["layer", "global"])
@pytest.mark.parametrize("memory", ["layer", "model"])
def test_ten_steps_equal_the_plain_loop(weights, clipping, memory):
    """Float64, three micro-batches a step, clipped at every step."""
    ours, theirs = twins(make_opt())
    before = [parameter.clone() for parameter in ours.parameters()]
    batches = make_batches(10, 5)
    config = make_config(0.05, clipping, weights=weights, memory=memory)
    losses = train_layerwise(ours, batches, 2, 1e-2, config, held=None if memory == "model" else 9000)
    wanted = train_plainly(theirs, batches, 1e-2, config)
    assert [row["cross_entropy"] for row in losses] == pytest.approx(wanted, rel=1e-9)
    assert find_distance(ours, theirs) < 1e-8
    moved = [not torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True)]
    assert sum(moved) == {"all": 3 * 16 + 2, "norms_and_biases": 3 * 10 + 2}[weights]


def test_ten_steps_with_adapters_equal_the_plain_loop():
    models = twins(make_opt())
    batches = make_batches(10, 4)
    lora = Adapters(rank=3, alpha=6.0)
    config = make_config(0.05, "global", adapters=lora)
    for model, train in zip(models, (train_layerwise, train_plainly), strict=True):
        torch.manual_seed(0)
        with attach_adapters(model, match_linears(model, lora), lora) as adapters:
            for adapter in adapters:
                adapter.data = adapter.data.double()
            if train is train_layerwise:
                train(model, batches, 2, 1e-2, config)
            else:
                train(model, batches, 1e-2, config)
    assert find_distance(*models) < 1e-8
    assert find_distance(models[0], make_opt().double()) > 1e-3, "they have learnt"


@pytest.mark.parametrize("top_k", [8, VOCABULARY])
def test_steps_towards_a_teacher_equal_the_plain_loop(top_k):
    ours, theirs = twins(make_opt())
    teacher = make_opt(seed=1).double()
    batches = [
        [
            dataclasses.replace(s, teacher=compress_logits(teacher(s.tokens[None]).logits[0, :-1].detach(), top_k, 2.0))
            for s in batch
        ]
        for batch in make_batches(3, 2)
    ]
    config = make_config(loss=Loss(cross_entropy=0.25, kl=Divergence(weight=0.75, temperature=2.0)))
    losses = train_layerwise(ours, batches, 1, 1e-2, config)
    wanted = train_plainly(theirs, batches, 1e-2, config)
    assert [0.25 * row["cross_entropy"] + 0.75 * row["kl"] for row in losses] == pytest.approx(wanted, rel=1e-9)
    assert find_distance(ours, theirs) < 1e-8


TYPES = ["llama", "gemma2", "gemma3_text", "granite", "phi", "phi3", "gpt_neox", "qwen3_moe"]


@pytest.mark.parametrize("model_type", TYPES)
def test_every_layout_takes_the_plain_loop_s_steps(model_type):
    """Soft caps, scaled logits, biases of the head, fused projections, parallel residuals, experts, several masks."""
    model = make_model(model_type)
    model.config._experts_implementation = "eager"  # the grouped product knows no float64
    ours, theirs = twins(model)
    batches = make_batches(2, 3)
    losses = train_layerwise(ours, batches, 2, 1e-3)
    assert [row["cross_entropy"] for row in losses] == pytest.approx(train_plainly(theirs, batches, 1e-3), rel=1e-6)
    assert find_distance(ours, theirs) < 1e-5, "some classes normalise in float32, whatever the dtype"


@pytest.mark.parametrize("shape", [{"do_layer_norm_before": False, "word_embed_proj_dim": 16}, {"enable_bias": False}])
def test_projected_embeddings_take_the_plain_loop_s_steps(shape):
    ours, theirs = twins(make_opt(**shape))
    batches = make_batches(2, 2)
    train_layerwise(ours, batches, 2, 1e-2)
    train_plainly(theirs, batches, 1e-2)
    assert find_distance(ours, theirs) < 1e-8


@pytest.mark.parametrize("memory", ["layer", "model"])
def test_distances_of_hidden_states_have_the_right_gradient(memory):
    """Of one layer, by autograd over the whole model."""
    student, dense = make_opt(seed=1).double().requires_grad_(False), make_opt().double()
    (batch,) = make_batches(1, 2)
    stepper = make_stepper(student, make_config(loss=Loss(hidden=1.0), memory=memory))
    micro_batches = [stepper.runner.embed(batch)]
    LayerwiseTeacher(LayerwiseRunner(dense, DeviceContext(), CPU, torch.float64), 2).show_hidden(micro_batches)
    found: dict = {}
    run = stepper._run_whole if memory == "model" else stepper._run_layerwise
    losses = run(micro_batches, 22, lambda *_: None, found.__setitem__)
    wanted, gradients = _differentiate(student, dense, batch)
    assert losses["hidden"] == pytest.approx(wanted, rel=1e-9)
    torch.testing.assert_close(found["1"]["fc1.weight"], gradients, rtol=1e-7, atol=1e-12)


def _differentiate(student, dense, batch):
    weight = student.model.decoder.layers[1].fc1.weight.requires_grad_()
    ids = torch.stack([sample.tokens for sample in batch])
    mine, theirs = [], []
    handles = [
        layer.register_forward_hook(lambda _m, _a, out, to=to: to.append(out[:, :-1]))
        for model, to in ((student, mine), (dense, theirs))
        for _, layer in find_decoder_layers(model)
    ]
    student(ids)
    dense(ids)
    for handle in handles:
        handle.remove()
    total = sum((1 - F.cosine_similarity(a, b, dim=-1)).sum() for a, b in zip(mine, theirs, strict=True))
    loss = total / 3 / 22
    (gradient,) = torch.autograd.grad(loss, weight)
    weight.requires_grad_(False)
    return loss.item(), gradient


# -- memory ---------------------------------------------------------------------------------------------------------


def make_wide(layers=2):
    sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 512, "num_hidden_layers": layers}
    return make_opt(**sizes).bfloat16()


def measure_step(model, tokens=8, ahead=False, held=0):
    """Return (peak of a step, bytes of a layer)."""
    layer = sum(p.numel() * p.element_size() for p in find_decoder_layers(model)[0][1].parameters())
    (batch,) = make_batches(1, 4, length=tokens)
    with CountedContext.open() as context:
        stepper = make_stepper(model, make_config(1.0), context, 64, ahead, held)
        with context.watch() as peak:
            micro_batches = [stepper.runner.embed([sample]) for sample in batch]
            stepper.take(micro_batches, 4 * (tokens - 1), 1, 1e-3)
    return peak[0], layer


def test_a_step_holds_one_layer_whatever_the_depth():
    peaks = {}
    for layers in (2, 5):
        for ahead in (False, True):
            peaks[layers, ahead], layer = measure_step(make_wide(layers), ahead=ahead)
    assert peaks[5, False] < 1.01 * peaks[2, False]
    assert peaks[5, True] < 1.01 * peaks[2, True]
    assert peaks[2, False] < 2 * layer, "weights, one linear's gradient, activations of eight tokens"
    assert peaks[2, True] < 3 * layer, "and the next layer's weights"
    whole, _ = measure_step(make_wide(5), held=None)
    assert whole < 4.2 * layer, "and float32 gradients, twice as large as the weights"


def test_more_sequences_take_no_more():
    model = make_wide()
    one, _ = measure_step(model)
    (batch,) = make_batches(1, 16, length=8)
    with CountedContext.open() as context:
        stepper = make_stepper(model, make_config(1.0), context, 64, held=0)
        with context.watch() as peak:
            stepper.take([stepper.runner.embed([sample]) for sample in batch], 16 * 7, 1, 1e-3)
    assert peak[0] < 1.01 * one


def test_part_of_the_gradients_on_the_device_takes_their_bytes():
    peaks = [measure_step(make_wide(), held=held)[0] for held in (0, 4 * 128 * 512, 2 * 4 * 128 * 512)]
    for before, after in itertools.pairwise(peaks):
        assert 0.5 * 4 * 128 * 512 < after - before <= 4 * 128 * 512, "one of the FFN's two linears, in float32"


def test_the_placement_is_the_fastest_that_fits():
    many = RecoverySizes(100_000, 200_000, 30_000, 20_000, 8, 4, 100, 8, 2)
    found = {}
    for budget in (None, 450_000, 449_999, 350_000, 349_999, 150_000):
        placement = place_recovery(budget, None, many)
        found[budget] = (placement.ahead, placement.held_sums)
    assert found == {
        **{None: (False, 170_000), 450_000: (True, 200_000), 449_999: (False, 200_000), 350_000: (False, 200_000)},
        **{349_999: (False, 199_999), 150_000: (False, 0)},
    }
    few = dataclasses.replace(many, micro_batches=2)  # as few gradients travel as one sum weighs
    for budget, wanted in {None: (True, 0), 450_000: (True, 200_000), 250_000: (True, 0), 249_999: (False, 0)}.items():
        placement = place_recovery(budget, None, few)
        assert (placement.ahead, placement.held_sums) == wanted, budget
    assert place_recovery(150_000, None, many).vocabulary < place_recovery(350_000, None, many).vocabulary
    assert place_recovery(None, 200_000, many) == place_recovery(200_000, None, many), "what is free bounds it"
    assert place_recovery(None, 900_000, many) == place_recovery(None, None, many), "three layers are enough"
    for budget, free in ((149_999, None), (None, 149_999)):
        with pytest.raises(ValueError, match="memory_budget: must be at least 150,000 bytes for recovery"):
            place_recovery(budget, free, many)


# -- the stage ------------------------------------------------------------------------------------------------------


def recover(model, dataset=None, prune=True, **fields):
    options = {name: fields.pop(name) for name in ("output_dir", "checkpoint_dir") if name in fields}
    fields["schedule"] = STEADY | fields.get("schedule", {})
    stage = RecoveryModifier(**(FAST | fields))
    recipe = [StruPruneModifier(sparsity=0.3), stage] if prune else [stage]
    return run_oneshot(str(model), recipe, dataset, **options), stage.record


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return save_model(make_opt(seed=1), tmp_path_factory.mktemp("other"))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"adapters": {"dropout": 0.1}, "loss": {"cross_entropy": 0.5, "kl": 0.5}},
        {"weights": "norms_and_biases", "optimizer": {"clipping": "global"}},
        {"loss": {"hidden": 1.0, "kl": 0.1}},
        {"memory": "model"},
        {"optimizer": {"state_dtype": "bfloat16"}, "compute": "bfloat16"},
    ],
)
def test_what_is_held_out_gets_better(opt, other, fields):
    """Towards another model, which there is much to learn from."""
    rows = make_dataset(2, 24)["input_ids"][:] * 4  # the held-out samples are among the others too
    data = type(make_dataset()).from_dict({"input_ids": rows, "attention_mask": [[1] * 24] * 8})
    rate = 2e-2 if "adapters" in fields or "weights" in fields else 2e-3
    loss = {**fields.pop("loss", {"kl": 1.0}), "teacher": str(other)}
    how = {"schedule": {"epochs": 3, "learning_rate": rate}, "holdout": {"fraction": 0.2, "steps": 3}, "loss": loss}
    _, record = recover(opt, data, prune=False, **how, **fields)
    losses = [row["loss"] for row in record["holdout"]]
    assert [row["step"] for row in record["holdout"]] == [0, 3, 6, 9]
    assert min(losses) < 0.97 * losses[0]
    assert record["best_step"] == 3 * losses.index(min(losses))
    assert record["samples"] == {"trained": 6, "held_out": 2}
    assert record["tokens_seen"] == 3 * 6 * 23


def test_where_nothing_is_better_nothing_changes(opt):
    """The dense model cannot come closer to itself."""
    model, record = recover(
        opt, prune=False, schedule={"epochs": 2, "learning_rate": 0.1}, holdout={"steps": 2, "patience": 2}
    )
    assert record["best_step"] == 0
    assert record["steps"] == 4, "two measurements without a better one"
    before = weights_of(AutoModelForCausalLM.from_pretrained(opt))
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())


def test_layer_and_model_memory_make_the_same_weights(opt, other):
    how = {"prune": False, "loss": {"kl": 1.0, "teacher": str(other)}, "schedule": {"max_steps": 2}}
    for adapters in (None, {}):
        both = [recover(opt, adapters=adapters, memory=memory, **how)[0] for memory in ("layer", "model")]
        assert find_distance(*both) == 0


def test_an_output_saves_reloads_and_tells_its_curve(opt, tmp_path):
    model, _ = recover(opt, output_dir=str(tmp_path / "out"), schedule={"max_steps": 2})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(4, 30)[None]
    assert torch.equal(model(ids).logits, again(ids).logits)
    manifest = read_manifest(tmp_path / "out")
    recovery = manifest.recovery
    assert manifest.groups
    assert recovery.settings["loss"]["kl"] == {"weight": 1.0, "temperature": 1.0, "top_k": 64}
    assert {len(values) for values in recovery.train.values()} == {2}
    assert recovery.teacher["parameters"] == make_opt().num_parameters()
    assert recovery.teacher["cache_bytes"] > 5 * 31 * (6 * 64 + 2)
    assert {parameter.requires_grad for parameter in model.parameters()} == {True}


def test_files_of_states_change_nothing_and_go(opt, other, tmp_path, monkeypatch):
    how = {"prune": False, "loss": {"kl": 1.0, "teacher": str(other)}, "schedule": {"max_steps": 2}}
    files, inner = [], torch.from_file
    monkeypatch.setattr(torch, "from_file", lambda name, **how: (files.append(name), inner(name, **how))[1])
    plain = recover(opt, **how)[0]
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "mine.bin").write_text("dear")
    filed = recover(opt, **how, optimizer={"state_folder": str(tmp_path / "states")})[0]
    assert find_distance(plain, filed) == 0
    assert len(files) == 2 * (3 * 16 + 2)
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["mine.bin"]
    with pytest.raises(ValueError, match=r"state_folder: must be a folder, .* is a file"):
        recover(opt, optimizer={"state_folder": str(tmp_path / "states" / "mine.bin")})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_learn_in_float32_beside(opt, dtype):
    schedule = STEADY | {"learning_rate": 5e-3, "epochs": 12}
    stage = RecoveryModifier(**FAST, **TEXT, schedule=schedule, holdout=None)
    recipe = [StruPruneModifier(sparsity=0.3), stage]
    model = run_oneshot(str(opt), recipe, make_dataset(4, 16), precision=dtype, num_calibration_samples=4)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    losses = stage.record["train"]["loss"]
    assert losses[-1] < 0.8 * losses[0]


def test_budgets_are_kept(opt):
    with pytest.raises(ValueError, match="memory_budget: must be at least") as refusal:
        recover(opt, prune=False, memory_budget=1000, **TEXT)
    least = int(str(refusal.value).split("at least ")[1].split(" ")[0].replace(",", ""))
    for factor in (1.0, 1.5):
        fields = {"memory_budget": int(factor * least), "schedule": {"max_steps": 1}}
        with count_memory():
            _, record = recover(opt, prune=False, **TEXT, **fields)
        peaks = {stage["name"]: stage["peak_bytes"] for stage in record["stages"]}
        assert peaks["training"] <= factor * least


def test_text_of_its_own_is_packed_and_mixed(opt, tmp_path):
    for name, word in (("a", "alpha "), ("b", "beta ")):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "' + word * 200 + '"}\n')
    data = {"files": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], "window": 16}
    _, record = recover(opt, data={**data, "tokens": 320}, holdout={"fraction": 0.1}, prune=False, **TEXT)
    assert record["samples"] == {"trained": 18, "held_out": 2}
    with pytest.raises(ValueError, match="must hold a window of 16 tokens, got 8 tokens"):
        recover(opt, data={**data, "tokens": 16})
    with pytest.raises(ValueError, match="tokens: must be given where data come from the hub"):
        recover(opt, data="c4")


# -- over again -----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("after", "fields"),
    [
        ("recovery-00000004", {}),
        ("recovery-00000004", {"adapters": {"dropout": 0.2}, "prune": False}),
        ("teacher-00000", {"prune": False}),
        ("best", {"optimizer": {"state_dtype": "bfloat16"}, "prune": False}),
    ],
)
def test_a_killed_run_ends_with_the_same_bytes(opt, other, tmp_path, monkeypatch, fields, after):
    how = {
        "schedule": {"epochs": 2, "learning_rate": 2e-3},
        "holdout": {"steps": 3},
        "checkpoint_steps": 2,
        "loss": {"kl": 1.0, "teacher": str(other)},
        **fields,
    }
    whole, record = recover(opt, **how)
    written, inner = [], ResumeStore.write

    def write(self, part, *args):
        inner(self, part, *args)
        written.append(part)
        if part == after:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ResumeStore, "write", write)
        with pytest.raises(Killed):
            recover(opt, checkpoint_dir=tmp_path / "c", **how)
    assert (tmp_path / "c").exists()
    with monkeypatch.context() as patch:
        patch.setattr(ResumeStore, "write", lambda self, part, *args: (inner(self, part, *args), written.append(part)))
        written.clear()
        again, repeated = recover(opt, checkpoint_dir=tmp_path / "c", **how)
    assert find_distance(whole, again) == 0
    assert repeated["train"]["loss"] == record["train"]["loss"]
    assert repeated["holdout"] == record["holdout"]
    assert not (tmp_path / "c").exists()
    assert "teacher-00000" not in written, "the teacher is asked once"
    assert not after.startswith("recovery") or "recovery-00000002" not in written


def test_going_on_with_other_text_is_refused(opt, tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "' + "alpha " * 200 + '"}\n')
    how = {"data": {"files": [str(file)], "window": 16}, "checkpoint_steps": 1, "prune": False, **TEXT}
    inner = ResumeStore.write

    def write(self, part, *args):
        inner(self, part, *args)
        if part.startswith("recovery"):
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ResumeStore, "write", write)
        with pytest.raises(Killed):
            recover(opt, checkpoint_dir=tmp_path / "c", **how)
    file.write_text('{"text": "' + "gamma " * 200 + '"}\n')
    with pytest.raises(ValueError, match="checkpoint_dir: recovery must continue with the text that it began with"):
        recover(opt, checkpoint_dir=tmp_path / "c", **how)


def test_two_stages_keep_no_checkpoint(opt, tmp_path):
    """Their parts would bear the same names."""
    stages = [RecoveryModifier(**FAST, schedule={"max_steps": 1}) for _ in range(2)]
    with pytest.raises(ValueError, match="must be left out for several recovery stages in one recipe, got 2"):
        run_oneshot(str(opt), stages, checkpoint_dir=tmp_path / "c")


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": {}}, "loss must hold one of cross_entropy, kl and hidden, got none"),
        ({"loss": {"kl": -1.0}}, "loss.kl.weight must be greater than 0, got -1.0"),
        ({"loss": {"mse": 1.0}}, "loss.mse is not a field of loss"),
        ({"loss": {"cross_entropy": 1.0, "teacher": "x"}}, "`teacher: x` has no effect with cross_entropy alone"),
        ({"weights": "all", "adapters": {}}, "`weights: all` has no effect with adapters. Remove one"),
        ({"weights": "some"}, "weights must .*'all' or 'norms_and_biases'"),
        ({"rank": 4}, "rank is not a field of RecoveryModifier"),
        ({"data": {"tokens": 100}}, "data.files must be valid"),
        ({"memory": "model", "memory_budget": 10}, "`memory_budget: 10` has no effect with `memory: model`"),
        ({"memory": "model", "optimizer": {"state_folder": "x"}}, "`optimizer.state_folder: x` has no effect with"),
        ({"holdout": {"fraction": 0, "patience": 2}}, "holdout.fraction must be greater than 0, got 0"),
        ({"start": 0.0}, "start and end have no effect: RecoveryModifier runs once"),
        ({"optimizer": {"state_dtype": "float16"}}, "optimizer.state_dtype must .*'float32' or 'bfloat16'"),
    ],
)
def test_fields_are_checked(fields, message):
    text = yaml.safe_dump({"x_stage": {"x_modifiers": {"RecoveryModifier": fields}}})
    with pytest.raises(ValueError, match=message):
        load_recipe(text)


def test_a_diverging_run_says_so(opt):
    with pytest.raises(
        ValueError, match=r"recovery: .* must be finite, got NaN or Inf at step \d+. Lower schedule.learning"
    ):
        recover(opt, schedule={"learning_rate": 1e30, "epochs": 4})


def test_recipes_run(opt, tmp_path):
    recipe = ROOT / "recipes" / "struprune_recover.yaml"
    run_oneshot(str(opt), str(recipe), output_dir=str(tmp_path / "out"))
    manifest = read_manifest(tmp_path / "out")
    assert abs(manifest.budget.met_sparsity - 0.3) < 0.005
    assert manifest.recovery.settings["adapters"]["rank"] == 8


def test_prune_recover_quantise_in_one_recipe(opt, tmp_path):
    recipe = {
        "a_stage": {"a_modifiers": {"StruPruneModifier": {"sparsity": 0.3}}},
        "b_stage": {"b_modifiers": {"RecoveryModifier": {**FAST, "schedule": {**STEADY, "max_steps": 2}}}},
        "c_stage": {
            "c_modifiers": {"QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W8A8"}}
        },
    }
    run_oneshot(str(opt), yaml.safe_dump(recipe, sort_keys=False), output_dir=str(tmp_path / "out"))
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    plain, _ = recover(opt, schedule={"max_steps": 2})
    ids = torch.arange(4, 30)[None]
    with torch.no_grad():
        found, wanted = quantised(ids).logits, plain(ids).logits
    assert (found - wanted).norm() < 0.1 * wanted.norm(), "scales are those of the recovered weights"
