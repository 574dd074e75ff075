"""What every process of the distributed tests runs, one job after the other: prune and leave a digest of its weights.

python -m torch.distributed.run --nproc-per-node 2 tests/helpers/run_distributed.py '[["MODEL", "FOLDER", {"sparsity": 0.3}]]'
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import distributed

from helpers.models import make_dataset, run_oneshot
from struprune_plugin import LoRARecoveryModifier

NUM_SAMPLES = 8


def read_options(fields: dict) -> dict:
    """Return what every run of a job is given: fields of a pruning, beside ``num_samples``, or of a training, as ``lora``."""
    fields = dict(fields)
    samples = fields.pop("num_samples", NUM_SAMPLES)
    options = {"dataset": make_dataset(samples), "num_calibration_samples": samples, "batch_size": 1}
    return options | ({"recipe": LoRARecoveryModifier(**fields["lora"])} if "lora" in fields else fields)


def run_job(model: str, folder: Path, fields: dict) -> None:
    """Prune ``model`` into ``folder``/out; leave ``digest<rank>.txt`` there, or ``error<rank>.txt`` where it was refused."""
    options = read_options(fields)
    try:
        pruned = run_oneshot(model, output_dir=folder / "out", **options)
    except ValueError as error:
        (folder / f"error{distributed.get_rank()}.txt").write_text(str(error))
    else:
        digest = hashlib.sha256()
        for name, value in sorted(pruned.state_dict().items()):
            digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        (folder / f"digest{distributed.get_rank()}.txt").write_text(digest.hexdigest())


def run_jobs(jobs: list) -> None:
    """Run (model, folder, fields) of each."""
    torch.set_num_threads(1)
    for model, folder, fields in jobs:
        run_job(model, Path(folder), fields)
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    run_jobs(json.loads(sys.argv[1]))
