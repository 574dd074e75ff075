"""A kind of units that the package does not have, written in one place, goes the whole way."""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import pytest
import torch
from helpers.models import run_oneshot
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from struprune_plugin import StruPruneModifier, read_manifest
from struprune_plugin.cli import main as cli
from struprune_plugin.model.structure.layout import LayerLayout, UnitLayout
from struprune_plugin.model.structure.trial_removal import find_flaw
from struprune_plugin.model.unit_kind import UNIT_KINDS, UnitGroup, UnitKind


class ChannelPairs(UnitKind):
    """Two neighbouring channels that read each other."""

    label: ClassVar[str] = "channel pairs"
    pool: ClassVar[str] = "pairs"
    parts: ClassVar[tuple[str, ...]] = ("pair",)
    kind: Literal["pairs"] = "pairs"

    def read(self, measured, thin: Mapping, consumer: str) -> UnitLayout | None:
        columns = measured.inputs[consumer].shape[-1]
        wanted = torch.eye(columns // 2, dtype=torch.bool).repeat_interleave(2, 0).repeat_interleave(2, 1)
        producers = {name: ("pair",) for name, coupling in thin.items() if torch.equal(coupling.reached, wanted)}
        return UnitLayout(kind="pairs", producers=producers, output=consumer) if producers else None

    def prove(self, unit, measured, run) -> tuple[str, UnitLayout]:
        gone = torch.arange(measured.inputs[unit.output].shape[-1]) // 2 % 3 == 0
        return find_flaw(unit, measured, gone, run), unit

    def list_groups(self, layout: LayerLayout, layer: nn.Module) -> Iterator[UnitGroup]:
        for unit in layout.units:
            if unit.kind == self.kind:
                pairs = layer.get_submodule(unit.output).in_features // 2
                yield UnitGroup(self, unit, pairs, {"pair": 2}, columns_per_unit=2)


@pytest.fixture
def pairs(monkeypatch):
    """Let the FFNs of LLaMA read pairs of channels, of which no built-in kind knows anything."""

    def forward(mlp, hidden):
        pair = mlp.up_proj(hidden).unflatten(-1, (-1, 2))
        return mlp.down_proj((pair * torch.sigmoid(pair.flip(-1))).flatten(-2))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    monkeypatch.setitem(UNIT_KINDS, "pairs", ChannelPairs)


def test_a_kind_of_a_third_party_goes_the_whole_way(pairs, save_family, tmp_path, capsys):
    folder, out = save_family("llama"), tmp_path / "out"
    recipe = "s_stage: {s_modifiers: {StruPruneModifier: {units: [pairs], sparsity: 0.1, allocation: uniform}}}"
    (tmp_path / "r.yaml").write_text(recipe)
    assert cli.main(["plan", str(folder), "--recipe", str(tmp_path / "r.yaml")]) == 0
    assert "channel pairs" in capsys.readouterr().out
    pruned = run_oneshot(str(folder), recipe=str(tmp_path / "r.yaml"), output_dir=str(out))
    manifest = read_manifest(out)
    assert {(group.kind, group.units) for group in manifest.groups} == {("pairs", "channel pairs")}
    assert all(group.error_after < group.error_before for group in manifest.groups)
    for group in manifest.groups:
        assert pruned.get_submodule(group.name).in_features == 2 * group.kept < 2 * group.num_units
    tokens = torch.arange(4, 20)[None]
    loaded = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(loaded(tokens).logits, pruned(tokens).logits)
    assert cli.main(["inspect", str(out)]) == 0
    assert "channel pairs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"units": ["pears"]}, "must be a known kind"),
        ({"units": ["ffn"], "prune_ffn": False}, "units and prune_ffn are two choices of units"),
        ({"units": []}, "at least 1 item"),
    ],
)
def test_choices_of_units_that_contradict_each_other_are_refused(fields, told):
    with pytest.raises(ValueError, match=told):
        StruPruneModifier(sparsity=0.1, **fields)


def test_short_forms_and_units_are_the_same_choice():
    long = StruPruneModifier(sparsity=0.1, units=["head", {"kind": "experts", "widths": "per_layer"}])
    short = StruPruneModifier(sparsity=0.1, attention_unit="head", prune_ffn=False, experts={"widths": "per_layer"})
    for name in ("attention_unit", "prune_ffn", "experts"):
        assert getattr(long, name) == getattr(short, name), name
    assert {kind.kind for kind in long.list_units()} == {kind.kind for kind in short.list_units()}
    again = StruPruneModifier(**long.dump_fields())  # as a written recipe is read
    assert again.dump_fields() == long.dump_fields()
