"""``struprune sample``: text that a model writes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from struprune_plugin.cli.console import Screen
from struprune_plugin.cli.options import Device, Dtype, Model, Overwrite, Seed, check_names, option, prepare, whole


@dataclass(frozen=True)
class Sampling:
    """Settings of the sampling."""

    output: Annotated[Path, option("file to write, one text per line", "FILE.jsonl")]
    tokens: Annotated[int, whole("tokens to write")] = 200_000
    length: Annotated[int, whole("tokens per text", low=2)] = 256
    batch_size: Annotated[int, whole("texts per batch")] = 64
    seed: Seed = 0
    dtype: Dtype = "auto"
    overwrite: Overwrite = False
    device: Device = "auto"


def sample(model: Model, sampling: Sampling, screen: Screen) -> None:
    """Sample text from a model, for calibration and training without other data.

    Pass the file to `prune --data FILE.jsonl`, or to the data of a RecoveryModifier. If the tokenizer has a chat template, half of
    the texts are conversations. The whole model must fit on the device.
    """
    check_names(sampling.device, None, [model], [])
    prepare(sampling.device, screen)
    from struprune_plugin.evaluation.sampling import sample_windows, write_window
    from struprune_plugin.evaluation.scoring import load_checkpoint
    from struprune_plugin.storage.files import check_place, write_whole

    check_place("--output", sampling.output.absolute().parent)
    if sampling.output.exists() and not sampling.overwrite:
        raise ValueError(f"--output: {sampling.output} exists. Choose another path, or pass --overwrite.")
    loaded, tokenizer = load_checkpoint(model, sampling.dtype)
    began, count = time.perf_counter(), -(-sampling.tokens // sampling.length)
    windows = sample_windows(loaded, tokenizer, count, sampling.length, sampling.batch_size, sampling.seed)
    lines = [json.dumps({"text": write_window(tokenizer, window)}) for window in windows]
    write_whole(sampling.output, "".join(f"{line}\n" for line in lines))
    seconds = time.perf_counter() - began
    record = {"texts": count, "tokens": count * sampling.length, "seconds": round(seconds, 3)}
    screen.show(
        record, f"wrote {sampling.output}: {count:,} texts, {count * sampling.length:,} tokens, {seconds:.0f} s"
    )
