"""Text that a model writes by itself: to calibrate and to train on where there is no other."""

from __future__ import annotations

import torch
from compressed_tensors.utils import patch_attr
from datasets import Dataset
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

SELF = "self"  # name of this source, where a file or a data set is asked for
_MARK = "user message"  # to be found again in the chat template's text


@torch.no_grad()
def sample_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_windows: int,
    length: int,
    batch_size: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """Return windows that a model samples from its own distribution.

    Every other window begins as a user's turn of the chat template, where the tokenizer has one, so that the model writes a
    question and its answer; the others begin with a token drawn at random. The model goes on after an end of text. Sources:
    LLM-QAT (Liu et al., 2023) for the random token, Magpie (Xu et al., 2024) for the user's turn.

    :param length: tokens of a window, those that it begins with included
    :param batch_size: windows that are sampled together
    :param temperature: of the distribution that is sampled from
    :param seed: of the first tokens and of the sampling
    :return: shape [num_windows, length], int64, on the host
    :raises ValueError: a window that is no longer than what it begins with
    """
    turn, before = _find_user_turn(tokenizer), tokenizer("")["input_ids"]
    if length <= len(before) + 1:
        raise ValueError(
            f"seq_length: must be above {len(before) + 1} tokens, with which a sampled window begins, got {length}. Raise it."
        )
    own = num_windows // 2 if 0 < len(turn) < length else 0  # that begin as a user's turn
    starts = [_draw_starts(tokenizer, before, num_windows - own, seed), torch.tensor([turn]).expand(own, -1)]
    config = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=0, top_p=1.0, pad_token_id=0, max_length=length
    )
    bar = tqdm(total=num_windows, desc="sampling text")
    devices = [] if model.device.type in ("cpu", "mps") else [model.device]
    kinds = []
    with torch.random.fork_rng(devices), patch_attr(model.generation_config, "eos_token_id", None), bar:
        torch.manual_seed(seed)
        for begin in (part for kind in starts if len(kind) for part in kind.to(model.device).split(batch_size)):
            written = model.generate(begin, attention_mask=torch.ones_like(begin), generation_config=config)
            kinds += [*written.cpu()]
            bar.update(len(begin))
    return torch.stack(
        [window for _, window in sorted(enumerate(kinds), key=lambda pair: pair[0] % (num_windows - own))]
    )


def sample_dataset(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_samples: int, seq_length: int, seed: int = 0
) -> Dataset:
    """Return windows of a model's own text for ``oneshot(dataset=…)``."""
    windows = sample_windows(model, tokenizer, num_samples, seq_length, seed=seed)
    return Dataset.from_dict({"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()})


def write_window(tokenizer: PreTrainedTokenizerBase, window: Tensor) -> str:
    """Return the text of a window, without what the tokenizer puts before every text."""
    before, tokens = tokenizer("")["input_ids"], window.tolist()
    kept = tokens[len(before) :] if tokens[: len(before)] == before else tokens
    return str(tokenizer.decode(kept, clean_up_tokenization_spaces=False))


def _find_user_turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a chat before the user's first word; none without a chat template."""
    if not tokenizer.chat_template:
        return []
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False))
    before, found, _ = text.partition(_MARK)
    return list(tokenizer(before, add_special_tokens=False)["input_ids"]) if found else []


def _draw_starts(tokenizer: PreTrainedTokenizerBase, before: list[int], count: int, seed: int) -> Tensor:
    """Return what windows begin with: what the tokenizer puts before every text, and a token at random, none of the special ones.

    :return: shape [count, tokens], int64
    """
    generator = torch.Generator().manual_seed(seed)
    plain = torch.tensor(sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)))
    drawn = plain[torch.randint(0, len(plain), (count, 1), generator=generator)]
    return torch.cat([torch.tensor(before, dtype=torch.int64).expand(count, -1), drawn], dim=1)
