"""The dense model as teacher, run layer by layer: its distributions, stored on disk, and its hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from struprune_plugin.layerwise.head import compress_head
from struprune_plugin.layerwise.runner import LayerwiseRunner, MicroBatch
from struprune_plugin.layerwise.samples import Sample, TeacherTargets, make_micro_batches
from struprune_plugin.model.layers import count_parameters, describe_weights
from struprune_plugin.recovery.recovery_config import Divergence
from struprune_plugin.storage.resume_store import ResumeStore

_PART = 64  # sequences that go through the layers together, and lie in one file


class LayerwiseTeacher:
    """The dense model's targets for samples.

    :param runner: of the dense model
    :param micro_size: sequences on the device at a time
    """

    def __init__(self, runner: LayerwiseRunner, micro_size: int):
        self._runner, self._micro_size = runner, micro_size
        self._parts: dict[int, tuple[ResumeStore, str]] = {}  # of a sample: where what is said of it lies
        self._num_parameters = count_parameters(runner.model)

    def write_logits(
        self,
        samples: Sequence[Sample],
        numbers: Iterable[int],
        store: ResumeStore,
        divergence: Divergence,
        data: str = "",
    ) -> None:
        """Store the top outcomes of the next-token distributions of samples, unless the store holds them already.

        :param numbers: of the samples asked about
        :param data: digest of all samples: what is stored of other text, or of another teacher, is not used
        """
        about = {"data": data, "weights": describe_weights(self._runner.model)}
        wanted = sorted(set(numbers))
        for start in tqdm(range(0, len(wanted), _PART), desc="teacher logits"):
            chosen = wanted[start : start + _PART]
            part = f"teacher-{start // _PART:05d}"
            held = store.read(part)
            if held is None or held[0] != {"numbers": chosen, **about}:
                said = self._compute_logits({number: samples[number] for number in chosen}, divergence)
                store.write(part, {"numbers": chosen, **about}, said)
            self._parts |= dict.fromkeys(chosen, (store, part))

    def forget_weights(self) -> None:
        """Release the model's weights; stored distributions stay readable."""
        self._runner.model.to("meta")

    def describe(self) -> dict[str, int]:
        """Return the teacher's parameter count and, if distributions are stored, their bytes."""
        cache = sum(store.locate(part).stat().st_size for store, part in set(self._parts.values()))
        return {"parameters": self._num_parameters, **({"cache_bytes": cache} if self._parts else {})}

    def read_logits(self, number: int, sample: Sample) -> Sample:
        """Return a sample with its stored distributions."""
        store, part = self._parts[number]
        with safe_open(store.locate(part), framework="pt") as file:
            indices = f"{number}.indices"
            kept = file.get_tensor(indices) if indices in file.keys() else None  # noqa: SIM118  # no mapping
            return replace(sample, teacher=TeacherTargets(file.get_tensor(f"{number}.log_probs"), kept))

    @torch.no_grad()
    def _compute_logits(self, samples: dict[int, Sample], divergence: Divergence) -> dict[str, Tensor]:
        names = {id(sample): number for number, sample in samples.items()}
        runner, found = self._runner, dict[str, Tensor]()
        micro_batches = [runner.embed(micro) for micro in make_micro_batches(samples.values(), self._micro_size)]
        runner.forward(micro_batches, keep=False)
        head = runner.make_head()
        for micro_batch, final in runner.finish_all(micro_batches):
            kept = compress_head(final[:, :-1].flatten(0, 1), head, divergence.top_k, divergence.temperature)
            shape = (len(micro_batch.samples), -1, kept.log_probs.shape[-1])
            log_probs = kept.log_probs.clamp_min(torch.finfo(torch.float16).min).half().view(shape)
            for row, sample in enumerate(micro_batch.samples):
                number = names[id(sample)]
                found[f"{number}.log_probs"] = runner.context.to_host(log_probs[row]).clone()
                if kept.indices is not None:
                    indices = kept.indices.int().view(len(micro_batch.samples), -1, kept.indices.shape[-1])[row]
                    found[f"{number}.indices"] = runner.context.to_host(indices).clone()
        return found

    def show_hidden(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set the dense outputs of all layers in micro-batches."""
        twins = [self._runner.embed(one.samples) for one in micro_batches]
        self._runner.forward(twins)
        for micro_batch, twin in zip(micro_batches, twins, strict=True):
            micro_batch.wanted = [states.hidden for states in twin.states[1:]]
