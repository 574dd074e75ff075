"""What is done to logits after the output embeddings, measured."""

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from struprune_plugin.layerwise.logits import LogitShape, measure_logits
from struprune_plugin.model.structure.tiny import build_tiny


@pytest.mark.parametrize(
    ("model_type", "fields", "shape"),
    [
        ("llama", {}, LogitShape()),
        ("granite", {"logits_scaling": 6.0}, LogitShape(scale=6.0)),
        ("granite", {"logits_scaling": 1.0}, LogitShape()),
        ("cohere", {"logit_scale": 0.0625}, LogitShape(factor=0.0625)),
        ("gemma2", {"final_logit_softcapping": 17.5}, LogitShape(cap=17.5)),
        ("gemma2", {"final_logit_softcapping": None}, LogitShape()),
    ],
)
def test_scales_and_caps_are_found(model_type, fields, shape):
    assert measure_logits(build_tiny(CONFIG_MAPPING[model_type](num_hidden_layers=2, **fields))) == shape


class Odd(torch.nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden).tanh()


def test_what_cannot_be_taken_in_pieces_is_refused():
    model = build_tiny(CONFIG_MAPPING["llama"](num_hidden_layers=2))
    forward = model.forward

    def soften(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits.softmax(-1)
        return output

    model.forward = soften
    with pytest.raises(ValueError, match="logits must be what LlamaForCausalLM's output embeddings give"):
        measure_logits(model)
    model.lm_head = Odd(8, 8)
    with pytest.raises(ValueError, match="output embeddings must be a linear, got Odd"):
        measure_logits(model)


def test_a_shape_is_a_scale_and_a_cap():
    logits = torch.tensor([-30.0, 0.0, 3.0])
    wanted = 5 * torch.tanh(logits * 3 / 2 / 5)
    torch.testing.assert_close(LogitShape(2.0, 3.0, 5.0)(logits), wanted)
