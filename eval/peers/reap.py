"""REAP (Lasby et al. 2025): removes the experts with the least router-weighted output; llm-compressor's own code.

A router of sigmoids that chooses k experts chooses k among those left, by the scores and the bias of choice that they had; its
weights are not normed anew where the configuration does not ask for it. No fewer than k experts can stay.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor.modifiers.pruning import REAPPruningModifier
from llmcompressor.modifiers.pruning.reap.utils import get_moe_attrs, prune_moe_layer
from torch import Tensor, nn
from transformers import PreTrainedModel

from eval.peers import PeerResult
from struprune_plugin import StruPruneModifier, oneshot
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.layerwise.expert_streams import capture_experts, capture_sum
from struprune_plugin.layerwise.module_view import ModuleView
from struprune_plugin.layerwise.statistics import LayerStatistics, MomentGatherer
from struprune_plugin.model.experts import take_apart
from struprune_plugin.model.layers import count_prunable_parameters, find_decoder_layers
from struprune_plugin.model.surgery import set_consumer
from struprune_plugin.model.units.group import UnitGroup, select_groups
from struprune_plugin.modifiers.host_pipeline import calibrating
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.pruning.layer_loop import prune_layers
from struprune_plugin.pruning.prune_layer import LayerOutcome, LayerPruner
from struprune_plugin.pruning.reconstruction import LeastSquaresProblem, solve_group
from struprune_plugin.pruning.signals import Sensitivity
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.storage.records import AllocationRecord

_BATCH = 8


def prune_reap(folder: str, windows: Tensor, share: float) -> PeerResult:
    """Drop a share of the experts of every layer.

    :param windows: calibration tokens, shape [windows, length], int64
    :param share: of every layer's experts, rounded down to whole ones
    :raises ValueError: fewer experts would stay than a token goes to
    """
    start = time.perf_counter()
    model, _ = _run_reap(folder, windows, share)
    return PeerResult(model, _measure_removed(folder, model), time.perf_counter() - start)


def prune_reap_and_solve(folder: str, windows: Tensor, share: float) -> PeerResult:
    """Drop the same experts, layer after layer in our pass, and solve the down projections of those that stay again."""
    start = time.perf_counter()
    _, retained = _run_reap(folder, windows, share)
    model, _ = load_checkpoint(folder, "auto")
    recipe = StruPruneModifier(sparsity=share, attention_unit="none", prune_ffn=False)
    groups = recipe.find_groups(model)  # takes the experts apart
    config = recipe.make_config(recipe.reconstruct)
    nothing = UnitAllocation({}, AllocationRecord("uniform")), Sensitivity()
    dropper = ExpertDropper(config, *nothing, DeviceContext(), model, groups, retained)
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in windows.split(_BATCH)]
    with torch.no_grad(), calibrating(model):
        prune_layers(model, batches, groups, dropper)
    return PeerResult(model, _measure_removed(folder, model), time.perf_counter() - start)


@dataclass(frozen=True)
class ExpertDropper(LayerPruner):
    """Drops experts of a decoder layer in place of channels, and solves the down projections of those that stay.

    :param model: whose layers come one after the other
    :param groups: of the dense model, a group an expert
    :param retained: the experts that stay, by the full name of the module that holds them and their router
    """

    model: PreTrainedModel
    groups: Sequence[UnitGroup]
    retained: Mapping[str, Sequence[int]]

    def prune(
        self,
        layer: nn.Module,
        groups: Sequence[UnitGroup],
        statistics: LayerStatistics,
        changed: bool = False,
        progress: str = "",
    ) -> LayerOutcome:
        name = next(name for name, module in find_decoder_layers(self.model) if module is layer)
        for block, keep in self.retained.items():
            if block.startswith(f"{name}."):
                prune_moe_layer(self.model, block, list(keep), get_moe_attrs(self.model, []))
                self._solve(layer, select_groups(self.groups, name)[: len(keep)], statistics)
        return LayerOutcome([], None, True)

    def _solve(self, layer: nn.Module, groups: Sequence[UnitGroup], statistics: LayerStatistics) -> None:
        """Solve every expert that is left as our pass does, all of them on the same statistics.

        :param groups: those of as many experts, which are all of one size and named by their number
        """
        gatherer = MomentGatherer(self.context, hold_out=self.config.chooses_dampening)
        with capture_experts(layer, groups) as take, capture_sum(layer, groups[0]) as take_sum:
            for index, call in enumerate(statistics.calls):
                call.repeat(layer, self.context)
                for group, visit in take(call, statistics.dense.find_repair(groups[0], take_sum, index)):
                    gatherer.add(layer, group, visit)
        for group in groups:
            module = ModuleView(layer, group, statistics)
            problem = LeastSquaresProblem.pose(module, gatherer.finish(group), self.config.dampening_frac)
            weight, _ = solve_group(problem, torch.arange(group.num_units), self.config)
            set_consumer(layer, group, weight)


def _run_reap(folder: str, windows: Tensor, share: float) -> tuple[PreTrainedModel, dict[str, list[int]]]:
    """Return the model that llm-compressor leaves, its experts linears, and the experts that stayed, by their block."""
    dataset = Dataset.from_dict({"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()})
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "retained.json"
        model = oneshot(
            model=folder,
            recipe=REAPPruningModifier(sparsity=share, report_path=str(report)),
            dataset=dataset,
            batch_size=_BATCH,
            num_calibration_samples=len(dataset),
            shuffle_calibration_samples=False,
            moe_calibrate_all_experts=False,
        )
        return model, json.loads(report.read_text())


def _measure_removed(folder: str, model: PreTrainedModel) -> float:
    """Return the share of the routed experts' parameters that is gone."""
    before, after = count_experts(load_checkpoint(folder, "auto")[0]), count_experts(model)
    return 1 - after / before


def count_experts(model: PreTrainedModel) -> int:
    """Return the number of the parameters of a mixture's routed experts, which are taken apart."""
    take_apart(model)
    return count_prunable_parameters(model, experts=True) - count_prunable_parameters(model)
