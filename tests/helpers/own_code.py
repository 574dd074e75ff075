"""A tiny decoder of a class that comes with its checkpoint, in files of its own."""

import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from struprune_plugin.evaluation.text import DEMO_MODEL

CODE = {
    "configuration_own.py": """
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "own"
    def __init__(self, vocab_size=2048, d_model=48, n_heads=4, width=80, num_hidden_layers=3, **kwargs):
        self.vocab_size, self.d_model, self.n_heads, self.width = vocab_size, d_model, n_heads, width
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**kwargs)
""",
    "parts_own.py": """
from torch import nn

class OwnBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.d_model
        self.n_heads = config.n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.fc, self.proj = nn.Linear(size, config.width), nn.Linear(config.width, size)
        self.attn_norm, self.ffn_norm = nn.LayerNorm(size), nn.LayerNorm(size)
    def attend(self, x):
        q, k, v = (w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))
    def forward(self, x):
        x = x + self.attend(self.attn_norm(x))
        return x + self.proj(self.fc(self.ffn_norm(x)).relu())
""",
    "modeling_own.py": """
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_own import OwnConfig
from .parts_own import OwnBlock

class OwnPreTrainedModel(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"

class OwnModel(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList([OwnBlock(config) for _ in range(config.num_hidden_layers)])
        self.post_init()
    def forward(self, input_ids, **kwargs):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x

class OwnForCausalLM(OwnPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {"input_ids": input_ids}
    def forward(self, input_ids, **kwargs):
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)))
""",
}


def save_own(folder, **sizes):
    """Save a random instance with its code and the demo's tokenizer; return the folder."""
    folder.mkdir(exist_ok=True)
    for name, text in CODE.items():
        (folder / name).write_text(text)
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map, **sizes}))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)
    return folder
