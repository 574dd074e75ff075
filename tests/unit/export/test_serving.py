import inspect
import json
from contextlib import nullcontext

import pytest
from helpers.cuts import save_pruned
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.models.opt.modeling_opt import OPTAttention

from struprune_plugin.export import modeling_struprune


def test_auto_map_names_what_engines_ask_for(opt, prune_once):
    config = json.loads((prune_once(opt, "value_channels")[1] / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "modeling_struprune.StruPruneOPTConfig",
        "AutoModel": "modeling_struprune.StruPruneOPTModel",
        "AutoModelForCausalLM": "modeling_struprune.StruPruneOPTForCausalLM",
        "AutoModelForQuestionAnswering": "modeling_struprune.StruPruneOPTForQuestionAnswering",
        "AutoModelForSequenceClassification": "modeling_struprune.StruPruneOPTForSequenceClassification",
    }


@pytest.mark.parametrize("name", ["StruPruneOPTModel", "StruPruneLlamaModel", "StruPruneGPTNeoXForCausalLM"])
def test_derived_classes_have_no_annotations_that_vllm_would_check(name):
    """It compares arguments with the annotations of ``__init__``, which are texts in that file."""
    parameters = inspect.signature(modeling_struprune.derive_class(name).__init__).parameters.values()
    assert all(parameter.annotation is inspect.Parameter.empty for parameter in parameters)


def test_attention_looks_the_engines_kernel_up_where_vllm_reads(opt, prune_once):
    """It reads the source of ``forward`` for a lookup in ALL_ATTENTION_FUNCTIONS: the stock class', through ``__wrapped__``."""
    model = AutoModelForCausalLM.from_pretrained(prune_once(opt, "value_channels")[1])
    source = inspect.getsource(type(model.model.decoder.layers[0].self_attn).forward)
    assert "ALL_ATTENTION_FUNCTIONS" in source
    assert source == inspect.getsource(OPTAttention.forward)


@pytest.mark.parametrize(("unit", "own"), [("none", False), ("head", False), ("value_channels", True)])
def test_layers_whose_values_are_whole_load_with_stock_attention(opt, prune_once, unit, own):
    model = AutoModelForCausalLM.from_pretrained(prune_once(opt, unit)[1])
    kinds = {type(layer.self_attn).__name__ for layer in model.model.decoder.layers}
    assert ("StruPruneOPTAttention" in kinds) == own
    assert own or kinds == {"OPTAttention"}


@pytest.mark.parametrize("model_type", ["opt", "llama"])
def test_every_layers_configuration_tells_its_head_size(save_family, prune_once, model_type):
    """vLLM sizes a layer's cache by it, and by hidden_size / heads where there is none."""
    folder = save_family(model_type)
    dense = AutoModelForCausalLM.from_pretrained(folder)
    width = next(m.head_dim for m in dense.modules() if hasattr(m, "q_proj"))
    config = AutoConfig.from_pretrained(prune_once(folder, "head")[1])
    assert {layer.head_dim for layer in config.per_layer_config} == {width}


@pytest.mark.parametrize(("model_type", "stops"), [("falcon_h1", True), ("llama", False)])
def test_its_backend_that_keeps_no_recurrent_states_is_refused(model_type, stops, tmp_path, monkeypatch):
    """vLLM's Transformers backend runs Falcon-H1, whose layers have attention, too, and its tokens would be wrong."""
    save_pruned(model_type, tmp_path)
    monkeypatch.setitem(AttentionInterface._global_mapping, "vllm", None)
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation="vllm")
    with pytest.raises(ValueError, match="no recurrent states") if stops else nullcontext():
        AutoModelForCausalLM.from_config(config)
