"""``LoRARecoveryModifier``: train low-rank adapters on a pruned model, and merge them.

Shapes: B batch, S sequence, V vocabulary, k teacher outcomes kept a token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from compressed_tensors.offload import remove_dispatch, set_onload_device
from compressed_tensors.offload.cache import DiskCache, OffloadCache
from compressed_tensors.utils import match_name, patch_attr
from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from llmcompressor.utils.dev import get_main_device
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from struprune_plugin.device.ranks import check_one_process
from struprune_plugin.export import MANIFEST_NAME, read_manifest, wrap_save, write_manifest
from struprune_plugin.model.families import find_family
from struprune_plugin.model.layers import find_decoder_layers, list_linears
from struprune_plugin.modifiers.checks import check_alone, check_order

Schedule = Literal["cosine", "linear", "constant"]
_HALF = (torch.bfloat16, torch.float16)


# -- what is learned from -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TeacherTargets:
    """What is kept of the teacher's distribution over the next token.

    :param log_probs: log-probabilities at the distillation temperature, shape [..., k + 1], the last of all tokens not
        in ``indices`` together; shape [..., V] in vocabulary order where ``indices`` is None
    :param indices: tokens of the k largest, shape [..., k]; None where every token is kept
    """

    log_probs: Tensor
    indices: Tensor | None


@dataclass(frozen=True)
class Sample:
    """One calibration sequence, on the host, padding removed.

    :param tokens: shape [S], int64
    :param teacher: float16 and int32, for the S - 1 predictions; None without distillation
    """

    tokens: Tensor
    teacher: TeacherTargets | None = None

    @property
    def num_targets(self) -> int:
        return len(self.tokens) - 1


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


def find_rate_factor(step: int, num_steps: int, schedule: Schedule, warmup_fraction: float) -> float:
    """Return the factor on the learning rate at a step: a linear rise, then the schedule down to zero (or none).

    :param step: from 0 to ``num_steps`` - 1
    :param warmup_fraction: share of the steps in which it rises, rounded up to whole steps
    :return: in (0, 1]
    """
    warmup = math.ceil(warmup_fraction * num_steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(num_steps - warmup, 1)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress if schedule == "linear" else 1.0


def read_samples(loader: Iterable | None) -> tuple[list[Sample], int]:
    """Return the calibration sequences in the loader's order, padding removed, and the largest batch among them.

    :raises ValueError: no data, or no sequence of two tokens
    """
    if loader is None:
        raise ValueError(
            "dataset: calibration text must be given, got none. LoRARecoveryModifier trains on it; pass dataset=… to "
            "oneshot."
        )
    samples, largest = [], 0
    for batch in loader:
        ids = batch["input_ids"].cpu()
        mask = batch.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask.cpu()
        samples += [Sample(row[kept.bool()]) for row, kept in zip(ids, mask, strict=True)]
        largest = max(largest, len(ids))
    samples = [sample for sample in samples if sample.num_targets > 0]
    if not samples:
        raise ValueError(
            "dataset: calibration text must hold at least one sequence of two tokens, got none. Give longer samples."
        )
    return samples, largest


def split_samples(samples: list[Sample], fraction: float) -> tuple[list[Sample], list[Sample]]:
    """Return (training part, held-out part): the last ``fraction``, at least one where it is above 0.

    :raises ValueError: nothing is left to train on
    """
    num_held = max(1, round(fraction * len(samples))) if fraction > 0 else 0
    if num_held >= len(samples):
        raise ValueError(
            f"holdout_fraction: must leave a sample to train on, got {fraction} ({num_held} of {len(samples)} samples held "
            "out). Lower it or raise the number of samples."
        )
    return samples[: len(samples) - num_held], samples[len(samples) - num_held :]


def make_micro_batches(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Give groups of at most ``size`` samples of one length."""
    by_length: dict[int, list[Sample]] = {}
    for sample in samples:
        by_length.setdefault(len(sample.tokens), []).append(sample)
    for group in by_length.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


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


# -- the model, lent for training ---------------------------------------------------------------------------------


def match_linears(model: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Return the full names of the decoder layers' linears that targets name, all where None.

    :param targets: full names, names within a decoder layer (``self_attn.q_proj``), last parts of them (``q_proj``), or
        ``re:<pattern>`` on full names
    :raises ValueError: a target matches nothing
    """
    family = find_family(model)
    names = [f"{name}.{linear}" for name, layer in find_decoder_layers(model) for linear in list_linears(family, layer)]
    if targets is None:
        return names
    matches = {
        target: {name for name in names if match_name(name, target) or f".{name}".endswith(f".{target}")}
        for target in targets
    }
    for target, found in matches.items():
        if not found:
            leaves = ", ".join(dict.fromkeys(name.split(".")[-1] for name in names))
            raise ValueError(
                f"LoRARecoveryModifier: targets must match linears of the decoder layers, got {target!r} that matches none "
                f"({len(names)} candidates, the first is {names[0]!r}). Use {leaves}, or re:<pattern> on full names."
            )
    return [name for name in names if any(name in found for found in matches.values())]


@contextmanager
def lift_dispatch(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Free a model of the host's offloading, all of it in host memory, and put it back in the end."""
    dispatched = any(isinstance(module._parameters, OffloadCache) for module in model.modules())
    remove_dispatch(model)
    home = next(model.parameters()).device
    model.to("cpu")
    try:
        yield
    finally:
        model.to(home)
        if dispatched:
            set_onload_device(model, device)
        free_cache()


@contextmanager
def seed_random(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch, and give everybody else's random numbers back in the end."""
    with torch.random.fork_rng([] if device.type in ("cpu", "mps") else [device.index or 0]):
        torch.manual_seed(seed)
        yield


@contextmanager
def attach_adapters(
    model: nn.Module, names: list[str], rank: int, alpha: float, dropout: float
) -> Iterator[list[nn.Parameter]]:
    """Put float32 adapters on linears; merge them when the block ends well, take them off when it does not.

    The model's own dropout stays off. Weights are merged in float32 and rounded once to their own dtype.

    :return: the parameters of the adapters
    """
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names, bias="none")  # type: ignore[arg-type]
    adapted: Any = get_peft_model(model, config)  # type: ignore[arg-type]  # what it wraps is the model itself, in place
    try:
        model.eval()
        yield [parameter for parameter in model.parameters() if parameter.requires_grad]
    except BaseException:
        adapted.unload()
        raise
    else:
        adapted.merge_and_unload()
    finally:
        model.eval()
        for parameter, value in required:
            parameter.requires_grad_(value)


@contextmanager
def checkpoint_layers(model: nn.Module) -> Iterator[None]:
    """Recompute every decoder layer in the backward pass; transformers' own does so only with the model's dropout on."""
    with ExitStack() as stack:
        for _, layer in find_decoder_layers(model):
            stack.enter_context(patch_attr(layer, "forward", partial(checkpoint, layer.forward, use_reentrant=False)))
        yield


def switch_dropout(model: nn.Module, active: bool) -> None:
    """Switch the adapters' dropout, and nothing else."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout.train(active)


def free_cache() -> None:
    """Let go of accelerator memory that nothing uses."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


# -- the modifier -------------------------------------------------------------------------------------------------


@dataclass
class Curve:
    """What the manifest tells of a training run; lists have one entry a step, ``holdout`` one an epoch.

    ``tokens_seen`` counts predicted tokens; ``seconds`` is since the start; ``best_epoch`` 0 is the model as it was.
    """

    loss: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    tokens_seen: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    holdout: list[dict[str, float]] = field(default_factory=list)
    best_epoch: int | None = None


class LoRARecoveryModifier(Modifier):
    """
    Trains low-rank adapters (LoRA) on the linears of a pruned model's decoder layers, and merges them: ``W + alpha / rank
    * B A``. Names, shapes, classes and dtype stay as they were. Source: Hu et al., 2021.

    A stage between pruning and quantising. The whole model is on the device while it trains; the calibration samples are
    the training data. Each step takes ``batch_size`` samples, of which at most as many as a calibration batch holds, all
    of one length, are on the device at a time; its loss is the mean over their predicted tokens.

    :param rank: of the adapters
    :param alpha: scale of the adapters, divided by the rank
    :param targets: linears of the decoder layers: full names, last parts (``q_proj``, ``fc1``) or ``re:<pattern>``; all
        that the model family names where left out
    :param dropout: on the inputs of the adapters, in [0, 1); the model's own dropout stays off
    :param epochs: passes over the training part
    :param max_steps: stop after so many steps, in the midst of an epoch too
    :param learning_rate: of AdamW, after the warm-up
    :param schedule: how it falls after the warm-up: ``cosine``, ``linear`` (both to zero) or ``constant``
    :param warmup_fraction: share of the steps in which it rises from zero
    :param weight_decay: of AdamW, on the adapters
    :param batch_size: samples a step
    :param gradient_checkpointing: recompute every decoder layer in the backward pass: less memory, a third slower
    :param max_grad_norm: clip of the gradient's norm a step
    :param seed: of the adapters' start, the order of samples and the dropout
    :param holdout_fraction: the last samples, of which none is trained on (at least one where above 0). The loss on them
        is measured at every epoch, and the adapters of the best epoch are kept: of epoch 0, that is the model as it
        was, where no epoch was better. At 0 the last step's are kept
    :param distill: ``none``, or ``kl``: mix in the divergence from a dense teacher, see :func:`measure_divergence`
    :param distill_weight: w in ``(1 - w) * cross entropy + w * divergence``, in [0, 1]; at 1
        text of other kinds than the samples gains most
    :param distill_temperature: T of the divergence
    :param distill_top_k: tokens kept of each of the teacher's distributions, beside one bucket for the rest; the cache
        takes ``6 k + 2`` bytes a token of the data, or ``2 V`` where k is the vocabulary V
    :param teacher: folder or hub name of the teacher; the checkpoint that is being pruned where left out. It and the
        model are never on the device at the same time

    Example recipe::

        pruning_stage:
          pruning_modifiers:
            StruPruneModifier: {sparsity: 0.3}
        recovery_stage:
          recovery_modifiers:
            LoRARecoveryModifier: {rank: 8, epochs: 2}
    """

    requires_calibration_data: bool = False  # no pass over the layers: it trains between two of them

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    targets: list[str] | None = Field(default=None, min_length=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    epochs: int = Field(default=2, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=5e-4, gt=0, allow_inf_nan=False)
    schedule: Schedule = "cosine"
    warmup_fraction: float = Field(default=0.1, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    batch_size: int = Field(default=8, ge=1)
    gradient_checkpointing: bool = False
    max_grad_norm: float = Field(default=1.0, gt=0)
    seed: int = 0
    holdout_fraction: float = Field(default=0.1, ge=0, lt=1)
    distill: Literal["none", "kl"] = "none"
    distill_weight: float = Field(default=1.0, ge=0, le=1)
    distill_temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    distill_top_k: int = Field(default=64, ge=1)
    teacher: str | None = None

    _names: list[str] = PrivateAttr(default_factory=list)
    _train: list[Sample] = PrivateAttr(default_factory=list)
    _holdout: list[Sample] = PrivateAttr(default_factory=list)
    _micro_size: int = PrivateAttr(default=1)
    _teacher: dict[str, Any] | None = PrivateAttr(default=None)
    _curve: Curve = PrivateAttr(default_factory=Curve)
    _began: float = PrivateAttr(default=0.0)
    _record: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def record(self) -> dict[str, Any]:
        """What the manifest tells of the training; empty before it."""
        return self._record

    @model_validator(mode="after")
    def _check_fields(self) -> LoRARecoveryModifier:
        if self.start is not None or self.end is not None:
            raise ValueError("start and end must be left out: adapters are trained once, in a stage of their own.")
        if self.teacher is not None and self.distill == "none":
            raise ValueError(
                f"teacher must be left out where distill is none, got {self.teacher!r}. Set distill: kl to learn from it."
            )
        return self

    # -- lifecycle ------------------------------------------------------------------------------------------------

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        check_one_process("LoRARecoveryModifier", "Prune in several, then recover in a run of its own.")
        check_order(self)
        self._check_model(state.model)
        self._names = match_linears(state.model, self.targets)
        samples, self._micro_size = read_samples(state.data.calib)
        self._check_lengths(samples, state.model)
        self._train, self._holdout = split_samples(samples, self.holdout_fraction)
        if self.distill == "kl":
            self._teacher = {"name": self._find_teacher(state.model)}
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        check_alone(self)
        model, device = state.model, get_main_device()
        self._began = time.perf_counter()
        with seed_random(self.seed, device), lift_dispatch(model, device), DisableQuantization(model):
            if self._teacher is not None:
                self._ask_teacher(self._teacher, model, device)
            model.to(device)
            self._recover(model)
        self._train, self._holdout = [], []

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        if not self._record:
            return True  # an aborted run that the host winds down
        record = self._record

        def add_record(folder: str) -> None:
            if (Path(folder) / MANIFEST_NAME).is_file():  # none without a pruning stage
                write_manifest({**read_manifest(folder), "recovery": record}, folder)

        wrap_save(state.model, add_record)
        return True

    # -- refusals -------------------------------------------------------------------------------------------------

    def _check_model(self, model: PreTrainedModel) -> None:
        if getattr(model.config, "quantization_config", None) is not None:
            raise ValueError(
                "model: must not be quantised yet, got a config with quantization_config. "
                "Recover the full-precision checkpoint and quantise afterwards."
            )
        if any(isinstance(module._parameters, DiskCache) for module in model.modules()):
            raise ValueError(
                "model: must be held in memory for LoRARecoveryModifier, got weights offloaded to disk. "
                "Load it without disk offloading."
            )

    def _check_lengths(self, samples: list[Sample], model: PreTrainedModel) -> None:
        longest = max(len(sample.tokens) for sample in samples)
        positions = getattr(model.config, "max_position_embeddings", longest)
        if longest > positions:
            raise ValueError(
                f"dataset: samples must have at most the model's {positions} positions, got {longest} tokens. "
                "Lower the length of the samples."
            )

    def _find_teacher(self, model: PreTrainedModel) -> str:
        name = self.teacher or model.config._name_or_path
        try:
            config = AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"teacher: must be a model folder or a hub name that can be loaded, got {name!r}: {first}"
            ) from None
        if config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"teacher: {name!r} must have the model's vocabulary of {model.config.vocab_size} tokens, got "
                f"{config.vocab_size}. Name the checkpoint that is pruned."
            )
        return name

    # -- training -------------------------------------------------------------------------------------------------

    def _ask_teacher(self, record: dict[str, Any], model: PreTrainedModel, device: torch.device) -> None:
        """Put the teacher on the device, keep what it says of every sample on the host, and let it go."""
        teacher = AutoModelForCausalLM.from_pretrained(record["name"], dtype=model.dtype).eval().to(device)
        args = (self._micro_size, self.distill_top_k, self.distill_temperature)
        self._train, self._holdout = (cache_teacher(teacher, part, *args) for part in (self._train, self._holdout))
        record["parameters"] = teacher.num_parameters()
        if record["parameters"] <= model.num_parameters():
            logger.warning(
                f"teacher: {record['name']!r} is no larger than the model it teaches ({record['parameters']:,} parameters). "
                "Name the dense checkpoint in the field teacher."
            )
        del teacher
        free_cache()
        held = [s.teacher for s in (*self._train, *self._holdout) if s.teacher is not None]
        tensors = [tensor for part in held for tensor in (part.log_probs, part.indices) if tensor is not None]
        record["cache_bytes"] = sum(tensor.nbytes for tensor in tensors)

    def _recover(self, model: PreTrainedModel) -> None:
        """Train and merge adapters on a model that is on the device, and make the record."""
        with ExitStack() as stack:
            adapters = attach_adapters(model, self._names, self.rank, self.alpha, self.dropout)
            parameters = stack.enter_context(adapters)
            stack.enter_context(torch.enable_grad())
            if self.gradient_checkpointing:
                stack.enter_context(checkpoint_layers(model))
            self._train_adapters(model, parameters)
        curve = self._curve
        merged = self._measure(model) if self._holdout else None
        self._record = {
            "settings": {n: v for n, v in self.model_dump().items() if n not in Modifier.model_fields},
            "versions": {"peft": version("peft")},
            "linears": len(self._names),
            "adapter_parameters": sum(parameter.numel() for parameter in parameters),
            "samples": {"trained": len(self._train), "held_out": len(self._holdout)},
            "teacher": self._teacher,
            "steps": len(curve.loss),
            "tokens_seen": curve.tokens_seen[-1],
            "seconds": round(time.perf_counter() - self._began, 3),
            "best_epoch": curve.best_epoch,
            "merged": merged,
            "holdout": curve.holdout,
            "train": {n: getattr(curve, n) for n in ("loss", "learning_rate", "tokens_seen", "seconds")},
        }
        held = f", held-out {curve.holdout[0]['loss']:.4f} -> {merged['loss']:.4f}" if merged else ""
        logger.info(
            f"LoRA recovery: {len(curve.loss)} steps, loss {curve.loss[0]:.4f} -> {curve.loss[-1]:.4f}{held}, "
            f"{self._record['seconds']:.1f} s"
        )

    def _train_adapters(self, model: PreTrainedModel, parameters: list[nn.Parameter]) -> None:
        """Take every step; leave the best epoch's adapters where there is a held-out part."""
        optimizer = torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)
        # float16 gradients vanish unless they are scaled up
        scaler = torch.amp.GradScaler(model.device.type, enabled=model.dtype == torch.float16)
        batches = self._list_batches()
        best = self._end_epoch(model, parameters, 0, [])
        with tqdm(total=len(batches), desc="LoRA recovery") as bar:
            for step, (epoch, batch) in enumerate(batches):
                factor = find_rate_factor(step, len(batches), self.schedule, self.warmup_fraction)
                for group in optimizer.param_groups:
                    group["lr"] = self.learning_rate * factor
                loss = self._take_step(model, parameters, optimizer, scaler, batch)
                self._log_step(loss, self.learning_rate * factor, batch)
                bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                bar.update()
                if step + 1 == len(batches) or batches[step + 1][0] != epoch:
                    best = self._end_epoch(model, parameters, epoch, best)
        with torch.no_grad():
            for parameter, value in zip(parameters, best, strict=True):
                parameter.copy_(value)
                self._check_finite(bool(parameter.isfinite().all()), "an adapter")

    def _list_batches(self) -> list[tuple[int, list[Sample]]]:
        """Return (epoch from 1, samples) of every step."""
        batches = []
        for epoch in range(1, self.epochs + 1):
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(len(self._train), generator=generator).tolist()
            for start in range(0, len(order), self.batch_size):
                batches.append((epoch, [self._train[i] for i in order[start : start + self.batch_size]]))
        return batches[: self.max_steps]

    def _take_step(
        self,
        model: PreTrainedModel,
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        batch: list[Sample],
    ) -> float:
        """Change the adapters by one batch; return its loss before."""
        switch_dropout(model, True)
        num_targets = sum(sample.num_targets for sample in batch)
        total = 0.0
        for micro in make_micro_batches(batch, self._micro_size):
            loss = self._measure_losses(model, micro)["loss"] / num_targets
            scaler.scale(loss).backward()
            total += loss.item()
        self._check_finite(math.isfinite(total), "the loss")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return total

    def _measure_losses(self, model: PreTrainedModel, micro: list[Sample]) -> dict[str, Tensor]:
        """Return the losses of samples of one length, each a sum over predicted tokens."""
        tokens = torch.stack([sample.tokens for sample in micro]).to(model.device)
        with torch.autocast(model.device.type, model.dtype, enabled=model.dtype in _HALF):
            logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        logits = logits.float()
        cross_entropy = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        if self.distill == "none":
            return {"loss": cross_entropy}
        teacher = stack_teacher(micro, model.device)
        divergence = measure_divergence(logits, teacher, self.distill_temperature).sum()
        loss = (1 - self.distill_weight) * cross_entropy + self.distill_weight * divergence
        return {"loss": loss, "cross_entropy": cross_entropy, "divergence": divergence}

    @torch.no_grad()
    def _measure(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the mean losses a predicted token of the held-out part."""
        switch_dropout(model, False)
        num_targets = sum(sample.num_targets for sample in self._holdout)
        sums: dict[str, float] = {}
        for micro in make_micro_batches(self._holdout, self._micro_size):
            for name, value in self._measure_losses(model, micro).items():
                sums[name] = sums.get(name, 0.0) + value.item() / num_targets
        return sums

    def _end_epoch(
        self, model: PreTrainedModel, parameters: list[nn.Parameter], epoch: int, best: list[Tensor]
    ) -> list[Tensor]:
        """Measure the held-out loss; return the adapters to keep so far, on the host."""
        curve = self._curve
        if self._holdout:
            lowest = min((row["loss"] for row in curve.holdout), default=math.inf)
            losses = self._measure(model)
            self._check_finite(math.isfinite(losses["loss"]), "the held-out loss")
            curve.holdout.append({"epoch": epoch, "step": len(curve.loss), **losses})
            if not losses["loss"] < lowest and best:
                return best
            curve.best_epoch = epoch
        return [parameter.detach().cpu().clone() for parameter in parameters]

    def _log_step(self, loss: float, rate: float, batch: list[Sample]) -> None:
        curve = self._curve
        before = curve.tokens_seen[-1] if curve.tokens_seen else 0
        curve.loss.append(loss)
        curve.learning_rate.append(rate)
        curve.tokens_seen.append(before + sum(sample.num_targets for sample in batch))
        curve.seconds.append(round(time.perf_counter() - self._began, 3))

    def _check_finite(self, finite: bool, what: str) -> None:
        if not finite:
            raise ValueError(
                f"LoRARecoveryModifier: {what} must be finite, got NaN or Inf at step {len(self._curve.loss) + 1}. "
                f"Lower learning_rate ({self.learning_rate:g}), or load the model in a wider dtype."
            )
