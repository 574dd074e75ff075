"""Estimate time, memory and traffic of pruning a model of any size from counted, measured and assumed figures.

python -m eval.scale --profile results/profile/profile.json --output results/scale
python -m eval.scale --recovery                # what a recovery of 70 billion parameters takes, on the same card
python -m eval.scale --mixtures --measured 130 # mixtures of experts, here and on the card; seconds of the small one
python -m eval.scale --widths 1536,4864        # an FFN's elimination and solves by width: measured here, counted to 28,672

Counted: operations and bytes of every stage, from the sizes alone. Measured: how much longer than these operations at this
device's own matrix rates a real run takes (``--profile``, written by ``eval.profile`` with one thread on this machine).
Assumed: the card's rates, see ``CARD``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.utils import patch_attr
from torch import Tensor

from eval.measure import count_own_seconds, fit_exponent, time_side_by_side
from struprune_plugin.linalg import solve
from struprune_plugin.linalg.elimination import eliminate_units, keep_last
from struprune_plugin.linalg.second_moments import SecondMoments, count_sums
from struprune_plugin.linalg.solve import choose_damping, damp_moments, solve_kept_weights
from struprune_plugin.reporting.tables import format_table

_DAMPINGS = 3  # solves that choose the dampening: all that most modules need
_DIRECTIONS = 64  # of many outputs that held-out errors are measured in
_TRIED = 13  # plans and blocks that trials solve a module for; a search from 1 nat of divergence adds at most 17
_TRIALS = 2  # passes of the trials; a search adds three
_HELD = 4  # sequences that a plan is tried on
_KEPT = 250e9  # bytes of moments that a host keeps between the passes of trials: a quarter of 1 TB; each pass gathers more anew
_SENSED = 16  # sequences that the sensitivity is measured on


@dataclass(frozen=True)
class Size:
    """A decoder.

    :param linears: of an FFN: 2, or 3 where it is gated
    """

    name: str
    hidden: int
    ffn: int
    layers: int
    kv_width: int
    linears: int
    other: int = 0  # parameters outside of the decoder layers

    @property
    def attention(self) -> int:
        """Parameters of one layer's attention."""
        return 2 * self.hidden * (self.hidden + self.kv_width)

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return self.attention + self.linears * self.hidden * self.ffn


@dataclass(frozen=True)
class Job:
    samples: int
    length: int
    sparsity: float = 0.3

    @property
    def tokens(self) -> int:
        return self.samples * self.length


@dataclass(frozen=True)
class Rates:
    """What a device does in a second: operations in the model's dtype, in float32 and in float64; bytes to the host, over the
    links between devices, and from its own memory."""

    model: float
    single: float
    double: float
    host: float
    link: float
    memory: float


# an 80 GB H100 (SXM): about half of its published dense rates, PCIe 5, NVLink
CARD = Rates(model=400e12, single=30e12, double=30e12, host=25e9, link=200e9, memory=2e12)
CARD_BYTES = 80e9
LARGE = Size("405B class", hidden=16384, ffn=53248, layers=126, kv_width=1024, linears=3, other=2 * 128256 * 16384)
RECOVERED = Size("70B class", hidden=8192, ffn=28672, layers=80, kv_width=1024, linears=3, other=2 * 32000 * 8192)
SMALLER = (  # of LLaMA's family: what the growth of a recovery's bytes is read off, beside the one above
    Size("7B class", hidden=4096, ffn=11008, layers=32, kv_width=4096, linears=3, other=2 * 32000 * 4096),
    Size("13B class", hidden=5120, ffn=13824, layers=40, kv_width=5120, linears=3, other=2 * 32000 * 5120),
    Size("33B class", hidden=6656, ffn=17920, layers=60, kv_width=6656, linears=3, other=2 * 32000 * 6656),
)
EIGHT = Size("8B class", hidden=4096, ffn=14336, layers=32, kv_width=1024, linears=3, other=2 * 128256 * 4096)
HOST_RATE = 200e9  # bytes a second of the host's memory, read and written, two sockets
OPT_LAB = Size("opt-lab", hidden=256, ffn=1024, layers=8, kv_width=256, linears=2)


def count_seconds(size: Size, job: Job, rates: Rates, ranks: int = 1) -> dict[str, float]:
    """Return the seconds of every stage: operations over rates, none of them overlapped.

    Passes through a layer: the host's calibration (attention alone) and propagation, the dense path, and the FFN's statistics
    up to its consumer.
    """
    maps = 4 * job.tokens * job.length * size.hidden
    forward = 2 * size.layer * job.tokens + maps
    producers = size.layer - size.hidden * size.ffn
    passes = 2 * forward + 2 * job.tokens * (size.attention + producers) + 2 * maps
    allocated = min(1.0, max(16, 4 * size.ffn / job.length) / job.samples)
    sensed = min(1.0, _SENSED / job.samples)
    widths = (size.ffn, size.hidden)
    gathered = 1 if 8 * size.layers * sum(n * (n + size.hidden) for n in widths) <= _KEPT else 1 + _TRIALS
    gram = sum(2 * job.tokens * count_sums(n, size.hidden) for n in widths)
    per_layer = {
        "sensitivity": 4 * forward * sensed / rates.model / ranks,
        "allocation, statistics": (forward / rates.model + gram / rates.single) * allocated * gathered / ranks,
        "allocation, curves": sum(
            _count_elimination(size, n, 1.0, rates) for n in (*widths, size.hidden)
        ),  # values twice
        "allocation, trials": sum(_count_trials(size, n * (1 - job.sparsity)) for n in widths) / rates.single
        + _TRIED * _HELD / job.samples * forward / rates.model / ranks,
        "passes": passes / rates.model / ranks,
        "Gram products": gram / rates.single / ranks,
        "selection": sum(_count_elimination(size, n, job.sparsity, rates) for n in widths),
        "solves": sum(_count_solves(size, n * (1 - job.sparsity), rates) for n in widths),
        "host traffic": count_traffic(size, job)["host"] / ranks / rates.host,
        "traffic between cards": count_traffic(size, job)["between"] / rates.link if ranks > 1 else 0.0,
    }
    return {name: seconds * size.layers for name, seconds in per_layer.items()}


def _count_elimination(size: Size, n: int, removed: float, rates: Rates) -> float:
    """Return seconds: inverse, weights and downdates at the float32 rate, and traffic of the downdates at the memory's.

    A removal takes 2 n^2 operations on H^-1 and 2 d n on W; both are read and written once for 32 removals.
    """
    left = 1 - removed
    square, cube = n**2 * (1 - left**2) / 2, n**3 * (1 - left**3) / 3  # sums of n and n^2 over the removals
    downdates = 2 * cube + 2 * size.hidden * square
    traffic = 2 * 4 / 32 * (cube + size.hidden * square)
    return (n**3 + 4 * size.hidden * n**2 + downdates) / rates.single + traffic / rates.memory


def _count_trials(size: Size, kept: float) -> float:
    """Return operations: a factor per pass, a triangular solve per plan."""
    return _TRIALS * (kept**3 / 3 + size.hidden * kept**2) + _TRIED * size.hidden * kept**2


def _count_solves(size: Size, kept: float, rates: Rates) -> float:
    """Return seconds: solves that choose the dampening and their held-out errors in float32, the last solve in float64."""
    outputs = _DIRECTIONS if size.hidden > 4 * _DIRECTIONS else size.hidden
    factor, solved, error = kept**3 / 3, 2 * kept**2, 2 * kept**2  # of all outputs, and of one
    chosen = factor + outputs * (solved + error)
    return _DAMPINGS * chosen / rates.single + (factor + size.hidden * solved) / rates.double


def count_traffic(size: Size, job: Job) -> dict[str, float]:
    """Return bytes a layer: weights and hidden states between host and card, and moments between cards.

    Weights go up for either pass of the host and down once, and twice for every sequence of the sensitivity; moments are
    reduced for the allocation, and for the held-out tokens and the rest of the run.
    """
    hidden = 2.0 * job.tokens * size.hidden
    weights = 2.0 * size.layer
    moments = sum(4.0 * count_sums(n, size.hidden) for n in (size.ffn, size.hidden))
    decisions = 8.0 * size.hidden * (size.ffn + size.hidden)
    sensed = 2 * min(_SENSED, job.samples)
    return {"host": (3 + sensed) * weights + 8 * hidden + 4 * 2 * hidden, "between": 3 * moments + decisions}


def count_memory(size: Size, job: Job, ranks: int = 1) -> dict[str, float]:
    """Return bytes: of one layer with one sequence on its way, of the largest solve, and of the host in all.

    The solve holds H of all and of the held-out tokens in float32, and in float64 the damped H and what the choice of the
    damping makes of them.
    """
    activations = 4.0 * job.length * (4 * size.hidden + 2 * size.ffn)
    moments = 2 * 4.0 * count_sums(size.ffn, size.hidden)
    solve = 2 * 4.0 * size.ffn * (size.ffn + size.hidden) + 8.0 * size.ffn * (3.7 * size.ffn + 3 * size.hidden)
    states = job.tokens * size.hidden * (4 * 2.0 + 2 * 4.0) / ranks
    return {
        "statistics": 2.0 * size.layer + moments + activations,
        "solve": 2.0 * size.layer + solve,
        "host": 2.0 * (size.layers * size.layer + size.other) + states * ranks,
    }


@dataclass(frozen=True)
class Recovery:
    """A recovery of all weights of a pruned model under one layer, towards the dense one's distribution."""

    tokens: float = 100e6
    batch: int = 64
    micro_batch: int = 4
    length: int = 2048
    sparsity: float = 0.3
    moment_bytes: int = 4  # of each of the two
    held: float = 1.0  # share of a layer's summed gradients that lies on the card

    @property
    def step_tokens(self) -> int:
        return self.batch * self.length

    @property
    def micro_batches(self) -> int:
        return self.batch // self.micro_batch


def count_recovery(size: Size, job: Recovery, rates: Rates) -> dict[str, float]:
    """Return hours of every part, none of them overlapped.

    A token takes 8 operations a weight (forward, again, and twice that backward), 6 one of the head, and 2 one of the dense
    model, once. A step moves the weights up twice, and down float32 gradients, or every micro-batch's in 16 bits where they are
    added up on the host. AdamW reads and writes gradient, copy and
    moments on the host; every layer takes 10 bytes a value of its hidden states, and the dense one 4.
    """
    left, steps = size.layer * (1 - job.sparsity), job.tokens / job.step_tokens
    maps = 4 * job.length * size.hidden
    student = job.tokens * size.layers * (8 * left + 4 * maps) / rates.model
    head = job.tokens * (6 * size.other / 2 + 4 * size.other / 2) / rates.model
    teacher = job.tokens * size.layers * (2 * size.layer + maps) / rates.model
    gradients = 4 * job.held + 2 * job.micro_batches * (1 - job.held)
    weights = steps * size.layers * left * (2 * 2 + gradients) / rates.host
    states = job.tokens * size.layers * size.hidden * (10 + 4) / rates.host
    dense = job.tokens / (64 * job.length) * size.layers * 2 * size.layer / rates.host
    update = steps * size.layers * left * (4 + 2 * (4 + 2 * job.moment_bytes) + 2) / HOST_RATE
    parts = {
        **{"student's layers": student, "heads of both": head, "dense model, once": teacher},
        **{"traffic: weights, gradients": weights, "traffic: hidden states": states, "traffic: dense weights": dense},
        "AdamW, on the host": update,
    }
    return {name: seconds / 3600 for name, seconds in parts.items()}


def count_recovery_memory(size: Size, job: Recovery) -> dict[str, float]:
    """Return bytes: of the device for layers, gradients and a micro-batch on its way, and of the host.

    Of several processes on one host all share the weights, and each holds its part of copies, moments and hidden states.
    """
    left = size.layer * (1 - job.sparsity)
    gradient = 2.0 * size.hidden * size.ffn * (1 - job.sparsity)
    activations = 2.0 * job.micro_batch * job.length * (14 * size.hidden + 4 * size.ffn * (1 - job.sparsity))
    hidden = 2.0 * job.step_tokens * size.hidden * (size.layers + 1)
    weights, states = 2.0 * (size.layers * left + size.other), size.layers * left * (4.0 + 2 * job.moment_bytes)
    return {
        "card, no budget: three layers and activations": 3 * 2 * left + activations,
        "card, two layers and all gradients": (2 + 2 + 4) * left + gradient + activations,
        "card, the least: a layer and a gradient": 2 * left + gradient + activations,
        "host, weights": weights,
        "host, float32 copies and moments": states,
        "host, hidden states of a step": hidden,
        "host, all of it, for one process or eight": weights + states + hidden,
        "host, were weights and states each process' own (eight)": 8 * (weights + states) + hidden,
        "disk, the dense model's distributions": job.tokens * (6 * 64 + 2),
    }


def make_recovery_tables(size: Size, job: Recovery) -> str:
    """Return what a recovery takes, on paper."""
    left = size.layer * (1 - job.sparsity)
    context = 2 * 2 * left - 2.0 * size.hidden * size.ffn * (
        1 - job.sparsity
    )  # beside a layer, in three, a gradient on its way
    jobs = (replace(job, held=min(1.0, context / (4 * left))), job)
    usual, more = (count_recovery(size, each, CARD) for each in jobs)
    rows = [[name, f"{value:.1f}", f"{more[name]:.1f}"] for name, value in usual.items()]
    rows.append(["counted, nothing overlapped", *(f"{sum(hours.values()):.1f}" for hours in (usual, more))])
    cells = [
        [name, f"{value / 1e9:,.0f}", _judge(name, value)] for name, value in count_recovery_memory(size, job).items()
    ]
    head = (
        f"{size.name}: {size.layers * size.layer / 1e9:.0f} B parameters in {size.layers} layers, {job.sparsity:.0%} removed; "
        f"{job.tokens / 1e6:.0f} M tokens, {job.batch} × {job.length} a step, all weights, one card"
    )
    header = ["recovery", "hours, no budget", "hours, all gradients there"]
    tables = [format_table(header, rows), format_table(["bytes", "GB", "of 80 GB"], cells)]
    return "\n\n".join([head, *tables, describe_growth((*SMALLER, size), job)])


def count_adapters(size: Size, job: Recovery, rates: Rates) -> dict[str, float]:
    """Return minutes of every part of a recovery by adapters and cross entropy under one layer, none of them overlapped.

    A token takes 6 operations per weight (forward, again, and once that backward) and 4 per weight of the head. A step moves the
    weights up twice and every layer takes 10 bytes per value of its hidden states. Adapters are too small to count.
    """
    left, steps = size.layer * (1 - job.sparsity), job.tokens / job.step_tokens
    maps = 4 * job.length * size.hidden
    parts = {
        "layers": job.tokens * size.layers * (6 * left + 3 * maps) / rates.model,
        "head": job.tokens * 4 * size.other / 2 / rates.model,
        "traffic: weights": steps * size.layers * left * 2 * 2 / rates.host,
        "traffic: hidden states": job.tokens * size.layers * size.hidden * 10 / rates.host,
    }
    return {name: seconds / 60 for name, seconds in parts.items()}


def make_adapter_table(sizes: Sequence[Size], job: Recovery) -> str:
    """Return what the recipe ``struprune_recover`` takes on one card, on paper."""
    columns = []
    for size in sizes:
        minutes, memory = count_adapters(size, job, CARD), count_recovery_memory(size, job)
        card, weights, hidden = (
            memory[name] / 1e9
            for name in (
                "card, no budget: three layers and activations",
                "host, weights",
                "host, hidden states of a step",
            )
        )
        cells = [f"{value:.1f} min" for value in (*minutes.values(), sum(minutes.values()))]
        columns.append([*cells, f"{card:.1f} GB", f"{weights + hidden:.0f} GB"])
    names = [*count_adapters(sizes[0], job, CARD), "counted, nothing overlapped", "on the card", "on the host"]
    rows = [list(row) for row in zip(names, *columns, strict=True)]
    head = f"struprune_recover (adapters, cross entropy, one layer): {job.tokens:,.0f} tokens, {job.batch} × {job.length} per step"
    return f"{head}\n\n{format_table(['on paper', *(size.name for size in sizes)], rows)}"


def describe_growth(sizes: Sequence[Size], job: Recovery) -> str:
    """Return the exponents e of ``bytes ~ N^e`` over some sizes, fitted, of what the card holds with and without activations."""
    totals = [size.layers * size.layer + size.other for size in sizes]
    peaks = [count_recovery_memory(size, job)["card, no budget: three layers and activations"] for size in sizes]
    layers = [3 * 2 * size.layer * (1 - job.sparsity) for size in sizes]
    whole = [16.0 * total * (1 - job.sparsity) for total in totals]  # weights, gradients, copies, moments
    names = ", ".join(size.name for size in sizes)
    told = [
        f"{what} ~ N^{fit_exponent(totals, values):.2f}"
        for what, values in {
            "card, no budget": peaks,
            "of it layers": layers,
            "the whole model's states": whole,
        }.items()
    ]
    return f"{names}: {'; '.join(told)} (fit)"


@dataclass(frozen=True)
class Mixture:
    """A decoder whose FFNs are experts.

    :param inner: inputs of attention's output projection
    :param kv_width: outputs of the keys' projection, and of the values'
    :param width: channels of an expert
    :param active: experts that a token visits
    :param shared: channels of a dense FFN beside them, which stays whole
    """

    name: str
    hidden: int
    layers: int
    inner: int
    kv_width: int
    experts: int
    active: int
    width: int
    shared: int = 0
    other: int = 0

    @property
    def attention(self) -> int:
        return 2 * self.hidden * (self.inner + self.kv_width)

    @property
    def expert(self) -> int:
        return 3 * self.hidden * self.width

    @property
    def layer(self) -> int:
        return self.attention + self.experts * self.expert + 3 * self.hidden * self.shared

    @property
    def visited(self) -> int:
        """Parameters of a layer that a token meets."""
        return self.layer - (self.experts - self.active) * self.expert


MIXTURES = (
    Mixture("Qwen3-30B-A3B's shape", 2048, 48, 4096, 512, 128, 8, 768, other=2 * 151936 * 2048),
    Mixture("gpt-oss-20b's shape", 2880, 24, 4096, 512, 32, 4, 2880, other=2 * 201088 * 2880),
)
SMALL_MIXTURE = Mixture("eval.train_moe_model's", 576, 30, 576, 192, 16, 8, 64, shared=512)
_WHOLE_PASSES = 4  # of a layer: the dense path, calibration, the experts' statistics, propagation


def count_mixture(size: Mixture, job: Job, rates: Rates, values: bool = True) -> dict[str, float]:
    """Return the seconds of every stage: operations over rates, none of them overlapped.

    An expert's moments count the tokens that visit it; every expert's system is eliminated and solved by itself.

    :param values: whether value channels go, too
    """
    maps = 4 * job.tokens * job.length * size.inner
    forward = 2 * size.visited * job.tokens + maps
    systems = [(size.width, size.experts, size.active), *([(size.inner, 1, 1)] if values else [])]  # n, systems, visits
    gram = sum(2 * job.tokens * visits * count_sums(n, size.hidden) for n, _, visits in systems)
    allocated = min(1.0, max(16, 4 * max(n for n, *_ in systems) / job.length) / job.samples)
    as_dense = Size(
        "", size.hidden, size.width, size.layers, size.kv_width, 3
    )  # whose hidden size is all that is asked
    weights, states = 2.0 * size.layer, 2.0 * job.tokens * size.hidden
    per_layer = {
        "sensitivity": 4 * forward * min(1.0, _SENSED / job.samples) / rates.model,
        "allocation, statistics": (forward / rates.model + gram / rates.single) * allocated,
        "allocation, curves": sum(count * _count_elimination(as_dense, n, 1.0, rates) for n, count, _ in systems),
        "passes": _WHOLE_PASSES * forward / rates.model,
        "Gram products": gram / rates.single,
        "selection": sum(c * _count_elimination(as_dense, n, job.sparsity, rates) for n, c, _ in systems),
        "solves": sum(c * _count_solves(as_dense, n * (1 - job.sparsity), rates) for n, c, _ in systems),
        "host traffic": ((3 + 2 * min(_SENSED, job.samples)) * weights + 16 * states) / rates.host,
    }
    return {name: seconds * size.layers for name, seconds in per_layer.items()}


def make_mixture_tables(job: Job, here: Rates, measured: float | None) -> str:
    """Return Markdown: hours by stage, here and on the card.

    :param measured: seconds that ours took on the small mixture, 64 × 256 tokens, experts alone; None where that was not measured
    """
    parts = []
    counted = sum(count_mixture(SMALL_MIXTURE, Job(64, 256, 0.5), here, values=False).values())
    factor = None if measured is None else measured / counted
    if factor is not None:
        told = f"counted {counted:.0f} s, measured {measured:.0f} s: × {factor:.1f}"
        parts.append(f"{SMALL_MIXTURE.name}, half of the experts' channels: {told}")
    for size in MIXTURES:
        stages = [count_mixture(size, job, rates) for rates in (here, CARD)]
        rows = [[name, *(f"{each[name] / 3600:.2f}" for each in stages)] for name in stages[0]]
        sums = [sum(each.values()) / 3600 for each in stages]
        rows.append(["counted", *(f"{hours:.2f}" for hours in sums)])
        if factor is not None:
            rows.append([f"× {factor:.1f}, measured over counted", *(f"{hours * factor:.1f}" for hours in sums)])
        total = size.layers * size.layer + size.other
        head = f"{size.name}: {total / 1e9:.1f} B parameters, {size.layer / 1e9:.2f} B a layer"
        parts += [head, format_table(["hours", "here, one thread", "1 card"], rows)]
    return "\n\n".join(parts)


def measure_rates(device: str = "cpu", size: int = 1024) -> Rates:
    """Return the rates of a device: on a CPU float32 for the model's dtype and traffic within one memory, else bfloat16 and
    traffic with the host from pinned memory.

    :param size: of the square matrices
    """
    on_cpu = device == "cpu"
    kinds = {"model": torch.float32 if on_cpu else torch.bfloat16, "single": torch.float32, "double": torch.float64}
    matrices = {name: torch.randn(size, size, device=device).to(dtype) for name, dtype in kinds.items()}
    vector = torch.randn(64_000_000, device=device)
    held = torch.empty(16_000_000, pin_memory=not on_cpu)

    def multiply(matrix: Tensor) -> Tensor:
        return matrix @ matrix

    runs = {name: (lambda m=matrix: multiply(m)) for name, matrix in matrices.items()}
    copy = {} if on_cpu else {"host": lambda: held.to(device, non_blocking=True)}
    seconds = time_side_by_side({**runs, "read": vector.sum, **copy}, 5)
    model, single, double = (2 * size**3 / seconds[name] for name in kinds)
    memory = 4 * len(vector) / seconds["read"]
    host = memory if on_cpu else 4 * len(held) / seconds["host"]
    return Rates(model=model, single=single, double=double, host=host, link=host, memory=memory)


_WIDTHS = (1536, 4864, 8192, 14336, 28672)


def _make_moments(size: Size) -> tuple[SecondMoments, Tensor]:
    """Return moments of inputs some of which are large and many of which are alike, and the weights, of an FFN's consumer."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(size.ffn // 8, size.ffn, generator=generator)
    inputs = torch.randn(2 * size.ffn, size.ffn // 8, generator=generator) @ mix + torch.randn(2 * size.ffn, size.ffn)
    inputs *= torch.logspace(0, 1, size.ffn)
    inputs = torch.nn.functional.pad(inputs, (0, 1), value=1.0)
    weight = torch.nn.functional.pad(torch.randn(size.hidden, size.ffn, generator=generator), (0, 1)).double()
    gram = inputs.T @ inputs
    cross = (weight @ gram.double()).float()
    energy = (cross.double() * weight).sum()
    return SecondMoments(gram, cross, energy, inputs.abs().sum(0)), weight


def _measure_width(size: Size, removed: float) -> dict[str, float]:
    """Return own seconds of one FFN's selection and solves as a run takes them, and of the selection in float64."""
    moments, weight = _make_moments(size)
    damped, gone = damp_moments(moments, weight, 0.01), int(removed * size.ffn)
    held = replace(moments, gram=moments.gram / 4, cross=moments.cross / 4, target_energy=moments.target_energy / 4)
    found: dict[str, float] = {}

    def take(name: str, run: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = run()
        found[name] = time.process_time() - start
        return result

    order = take("selection", lambda: eliminate_units(damped, 1, "ffn", num_remove=gone)).order
    with patch_attr(solve, "_SMALL", size.ffn + 1):
        take("selection in float64", lambda: eliminate_units(damped, 1, "ffn", num_remove=gone))
    keep = keep_last(order, size.ffn, size.ffn - gone)
    take("solves", lambda: choose_damping(moments, held, weight, keep, True, "ffn"))
    last = take("last solve", lambda: solve_kept_weights(damped, keep, "ffn"))
    assert last.weight.isfinite().all()
    return {**found, "solves": found["solves"] + found.pop("last solve")}


def study_widths(measured: Sequence[int], removed: float, here: Rates) -> str:
    """Return Markdown: seconds of one FFN's selection and solves by its width, measured here and counted here and on the card."""
    rows = []
    for width in _WIDTHS:
        size = Size("", hidden=width * 2 // 7 // 64 * 64, ffn=width, layers=1, kv_width=0, linears=3)
        told = _measure_width(size, removed) if width in measured else {}
        line = [f"{width:,}"]
        for name in ("selection", "solves"):
            counted = [
                _count_elimination(size, width, removed, rates)
                if name == "selection"
                else _count_solves(size, width * (1 - removed), rates)
                for rates in (here, CARD)
            ]
            line += [f"{told[name]:.1f}" if told else "", f"{counted[0]:.1f}", f"{counted[1]:.2f}"]
            line.append(f"{told[name] / counted[0]:.1f}" if told else "")
        line.append(f"{told['selection in float64'] / told['selection']:.1f}" if told else "")
        rows.append(line)
    parts = [f"{name}, {kind}" for name in ("selection", "solves") for kind in ("s", "counted", "card", "ratio")]
    return format_table(["width", *parts, "float64 / float32"], rows)


def make_tables(size: Size, job: Job, factor: float) -> str:
    """Return Markdown: hours by stage, and bytes, on one card and on eight."""
    by_ranks = {ranks: count_seconds(size, job, CARD, ranks) for ranks in (1, 8)}
    rows = [[name, *(f"{by_ranks[ranks][name] / 3600:.2f}" for ranks in by_ranks)] for name in by_ranks[1]]
    sums = {ranks: sum(parts.values()) / 3600 for ranks, parts in by_ranks.items()}
    rows.append(["counted", *(f"{hours:.2f}" for hours in sums.values())])
    rows.append([f"× {factor:.2f}, measured over counted", *(f"{hours * factor:.2f}" for hours in sums.values())])
    hours = format_table(["hours", "1 card", "8 cards"], rows)
    memory, traffic = count_memory(size, job), count_traffic(size, job)
    values = {
        "card, statistics": memory["statistics"],
        "card, FFN solve": memory["solve"],
        "host, weights and hidden states": memory["host"],
        "host traffic, whole run": traffic["host"] * size.layers,
        "between cards, whole run": traffic["between"] * size.layers,
    }
    cells = [[name, f"{value / 1e9:,.0f}", _judge(name, value)] for name, value in values.items()]
    return f"{hours}\n\n{format_table(['bytes', 'GB', f'of {CARD_BYTES / 1e9:.0f} GB'], cells)}"


def _judge(name: str, value: float) -> str:
    if not name.startswith("card"):
        return ""
    return "fits" if value <= CARD_BYTES else "does not fit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="profile.json of opt-lab, 64 × 256 tokens, one thread")
    parser.add_argument(
        "--recovery", action="store_true", help="estimate a recovery instead, for which nothing is measured"
    )
    parser.add_argument("--mixtures", action="store_true", help="estimate mixtures of experts instead")
    parser.add_argument("--widths", help="FFN widths to measure, separated by commas; wider ones are counted")
    parser.add_argument("--measured", type=float, help="seconds measured on the small mixture, with --mixtures")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.recovery:
        print(make_recovery_tables(RECOVERED, Recovery(sparsity=args.sparsity)))
        recipe = Recovery(tokens=400_000, batch=4, length=512, sparsity=args.sparsity)
        print("\n" + make_adapter_table((EIGHT, RECOVERED), recipe))
        return
    if args.profile is None and not args.mixtures and not args.widths:
        parser.error("--profile: must be given, or --recovery, --mixtures or --widths")

    torch.set_num_threads(1)
    with count_own_seconds():
        here = measure_rates()
    if args.widths:
        print(study_widths([int(width) for width in args.widths.split(",")], args.sparsity, here))
        return
    if args.mixtures:
        print(make_mixture_tables(Job(args.samples, args.length, args.sparsity), here, args.measured))
        return
    counted = sum(count_seconds(OPT_LAB, Job(64, 256, args.sparsity), here).values())
    measured = json.loads(args.profile.read_text())["stages"]["whole pass"]
    job = Job(args.samples, args.length, args.sparsity)
    lines = [
        f"measured here: {here.single / 1e9:.0f} and {here.double / 1e9:.0f} GFLOP/s (float32, float64), "
        f"{here.memory / 1e9:.0f} GB/s; opt-lab counted {counted:.1f} s, measured {measured:.1f} s",
        f"assumed of a card: {CARD.model / 1e12:.0f}, {CARD.single / 1e12:.0f} and {CARD.double / 1e12:.0f} TFLOP/s (bfloat16, "
        f"float32, float64), {CARD.memory / 1e9:,.0f} GB/s of memory, {CARD.host / 1e9:.0f} to the host, "
        f"{CARD.link / 1e9:.0f} between cards",
        f"{LARGE.name}: {(LARGE.layers * LARGE.layer + LARGE.other) / 1e9:.0f} B parameters, {LARGE.layer / 1e9:.2f} B a layer, "
        f"{args.samples} × {args.length} tokens, {args.sparsity:.0%} removed",
        "",
        make_tables(LARGE, job, measured / counted),
    ]
    print("\n".join(lines))
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "scale.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        record = {"here": asdict(here), "counted": counted, "measured": measured, "card": asdict(CARD)}
        record["seconds"] = {ranks: count_seconds(LARGE, job, CARD, ranks) for ranks in (1, 8)}
        record["bytes"] = {"memory": count_memory(LARGE, job), "traffic": count_traffic(LARGE, job)}
        (args.output / "scale.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
