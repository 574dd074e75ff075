"""The rehearsal on a tiny instance, and what it refuses before a run begins."""

import pytest
import torch
from transformers import OPTForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from struprune_plugin.export import rehearsal
from struprune_plugin.model.structure.finder import find_structure_of
from struprune_plugin.model.structure.tiny import build_tiny
from struprune_plugin.model.unit_kind import UnitGroup, list_kinds


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr("struprune_plugin.model.structure.tiny._PROVED", {})


def build(model_type, **fields):
    return build_tiny(CONFIG_MAPPING[model_type](**fields))


@pytest.mark.parametrize(("model_type", "unit"), [("llama", "value_channels"), ("mixtral", "head"), ("llama", "none")])
def test_what_is_rehearsed_passes_and_is_remembered(model_type, unit, monkeypatch):
    """Mixtral's configuration leaves the heads' size to the hidden size and the number of heads, which differs afterwards."""
    model = build(model_type, num_hidden_layers=2)
    rehearsal.rehearse(model, list_kinds(attention_unit=unit, prune_ffn=True))
    monkeypatch.setattr(rehearsal, "build_tiny", None)
    rehearsal.rehearse(model, list_kinds(attention_unit=unit, prune_ffn=True))
    with pytest.raises(TypeError):
        rehearsal.rehearse(model, list_kinds(attention_unit=unit, prune_ffn=False))


def test_a_class_that_loses_weights_on_saving_is_refused(monkeypatch):
    monkeypatch.setattr(OPTForCausalLM, "_keys_to_ignore_on_save", ["model.decoder.layers.1.fc2.bias"], raising=False)
    with pytest.raises(ValueError, match=r"OPTForCausalLM .* the same logits loaded as before it was saved"):
        rehearsal.rehearse(build("opt", num_hidden_layers=2), list_kinds(attention_unit="none", prune_ffn=True))


def test_rows_that_do_not_go_with_their_columns_are_refused(monkeypatch):
    def shift(group, producer, keep):
        return keep + 1

    monkeypatch.setattr(rehearsal, "pick_two_thirds", lambda group: torch.arange(group.num_units - 1))
    monkeypatch.setattr(UnitGroup, "find_kept_rows", shift)
    with pytest.raises(ValueError, match="with units removed as with zeros in their place"):
        rehearsal.rehearse(build("llama", num_hidden_layers=2), list_kinds(attention_unit="none", prune_ffn=True))


def test_heads_that_something_else_counts_in_their_order_are_refused():
    """Each of GPT-OSS's heads has a sink, and there are two heads of keys and values: the second one may be what stays."""
    with pytest.raises(ValueError, match="with units removed as with zeros in their place"):
        rehearsal.rehearse(build("gpt_oss", num_hidden_layers=1), list_kinds(attention_unit="head"))


def test_layers_that_do_not_run_in_order_are_refused():
    with pytest.raises(ValueError, match=r"each once, got a pass that runs 0, 1, 2, 4"):
        find_structure_of(CONFIG_MAPPING["mllama"]())
