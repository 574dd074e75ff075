"""Memory of a card during pruning: by its own counters, by the account, and against budgets that its allocator enforces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from eval.accelerator.pruning import SPARSITY, TINY, Shape, make_random, release_cache
from eval.accelerator.steps import Place, Step
from eval.account import LiveBytes, count_memory
from eval.paper_sizes import count_least_budget, prune_random
from struprune_plugin import StruPruneModifier
from struprune_plugin.model.layers import find_decoder_layers

WITHIN = 0.1  # the account's peak, of the counters'


@dataclass(frozen=True)
class Case:
    """A run whose memory is measured.

    :param budget: in decoder layers; none where None, the least where 0
    :param seconds: that it may take; :func:`count_paper_seconds` says why
    :param fields: of the recipe, beside the sparsity
    :param samples: sequences; as few as the widest solve needs where None
    """

    shape: Shape
    budget: float | None
    seconds: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None

    @property
    def name(self) -> str:
        """As the report has it."""
        told = (
            "default" if self.budget is None else f"budget of {self.budget:g} layers" if self.budget else "least budget"
        )
        changes = ", ".join(f"{name}: {value}" for name, value in self.fields.items())
        return f"{self.shape.name} × {self.shape.layers}, {told}" + (f" ({changes})" if changes else "")


_7B, _7B_ONE = Shape("LLaMA-2-7B", 32, 4), Shape("LLaMA-2-7B", 32, 1)
_70B = Shape("LLaMA-2-70B", 80, 4)
# Under these budgets systems are solved on the host: four layers of the default's would take it an hour. What is on the card does
# not depend on how many systems there are, so allocation and damping are given; with the least budget nothing is solved at all,
# for every 64 tokens bring whole Gram matrices to the host. One layer of the default runs under either budget as well.
_UNIFORM = {"allocation": "uniform", "dampening_frac": 0.01}
_RANKED = {"allocation": "uniform", "importance": "wanda", "dampening_frac": 0.01}
_SUMMED = {"allocation": "uniform", "importance": "wanda", "weight_update": "none"}
CASES: tuple[Case, ...] = (
    Case(_7B, None, 330.0),
    Case(_7B, 4.0, 400.0, _UNIFORM),
    Case(_7B, 0.0, 400.0, _UNIFORM),
    Case(_7B_ONE, 4.0, 300.0),
    Case(_7B_ONE, 0.0, 400.0),
    Case(_70B, None, 480.0),
    Case(_70B, 4.0, 480.0, _RANKED),
    Case(_70B, 0.0, 480.0, _SUMMED, samples=2),
)
_REDUCED = (Case(TINY, None, 120.0), Case(TINY, 4.0, 120.0, _RANKED), Case(TINY, 0.0, 120.0))

# The machine on paper: a card's bfloat16 and float64 products, its launches under the account, a host of 16 cores, a slow bus.
_MODEL, _DOUBLE, _LAUNCH, _EIGEN = 300e12, 25e12, 40e-6, 0.05  # FLOP/s, FLOP/s, s an operation, s a round of a rotation
_HOST, _BUS = 0.4e12, 5e9  # FLOP/s in float64; bytes/s to the host, added there


def list_memory_steps(reduced: bool) -> list[Step]:
    """Return a step a case."""
    return [
        Step(f"memory: {case.name}", case.seconds, partial(measure_memory, case), {"case": asdict(case)})
        for case in (_REDUCED if reduced else CASES)
    ]


def count_paper_seconds(case: Case) -> float:
    """Return what a case takes on paper, from operations and bytes alone: what its limit is chosen by.

    Solves on the card where there is no budget, on the host else. Saving, loading and start-up count as a minute.
    """
    shape, config = case.shape, case.shape.make_config(case.shape.layers)
    wide, hidden, heads = config.intermediate_size, config.hidden_size, config.num_attention_heads
    ranks, solves = case.fields.get("importance") != "wanda", case.fields.get("weight_update") != "none"
    plans = "allocation" not in case.fields
    weights = 2 * hidden * hidden * (1 + config.num_key_value_heads / heads) + 3 * hidden * wide
    tokens = shape.length * _count_samples(case)
    passes = 5 + 3 * plans + 4 * ranks
    card = passes * 2 * weights * tokens / _MODEL
    inverse, kept = wide**3, (1 - SPARSITY) * wide
    share = SPARSITY + plans  # of all units, that eliminations remove
    elimination = ranks * (1 + plans) * 2 * inverse + ranks * share * 2 * inverse
    solve = solves * (
        (1 + 5 * ("dampening_frac" not in case.fields)) * (kept**3 / 3 + 4 * kept**2 * hidden) + kept**2 * hidden
    )
    errors = 4 * kept**2 * hidden
    products = elimination + solve + errors
    calls = ranks * (share * wide * 30 * _LAUNCH + (1 + plans) * hidden / heads * _EIGEN)
    if case.budget is None:
        card += products / _DOUBLE + calls
    else:
        card += products / _HOST + calls
    if case.budget == 0:
        pieces = tokens / 64 * (1 + plans)
        card += pieces * 4 * (wide * wide / 2 + hidden * wide + 1.5 * hidden * hidden) / _BUS
    return 60.0 + shape.layers * card


def _count_samples(case: Case) -> int:
    config: Any = case.shape.make_config(case.shape.layers)
    return case.samples or config.intermediate_size // case.shape.length + 1


class CardBytes(LiveBytes):
    """The account, of the card's tensors: what an operation makes is counted where it lies on the card."""

    granule = 512  # as the card's allocator counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                self._add(leaf.untyped_storage())
        return result


def measure_memory(case: Case, place: Place) -> dict[str, Any]:
    """Prune; return the peak by the counters and by the account.

    Under a budget the card's allocator is held to it: to go past it is an error.
    """
    shape = case.shape
    model = make_random(shape, shape.layers, place)
    layer = sum(p.numel() * p.element_size() for p in find_decoder_layers(model)[0][1].parameters())
    budget = None if case.budget is None else round(case.budget * layer)
    if case.budget is not None:
        budget = max(budget or 0, count_least_budget(model, case.fields, shape.length))
    modifier = StruPruneModifier(sparsity=SPARSITY, memory_budget=budget, **case.fields)
    account: CardBytes | None
    with (
        _hold_to(budget, place),
        CardBytes() if place.device.type == "cuda" else nullcontext() as account,
        count_memory(),
    ):
        manifest = prune_random(model, modifier, _count_samples(case), shape.length)
    peak = max(stage.peak_bytes or 0 for stage in manifest.stages)
    counted = peak if account is None else account.peak
    reserved = torch.cuda.max_memory_reserved() if place.device.type == "cuda" else None
    return {
        "layer_bytes": layer,
        "budget_bytes": budget,
        "peak_bytes": peak,
        "account_bytes": counted,
        "reserved_bytes": reserved,
        "peaks": {stage.name: stage.peak_bytes for stage in manifest.stages},
        "measure": manifest.memory_measure,
        "passed": abs(counted / peak - 1) <= WITHIN and (budget is None or peak <= budget),
    }


@contextmanager
def _hold_to(budget: int | None, place: Place) -> Iterator[None]:
    """Let the card's allocator give no more than a budget."""
    if place.device.type == "cpu":
        yield
        return
    release_cache(place)
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if budget is None else budget / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
