"""Fixtures that all tests share."""

import functools
import gc
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # results are the CPU's; `python -m eval.accelerator` is for cards
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads take twice as long over tensors this small
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # where a test asks for two, neither burns the core it waits on
# Fixtures import what is heavy: the process that hands tests to others would wait ten seconds for what it never uses.


def pytest_configure() -> None:
    """Hear Ctrl-C, and let processes of tests hear it, where a shell started this in the background and told it not to."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what the imports made out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def few_tasks(tmp_path_factory) -> Iterator[None]:
    """Let lm-eval's own tasks be few: its index of them all takes 15 seconds."""
    from lm_eval.tasks import manager

    folder, own = tmp_path_factory.mktemp("tasks"), Path(manager.__file__).parent
    shutil.copytree(own / "arc", folder / "arc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "__file__", str(folder / "manager.py"))
        yield


@pytest.fixture(autouse=True)
def no_waiting_for_disks(request, monkeypatch) -> None:
    """Let no disk be waited for, but by the tests of what outlives a crash (marked `durable`)."""
    if request.node.get_closest_marker("durable") is None:
        monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="session")
def save_shape(tmp_path_factory) -> Callable[[str], Path]:
    """A function that saves, once, a tiny OPT of a shape with a tokenizer, to be read only."""
    from helpers.models import SHAPES, save_opt

    return functools.cache(lambda shape: save_opt(tmp_path_factory.mktemp(shape), **SHAPES[shape]))


@pytest.fixture(scope="session")
def save_family(tmp_path_factory) -> Callable[[str], Path]:
    """A function that saves, once, a tiny model of a type, to be read only."""
    from helpers.families import make_model
    from helpers.models import save_model

    return functools.cache(lambda model_type: save_model(make_model(model_type), tmp_path_factory.mktemp(model_type)))


@pytest.fixture(scope="session")
def prune_once(tmp_path_factory) -> Callable:
    """A function that prunes a folder by the default, and experts by channels, once, and returns (model in memory, its folder), to
    be read only."""
    from helpers.models import DEFAULT, run_oneshot

    @functools.cache
    def prune(folder: Path, unit: str, sparsity: float = 0.3):
        out = tmp_path_factory.mktemp(f"{folder.name}_{unit}") / "out"
        fields = {"sparsity": sparsity, "attention_unit": unit, "experts": "channels", **DEFAULT}
        return run_oneshot(str(folder), **fields, output_dir=str(out)).eval(), out

    return prune


@pytest.fixture(scope="session")
def opt(save_shape) -> Path:
    """A saved tiny OPT of the usual shape."""
    return save_shape("pre_norm")


@pytest.fixture(scope="session")
def testbed() -> Path:
    folder = Path(__file__).parents[2] / "shared" / "testbed"
    if not (folder / "opt-mini").is_dir():
        pytest.skip("the testbed (../shared/testbed) is not here")
    return folder
