"""The ordinary way to train, in a few plain lines: what recovery under one layer must equal."""

import torch
import torch.nn.functional as F
from torch import nn


def train_plainly(model, parameters, batches, rates):
    """Train by autograd over the whole model, one sequence at a time, and torch's AdamW; return the losses.

    :param batches: token ids of every step's samples, shape [tokens] each
    """
    optimizer, losses = torch.optim.AdamW(parameters, weight_decay=0.0), []
    for batch, rate in zip(batches, rates, strict=True):
        count, total = sum(len(sample) - 1 for sample in batch), 0.0
        optimizer.zero_grad()
        for sample in batch:  # gradient accumulation
            loss = measure_loss(model, sample) / count
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        losses.append(total)
    return losses


def measure_loss(model, sample):
    """Return the summed cross entropy of a sample's predicted tokens."""
    logits = model(input_ids=sample[None], use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits, sample[1:], reduction="sum")


def weights_of(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def changed(first, second):
    """Return the names of the weights that differ."""
    assert first.keys() == second.keys()
    return {name for name in first if not torch.equal(first[name], second[name])}
