"""The dense model, asked layer by layer in passes of its own: its distributions, on the disk, and its hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from struprune_plugin.device.ranks import sum_over_ranks
from struprune_plugin.passes.journal import Journal
from struprune_plugin.recovery.head import Head, compress_head, measure_head
from struprune_plugin.recovery.layered import Flow, LayeredModel
from struprune_plugin.recovery.samples import Sample, TeacherTargets, make_micro_batches

_PART = 64  # sequences that go through the layers together, and lie in one file


class LayeredTeacher:
    """What a dense model says of samples.

    :param model: runs its layers
    :param micro_size: sequences on the device at a time
    """

    def __init__(self, model: LayeredModel, micro_size: int):
        self._model, self._micro_size = model, micro_size
        self._parts: dict[int, tuple[Journal, str]] = {}  # of a sample: where what is said of it lies

    def write_logits(
        self, samples: Sequence[Sample], numbers: Iterable[int], journal: Journal, top_k: int, temperature: float
    ) -> None:
        """Keep the distributions over the next token of some samples, top outcomes alone, unless a journal holds them already.

        :param numbers: of the samples asked about
        """
        wanted = sorted(set(numbers))
        for start in tqdm(range(0, len(wanted), _PART), desc="teacher"):
            chosen = wanted[start : start + _PART]
            part = f"teacher-{start // _PART:05d}"
            held = journal.read(part)
            if held is None or held[0] != {"numbers": chosen}:
                said = self._find_logits({number: samples[number] for number in chosen}, top_k, temperature)
                journal.write(part, {"numbers": chosen}, said)
            self._parts |= dict.fromkeys(chosen, (journal, part))

    def forget_weights(self) -> None:
        """Let go of the model, where only what lies on the disk is asked for from now on."""
        self._model.model.to("meta")

    @property
    def cache_bytes(self) -> int:
        """What lies on the disk."""
        return sum(journal.locate(part).stat().st_size for journal, part in set(self._parts.values()))

    def read_logits(self, number: int, sample: Sample) -> Sample:
        """Return a sample with what is kept of its distributions."""
        journal, part = self._parts[number]
        with safe_open(journal.locate(part), framework="pt") as file:
            indices = f"{number}.indices"
            kept = file.get_tensor(indices) if indices in file.keys() else None  # noqa: SIM118  # no mapping
            return replace(sample, teacher=TeacherTargets(file.get_tensor(f"{number}.log_probs"), kept))

    @torch.no_grad()
    def _find_logits(self, samples: dict[int, Sample], top_k: int, temperature: float) -> dict[str, Tensor]:
        names = {id(sample): number for number, sample in samples.items()}
        found: dict[str, Tensor] = {}
        for flow, final, head in self._finish(list(samples.values())):
            kept = compress_head(final[:, :-1].flatten(0, 1), head, top_k, temperature)
            shape = (len(flow.samples), -1, kept.log_probs.shape[-1])
            log_probs = kept.log_probs.clamp_min(torch.finfo(torch.float16).min).half().view(shape)
            for row, sample in enumerate(flow.samples):
                number = names[id(sample)]
                found[f"{number}.log_probs"] = self._model.room.to_host(log_probs[row]).clone()
                if kept.indices is not None:
                    indices = kept.indices.int().view(len(flow.samples), -1, kept.indices.shape[-1])[row]
                    found[f"{number}.indices"] = self._model.room.to_host(indices).clone()
        return found

    def _finish(self, samples: list[Sample], keep: bool = False) -> Iterable[tuple[Flow, Tensor, Head]]:
        """Give every micro-batch with the inputs of its head, on the device."""
        model = self._model
        flows = [model.start(micro) for micro in make_micro_batches(samples, self._micro_size)]
        model.forward(flows, keep=keep)
        rest, head = model.fetch_rest(), model.make_head()
        for flow in flows:
            with torch.set_grad_enabled(keep):
                leaf = model.room.to_device(flow.hidden[-1], model.device).detach().requires_grad_(keep)
                final = model.finish(flow, leaf, rest)
            if keep:
                flow.graphs.append((leaf, final))
            yield flow, final, head

    def show_hidden(self, flows: Sequence[Flow]) -> None:
        """Give micro-batches the dense outputs of every layer."""
        twins = [self._model.start(flow.samples) for flow in flows]
        self._model.forward(twins)
        for flow, twin in zip(flows, twins, strict=True):
            flow.wanted = twin.hidden[1:]

    def measure_fisher(self, samples: Sequence[Sample], seed: int) -> Tensor:
        """Return the diagonal of the Fisher information of every layer's output, mean over tokens, shape [layers, d], float32.

        With g the gradient of -log p(y) there, y drawn from the model's own p: ``E[g^2]``. An error e of the output changes the
        distribution by about ``sum e^2 F / 2``, its channels and tokens taken as independent.
        """
        model, generator = self._model, torch.Generator().manual_seed(seed)
        flows: list[Flow] = []
        for flow, final, head in self._finish(list(samples), keep=True):
            tokens = final[:, :-1].detach().flatten(0, 1)
            labels = _draw_labels(tokens, head, lambda shape: torch.rand(shape, generator=generator))
            found = measure_head(tokens, labels, None, head, 1.0, (1.0, 0.0))
            assert found.gradient is not None
            above = torch.zeros_like(final)
            above[:, :-1] = found.gradient.view_as(above[:, :-1])
            torch.autograd.backward([final], [above])
            leaf = flow.graphs.pop()[0]
            assert leaf.grad is not None
            flow.above = model.room.park(leaf.grad)
            flows.append(flow)
        sums = torch.zeros(len(model.layers), flows[0].hidden[0].shape[-1], dtype=torch.float64)
        for index, weights in model.visit(range(len(model.layers) - 1, -1, -1)):
            for flow in flows:
                assert flow.above is not None
                sums[index] += flow.above.double().square().sum((0, 1))
                flow.above = self._run_backward(index, weights, flow) if index else flow.above
        counted = torch.tensor([float(sum(sample.num_targets for sample in samples))], dtype=torch.float64)
        return (sum_over_ranks(sums) / sum_over_ranks(counted)).float()

    def _run_backward(self, index: int, weights: dict[str, Tensor], flow: Flow) -> Tensor:
        room = self._model.room
        assert flow.above is not None
        with torch.enable_grad():
            hidden = room.to_device(flow.hidden[index], self._model.device).detach().requires_grad_()
            output = self._model.run(index, weights, flow, hidden)
        (below,) = torch.autograd.grad(output, [hidden], room.to_device(flow.above, self._model.device))
        return room.park(below)


def _draw_labels(hidden: Tensor, head: Head, draw: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    """Draw a token each from the head's distribution, shape [tokens]: the largest logit with Gumbel noise, piece by piece.

    :param draw: gives numbers in [0, 1) of a shape, on the host
    """
    best = torch.full((len(hidden),), -torch.inf, device=hidden.device)
    labels = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    for start, logits, _ in head.find_logits(hidden):
        noise = draw(tuple(logits.shape)).clamp_min(1e-20).to(logits.device)
        values, at = (logits - (-noise.log()).log()).max(-1)
        labels = torch.where(values > best, at + start, labels)
        best = torch.maximum(best, values.to(best.dtype))
    return labels
