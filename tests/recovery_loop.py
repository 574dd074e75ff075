"""The ordinary way to train, in a few plain lines: what recovery under one layer must equal."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from struprune_plugin.device.room import Room
from struprune_plugin.maths.adam import AdamRates
from struprune_plugin.recovery.layered import LayeredModel
from struprune_plugin.recovery.samples import Sample, TeacherTargets, stack_teacher
from struprune_plugin.recovery.states import TrainedStates, list_trained
from struprune_plugin.recovery.step import Objective, Stepper, StepSettings

CPU = torch.device("cpu")
DECAY = 0.01


def make_stepper(model, method="full", objective=None, settings=None, room=None, vocabulary=300, ahead=False, **states):
    layered = LayeredModel(model, room or Room(), CPU, next(model.parameters()).dtype, ahead, vocabulary)
    trained = TrainedStates(list_trained(layered, method), AdamRates(decay=DECAY), **states)
    return layered, trained, Stepper(layered, trained, objective or Objective(1.0), settings or StepSettings(1e9))


def train_layered(model, batches, micro, rate, **how):
    """Take a step a batch; return the losses."""
    layered, _, stepper = make_stepper(model, **how)
    losses = []
    for step, batch in enumerate(batches, 1):
        flows = [layered.start(batch[i : i + micro]) for i in range(0, len(batch), micro)]
        losses.append(stepper.take(flows, sum(sample.num_targets for sample in batch), step, rate))
    return losses


def train_plainly(model, batches, rate, method="full", objective=None, max_norm=1e9, clipping="layer"):
    """The same by autograd over the whole model, one sequence at a time, and torch's AdamW; return the losses."""
    objective = objective or Objective(1.0)
    trained = list_trained(LayeredModel(model, Room(), CPU, torch.float64), method)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    owners: dict[str, list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        owners.setdefault(name.partition(".")[0], []).append(parameter.requires_grad_())
    everything = [parameter for owner in owners.values() for parameter in owner]
    optimizer = torch.optim.AdamW(everything, lr=rate, weight_decay=DECAY)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        count = sum(sample.num_targets for sample in batch)
        for sample in batch:  # gradient accumulation
            loss = find_loss(model, sample, objective) / count
            loss.backward()
            total += loss.item()
        for group in owners.values() if clipping == "layer" else [everything]:
            nn.utils.clip_grad_norm_(group, max_norm)
        optimizer.step()
        losses.append(total)
    return losses


def find_loss(model, sample, objective):
    logits = model(input_ids=sample.tokens[None]).logits[0, :-1]
    loss = objective.cross_entropy * F.cross_entropy(logits, sample.tokens[1:], reduction="sum")
    if objective.kl:
        teacher = stack_teacher([sample], CPU).flatten()
        loss = loss + objective.kl * measure_divergence(logits, teacher, objective.temperature).sum()
    return loss


def make_batches(num_steps, num_samples, length=12, seed=3, vocabulary=2048):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, vocabulary, (num_steps, num_samples, length), generator=generator)
    return [[Sample(row) for row in batch] for batch in ids]


def twins(model):
    """Two copies in float64, nothing of them trained yet."""
    first = model.double().requires_grad_(False)
    return first, copy.deepcopy(first)


def find_distance(first, second):
    """The largest difference of two models' parameters."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def compress_logits(logits: Tensor, top_k: int, temperature: float) -> TeacherTargets:
    """Keep the ``top_k`` likeliest tokens of every distribution, and the rest as one, from all logits at once, shape [..., V]."""
    log_probs = F.log_softmax(logits / temperature, dim=-1)
    if top_k >= logits.shape[-1]:
        return TeacherTargets(log_probs, None)
    kept, indices = log_probs.topk(top_k, dim=-1)
    return TeacherTargets(torch.cat([kept, _measure_rest(log_probs, indices)], dim=-1), indices)


def measure_divergence(logits: Tensor, teacher: TeacherTargets, temperature: float) -> Tensor:
    """Return the divergence of a student from what is kept of its teacher, per token, from all logits at once.

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
