"""The ordinary way to train, in a few plain lines: what recovery under one layer must equal."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from struprune_plugin.layerwise.runner import LayerwiseRunner
from struprune_plugin.layerwise.samples import Sample, TeacherTargets, stack_teacher
from struprune_plugin.recovery.objective import Objective
from struprune_plugin.recovery.recovery_config import Loss, Optimizer, RecoveryConfig
from struprune_plugin.recovery.states import TrainedStates, list_trained
from struprune_plugin.recovery.step import Stepper
from struprune_plugin.runtime.device_context import DeviceContext

CPU = torch.device("cpu")
DECAY = 0.01


def make_config(max_norm=1e9, clipping="layer", **fields):
    optimizer = Optimizer(weight_decay=DECAY, max_grad_norm=max_norm, clipping=clipping)
    return RecoveryConfig(**({"loss": Loss(cross_entropy=1.0), "optimizer": optimizer} | fields))


def make_stepper(model, config=None, context=None, vocabulary=300, ahead=False, held=None):
    config, dtype = config or make_config(), next(model.parameters()).dtype
    runner = LayerwiseRunner(model, context or DeviceContext(), CPU, dtype, ahead, vocabulary)
    states = TrainedStates(list_trained(runner, config.trained), config.optimizer)
    return Stepper(runner, states, Objective(runner, config.loss), config, held)


def train_layerwise(model, batches, micro, rate, config=None, held=None):
    """Take a step a batch; return the losses."""
    stepper, losses = make_stepper(model, config, held=held), []
    for step, batch in enumerate(batches, 1):
        micro_batches = [stepper.runner.embed(batch[i : i + micro]) for i in range(0, len(batch), micro)]
        losses.append(stepper.take(micro_batches, sum(sample.num_targets for sample in batch), step, rate))
    return losses


def train_plainly(model, batches, rate, config=None):
    """The same by autograd over the whole model, one sequence at a time, and torch's AdamW; return the losses."""
    config = config or make_config()
    clipping, max_norm = config.optimizer.clipping, config.optimizer.max_grad_norm
    trained = list_trained(LayerwiseRunner(model, DeviceContext(), CPU, torch.float64), config.trained)
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
            loss = find_loss(model, sample, config.loss) / count
            loss.backward()
            total += loss.item()
        for group in owners.values() if clipping == "layer" else [everything]:
            nn.utils.clip_grad_norm_(group, max_norm)
        optimizer.step()
        losses.append(total)
    return losses


def find_loss(model, sample, wanted):
    logits = model(input_ids=sample.tokens[None]).logits[0, :-1]
    loss = (wanted.cross_entropy or 0.0) * F.cross_entropy(logits, sample.tokens[1:], reduction="sum")
    if wanted.kl:
        teacher = stack_teacher([sample], CPU).flatten()
        loss = loss + wanted.kl.weight * measure_divergence(logits, teacher, wanted.kl.temperature).sum()
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


def weights_of(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def make_logits(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
