"""Tiny random instances of any causal-LM class, on which its structure is measured."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from struprune_plugin.model.structure.shrinking import SPECIAL_TOKEN, find_vocabulary, shrink_config, walk_parts

_CLOSE = 1e-5  # relative to the largest logit
_LAST_BIT = 2**-23
_LABELS = "_name_or_path architectures auto_map disable_custom_kernels dtype transformers_version use_cache"
_PROVED: dict[str, Any] = {}


def prove_once(what: object, model_class: type, config: PreTrainedConfig, prove: Callable[[], Any]) -> Any:
    """Return what a proof on tiny instances returns; run once per proof (``what``), class and configuration in a process."""

    def drop_labels(values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: drop_labels(value) for name, value in values.items() if name not in _LABELS.split()}

    facts = json.dumps(drop_labels(shrink_config(config).to_dict()), sort_keys=True, default=str)
    key = f"{what} {model_class.__module__}.{model_class.__name__} {facts}"
    if key not in _PROVED:
        _PROVED[key] = prove()
    return _PROVED[key]


@dataclass(frozen=True)
class TinyRun:
    """Run of a tiny model, in float32, whose logits are compared after a change that must not matter.

    :param forward: returns the logits of a model and tokens
    """

    model: Any
    tokens: Tensor
    forward: Callable[[Any, Tensor], Tensor] = lambda model, tokens: model(input_ids=tokens, use_cache=False).logits

    def __call__(self) -> Tensor:
        return self.forward(self.model, self.tokens)

    @torch.no_grad()
    def describe_difference(self, logits: Tensor, wanted: Tensor) -> str:
        """Return how much logits differ; empty where rounding explains it: up to 1e-5 of the largest, or up to a hundredth of it
        and ten times what a last bit of every weight changes, which states handed on from token to token amplify."""
        difference, largest = float((logits - wanted).abs().max()), float(wanted.abs().max())
        if difference <= _CLOSE * largest:
            return ""
        other, generator = deepcopy(self.model), torch.Generator().manual_seed(0)
        for parameter in other.parameters():
            parameter.mul_(1 + _LAST_BIT * torch.randn(parameter.shape, generator=generator))
        rounding = float((self.forward(other, self.tokens) - self()).abs().max())
        is_rounding = difference <= min(10 * rounding, 0.01 * largest)
        return "" if is_rounding else f"{difference / (largest or 1):.1e} of the largest"


def run_in_pieces(model: Any, tokens: Tensor, sizes: Sequence[int], mask: Tensor | None = None) -> Tensor:
    """Return a model's logits of tokens that it reads in pieces of such sizes, each with the cache of those before."""
    cache, logits, seen = None, list[Tensor](), 0
    for piece in tokens.split([*sizes], 1):
        seen += piece.shape[1]
        masks = {} if mask is None else {"attention_mask": mask[:, :seen]}
        output = model(input_ids=piece, past_key_values=cache, use_cache=True, **masks)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, 1)


def find_auto_class(config: PreTrainedConfig) -> Any:
    """Return the auto class that loads a whole checkpoint: for a wrapper around a text decoder and images, the wrapper's."""
    autos = AutoModelForCausalLM, AutoModelForImageTextToText
    known = [auto for auto in autos if type(config) in auto._model_mapping]
    names = config.architectures or []
    named = [auto for auto in known if any(each.__name__ in names for each in _list_classes(auto, config))]
    return (named or known or [AutoModelForCausalLM])[0]


def _list_classes(auto: Any, config: PreTrainedConfig) -> list[Any]:
    classes = auto._model_mapping[type(config)]
    return list(classes) if isinstance(classes, (list, tuple)) else [classes]


def find_class(
    config: PreTrainedConfig, model_class: type[PreTrainedModel] | None = None
) -> tuple[Any, PreTrainedConfig]:
    """Return the class that :func:`find_auto_class` instantiates from a configuration, and the configuration (part) it takes.

    :param model_class: the class where it is known, for instance of custom code outside transformers
    :raises ValueError: no class is known
    """
    if model_class is None:
        auto = find_auto_class(config)
        if type(config) not in auto._model_mapping:
            raise ValueError(
                f"config: the class must be known to AutoModelForCausalLM, got {type(config).__name__} of model type "
                f"{config.model_type!r}. Pass the model's class as model_class."
            )
        classes = _list_classes(auto, config)
        model_class = next((one for one in classes if one.__name__ in (config.architectures or [])), classes[0])
    text = config.sub_configs.get("text_config")
    takes_part = text is not None and getattr(model_class, "config_class", None) is text
    return model_class, config.get_text_config() if takes_part else config


def build_tiny(
    config: PreTrainedConfig, seed: int = 0, model_class: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """Build a random instance of a configuration's class with the sizes of :func:`shrink_config`, as :func:`find_class` finds it.

    Float32, on the CPU, in eval mode, with eager attention. Norms, biases, gates and the like vary around their initial
    values, so that nothing is zero or one by chance of initialisation. Torch's random state does not change.
    """
    return build_instance(*find_class(shrink_config(config), model_class), seed)


def build_instance(model_class: Any, small: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Build an instance as :func:`build_tiny` does, from a configuration whose sizes are already small."""
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True, warn_only=True)  # uninitialised memory becomes NaN
        try:
            model = model_class._from_config(small, **options)
        finally:
            torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])
        _vary(model)
    return model.eval()


def draw_tokens(config: PreTrainedConfig, rows: int, length: int, seed: int = 0) -> Tensor:
    """Return random token ids for an instance, shape [rows, length], int64, without special tokens (padding, image and so on)."""
    values = [(name, value) for part in walk_parts(config) for name, value in vars(part).items()]
    ids = [value if isinstance(value, list) else [value] for name, value in values if SPECIAL_TOKEN.search(name)]
    special = {one for several in ids for one in several}
    plain = torch.tensor([index for index in range(3, find_vocabulary(config)) if index not in special])
    return plain[torch.randint(len(plain), (rows, length), generator=torch.Generator().manual_seed(seed))]


@torch.no_grad()
def _vary(model: Any) -> None:
    """Redraw the weights of linears and similar modules at unit scale; add a little noise to other parameters.

    The deeper a model, the smaller the scale: else many layers amplify rounding beyond every tolerance.
    """
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None) or 1
    scale = min((8 / depth) ** (1 / 3), 1.0)
    linears, embeddings = (
        {id(module.weight) for module in model.modules() if isinstance(module, layer_class)}
        for layer_class in (nn.Linear, nn.Embedding)
    )
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise, values = torch.randn_like(parameter), parameter.nan_to_num(0.0)
            if id(parameter) in linears or (parameter.dim() > 1 and _is_random(values)):
                fan_in = max(parameter.shape[1:]) if parameter.dim() in (2, 3) else parameter[0].numel()
                parameter.copy_((1.0 if id(parameter) in embeddings else scale) * noise / fan_in**0.5)
            else:
                parameter.copy_(values + 0.1 * noise)
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            values = buffer.nan_to_num(0.0, posinf=float("inf"), neginf=float("-inf"))
            buffer.copy_(values + 0.1 * torch.randn_like(buffer) if name in saved else values)


def _is_random(values: Tensor) -> bool:
    """Return whether initial values are zero or noise around zero, and not a pattern."""
    return values.numel() == 0 or (abs(values.mean().item()) <= 0.1 and values.abs().max().item() <= 6.0)
