"""Refusals of a loaded model that is not what its class makes of its configuration."""

from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from struprune_plugin.export.any_class import build_dense
from struprune_plugin.model.layers import QUANTISER_PARAMETERS
from struprune_plugin.model.structure.locate import find_stock, is_pruned
from struprune_plugin.runtime.model_state import find_forward, wraps_own
from struprune_plugin.storage.checkpoint import check_architecture, check_returns
from struprune_plugin.storage.files import MERGE, shorten_error


def check_loaded(model: PreTrainedModel) -> None:
    """Raise if a loaded model is no causal language model, carries adapters, runs other functions than its class', or has tensors
    that its class does not make of its configuration."""
    check_architecture([find_stock(type(model)).__name__], model.config)
    check_returns(model.config)
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            adapters = sorted({one for part in module.adapter_layer_names for one in getattr(module, part, None) or ()})
            raise ValueError(
                f"model: must carry no adapters, got {', '.join(adapters) or type(module).__name__} on {name}. {MERGE}"
            )
        forward = find_forward(module)
        if not (forward is None or hasattr(forward, "__self__") or wraps_own(module, forward)):
            name_found = getattr(forward, "__name__", type(forward).__name__)
            raise ValueError(
                f"model: {name or type(model).__name__}.forward must be its class', got another function, {name_found}, which no "
                "folder can hold. Delete it (`del module.forward`), or load the model again."
            )
    if is_pruned(type(model)) and getattr(model.config, "quantization_config", None) is not None:
        return  # refused by what it is asked to do
    try:
        built = build_dense(type(model), model.config)
    except Exception as error:  # a configuration that was changed raises errors of many classes
        raise ValueError(
            f"model: its configuration must be one that {type(model).__name__} can be made of, got: {shorten_error(error)}. "
            "Correct the configuration, or load the model again."
        ) from None
    wanted, present = ({name: list(p.shape) for name, p in each.named_parameters()} for each in (built, model))
    for name in sorted({**wanted, **present}):
        is_split = ".experts." in name and (name not in wanted or name not in present)
        is_hosts = name.rpartition(".")[2] in QUANTISER_PARAMETERS  # of a quantiser in the same recipe
        if wanted.get(name) != present.get(name) and not (is_split or is_hosts):
            raise ValueError(
                f"model: {name} must have the shape {wanted.get(name)} that {type(model).__name__} makes of its configuration, got "
                f"{present.get(name)}. Correct the model, or the configuration (resize_token_embeddings for other tokens, "
                "tie_word_embeddings for a head)."
            )
