"""``python -m eval.experts`` on a tiny random mixture: every row, the shares that are gone, and the widths that stay."""

import json
import shutil

import pytest
import torch
from helpers.families import make_model
from helpers.models import save_model

from eval.experts import CALIBRATION, CRITERIA, PEERS, ROWS, main
from eval.peers import experts as criteria
from eval.peers.reap import prune_reap, prune_reap_and_solve
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_TEST
from struprune_plugin.model.experts import list_experts, take_apart
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.model.units import find_groups

EXPERTS, WIDTH = 4, 64
WINDOWS = torch.randint(4, 2048, (8, 24), generator=torch.Generator().manual_seed(3))


def make_mixture(**changes):
    return make_model("qwen3_moe", moe_intermediate_size=WIDTH, num_hidden_layers=2, mlp_only_layers=[], **changes)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return str(save_model(make_mixture(), tmp_path_factory.mktemp("mixture")))


def list_widths(model):
    """Return the widths of all experts of every layer."""
    take_apart(model)
    return [
        [expert.down_proj.in_features for expert in experts if hasattr(expert, "down_proj")]
        for _, layer in find_decoder_layers(model)
        for _, experts in list_experts(layer)
    ]


def test_every_row_removes_its_share(mixture, tmp_path, capsys):
    shutil.copy(DEMO_CALIBRATION, tmp_path / CALIBRATION)
    for name in ("wikitext2_test.jsonl", "books_test.jsonl"):
        shutil.copy(DEMO_TEST, tmp_path / name)
    sizes = ["--num-samples", "8", "--window", "32", "--max-tokens", "200", "--share", "0.25"]
    for rows in ("all", "study"):
        main(["--model", mixture, "--data", str(tmp_path), "--rows", rows, "--output", str(tmp_path), *sizes])
    found = json.loads((tmp_path / "experts.json").read_text())["rows"]
    names = {*ROWS["all"], *ROWS["study"]}
    assert found.keys() == {"dense", *(f"0.25 | {name}" for name in names)}
    for name in names:
        (row,) = found[f"0.25 | {name}"]
        assert "refused" not in row, row
        assert row["removed"] == pytest.approx(0.25, abs=0.01), name
        assert all(value > 1 for value in row["perplexity"].values())
    assert "of the best peer's" in capsys.readouterr().out
    assert (tmp_path / "experts-all.md").exists()


@pytest.mark.parametrize("name", CRITERIA)
def test_slicing_leaves_the_same_multiple_of_8_in_every_expert(name, mixture):
    function = PEERS[name].peer.split(":")[1]
    result = getattr(criteria, function)(mixture, WINDOWS, 0.27)
    assert list_widths(result.model) == [[48] * EXPERTS] * 2
    assert result.removed == 0.25


def test_reap_with_our_solve_keeps_the_same_experts(mixture):
    dropped, solved = (prune(mixture, WINDOWS, 0.25) for prune in (prune_reap, prune_reap_and_solve))
    assert list_widths(dropped.model) == list_widths(solved.model) == [[WIDTH] * (EXPERTS - 1)] * 2
    assert dropped.removed == solved.removed == 0.25
    weights = dict(dropped.model.named_parameters())
    changed = {name for name, weight in solved.model.named_parameters() if not torch.equal(weight, weights[name])}
    assert changed == {name for name in weights if name.endswith("down_proj.weight")}


def test_heapr_needs_no_matrix():
    """Its score is that of the covariance of the gradients at an expert's output, which is never made."""
    model = make_mixture()
    take_apart(model)
    groups = find_groups(model, "none", False, prune_experts=True)
    scores = criteria.Heapr().measure(model, [{"input_ids": part} for part in WINDOWS.split(4)], groups)
    group = groups[1]
    down = model.get_submodule(group.name)
    seen = []
    down.register_forward_hook(lambda _module, args, output: seen.extend([args[0], output]))
    logits = model(input_ids=WINDOWS, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), WINDOWS[:, 1:].flatten(), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, seen[1])
    covariance = gradient.T @ gradient / len(gradient)
    outputs = seen[0].square().mean(0) * (down.weight.T @ covariance @ down.weight).diagonal() / 2
    torch.testing.assert_close(scores[group.name].float(), outputs.detach(), rtol=1e-3, atol=1e-9)
