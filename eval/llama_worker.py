"""Worker for one GGUF file in llama.cpp: greedy tokens, tokens per second, its own quantiser.

Reads ``{"file", "prompts", "new_tokens", "length", "rounds"}`` or ``{"file", "quantised", "type"}`` as JSON from standard input,
and prints the results as one line of JSON. The first needs xllamacpp, the second llama-cpp-python; neither needs this package.
"""

import json
import os
import sys
from typing import Any

NEW_TOKENS = 32  # of a round of decoding


def main() -> None:
    job = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp says goes with its log
    print(json.dumps(quantise(job) if "quantised" in job else run(job)), file=answers, flush=True)


def quantise(job: dict[str, Any]) -> dict[str, Any]:
    """Write a file again, in a type of llama.cpp's."""
    import ctypes

    import llama_cpp

    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{job['type']}")
    params.nthread = 1
    if llama_cpp.llama_model_quantize(job["file"].encode(), job["quantised"].encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not quantise {job['file']}")
    return {}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Return the greedy answers to prompts, and the tokens a second of prompts and of new tokens, the best of rounds."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = job["file"]
    params.n_ctx = params.n_batch = params.n_ubatch = 2 * job["length"] + NEW_TOKENS
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    answers = [answer(server, prompt, job["new_tokens"]) for prompt in job["prompts"]]
    text = [5 + i % 1000 for i in range(job["length"])]
    prefill = [complete(server, text, 1)["timings"]["prompt_per_second"] for _ in range(job["rounds"])]
    decode = [complete(server, text[:3], NEW_TOKENS, ignore_eos=True)["timings"] for _ in range(job["rounds"])]
    rates = [timings["predicted_per_second"] for timings in decode]
    return {"answers": answers, "prefill": max(prefill), "decode": max(rates)}


def complete(server: Any, prompt: list[int], new_tokens: int, **options: Any) -> dict[str, Any]:
    """Ask for the likeliest tokens after a prompt."""
    asked = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0.0, "cache_prompt": False}
    return server.handle_completions({**asked, **options})


def answer(server: Any, prompt: list[int], new_tokens: int) -> dict[str, list]:
    """Return greedy tokens and their log-probabilities, up to the first that is half a character: it is not told of those."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(new_tokens):
        told = complete(server, prompt + tokens, 1, logprobs=1)["choices"][0].get("logprobs") or {}
        if not told.get("content"):
            break
        tokens.append(told["content"][0]["id"])
        logprobs.append(told["content"][0]["logprob"])
    return {"tokens": tokens, "logprobs": logprobs}


if __name__ == "__main__":
    main()
