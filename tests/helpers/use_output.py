"""What users do with a loaded output, in an environment without this package: heads of other tasks, fewer layers, pickle.

    python use_output.py OUTPUT

Prints one line of JSON: ``heads``, by task: whether the trunk is the output's and whether a trained head is loaded as it was saved;
``dropped``: whether layers 0 and 2 alone are loaded as they were saved; ``pickled``: whether a copy by pickle gives the same
logits.
"""

import json
import pickle
import sys
import tempfile

import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

IDS = torch.arange(5, 17).view(2, 6)
TASKS = {
    "SequenceClassification": {"labels": torch.tensor([0, 1])},
    "TokenClassification": {"labels": torch.ones_like(IDS)},
    "QuestionAnswering": {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([2, 1])},
}


def use_head(folder, task, labels, **options):
    """Train a head a step, save and load it; return whether its trunk was the checkpoint's and whether its logits stay."""
    auto = getattr(transformers, f"AutoModelFor{task}")
    model = auto.from_pretrained(folder, **options)
    model.config.pad_token_id = 1
    hidden = [each.eval()(IDS)[0] for each in (model.base_model, AutoModel.from_pretrained(folder, **options))]
    model.train()(IDS, **labels).loss.backward()
    torch.optim.SGD(model.parameters(), 1e-2).step()
    with tempfile.TemporaryDirectory() as place:
        model.eval().save_pretrained(place)
        again = auto.from_pretrained(place, **options).eval()
    return torch.equal(*hidden), torch.equal(again(IDS)[0], model(IDS)[0])


def keep_layers(model, places):
    """Leave a model the layers of ``places``, as users do."""
    layers = model.get_decoder().layers
    model.get_decoder().layers = nn.ModuleList(layers[place] for place in places)
    model.config.num_hidden_layers = len(places)
    for index, layer in enumerate(model.get_decoder().layers):
        layer.self_attn.layer_idx = index
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[place] for place in places]


def copy_by_pickle(each):
    return pickle.loads(pickle.dumps(each))  # noqa: S301  # its own bytes


def use(folder):
    trust = {"trust_remote_code": True}
    found = {"heads": {task: use_head(folder, task, labels, **trust) for task, labels in TASKS.items()}}
    model = AutoModelForCausalLM.from_pretrained(folder, **trust).eval()
    found["pickled"] = torch.equal(copy_by_pickle(model)(IDS).logits, model(IDS).logits)
    keep_layers(model, [0, 2])
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        again = AutoModelForCausalLM.from_pretrained(place, **trust).eval()
    found["dropped"] = torch.equal(again(IDS).logits, model(IDS).logits)
    assert "struprune_plugin" not in sys.modules
    print(json.dumps(found))


if __name__ == "__main__":
    use(sys.argv[1])
