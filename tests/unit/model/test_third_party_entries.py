"""Entries of lists of modules, chosen by a kind that the package does not have, go the whole way under their label."""

from typing import ClassVar, Literal

import pytest
import torch
from helpers.models import make_dataset, make_model, run_oneshot, save_model
from transformers import AutoModelForCausalLM

from struprune_plugin import StruPruneModifier, read_manifest
from struprune_plugin.cli import main as cli
from struprune_plugin.model.unit_kind import UNIT_KINDS
from struprune_plugin.modifiers.plan import Workload, plan_run
from struprune_plugin.units.entire_experts import EntireExperts
from struprune_plugin.units.expert_channels import ExpertChannels
from struprune_plugin.units.ffn import FFNChannels


class LastPieces(EntireExperts):
    """Entries of which the last ones stay."""

    label: ClassVar[str] = "pieces"

    def choose(self, model, batches, num_keep, context):
        return {name: list(range(len(groups) - num_keep, len(groups))) for name, groups in self.lists.items()}


class Pieces(ExpertChannels):
    kind: Literal["pieces"] = "pieces"
    short_form: ClassVar[None] = None

    def extend(self, model, measured, layouts, run):
        return [*layouts]  # the built-in kind has read them

    def find_entries(self, model, groups, others):
        return LastPieces(**vars(super().find_entries(model, groups, others)))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    sizes = {"mlp_only_layers": [], "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    return str(save_model(make_model("qwen3_moe", **sizes), tmp_path_factory.mktemp("mixture")))


def test_entries_of_a_third_party_go_the_whole_way(mixture, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(UNIT_KINDS, "pieces", Pieces)
    recipe, out = tmp_path / "r.yaml", tmp_path / "out"
    recipe.write_text("s_stage: {s_modifiers: {StruPruneModifier: {units: [pieces], sparsity: 0.2}}}")
    assert cli.main(["plan", mixture, "--recipe", str(recipe)]) == 0
    assert "3 of 4 stay in every layer" in capsys.readouterr().out
    pruned = run_oneshot(mixture, recipe=str(recipe), dataset=make_dataset(16), output_dir=str(out))
    manifest = read_manifest(out)
    assert [record.keep for record in manifest.experts] == [[1, 2, 3]] * len(manifest.experts)
    assert [*manifest.entries] == ["pieces"]
    assert cli.main(["inspect", str(out)]) == 0
    assert "pieces" in capsys.readouterr().out
    tokens = torch.arange(4, 20)[None]
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.num_experts == 3
    torch.testing.assert_close(loaded(tokens).logits, pruned(tokens).logits, rtol=0, atol=2e-5)


def test_entries_of_two_kinds_are_refused(mixture, monkeypatch):
    monkeypatch.setattr(FFNChannels, "drops_entries", True)
    recipe = [StruPruneModifier(sparsity=0.2, units=["experts", "ffn"])]
    with pytest.raises(ValueError, match="units: entries of lists of modules may go for one kind, got experts, ffn"):
        plan_run(mixture, recipe, Workload(8, 32, 8))
