"""ADMM on the token variables of an FFN and of an attention module."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from struprune_plugin.layerwise.capture import Visit
from struprune_plugin.layerwise.module_view import ModuleView
from struprune_plugin.linalg.second_moments import SecondMoments
from struprune_plugin.paper.admm import ADMMRun, Weights, pick_tokens
from struprune_plugin.paper.admm_ffn import (
    accumulate_ffn_moments,
    initialize_ffn_variables,
    measure_ffn_objective,
    update_ffn_variables,
)
from struprune_plugin.paper.admm_variables import ADMMSettings, Sample, Variables
from struprune_plugin.paper.attention_steps import (
    accumulate_attention_moments,
    initialize_attention_variables,
    solve_attention_weights,
    update_attention_variables,
)
from struprune_plugin.paper.attention_terms import AttentionSample, AttentionWeights, measure_attention_objective


def make_run(module: ModuleView, settings: ADMMSettings, damping: float) -> FFNRun | AttentionRun:
    """Return the ADMM run of an FFN or attention module; parameters as in :class:`~struprune_plugin.paper.admm.ADMMRun`."""
    return (FFNRun if module.group.unit.is_ffn else AttentionRun)(module, settings, damping)


class FFNRun(ADMMRun[Sample]):
    """ADMM on one FFN."""

    def __init__(self, module: ModuleView, settings: ADMMSettings, damping: float):
        super().__init__(module, settings, damping, {n: len(parts) for n, parts in module.group.producers.items()})

    def split(self, visit: Visit) -> Iterator[Sample]:
        yield pick_tokens(visit, self.context)

    def initialize(self, sample: Sample, weights: Weights) -> Variables:
        return initialize_ffn_variables(sample.inputs, weights[:-1])

    def visit(
        self, sample: Sample, variables: Variables, weights: Weights, moments: list[SecondMoments], move: bool
    ) -> tuple[Variables, float]:
        if move:
            variables = update_ffn_variables(variables, sample, weights, self.settings.alpha, self.settings.beta)
        return variables, accumulate_ffn_moments(moments, variables, sample)

    def measure(self, moments: list[SecondMoments], weights: Weights, total: float) -> float:
        return measure_ffn_objective(moments, weights, total, self.settings.alpha, self.settings.beta)


class AttentionRun(ADMMRun[AttentionSample]):
    """ADMM on one attention module; its objective is measured before the weights are solved."""

    def __init__(self, module: ModuleView, settings: ADMMSettings, damping: float):
        names = (*module.group.query_key, list(module.group.producers)[-1])
        super().__init__(module, settings, damping, dict.fromkeys(names, 1))

    def split(self, visit: Visit) -> Iterator[AttentionSample]:
        batch, length = visit.call.batch_shape
        source = self.context.to_host(visit.source.float()).view(batch, length, -1)
        target = self.context.to_host(visit.target).view(batch, length, -1)
        mask = visit.call.arguments.get("attention_mask")
        valid = torch.ones(batch * length, dtype=torch.bool)
        if visit.call.tokens is not None:
            valid = torch.zeros_like(valid).index_fill(0, visit.call.tokens.cpu(), True)
        causal = torch.full((length, length), float("-inf")).triu(1)
        for row in range(batch):
            own = causal if mask is None else mask[min(row, len(mask) - 1), 0, :length, :length].float()
            rows = valid.view(batch, length)[row].nonzero().flatten()
            kept = None if len(rows) == length else rows
            yield AttentionSample(source[row], target[row], own, kept)

    def initialize(self, sample: AttentionSample, weights: Weights) -> Variables:
        return initialize_attention_variables(sample, self._join(weights), self.settings.attention_method)

    def visit(
        self, sample: AttentionSample, variables: Variables, weights: Weights, moments: list[SecondMoments], move: bool
    ) -> tuple[Variables, float]:
        joined, settings, maps = self._join(weights), self.settings, None
        if move:
            variables, maps = update_attention_variables(sample, variables, joined, settings)
            accumulate_attention_moments(moments, sample, variables, maps, joined, max(self.damping, 1e-6))
        terms = measure_attention_objective(sample, variables, joined, settings.alpha, settings.beta, maps)
        return variables, sum(terms.values())

    def list_regressed(self, weights: Weights) -> Weights:
        return self._join(weights).list_regressed()

    def solve(self, moments: list[SecondMoments], pull: Weights) -> Weights:
        solved = solve_attention_weights(moments, self._join(pull), self.damping, self.module.has_bias, self.group.name)
        return [solved.query, solved.key, solved.value, solved.output]

    def _join(self, weights: Weights) -> AttentionWeights:
        query, key, value, output = weights
        num_units = (output.shape[1] - 1) // self.group.columns_per_unit
        return AttentionWeights(query, key, value, output, self.group.unit.count_heads(self.group, num_units))
