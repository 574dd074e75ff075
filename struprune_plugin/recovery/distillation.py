"""A teacher's distributions, compressed, and a student's divergence from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.recovery.samples import Sample, TeacherTargets, make_micro_batches


def compress_logits(logits: Tensor, top_k: int, temperature: float) -> TeacherTargets:
    """Keep the ``top_k`` likeliest tokens of every distribution, and the probability of all others together.

    With p = softmax(logits / T) and I the ``top_k`` largest: ``log p_i, i in I`` and ``log(sum_{j not in I} p_j)``.

    :param logits: shape [..., V]
    :param top_k: outcomes to keep; all where it is V or more
    :param temperature: T
    """
    log_probs = F.log_softmax(logits / temperature, dim=-1)
    if top_k >= logits.shape[-1]:
        return TeacherTargets(log_probs, None)
    kept, indices = log_probs.topk(top_k, dim=-1)
    return TeacherTargets(torch.cat([kept, _measure_rest(log_probs, indices)], dim=-1), indices)


def measure_divergence(logits: Tensor, teacher: TeacherTargets, temperature: float) -> Tensor:
    """Return the divergence of a student from what is kept of its teacher, per token.

    ``T^2 * sum_o p_o (log p_o - log q_o)`` over the outcomes o: the teacher's k likeliest tokens, and one bucket that
    holds the rest of the vocabulary on both sides. p is renormalised over them, so that rounding in the cache cancels;
    q = softmax(logits / T). It is the full KL divergence where every token is kept, never more where fewer are, and
    zero where student and teacher agree. T^2 keeps the size of the gradients (Hinton et al., 2015).

    :param logits: of the student, shape [..., V], in the dtype to compute in
    :param teacher: of the same leading shape
    :param temperature: T, that of the teacher's targets
    :return: shape [...]
    """
    wanted = F.log_softmax(teacher.log_probs.to(logits.dtype), dim=-1)
    found = F.log_softmax(logits / temperature, dim=-1)
    if teacher.indices is not None:
        indices = teacher.indices.long()
        found = torch.cat([found.gather(-1, indices), _measure_rest(found, indices)], dim=-1)
    return temperature**2 * (wanted.exp() * (wanted - found)).sum(-1)


def _measure_rest(log_probs: Tensor, indices: Tensor) -> Tensor:
    """Return the log-probability of all tokens but ``indices`` together, shape [..., 1]; summed, not 1 minus, for accuracy."""
    return log_probs.scatter(-1, indices, -math.inf).logsumexp(-1, keepdim=True)


def stack_teacher(samples: Sequence[Sample], device: torch.device) -> TeacherTargets:
    """Return the teacher targets of samples of one length, on the device."""
    parts = [sample.teacher for sample in samples]
    log_probs = torch.stack([part.log_probs for part in parts if part is not None]).to(device)
    indices = [part.indices for part in parts if part is not None and part.indices is not None]
    return TeacherTargets(log_probs, torch.stack(indices).to(device) if indices else None)


@torch.no_grad()
def cache_teacher(
    teacher: PreTrainedModel, samples: Sequence[Sample], size: int, top_k: int, temperature: float
) -> list[Sample]:
    """Return the samples, in their order, with what the teacher says of them, on the host.

    :param size: sequences on the device at a time
    """
    said: dict[int, TeacherTargets] = {}
    for batch in tqdm(list(make_micro_batches(samples, size)), desc="teacher"):
        tokens = torch.stack([sample.tokens for sample in batch]).to(teacher.device)
        logits = teacher(input_ids=tokens, use_cache=False).logits[:, :-1]
        kept = compress_logits(logits.float(), top_k, temperature)
        log_probs = kept.log_probs.clamp_min(torch.finfo(torch.float16).min).half().cpu()
        indices = None if kept.indices is None else kept.indices.int().cpu()
        for row, sample in enumerate(batch):
            said[id(sample)] = TeacherTargets(log_probs[row].clone(), None if indices is None else indices[row].clone())
    return [Sample(sample.tokens, said[id(sample)]) for sample in samples]
