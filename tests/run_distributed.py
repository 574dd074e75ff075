"""What every process of a distributed test runs: prune, and leave a digest of its own weights.

python -m torch.distributed.run --nproc-per-node 2 tests/run_distributed.py MODEL FOLDER '{"sparsity": 0.3}'
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from conftest import make_dataset, run_oneshot
from torch import distributed

NUM_SAMPLES = 16


def main() -> None:
    model, folder, fields = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    try:
        options = {"dataset": make_dataset(NUM_SAMPLES), "num_calibration_samples": NUM_SAMPLES, "batch_size": 1}
        pruned = run_oneshot(model, output_dir=folder / "out", **options, **fields)
    except ValueError as error:
        (folder / f"error{distributed.get_rank()}.txt").write_text(str(error))
    else:
        digest = hashlib.sha256()
        for name, value in sorted(pruned.state_dict().items()):
            digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        (folder / f"digest{distributed.get_rank()}.txt").write_text(digest.hexdigest())
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
