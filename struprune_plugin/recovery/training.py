"""LoRA training with one decoder layer on the device at a time: fields, adapters by peft's own layers, the loop.

Shapes: S tokens of a sequence.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from compressed_tensors.offload import disable_offloading, update_offload_parameter
from compressed_tensors.utils import match_name
from peft import LoraConfig
from peft.tuners.lora import Linear
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm
from transformers import PreTrainedModel, get_scheduler
from transformers.pytorch_utils import Conv1D

from struprune_plugin.layerwise.ends import BatchFlow, compute_logits, enter_batches
from struprune_plugin.layerwise.passes import walk_layers
from struprune_plugin.model.layers import find_decoder_layers, find_layouts, freeze_weights
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.settings.registry import Config, Patterns


class Adapters(Config):
    """Low-rank adapters on linears of the decoder layers, merged at the end: ``W + alpha / rank * B A`` (Hu et al., 2021).

    :param targets: linears to adapt: full names, last parts (``q_proj``, ``fc1``) or ``re:<pattern>``; None takes all linears
        of attention and FFNs that hold units. Experts get none
    """

    rank: int = Field(default=8, ge=1, le=1024)
    alpha: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    targets: Annotated[Patterns, Field(min_length=1)] | None = None


class Schedule(Config):
    """Steps and their learning rates.

    :param epochs: passes over the training part, each in a new order
    :param max_steps: upper bound on the steps
    :param learning_rate: after the warm-up
    :param decay: of the learning rate after the warm-up: ``cosine``, ``linear`` (both to zero) or ``constant``
    :param warmup_fraction: share of the steps in which the learning rate rises from zero, rounded up to whole steps
    """

    epochs: int = Field(default=2, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=5e-4, gt=0, allow_inf_nan=False)
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_fraction: float = Field(default=0.1, ge=0, lt=1)


class Holdout(Config):
    """The last samples, which are not trained on; the best adapters on them are kept, the untrained ones included.

    :param fraction: held-out share of the samples, at least one sample
    """

    fraction: float = Field(default=0.1, gt=0, lt=1)


class RecoveryConfig(BaseModel):
    """Settings of a recovery.

    :param batch_size: sequences per step; as many as a calibration batch holds are on the device at a time
    :param holdout: None keeps the adapters of the last step
    :param seed: seed of the adapters' start and the order of samples
    """

    adapters: Adapters = Adapters()
    schedule: Schedule = Schedule()
    batch_size: int = Field(default=8, ge=1)
    holdout: Holdout | None = Holdout()
    seed: int = 0


# -- adapters --------------------------------------------------------------------------------------------------------


def match_linears(model: nn.Module, adapters: Adapters) -> list[str]:
    """Return the full names of the decoder layers' linears that get adapters.

    :raises ValueError: a target that matches nothing, or a model without such linears
    """
    layers = zip(find_decoder_layers(model), find_layouts(model), strict=True)
    names = [f"{name}.{linear}" for (name, _), (_, layout) in layers for linear in layout.list_linears()]
    if not names:
        raise ValueError(
            "LoRARecoveryModifier: the model must have attention or FFNs that hold units, got none. Remove the stage."
        )
    chosen = set(names) if adapters.targets is None else set()
    for target in adapters.targets or ():
        matching = {name for name in names if match_name(name, target) or f".{name}".endswith(f".{target}")}
        if not matching:
            leaves = ", ".join(dict.fromkeys(name.split(".")[-1] for name in names))
            raise ValueError(
                f"adapters.targets: must match linears of the decoder layers, got {target!r} that matches none. Use {leaves}, or "
                "re:<pattern> on full names."
            )
        chosen |= matching
    return [name for name in names if name in chosen]


@contextmanager
def attach_adapters(
    model: nn.Module, names: Sequence[str], adapters: Adapters, seed: int = 0
) -> Iterator[list[nn.Parameter]]:
    """Put peft's LoRA layers in the place of linears, as the model's only weights that learn; take them off on exit.

    They are merged if the block succeeds. Adapters are in float32 or wider; the sum is rounded once to a weight's own dtype.

    :return: the parameters of the adapters
    """
    attached: dict[str, Any] = {}
    with freeze_weights(model), torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            for name in names:
                linear: Any = model.get_submodule(name)
                config = LoraConfig(fan_in_fan_out=isinstance(linear, Conv1D))
                attached[name] = Linear(linear, "default", config, r=adapters.rank, lora_alpha=adapters.alpha)  # type: ignore[arg-type]
                model.set_submodule(name, attached[name])
            parameters = [part for layer in attached.values() for part in layer.parameters() if part.requires_grad]
            for parameter in parameters:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            model.eval()
            yield parameters
            with torch.no_grad():
                for layer in attached.values():
                    linear, change = layer.get_base_layer(), layer.get_delta_weight("default")
                    merged = (linear.weight.to(change) + change).to(linear.weight.dtype)
                    update_offload_parameter(linear, "weight", merged)
        finally:
            for name, layer in attached.items():
                model.set_submodule(name, layer.get_base_layer())


# -- training --------------------------------------------------------------------------------------------------------


@dataclass
class TrainingCurve:
    """Curve of a training.

    :param losses: cross entropy per predicted token of every step's samples, before the step
    :param holdout: ``step``, 0 for the model as it was, and held-out ``loss`` after every epoch and at the end
    :param tokens_seen: predicted tokens trained on, counted every time
    :param best_step: step whose adapters were kept; None without a held-out part
    """

    losses: list[float] = field(default_factory=list)
    holdout: list[dict[str, Any]] = field(default_factory=list)
    tokens_seen: int = 0
    best_step: int | None = None


@dataclass
class AdapterTraining:
    """Training of a model's adapters on the cross entropy of text, see :class:`RecoveryConfig`.

    In a step, all micro-batches pass through each layer together. The forward pass stores every layer's inputs on the host; the
    model's own head gives the logits of one sequence at a time; then each layer, alone on the device, runs again from its inputs
    and passes the gradient on. Source: L2L (Pudipeddi et al., 2020).

    :param parameters: of the adapters, the only weights of the model that learn
    :param micro_size: sequences on the device at a time
    """

    model: PreTrainedModel
    parameters: Sequence[nn.Parameter]
    config: RecoveryConfig
    micro_size: int
    context: DeviceContext

    def run(self, samples: Sequence[Tensor], held_out: Sequence[Tensor]) -> TrainingCurve:
        """Take all steps, and set the adapters that were best on the held-out samples, if there are any.

        :param samples: token ids without padding, shape [S], int64, at least two each
        :raises ValueError: a loss or a gradient that is not finite
        """
        config, curve, best = self.config, TrainingCurve(), list[Tensor]()
        batches = list_batches(len(samples), config)
        epoch = math.ceil(len(samples) / config.batch_size)
        optimizer, scheduler = self.make_optimizer(len(batches))
        for step in tqdm(range(len(batches) + 1), desc="recovery"):
            if step:
                chosen = [samples[number] for number in batches[step - 1]]
                curve.losses.append(self.take_step(chosen, step, optimizer))
                scheduler.step()
                curve.tokens_seen += count_targets(chosen)
            if held_out and (step % epoch == 0 or step == len(batches)):
                loss = self.measure(held_out, step)
                if all(loss < row["loss"] for row in curve.holdout):
                    curve.best_step, best = step, [parameter.detach().clone() for parameter in self.parameters]
                curve.holdout.append({"step": step, "loss": loss})
        if held_out:
            for parameter, value in zip(self.parameters, best, strict=True):
                parameter.data.copy_(value)
        return curve

    def make_optimizer(self, num_steps: int) -> tuple[torch.optim.Optimizer, LRScheduler]:
        """Return torch's AdamW and transformers' schedule, moved on by a step, as the rate of its first one is 0."""
        schedule = self.config.schedule
        name = "constant_with_warmup" if schedule.decay == "constant" else schedule.decay
        optimizer = torch.optim.AdamW(self.parameters, lr=schedule.learning_rate, weight_decay=0.0)
        scheduler = get_scheduler(name, optimizer, math.ceil(schedule.warmup_fraction * num_steps), num_steps + 1)
        optimizer.step()  # without gradients it moves nothing
        scheduler.step()
        return optimizer, scheduler

    def take_step(self, samples: Sequence[Tensor], step: int, optimizer: torch.optim.Optimizer) -> float:
        """Update the adapters by one batch; return its loss per predicted token before the update."""
        count = count_targets(samples)
        loss = self.accumulate_gradients(samples) / count
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad /= count
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self._check_finite(loss + float(norm), step)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def accumulate_gradients(self, samples: Sequence[Tensor]) -> float:
        """Add the gradient of the summed cross entropy to the adapters' ``grad``; return the sum.

        A sum over tokens, so that gradients of 16-bit models do not vanish on their way.
        """
        flows = self._run_layers(samples)
        loss = self._run_heads(flows, learns=True)
        for index, _, layer, following in walk_layers(self.model, backward=True):
            with self.context.onload_layer(layer, following):
                for flow in flows:
                    flow.run_backward(index, layer, self.context)
        return loss

    def measure(self, samples: Sequence[Tensor], step: int = 0) -> float:
        """Return the cross entropy per predicted token."""
        loss = self._run_heads(self._run_layers(samples), learns=False) / count_targets(samples)
        self._check_finite(loss, step)
        return loss

    def _run_layers(self, samples: Sequence[Tensor]) -> list[BatchFlow]:
        """Return micro-batches of samples after all layers; their calls hold the layers' inputs, on the host."""
        batches = [{"input_ids": batch} for batch in make_micro_batches(samples, self.micro_size)]
        flows = enter_batches(self.model, batches, self.context)
        for index, _, layer, following in walk_layers(self.model):
            with torch.no_grad(), self.context.onload_layer(layer, following):
                for flow in flows:
                    flow.advance(index, layer, self.context)
        return flows

    def _run_heads(self, flows: Sequence[BatchFlow], learns: bool) -> float:
        """Return the summed cross entropy of micro-batches; store its gradient at the last layer's output if that ``learns``."""
        total, context = 0.0, self.context
        with disable_offloading(), torch.set_grad_enabled(learns):
            for flow in flows:
                hidden = context.to_device(flow.states.hidden, flow.calls[-1].device).detach().requires_grad_(learns)
                for row, tokens in enumerate(flow.batch["input_ids"]):
                    logits = compute_logits(self.model, flow.batch, row, hidden, context)[:-1]
                    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
                    loss = F.cross_entropy(wide, tokens[1:].to(wide.device), reduction="sum")
                    if learns:
                        loss.backward()
                    total += loss.item()
                if hidden.grad is not None:
                    flow.above = [context.offload(hidden.grad)]
        return total

    def _check_finite(self, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise ValueError(
                f"recovery: loss and gradients must be finite, got NaN or Inf at step {step}. Lower schedule.learning_rate "
                f"({self.config.schedule.learning_rate:g}), or load the model in a wider dtype (--dtype)."
            )


def list_batches(num_samples: int, config: RecoveryConfig) -> list[list[int]]:
    """Return the sample numbers of every step; each epoch is shuffled anew."""
    batches = []
    for epoch in range(1, config.schedule.epochs + 1):
        generator = torch.Generator().manual_seed(config.seed + epoch)
        order = torch.randperm(num_samples, generator=generator).tolist()
        batches += [order[i : i + config.batch_size] for i in range(0, num_samples, config.batch_size)]
    return batches[: config.schedule.max_steps]


def make_micro_batches(samples: Sequence[Tensor], size: int) -> list[Tensor]:
    """Return samples in groups of at most ``size`` of one length, shape [sequences, S] each."""
    by_length: dict[int, list[Tensor]] = {}
    for sample in samples:
        by_length.setdefault(len(sample), []).append(sample)
    return [part for group in by_length.values() for part in torch.stack(group).split(size)]


def count_targets(samples: Sequence[Tensor]) -> int:
    """Return the number of predicted tokens."""
    return sum(len(sample) - 1 for sample in samples)
