"""Text sampled from a model itself, for calibration and training without other text."""

from __future__ import annotations

from itertools import zip_longest

import torch
from compressed_tensors.utils import patch_attr
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

SELF = "self"  # name of this source, in place of a file or a data set
_MARK = "user message"  # searched for in the chat template's text


@torch.no_grad()
def sample_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_windows: int,
    length: int,
    batch_size: int = 64,
    seed: int = 0,
) -> Tensor:
    """Return token windows that a model samples from its own distribution.

    Every other window begins as a user's turn of the chat template, if the tokenizer has one, so that the model writes a
    question and its answer; the others begin with a random token. Generation continues after an end-of-text token. Sources:
    LLM-QAT (Liu et al., 2023) for the random token, Magpie (Xu et al., 2024) for the user's turn.

    :param length: tokens per window, including the initial ones
    :param batch_size: windows that are sampled together
    :param seed: seed of the first tokens and of the sampling
    :return: shape [num_windows, length], int64, on the host
    :raises ValueError: ``length`` does not exceed the initial tokens, or exceeds the model's positions
    """
    turn, before = _find_user_turn(tokenizer), tokenizer("")["input_ids"]
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or length
    if not len(before) + 1 < length <= positions:
        raise ValueError(
            f"seq_length: must be above the {len(before) + 1} tokens with which a sampled window begins, and at most the model's "
            f"{positions} positions, got {length}. Change seq_length."
        )
    own = num_windows // 2 if 0 < len(turn) < length else 0  # windows that begin as a user's turn
    starts = [_draw_starts(tokenizer, before, num_windows - own, seed), torch.tensor([turn]).expand(own, -1)]
    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, max_length=length)
    devices = [] if model.device.type in ("cpu", "mps") else [model.device]
    written: list[Tensor] = []
    with torch.random.fork_rng(devices), patch_attr(model, "generation_config", config):
        torch.manual_seed(seed)
        batches = [part for kind in starts if len(kind) for part in kind.to(model.device).split(batch_size)]
        for begin in tqdm(batches, desc="sampling text"):
            options = {"attention_mask": torch.ones_like(begin), "generation_config": config}
            written += [*model.generate(begin, **options).cpu()]
    plain, turns = written[: num_windows - own], written[num_windows - own :]
    return torch.stack([window for pair in zip_longest(plain, turns) for window in pair if window is not None])


def _find_user_turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a chat before the user's first word; empty without a chat template."""
    if not tokenizer.chat_template:
        return []
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False))
    before, found, _ = text.partition(_MARK)
    return list(tokenizer(before, add_special_tokens=False)["input_ids"]) if found else []


def _draw_starts(tokenizer: PreTrainedTokenizerBase, before: list[int], count: int, seed: int) -> Tensor:
    """Return initial tokens: those that the tokenizer puts before every text, and a random one, shape [count, tokens], int64."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.tensor(sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)))
    drawn = plain[torch.randint(0, len(plain), (count, 1), generator=generator)]
    return torch.cat([torch.tensor(before, dtype=torch.int64).expand(count, -1), drawn], dim=1)
