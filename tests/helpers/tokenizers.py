"""Small tokenizers of every form that can be trimmed, and text of all scripts to try them on."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from helpers.families import make_model
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_TEST, read_texts
from struprune_plugin.vocabulary.tokenizer_json import BYTES

FOREIGN = "Привет, мир. Γειά σου κόσμε. 你好世界。こんにちは世界。 안녕하세요 세계. مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก "
ODD = [
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "é",
    "e\u0301",
    "  \t ",
    "\n\n",
    "\u00a0",
    "\u200b",
    "ﬁ",
    "𝔘𝔫𝔦",
    "\x07",
    "123456",
    "<s>",
    "</s>",
    "<unused1>",
    "…",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<unused0>", "<unused1>"]
FORMS = ("byte_level", "byte_level_ignore_merges", "byte_fallback", "characters", "unigram", "unigram_bytes")


def make_tokenizer(form: str, size: int = 900) -> Tokenizer:
    """Train a tokenizer of a form on the demo's text and a little of other scripts."""
    texts = [text[:4000] for text in read_texts(DEMO_CALIBRATION)[:12]] + [FOREIGN] * 20
    if form.startswith("unigram"):
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=size, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        )
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    elif form.startswith("byte_level"):
        tokenizer = Tokenizer(models.BPE())
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        special = SPECIAL + (BYTES if form == "byte_fallback" else [])
        trainer = trainers.BpeTrainer(vocab_size=size + len(special), special_tokens=special, show_progress=False)
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    content = json.loads(tokenizer.to_str())
    model = content["model"]
    model["ignore_merges"] = form == "byte_level_ignore_merges"
    if form == "byte_fallback":
        model["byte_fallback"] = True
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in BYTES]
    if form == "unigram_bytes":  # a piece's id is its place
        model["byte_fallback"] = True
        model["vocab"] = [*model["vocab"][:6], *([byte, 0.0] for byte in BYTES), *model["vocab"][6:]]
        content["decoder"] = {
            "type": "Sequence",
            "decoders": [{"type": "ByteFallback"}, json.loads(decoders.Metaspace().__getstate__())],
        }
    if form == "byte_level_ignore_merges":  # a word that no merges give
        model["vocab"]["Ġvermilion"] = len(model["vocab"])
    return Tokenizer.from_str(json.dumps(content))


def save_model(folder: Path, tokenizer: Tokenizer, model_type: str = "llama", extra: int = 10, **changes) -> Path:
    """Save a tiny model with ``extra`` rows that have no token, and the tokenizer, as a stock folder."""
    size = tokenizer.get_vocab_size() + extra
    model = make_model(model_type, vocab_size=size, pad_token_id=0, bos_token_id=1, eos_token_id=2, **changes)
    model.generation_config.eos_token_id = [2, 1]
    model.save_pretrained(folder)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


def load_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def fuzz_texts(number: int, seed: int = 0) -> list[str]:
    """Return strings of all scripts, shuffled letters, odd characters and special tokens."""
    draw, plain = random.Random(seed), "".join(read_texts(DEMO_TEST)[:6])
    words = [*plain.split()[:2000], *FOREIGN.split(), *ODD]
    found = []
    for index in range(number):
        kind = index % 4
        if kind == 0:
            found.append(" ".join(draw.choices(words, k=draw.randint(1, 12))))
        elif kind == 1:
            found.append(
                "".join(
                    chr(
                        draw.choice(
                            (draw.randint(32, 0x2FF), draw.randint(0x370, 0xD7FF), draw.randint(0x1F300, 0x1FAFF))
                        )
                    )
                    for _ in range(8)
                )
            )
        elif kind == 2:
            letters = [*" ".join(draw.choices(words, k=4))]
            draw.shuffle(letters)
            found.append("".join(letters))
        else:
            at = draw.randrange(len(plain) - 100)
            found.append(plain[at : at + 80] + draw.choice(ODD))
    return found
