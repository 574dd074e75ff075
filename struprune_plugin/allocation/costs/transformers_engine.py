"""Timing of modules in transformers, in the form in which pruning leaves them."""

from __future__ import annotations

import copy
import platform
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from struprune_plugin.allocation.costs.few_layers import adopt_all, cut_alike, shorten_class
from struprune_plugin.allocation.costs.measure_costs import Change, Engine, Run
from struprune_plugin.export.any_class import replace_conv1d
from struprune_plugin.model.layers import find_decoder_layers, find_linear
from struprune_plugin.model.structure.locate import locate_layers
from struprune_plugin.model.structure.tiny import draw_tokens
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.runtime.stopwatch import compare_rounds, time_rounds

_REPEATS = {"prompt": 5, "token": 25}


class TransformersEngine(Engine):
    """Engine of transformers, with the attention and the linears of pruned models.

    :param model: model whose shapes are timed; it may be without values
    :param dtype: dtype of the timed weights
    :param num_layers: number of decoder layers that are timed
    """

    name = "transformers"

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, run: Run, num_layers: int):
        self.num_layers = num_layers
        kind, part = shorten_class(model, self.num_layers)
        self._device = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._dense = kind._from_config(part, dtype=dtype).to(self._device).eval()
        replace_conv1d(self._dense)
        self._whole = copy.deepcopy(self._dense)
        adopt_all(self._whole)
        self.dtype, self._run = str(dtype).removeprefix("torch."), run
        where = (
            torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
        )
        self.machine = f"{where}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        self._tokens = draw_tokens(part, run.batch, run.length).to(self._device)

    @torch.no_grad()
    def compare(self, changes: Sequence[Change] | None) -> Mapping[str, tuple[float, float]]:
        changed = copy.deepcopy(self._whole)
        if changes is None:
            changed.set_submodule(locate_layers(changed), nn.ModuleList())
        for change in changes or ():
            if change.units:
                cut_alike(changed, change)
            else:
                self._remove(changed, change.group)
        return time_pair(self._dense, changed, self._run, self._tokens)

    def _remove(self, model: PreTrainedModel, group: UnitGroup) -> None:
        """Replace the modules of one kind, in every layer, by ones that return zeros without computation."""
        names = [group.attention] if group.attention else [group.consumer.rpartition(".")[0]]
        for _, layer in find_decoder_layers(model):
            if names[0]:
                layer.set_submodule(names[0], _Nothing(is_attention=bool(group.attention)))
            else:  # linears directly in the layer: one column costs next to nothing
                for name in group.producers:
                    layer.set_submodule(name, _First())
                layer.set_submodule(group.consumer, _Nothing(False, find_linear(layer, group.consumer).out_features))


class _Nothing(nn.Module):
    """Sublayer that adds zeros to the residual stream."""

    def __init__(self, is_attention: bool, width: int = 0):
        super().__init__()
        self._is_attention, self._width = is_attention, width

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        width = self._width or hidden_states.shape[-1]
        zeros = hidden_states.new_zeros(()).expand(*hidden_states.shape[:-1], width)
        return (zeros, None) if self._is_attention else zeros


class _First(nn.Module):
    """Linear that returns one channel."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[..., :1]


@torch.no_grad()
def time_pair(
    dense: PreTrainedModel, changed: PreTrainedModel, run: Run, tokens: Tensor
) -> dict[str, tuple[float, float]]:
    """Return the seconds, by phase, of two models run in turn, see :func:`~struprune_plugin.runtime.stopwatch.compare_rounds`.

    :param tokens: the prompt, shape [batch, length], on the models' device
    """
    found: dict[str, tuple[float, float]] = {}
    for phase in run.phases:
        make = _make_prompt if phase == "prompt" else _make_token
        runs = {"dense": make(dense, tokens), "changed": make(changed, tokens)}
        for warm_up in runs.values():
            warm_up()
        rounds = time_rounds(runs, _REPEATS[phase])
        found[phase] = compare_rounds(rounds["dense"], rounds["changed"])
    return found


def _make_prompt(model: PreTrainedModel, tokens: Tensor) -> Any:
    """Return a run over a prompt that fills a cache and returns the last token's logits, as generation begins."""
    return partial(model, tokens, use_cache=True, logits_to_keep=1)


def _make_token(model: PreTrainedModel, tokens: Tensor) -> Any:
    """Return a run over one token beyond those in the cache, which then holds it, too."""
    cache = DynamicCache(config=model.config)
    model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return partial(model, tokens[:, -1:], past_key_values=cache, use_cache=True)
