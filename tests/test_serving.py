import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import transformers
from families import MODEL_TYPES

from struprune_plugin.export import modeling_struprune


def test_vllm_finds_every_architecture_by_the_entry_point(monkeypatch):
    """vLLM itself is not here: its registry is played."""
    registered = {"StruPruneOPTForCausalLM": "kept"}
    registry = SimpleNamespace(
        get_supported_archs=lambda: set(registered), register_model=lambda name, where: registered.update({name: where})
    )
    vllm = ModuleType("vllm")
    vllm.ModelRegistry = registry
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    (point,) = entry_points(group="vllm.general_plugins", name="struprune")
    point.load()()
    assert len(registered) == len(MODEL_TYPES)
    assert registered.pop("StruPruneOPTForCausalLM") == "kept"
    for name, where in registered.items():
        assert where.endswith(":TransformersForCausalLM")
        assert issubclass(getattr(modeling_struprune, name), getattr(transformers, name.removeprefix("StruPrune")))
        assert getattr(modeling_struprune, name)._supports_attention_backend  # what that backend asks
