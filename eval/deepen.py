"""Deepen a model by copies of its layers that contribute almost nothing, to test whether pruning finds them.

    python -m eval.deepen --model MODEL --every 5 --scale 0.02 --output DEEP

Every fifth layer is followed by a copy whose attention and FFN outputs are scaled by 0.02.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from struprune_plugin.model.layers import find_decoder_layers, find_layouts
from struprune_plugin.model.structure.finder import find_structure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model folder or hub name")
    parser.add_argument("--every", type=int, default=5, help="number of layers between copies")
    parser.add_argument("--scale", type=float, default=0.02, help="factor on the outputs of a copy")
    parser.add_argument("--output", type=Path, required=True, help="folder for the deeper model")
    args = parser.parse_args()
    if args.every < 1:
        parser.error(f"--every: must be at least 1, got {args.every}")
    model = deepen(AutoModelForCausalLM.from_pretrained(args.model, dtype="auto"), args.every, args.scale)
    model.save_pretrained(args.output)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.output)
    print(f"{model.config.num_hidden_layers} layers")
    return 0


@torch.no_grad()
def deepen(model: PreTrainedModel, every: int, scale: float) -> PreTrainedModel:
    """Return a model with a copy behind every so many layers.

    :param scale: factor on what the copies' attention and FFNs give
    """
    config: Any = type(model.config).from_dict(model.config.to_dict())
    path, layers = find_structure(model).layers, [layer for _, layer in find_decoder_layers(model)]
    sources = [index for index in range(len(layers)) for _ in range(1 + (index % every == every - 1))]
    config.num_hidden_layers = len(sources)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == len(layers):
            setattr(config, name, [value[index] for index in sources])
    made: Any = type(model)._from_config(config, dtype=model.dtype)
    stack = made.get_submodule(path)
    rest = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(f"{path}.")}
    made.load_state_dict(rest, strict=False)
    for place, index in enumerate(sources):
        stack[place].load_state_dict(layers[index].state_dict())
    for place, (layer, layout) in enumerate(find_layouts(made)):
        if place and sources[place] == sources[place - 1]:
            for module in (layout.attention, *layout.ffns):
                for parameter in layer.get_submodule(module.output).parameters() if module else ():
                    parameter.mul_(scale)
    return made.eval()


if __name__ == "__main__":
    raise SystemExit(main())
