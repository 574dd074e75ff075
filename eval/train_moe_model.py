"""Make a small mixture-of-experts model from a dense LLaMA model: its FFNs are split into experts, then distilled.

A model to measure expert pruning on. Every FFN's channels are put into one shared expert, which holds those of most
energy, and equal routed experts of channels that fire together; a linear router is fitted to the experts' energies.
Then every layer's down projections are solved again, so that the layer repairs the error it inherits, and the whole
is trained on the dense model's predictions. The output is a stock ``glm4_moe`` folder: its attention is LLaMA's
once rotary embeddings turn whole heads, its shared expert has no gate, its routed experts are weighed by sigmoids that
need not sum to one, and a bias of the choice alone keeps their loads even.

    python -m eval.train_moe_model --model smollm2 --data DATA --output moe

One seed and one thread: two runs on one machine write the same bytes.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from eval.split_ffn import DAMPING, SCALE, Sizes, SplitFFN, split_ffn
from struprune_plugin.evaluation.scoring import load_checkpoint, measure_perplexity
from struprune_plugin.evaluation.text import read_texts, tokenize_texts
from struprune_plugin.reporting.tables import format_table

WINDOW = 256
TEST_TOKENS = 12_000
CALIBRATION, TRAINING = "mixed_calibration.jsonl", "books_train.jsonl"
KEPT = (  # keys of LLaMA's configuration that the stock class takes as they are
    *(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *("head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_bias"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
TESTS = {"WikiText-2": "wikitext2_test.jsonl", "books": "books_test.jsonl"}
BATCH = 4  # windows
BALANCE = 1e-4  # step of the bias of choice, in scores


def read_windows(tokenizer: object, file: Path, count: int) -> Tensor:
    """Return the first windows of a file, at most ``count``, shape [windows, WINDOW], int64."""
    tokens = tokenize_texts(tokenizer, read_texts(file), count * WINDOW)
    return tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)


def attend(model: LlamaForCausalLM, layer: LlamaDecoderLayer, stream: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stream after a layer's attention, and its FFN's input; both [windows, WINDOW, d]."""
    rotary = model.model.rotary_emb(stream, torch.arange(stream.shape[1])[None])
    outs = []
    for part in stream.split(8):
        with torch.autocast("cpu", torch.bfloat16):
            attended = layer.self_attn(layer.input_layernorm(part), position_embeddings=rotary, attention_mask=None)[0]
        outs.append(part + attended)
    after = torch.cat(outs)
    return after, layer.post_attention_layernorm(after)


@torch.no_grad()
def split_layers(model: LlamaForCausalLM, windows: Tensor, sizes: Sizes) -> None:
    """Split every FFN into experts and fit its router, on the dense model's stream."""
    stream = model.model.embed_tokens(windows)
    for layer in tqdm(model.model.layers, desc="splitting"):
        stream, inputs = attend(model, layer, stream)
        stream = stream + layer.mlp(inputs)
        layer.mlp = split_ffn(layer.mlp, inputs.flatten(0, 1), sizes)


@torch.no_grad()
def solve_layers(model: LlamaForCausalLM, dense: LlamaForCausalLM, windows: Tensor) -> None:
    """Solve every FFN's down projection again: the stream after it is to be the dense model's."""
    stream = target = model.model.embed_tokens(windows)
    for layer, teacher in tqdm(zip(model.model.layers, dense.model.layers, strict=True), desc="solving"):
        target, wanted = attend(dense, teacher, target)
        stream, inputs = attend(model, layer, stream)
        with torch.autocast("cpu", torch.bfloat16):
            target = target + teacher.mlp(wanted)
            routed = layer.mlp.route(inputs).flatten(0, 1).float()
        weight = layer.mlp.down_proj.weight
        missing = (target - stream).flatten(0, 1) - routed @ weight.T
        moment = (routed.T @ routed).double()
        moment.diagonal().add_(DAMPING * moment.diagonal().mean())
        weight += torch.linalg.solve(moment, (routed.T @ missing).double()).T.float()
        stream = stream + layer.mlp.down_proj(routed).view_as(stream)


def distill(model: LlamaForCausalLM, dense: LlamaForCausalLM, windows: Tensor, rate: float) -> None:
    """Train all but the embeddings on the dense model's predictions, BATCH windows a step, one pass."""
    model.model.embed_tokens.weight.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    steps = len(windows) // BATCH
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    bar = tqdm(windows[: steps * BATCH].split(BATCH), desc="distilling")
    for batch in bar:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = dense(input_ids=batch, use_cache=False).logits.float().log_softmax(-1)
            got = model(input_ids=batch, use_cache=False).logits.float().log_softmax(-1)
        loss = functional.kl_div(got.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
        for layer in model.model.layers:
            layer.mlp.bias += BALANCE * (layer.mlp.load.mean() - layer.mlp.load).sign()
            layer.mlp.load.zero_()


@torch.no_grad()
def convert(model: LlamaForCausalLM, sizes: Sizes) -> Glm4MoeForCausalLM:
    """Return the split model as one of the stock class, in bfloat16."""
    config = Glm4MoeConfig(
        **{name: getattr(model.config, name) for name in KEPT},
        rope_parameters={**model.config.rope_parameters, "partial_rotary_factor": 1.0},
        moe_intermediate_size=sizes.width,
        n_routed_experts=sizes.experts,
        n_shared_experts=sizes.shared,
        num_experts_per_tok=sizes.active,
        routed_scaling_factor=SCALE,
        norm_topk_prob=False,
        first_k_dense_replace=0,
        num_mtp_layers=0,
    )
    moe = Glm4MoeForCausalLM(config).to(torch.bfloat16)
    moe.generation_config = model.generation_config
    state = {name: value for name, value in model.state_dict().items() if ".mlp." not in name}
    for number, layer in enumerate(model.model.layers):
        ffn, prefix, cut = layer.mlp, f"model.layers.{number}.mlp.", sizes.shared * sizes.width
        gate, up = ffn.gate_proj.weight, ffn.up_proj.weight
        down = ffn.down_proj.weight
        state[prefix + "gate.weight"] = ffn.router
        state[prefix + "gate.e_score_correction_bias"] = ffn.bias
        for name, rows in (("gate", gate[:cut]), ("up", up[:cut]), ("down", down[:, :cut])):
            state[f"{prefix}shared_experts.{name}_proj.weight"] = rows
        pairs = [part[cut:].unflatten(0, (sizes.experts, sizes.width)) for part in (gate, up)]
        state[prefix + "experts.gate_up_proj"] = torch.cat(pairs, 1)
        state[prefix + "experts.down_proj"] = down[:, cut:].unflatten(1, (sizes.experts, sizes.width)).transpose(0, 1)
    for layer in moe.model.layers:  # of the choice, which half precision would move
        layer.mlp.gate.e_score_correction_bias = layer.mlp.gate.e_score_correction_bias.float()
    moe.load_state_dict(state)
    return moe


class Report:
    """Perplexities after every stage, and the seconds until then, those of scoring included."""

    def __init__(self, texts: dict[str, Tensor]) -> None:
        self.texts = texts
        self.rows: list[list[str]] = []
        self.start = time.perf_counter()

    def add(self, stage: str, model: nn.Module, half: bool = True) -> None:
        """Score a model, in bfloat16 unless told otherwise."""
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            found = [f"{measure_perplexity(model.eval(), tokens, WINDOW):.2f}" for tokens in self.texts.values()]
        self.rows.append([stage, *found, f"{time.perf_counter() - self.start:.0f}"])
        print(*self.rows[-1], sep="  ", flush=True)


def each_ffn(model: LlamaForCausalLM, **fields: object) -> list[SplitFFN]:
    """Return the split FFNs, their loads forgotten, after setting some of their fields."""
    ffns = [layer.mlp for layer in model.model.layers]
    for ffn in ffns:
        ffn.load.zero_()
        for name, value in fields.items():
            setattr(ffn, name, value)
    return ffns


def make_model(args: argparse.Namespace) -> Report:
    """Run all stages, write the model and return their perplexities."""
    torch.manual_seed(args.seed)
    dense, tokenizer = load_checkpoint(args.model)
    if dense.config.model_type != "llama" or dense.config.mlp_bias:
        raise SystemExit("--model: must be a LLaMA model whose FFNs have no biases. Choose another.")
    width = dense.config.intermediate_size // (args.experts + args.shared)  # channels left over, of least energy, go
    sizes = Sizes(args.experts, args.active, args.shared, width)
    half = args.steps * BATCH // 2
    mixed = read_windows(tokenizer, args.data / CALIBRATION, args.calibration + half)
    calibration, mixed = mixed[: args.calibration], mixed[args.calibration :]
    books = read_windows(tokenizer, args.data / TRAINING, half)
    report = Report(
        {n: read_windows(tokenizer, args.data / f, TEST_TOKENS // WINDOW).flatten() for n, f in TESTS.items()}
    )
    report.add("dense", dense)
    model = copy.deepcopy(dense)
    split_layers(model, calibration[: len(calibration) // 2], sizes)
    each_ffn(model, oracle=True)
    report.add("split, experts of most energy", model)
    each_ffn(model, oracle=False)
    report.add("fitted router", model)
    solve_layers(model, dense, calibration)
    report.add("down projections solved again", model)
    pairs = min(len(mixed), len(books))
    distill(model, dense, torch.stack([mixed[:pairs], books[:pairs]], 1).flatten(0, 1), args.rate)
    ffns = each_ffn(model)
    report.add("distilled", model)
    loads = torch.stack([ffn.load for ffn in ffns])
    convert(model, sizes).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    report.add("as saved, in float32", load_checkpoint(str(args.output))[0], half=False)
    print(format_table(["stage", *TESTS, "seconds"], report.rows))
    tokens = int(loads[0].sum()) // sizes.active
    print(
        f"{sizes}; of {tokens:,} test tokens an expert sees {int(loads.min()):,} at least, {int(loads.median()):,} (median)"
    )
    return report


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a dense LLaMA model")
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {CALIBRATION}, {TRAINING} and the tests")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--active", type=int, default=8, help="active experts per token")
    parser.add_argument("--shared", type=int, default=8, help="width of the shared expert, in routed experts")
    parser.add_argument("--calibration", type=int, default=96, help="calibration windows for the split and the solves")
    parser.add_argument("--steps", type=int, default=100, help="steps of the distillation")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate of the distillation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # sums do not depend on the machine's cores
    make_model(args)


if __name__ == "__main__":
    main()
