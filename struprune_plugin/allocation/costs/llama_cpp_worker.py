"""Script that times GGUF files in llama.cpp, in turn, through llama-cpp-python, without the rest of this package.

Reads ``{"files", "phases", "batch", "length", "threads", "repeats"}`` as JSON from standard input, and prints the seconds of every
file in every round, by phase, as one line of JSON, under ``seconds``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

_ROOM = 8  # tokens of a context besides the prompt
_ERROR = 4  # among llama.cpp's log levels


class Session:
    """GGUF file that is open in llama.cpp."""

    def __init__(self, file: str, job: dict[str, Any]):
        import llama_cpp

        self._api, self._batch, self._length = llama_cpp, job["batch"], job["length"]
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp could not load {file}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self._batch * (self._length + _ROOM)
        params.n_batch = max(512, self._batch * self._length)
        params.n_seq_max = self._batch
        params.n_threads = params.n_threads_batch = job["threads"]
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp could not make a context for {file}")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._memory = llama_cpp.llama_get_memory(self._context)

    def run_prompt(self) -> None:
        """Clear the cache and decode the prompt."""
        self._api.llama_memory_clear(self._memory, True)
        self._decode(range(self._length))

    def run_token(self) -> None:
        """Decode one more token, and remove it from the cache."""
        self._decode(range(self._length, self._length + 1))
        for sequence in range(self._batch):
            self._api.llama_memory_seq_rm(self._memory, sequence, self._length, -1)

    def _decode(self, positions: range) -> None:
        count = self._batch * len(positions)
        batch = self._api.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for index in range(count):
            sequence, place = divmod(index, len(positions))
            batch.token[index] = (5 + 7 * place + 13 * sequence) % self._vocabulary
            batch.pos[index] = positions[place]
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = place == len(positions) - 1
        failed = self._api.llama_decode(self._context, batch)
        self._api.llama_synchronize(self._context)
        self._api.llama_batch_free(batch)
        if failed:
            raise SystemExit(f"llama.cpp could not decode {count} tokens")


def time_files(job: dict[str, Any]) -> list[dict[str, list[float]]]:
    """Return the seconds of every file in every round, by phase; a single thread is timed by the CPU time of the process."""
    clock = time.process_time if job["threads"] == 1 else time.perf_counter
    sessions = [Session(file, job) for file in job["files"]]
    found: list[dict[str, list[float]]] = [{phase: [] for phase in job["phases"]} for _ in sessions]
    for phase in job["phases"]:
        for session in sessions:
            session.run_prompt()
            session.run_token()
        for _ in range(job["repeats"][phase]):
            for session, seconds in zip(sessions, found, strict=True):
                start = clock()
                session.run_prompt() if phase == "prompt" else session.run_token()
                seconds[phase].append(clock() - start)
    return found


def main() -> None:
    job = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp's output is sent where its log is
    import llama_cpp

    @llama_cpp.llama_log_callback
    def tell(level: int, text: bytes, data: object) -> None:
        if level >= _ERROR:
            print(text.decode(errors="replace"), end="", file=sys.stderr, flush=True)

    llama_cpp.llama_log_set(tell, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    print(json.dumps({"seconds": time_files(job)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
