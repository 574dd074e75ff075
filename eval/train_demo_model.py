"""Train the embedded demo model and cut its texts from one JSON-lines file of public-domain books.

Writes what ``struprune_plugin/demo`` ships: ``model/`` (a small OPT, its tokenizer and config),
``calibration.jsonl``, ``test.jsonl`` and ``word_order.jsonl`` (minimal pairs: a held-out sentence and the
same sentence with two neighbouring words exchanged). The documents of the three files are never trained on;
they come from the same books as the training text.

    python -m eval.train_demo_model --text books_train.jsonl --out struprune_plugin/demo
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 2048
WINDOW = 256
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]  # ids 0..3, as in every OPT tokenizer
HELD_OUT_EVERY = 40  # one document in 40 is held out; two in three of those calibrate, one tests


def split_documents(texts: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Split documents into (training, calibration, test) by position, so that the split needs no seed."""
    held_out = list(range(HELD_OUT_EVERY // 2, len(texts), HELD_OUT_EVERY))
    test = held_out[2::3]
    calibration = [i for i in held_out if i not in test]
    train = [text for i, text in enumerate(texts) if i not in set(held_out)]
    return train, [texts[i] for i in calibration], [texts[i] for i in test]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that, as OPT's does, puts ``</s>`` before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="</s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=WINDOW,
    )


def make_windows(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Tokenise, concatenate and cut into windows, shape [windows, WINDOW], int64."""
    ids = [i for text in texts for i in tokenizer(text, verbose=False)["input_ids"]]
    return torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)


def make_model() -> OPTForCausalLM:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            word_embed_proj_dim=192,
            ffn_dim=768,
            num_hidden_layers=5,
            num_attention_heads=6,
            max_position_embeddings=2 * WINDOW,
            dropout=0.1,
            pad_token_id=1,
            bos_token_id=2,
            eos_token_id=2,
        )
    )


@torch.no_grad()
def mean_loss(model: OPTForCausalLM, windows: torch.Tensor) -> float:
    model.eval()
    losses = [model(input_ids=batch, labels=batch).loss.item() for batch in windows.split(16)]
    model.train()
    return sum(losses) / len(losses)


def train_model(model: OPTForCausalLM, train: torch.Tensor, held_out: torch.Tensor, epochs: int, batch: int) -> None:
    """Train with AdamW and a cosine schedule, and leave the weights of the best held-out epoch in ``model``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    steps = epochs * (len(train) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    best, best_state = math.inf, model.state_dict()
    model.train()
    bar = tqdm(total=steps, desc="training", unit="step")
    for _ in range(epochs):
        for rows in torch.randperm(len(train), device=train.device).split(batch):
            if len(rows) < batch:
                continue
            with torch.autocast(train.device.type, torch.bfloat16):
                loss = model(input_ids=train[rows], labels=train[rows]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            bar.update()
        value = mean_loss(model, held_out)
        bar.set_postfix(train=f"{loss.item():.3f}", held_out=f"{value:.3f}")
        if value < best:
            best = value
            best_state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(best_state)


def trim_positions(model: OPTForCausalLM) -> None:
    """Drop the position embeddings beyond the training window, which training never touched."""
    positions = model.model.decoder.embed_positions
    positions.weight = torch.nn.Parameter(positions.weight[: WINDOW + positions.offset].detach().clone())
    positions.num_embeddings = len(positions.weight)
    model.config.max_position_embeddings = WINDOW


def make_word_order_pairs(texts: list[str], count: int, seed: int) -> list[dict[str, str]]:
    """Pair held-out sentences of 6 to 14 words with copies in which two neighbouring words are exchanged."""
    rng = random.Random(seed)
    sentences = [" ".join(s.split()) for text in texts for s in re.findall(r"[A-Z][^.!?\n\"“”_]{20,90}[.!?]", text)]
    rng.shuffle(sentences)
    pairs: list[dict[str, str]] = []
    for sentence in sentences:
        words = sentence.split(" ")
        swaps = [
            i
            for i in range(1, len(words) - 2)
            if words[i].isalpha() and words[i + 1].isalpha() and words[i].lower() != words[i + 1].lower()
        ]
        if 6 <= len(words) <= 14 and swaps:
            i = rng.choice(swaps)
            swapped = [*words[:i], words[i + 1], words[i], *words[i + 2 :]]
            pairs.append({"sentence_good": sentence, "sentence_bad": " ".join(swapped)})
    return pairs[:count]


def write_json_lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="JSON lines with a field 'text'")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="windows per training step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    texts = [json.loads(line)["text"] for line in args.text.open(encoding="utf-8")]
    train, calibration, test = split_documents(texts)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json_lines(args.out / "calibration.jsonl", [{"text": text} for text in calibration])
    write_json_lines(args.out / "test.jsonl", [{"text": text} for text in test])
    write_json_lines(args.out / "word_order.jsonl", make_word_order_pairs(test, 300, args.seed))

    tokenizer = train_tokenizer(train)
    windows = make_windows(tokenizer, train).to(args.device)
    held_out = make_windows(tokenizer, calibration).to(args.device)
    model = make_model().to(args.device)
    train_model(model, windows, held_out, args.epochs, args.batch)
    model.eval()
    print(f"test perplexity {math.exp(mean_loss(model, make_windows(tokenizer, test).to(args.device))):.2f}")

    trim_positions(model)
    model.config.dropout = 0.0
    model.to("cpu", torch.bfloat16).save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")


if __name__ == "__main__":
    main()
