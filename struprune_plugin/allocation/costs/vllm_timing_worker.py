"""Script that times two model folders in vLLM, in turn, with random weights, and of this package only its classes for vLLM.

Reads ``{"folders", "package", "dtype", "phases", "prompts", "cache_bytes", "threads", "repeats"}`` as JSON from standard input, and
prints the seconds of every folder in every round, by phase, with a description of the machine, as one line of JSON.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import time
from typing import Any

_ROOM = 32  # tokens of a context besides the prompt
_WARM_UP = 2  # tokens before the timed ones
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
# Both models live in one process, so that they run in turn without a wait and a single thread is timed by its CPU time. Another
# process times the next pair: an engine that ends takes the process' distributed groups from the one beside it.
_TOGETHER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class Session:
    """Folder that is open in vLLM's engine, which is asked step by step: the first step reads a prompt, each other one a token."""

    count = 0  # of all requests

    def __init__(self, folder: str, job: dict[str, Any]):
        import torch
        from vllm import LLM

        self._prompts, self._open = job["prompts"], list[str]()
        batch, length = len(self._prompts), len(self._prompts[0]) + _ROOM
        self._llm = LLM(
            folder,
            dtype=job["dtype"],
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=not torch.cuda.is_available(),  # graphs serve on an accelerator
            enable_prefix_caching=False,
            max_model_len=length,
            max_num_seqs=batch,
            max_num_batched_tokens=batch * length,  # all prompts in one step
            kv_cache_memory_bytes=job["cache_bytes"],
            gpu_memory_utilization=0.4,  # two models share the device
            disable_log_stats=True,
        )
        self._engine = self._llm.llm_engine

    def run_prompt(self) -> None:
        """Read the prompts, up to the choice of a token."""
        self._add(1)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def begin_tokens(self) -> None:
        """Read the prompts and a few tokens."""
        self._add(_ROOM)
        seen: set[str] = set()
        while len(seen) < len(self._open):
            seen |= {answer.request_id for answer in self._engine.step()}
        for _ in range(_WARM_UP):
            self._engine.step()

    def run_token(self) -> None:
        """Read one more token in every sequence."""
        self._engine.step()

    def end_tokens(self) -> None:
        """Forget the sequences."""
        self._engine.abort_request(self._open)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _add(self, new_tokens: int) -> None:
        from vllm import SamplingParams

        options = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        self._open = [str(Session.count + index) for index in range(len(self._prompts))]
        Session.count += len(self._open)
        for name, prompt in zip(self._open, self._prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, options)


def time_folders(job: dict[str, Any]) -> list[dict[str, list[float]]]:
    """Return the seconds of every folder in every round, by phase; a single CPU thread is timed by the process' CPU time."""
    import torch

    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    clock = time.process_time if alone else time.perf_counter
    sessions = [Session(folder, job) for folder in job["folders"]]
    found: list[dict[str, list[float]]] = [{phase: [] for phase in job["phases"]} for _ in sessions]
    gc.collect()
    gc.disable()  # what is left of loading is not searched while one of the two is timed
    for phase in job["phases"]:
        for session in sessions:
            session.run_prompt() if phase == "prompt" else session.begin_tokens()
        for _ in range(job["repeats"][phase]):
            for session, seconds in zip(sessions, found, strict=True):
                start = clock()
                session.run_prompt() if phase == "prompt" else session.run_token()
                seconds[phase].append(clock() - start)
        if phase == "token":
            for session in sessions:
                session.end_tokens()
    return found


def load_package(folder: str) -> None:
    """Load the package from its folder, whatever else lies beside it, and register its classes with vLLM."""
    place = importlib.util.spec_from_file_location(
        "struprune_plugin", f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    assert place is not None
    assert place.loader is not None
    package = importlib.util.module_from_spec(place)
    sys.modules["struprune_plugin"] = package
    place.loader.exec_module(package)
    from struprune_plugin.export.vllm_plugin import register

    register()


def describe_machine() -> str:
    """Return processor or accelerator, threads and version."""
    import platform

    import torch
    import vllm

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return f"{where}, {torch.get_num_threads()} threads, vllm {vllm.__version__}"


def main() -> None:
    job = json.load(sys.stdin)
    os.environ.update(_QUIET | _TOGETHER | {"OMP_NUM_THREADS": str(job["threads"])})
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # threads as OMP_NUM_THREADS
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's output is sent where its log is
    try:
        load_package(job["package"])
        answer = {"seconds": time_folders(job), "machine": describe_machine()}
    except Exception as error:  # whatever vLLM cannot do with a model
        answer = {"failed": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
