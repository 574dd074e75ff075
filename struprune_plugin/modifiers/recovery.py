"""``RecoveryModifier``: train a pruned model with no more than a decoder layer on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from llmcompressor.core import State
from pydantic import Field, PrivateAttr, model_validator

from struprune_plugin.data import load_tokenizer, pack_windows
from struprune_plugin.modifiers.recovery_stage import RecoveryStage
from struprune_plugin.recovery.choices import Choices, Clipping, Loss, Method
from struprune_plugin.recovery.samples import Sample

_RATES = {"lora": 1e-3, "full": 1e-4, "norms_and_biases": 1e-3}  # method -> learning rate
_USELESS: dict[str, tuple[str, ...]] = {  # without what the key says: fields that do nothing
    "method: lora": ("rank", "alpha", "targets", "dropout"),
    "losses: kl": ("distill_temperature", "distill_top_k"),
    "losses: hidden": ("hidden_distance",),
    "losses: kl or hidden": ("teacher",),
    "data": ("text_column", "seq_length", "tokens"),
    "memory: layer": ("memory_budget", "state_folder"),
    "a held-out part": ("patience",),
}


def _learn_from_the_dense() -> dict[Loss, float]:
    return {"kl": 1.0}


class RecoveryModifier(RecoveryStage):
    """
    Trains a pruned model towards the text, or towards the dense model, with one decoder layer on the device at a time.

    A stage between pruning and quantising. A step takes the micro-batches of a batch through the layers together: forward with
    every layer's input kept on the host, the head and its losses in pieces of the vocabulary, then backward, each layer run
    again, and its weights moved as soon as their gradient is there. Weights travel twice a step, whatever the batch; the
    weights, the moments of AdamW and hidden states are at rest on the host. Source: L2L (Pudipeddi et al., 2020), LOMO
    (Lv et al., 2023).

    :param method: ``lora`` trains low-rank adapters and merges them; ``full`` all weights of the decoder layers and the norm
        after them; ``norms_and_biases`` their vectors alone. Embeddings and the head, which pruning leaves whole, stay
    :param memory: ``layer`` holds one decoder layer on the device (two while the next is fetched), ``model`` the whole model
        and the graphs of its forward pass: a quarter fewer operations
    :param losses: weights of ``cross_entropy`` (with the text), ``kl`` (the divergence from the dense model's distribution)
        and ``hidden`` (the distance of every layer's output from the dense one's, mean over layers)
    :param hidden_distance: ``cosine`` (one minus it), or ``fisher``: half the squares, weighed by the diagonal of the Fisher
        information of the dense layer's output
    :param data: text to train on: JSON-lines files or hub data sets, mixed evenly; the calibration samples where left out
    :param text_column: of the data
    :param seq_length: tokens of a window; windows are packed without padding
    :param tokens: read so many of the data; all where left out
    :param epochs: passes over the training part, each in an order of its own
    :param learning_rate: of AdamW, after the warm-up; 0.001, and 0.0001 for ``full``, where left out
    :param micro_batch_size: sequences on the device at a time
    :param clipping: ``layer`` clips every layer's gradient by its own norm, at once; ``global`` by the norm of all, which
        ``method: full`` finds by a second backward pass
    :param holdout_steps: measure them so often, in steps, and at the end
    :param patience: stop after so many measurements without a better one
    :param checkpoint_steps: with ``checkpoint_dir``: keep so often, in steps, what a killed run goes on from
    :param compute: dtype of weights and hidden states in a layer: ``model``'s own (bfloat16 for float16), or another
    :param state_dtype: of AdamW's moments: ``float32``, or ``bfloat16``, rounded at random
    :param state_folder: where moments and float32 copies lie as files while it trains, if memory does not hold them
    :param memory_budget: bytes that the device may hold; the next layer is not fetched early where it does not fit, and gradients
        are added up on the host. None: three layers beside a micro-batch's activations; more spares traffic
    :param measure_memory: count on a CPU, too, what an accelerator would hold

    Example recipe::

        pruning_stage:
          pruning_modifiers:
            StruPruneModifier: {sparsity: 0.3}
        recovery_stage:
          recovery_modifiers:
            RecoveryModifier: {method: full, losses: {kl: 1.0}, data: [train.jsonl], tokens: 4000000}
    """

    method: Method = "full"
    memory: Literal["layer", "model"] = "layer"
    losses: dict[Loss, float] = Field(default_factory=_learn_from_the_dense)
    hidden_distance: Literal["cosine", "fisher"] = "cosine"
    data: str | list[str] | None = None
    text_column: str = "text"
    seq_length: int = Field(default=512, ge=2)
    tokens: int | None = Field(default=None, ge=1)
    epochs: int = Field(default=1, ge=1)
    learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    micro_batch_size: int = Field(default=4, ge=1)
    clipping: Clipping = "layer"
    holdout_steps: int = Field(default=50, ge=1)
    patience: int | None = Field(default=None, ge=1)
    checkpoint_steps: int = Field(default=50, ge=1)
    compute: Literal["model", "float32", "bfloat16"] = "model"
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    state_folder: str | None = None
    memory_budget: int | None = Field(default=None, ge=1)
    measure_memory: bool = False

    _tokenizer: Any = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check_fields(self) -> RecoveryModifier:
        if not any(self.losses.values()) or not all(0 <= weight < float("inf") for weight in self.losses.values()):
            raise ValueError(
                f"losses must hold finite weights, at least 0 and one of them above, got {self.losses}. "
                "Take {kl: 1.0}, say."
            )
        asked = {name for name, weight in self.losses.items() if weight}
        present = {
            "method: lora": self.method == "lora",
            "losses: kl": "kl" in asked,
            "losses: hidden": "hidden" in asked,
            "losses: kl or hidden": bool(asked & {"kl", "hidden"}),
            "data": self.data is not None,
            "memory: layer": self.memory == "layer",
            "a held-out part": self.holdout_fraction > 0,
        }
        for what, names in _USELESS.items():
            for name in () if present[what] else names:
                value = getattr(self, name)
                if (
                    value != type(self).model_fields[name].default
                ):  # saved recipes spell defaults too; they ask for nothing
                    raise ValueError(
                        f"{name} must be left out without {what}, got {value}. Leave it out, or ask for that."
                    )
        return self

    def take_tokenizer(self, tokenizer: Any) -> None:
        """Take in the tokenizer of the run, or where it lies; the model's folder is asked where nobody gives one."""
        self._tokenizer = tokenizer

    def _choose(self, largest: int) -> Choices:
        if self.state_folder is not None and Path(self.state_folder).is_file():
            raise ValueError(f"state_folder: must be a folder, {self.state_folder} is a file. Choose another path.")
        return Choices(**{**self._read_choices(), "learning_rate": self.learning_rate or _RATES[self.method]})

    def _read_samples(self, state: State) -> tuple[list[Sample], int]:
        if self.data is None:
            return super()._read_samples(state)
        tokenizer = self._tokenizer or state.model.config._name_or_path
        tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        sources = [self.data] if isinstance(self.data, str) else self.data
        rows = pack_windows(sources, tokenizer, self.seq_length, self.tokens, self.text_column)
        return [Sample(row) for row in rows], 0

    def _is_on_calibration_text(self) -> bool:
        return self.data is None

    @property
    def asks_teacher(self) -> bool:
        return bool(self.losses.get("kl"))
