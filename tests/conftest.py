"""Tiny random models, data and helpers that all tests share. Nothing here needs a network."""

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads take twice as long over tensors this small

import functools
import gc
import multiprocessing
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lm_eval.tasks.manager
import pytest
import torch
from datasets import Dataset
from families import make_model
from llmcompressor.pipelines.sequential import pipeline
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

from struprune_plugin import StruPruneModifier, cli, oneshot
from struprune_plugin.data import DEMO_MODEL

ROOT = Path(__file__).parents[1]
VOCABULARY = 2048
SHAPES = {  # name -> OPT configuration: the usual one, and that of OPT-350m (norms after, embeddings projected)
    "pre_norm": {},
    "post_norm": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "no_bias": {"enable_bias": False},
}


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
    manager = lm_eval.tasks.manager
    folder, own = tmp_path_factory.mktemp("tasks"), Path(manager.__file__).parent
    shutil.copytree(own / "arc", folder / "arc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "__file__", str(folder / "manager.py"))
        yield


@pytest.fixture(scope="session", autouse=True)
def few_traces() -> Iterator[None]:
    """Let the host trace a model once for all runs on models like it; and no disk be waited for."""
    trace, held = pipeline.trace_subgraphs, {}

    def trace_once(model, sample, *args):
        shapes = tuple((name, tuple(value.shape), value.device) for name, value in sample.items())
        kind = (type(model), model.config.to_json_string(), model.training, model.dtype, str(model.device))
        key = (kind, tuple(name for name, _ in model.named_modules()), shapes, repr(args))
        if key not in held:
            graphs = trace(model, sample, *args)
            held[key] = graphs, find_namespaces(model, graphs)
        graphs, namespaces = held[key]
        for name, namespace in namespaces:
            namespace["self"] = model.get_submodule(name)
        return graphs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "trace_subgraphs", trace_once)
        patch.setattr(os, "fsync", lambda _: None)
        yield


def find_namespaces(model, graphs) -> list[tuple[str, dict]]:
    """Return the namespaces in which the host's tracer wraps parts of a model's code, with the module that is ``self`` there."""
    names = {module: name for name, module in model.named_modules()}
    found = [getattr(node.target, "__globals__", {}) for graph in graphs for node in graph.graph.nodes]
    return [(names[space["self"]], space) for space in {id(s): s for s in found if "torch.fx.wrap" in s}.values()]


def start_cli(argv: Sequence[str], log: Path) -> multiprocessing.Process:
    """Run the command line in a process of its own, as :func:`start_process`."""
    return start_process(functools.partial(cli.main, argv), log)


def start_process(target: Callable[[], int | None], log: Path) -> multiprocessing.Process:
    """Run a function in a process of its own, a copy of this one: all that a start would import is there already.

    :param log: file that takes what is printed
    """

    def run() -> None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        sys.exit(target())

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def make_opt(seed: int = 0, **changes) -> OPTForCausalLM:
    torch.manual_seed(seed)
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "word_embed_proj_dim": 24,
        "ffn_dim": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "init_std": 0.2,
    }
    model = OPTForCausalLM(OPTConfig(**(config | changes))).eval()
    with torch.no_grad():  # biases and norms start at constants; give them values that matter
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model


def make_dataset(num_samples: int = 8, length: int = 32, seed: int = 1) -> Dataset:
    ids = torch.randint(4, VOCABULARY, (num_samples, length), generator=torch.Generator().manual_seed(seed))
    return Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})


def run_oneshot(model, recipe=None, dataset=None, **kwargs):
    """Run our oneshot with the options that make it deterministic; ``kwargs`` that it lacks go to the modifier."""
    ours = {k: kwargs.pop(k) for k in list(kwargs) if k in StruPruneModifier.model_fields}
    if "replay" not in ours and "importance" not in ours and "allocation" not in ours:
        ours = {
            "trial_samples": 0,
            **ours,
        }  # which take a fifth of so short a run; the recipes' tests and `test_trials` have them
    options = {"batch_size": 4, "shuffle_calibration_samples": False, "num_calibration_samples": 8} | kwargs
    return oneshot(
        model=model,
        recipe=StruPruneModifier(**ours) if recipe is None else recipe,
        dataset=make_dataset() if dataset is None else dataset,
        **options,
    )


@pytest.fixture(scope="session")
def save_shape(tmp_path_factory) -> Callable[[str], Path]:
    """A function that saves, once, a tiny OPT of a shape with a tokenizer, to be read only."""
    return functools.cache(lambda shape: save_opt(tmp_path_factory.mktemp(shape), **SHAPES[shape]))


@pytest.fixture(scope="session", params=SHAPES)
def opt_folder(request, save_shape) -> Path:
    """A saved tiny OPT with a tokenizer, in every shape."""
    return save_shape(request.param)


@pytest.fixture(scope="session")
def save_family(tmp_path_factory) -> Callable[[str], Path]:
    """A function that saves, once, a tiny model of a family, to be read only."""
    return functools.cache(lambda model_type: save_model(make_model(model_type), tmp_path_factory.mktemp(model_type)))


@pytest.fixture(scope="session")
def prune_once(tmp_path_factory) -> Callable:
    """A function that prunes a folder by an attention unit, once, and returns (model in memory, its folder), to be read only."""

    @functools.cache
    def prune(folder: Path, unit: str, sparsity: float = 0.3):
        out = tmp_path_factory.mktemp(f"{folder.name}_{unit}") / "out"
        return run_oneshot(str(folder), sparsity=sparsity, attention_unit=unit, output_dir=str(out)).eval(), out

    return prune


@pytest.fixture(scope="session")
def opt(save_shape) -> Path:
    """A saved tiny OPT of the usual shape."""
    return save_shape("pre_norm")


def save_wide_opt(folder: Path) -> Path:
    return save_opt(folder, hidden_size=64, word_embed_proj_dim=64, ffn_dim=128)


def save_wide_llama(folder: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save_model(make_model("llama", **sizes), folder)


WIDE_MODELS = {
    "opt": save_wide_opt,
    "llama": save_wide_llama,
}  # family -> a tiny model whose widths a quantiser's groups of 32 divide


@pytest.fixture(scope="session", params=WIDE_MODELS)
def wide(request, tmp_path_factory) -> Path:
    """A saved tiny model, in every family, wide enough for the quantisation recipes."""
    return WIDE_MODELS[request.param](tmp_path_factory.mktemp(f"wide_{request.param}"))


def save_opt(folder: Path, **changes) -> Path:
    return save_model(make_opt(**changes), folder)


def save_model(model, folder: Path) -> Path:
    """Save a tiny model with the demo's tokenizer."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def testbed() -> Path:
    folder = ROOT.parent / "shared" / "testbed"
    if not (folder / "opt-mini").is_dir():
        pytest.skip("the testbed (../shared/testbed) is not here")
    return folder
