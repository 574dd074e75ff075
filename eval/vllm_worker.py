"""Worker for vLLM's engine in one process, for one model after another: greedy tokens and tokens per second. Needs only vLLM.

With one thread (OMP_NUM_THREADS=1) seconds are the process' own: others may share the machine.

Reads ``{"folder", "dtype", "trust", "impl", "prompts", "load", "new_tokens", "rounds"}`` as one line of JSON per model, and
answers each with one line.
"""

import gc
import json
import os
import sys
import time
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM says goes with its log
    for line in sys.stdin:
        try:
            found = run(json.loads(line))
        except Exception as error:  # whatever it cannot do with a model: told, and on to the next
            found = {"failed": f"{type(error).__name__}: {error}"}
        gc.collect()
        cleanup_dist_env_and_memory()
        print(json.dumps(found), file=answers, flush=True)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Return the greedy answers to prompts, and the tokens a second of rounds of many requests."""
    model = LLM(
        job["folder"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=len(job["load"]),
        disable_log_stats=True,
        trust_remote_code=job["trust"],
        model_impl=job["impl"],
    )
    options = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, logprobs=1)

    def ask(prompts: list[list[int]]) -> list[Any]:
        made = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], options, use_tqdm=False)
        return [answer.outputs[0] for answer in made]

    answers = [ask([prompt])[0] for prompt in job["prompts"]]
    rates, clock = [], time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(job["rounds"]):
        start = clock()
        made = sum(len(answer.token_ids) for answer in ask(job["load"]))
        rates.append(made / (clock() - start))
    return {"answers": [read_answer(answer) for answer in answers], "rates": rates}


def read_answer(answer: Any) -> tuple[list[int], list[float]]:
    """Return an answer's tokens and their log-probabilities."""
    tokens = list(answer.token_ids)
    return tokens, [place[token].logprob for place, token in zip(answer.logprobs, tokens, strict=True)]


if __name__ == "__main__":
    main()
