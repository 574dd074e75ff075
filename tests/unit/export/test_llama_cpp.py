import shutil
import sys
from typing import get_type_hints

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from struprune_plugin.cli import main as cli
from struprune_plugin.export import outputs
from struprune_plugin.export.llama_cpp_gguf import _name_splitting
from struprune_plugin.export.outputs import CONVERSIONS, convert_folder

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def pruned(save_family, prune_once):
    return {unit: prune_once(save_family("llama"), unit, 0.4)[1] for unit in ("value_channels", "head")}


def read_field(reader, name):
    return reader.get_field(f"deci.{name}").contents()


@pytest.mark.parametrize("unit", ["value_channels", "head"])
def test_gguf_holds_every_layers_sizes_and_weights(pruned, unit, tmp_path):
    assert cli.main(["convert", str(pruned[unit]), "--to", "gguf", "--output", str(tmp_path / "out")]) == 0
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(pruned[unit])
    layers = model.model.layers
    assert read_field(reader, "feed_forward_length") == [layer.mlp.down_proj.in_features for layer in layers]
    width = layers[0].self_attn.head_dim
    assert read_field(reader, "attention.head_count") == [
        layer.self_attn.q_proj.out_features // width for layer in layers
    ]
    assert read_field(reader, "attention.value_length") == width
    tensors = {tensor.name: torch.from_numpy(numpy.array(tensor.data)) for tensor in reader.tensors}
    for index, layer in enumerate(layers):
        assert torch.equal(tensors[f"blk.{index}.ffn_down.weight"], layer.mlp.down_proj.weight.data)
        keys = tensors[f"blk.{index}.attn_k.weight"].view(-1, width // 2, 2, 32).transpose(1, 2).reshape(-1, 32)
        assert torch.equal(keys, layer.self_attn.k_proj.weight.data)
        values, own = tensors[f"blk.{index}.attn_v.weight"].view(-1, width, 32), layer.self_attn.v_proj.weight.data
        narrow = own.shape[0] // values.shape[0]
        assert torch.equal(values[:, :narrow].reshape(-1, 32), own)
        assert not values[:, narrow:].any()
    assert len(tensors) == 9 * len(layers) + (2 if model.config.tie_word_embeddings else 3)
    assert 'Llama("model.gguf")' in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("kind", ["own", "several", "processor"])
def test_gguf_carries_the_chat_template(pruned, kind, tmp_path):
    folder, out = shutil.copytree(pruned["head"], tmp_path / "pruned"), tmp_path / "out"
    if kind == "processor":
        (folder / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        several = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
        tokenizer.chat_template = several if kind == "several" else "{{ messages }}"
        tokenizer.save_pretrained(folder)
    out.mkdir()
    convert_folder(folder, "gguf", out)
    reader = gguf.GGUFReader(out / "model.gguf")
    assert reader.get_field("tokenizer.chat_template").contents() == "{{ messages }}"
    if kind == "several":
        assert reader.get_field("tokenizer.chat_template.tool_use").contents() == "{{ tools }}"


def test_gguf_refuses_other_types_and_tokenizers(opt, prune_once, tmp_path, monkeypatch, capsys):
    """Before it asks for the library or loads the model."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(outputs, "load_whole", lambda *args, **kwargs: pytest.fail("the model is loaded"))
    out = tmp_path / "out"
    assert cli.main(["convert", str(prune_once(opt, "value_channels")[1]), "--to", "gguf", "--output", str(out)]) == 2
    assert "gguf: model_type must be 'llama'" in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(ValueError, match="byte-level BPE"):
        _name_splitting({"model": {"type": "Unigram"}})
    plain = {"type": "ByteLevel"}
    assert _name_splitting({"model": {"type": "BPE"}, "pre_tokenizer": plain}) == "gpt-2"
    for other in ({"add_prefix_space": True}, {"use_regex": False}):
        with pytest.raises(ValueError, match="byte-level BPE"):
            _name_splitting({"model": {"type": "BPE"}, "pre_tokenizer": plain | other})
    with pytest.raises(ValueError, match="a change of the text before"):
        _name_splitting({"model": {"type": "BPE"}, "pre_tokenizer": plain, "normalizer": {"type": "Lowercase"}})


def test_gguf_without_its_library_says_what_to_install(pruned, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert cli.main(["convert", str(pruned["value_channels"]), "--to", "gguf", "--output", str(tmp_path / "out")]) == 2
    assert "pip install" in capsys.readouterr().err


def test_the_command_line_offers_every_conversion():
    assert tuple(get_type_hints(cli.convert)["to"].__args__) == tuple(CONVERSIONS)
