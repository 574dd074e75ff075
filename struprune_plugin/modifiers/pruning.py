"""``StruPruneModifier``: the modifier that prunes every decoder layer physically, one layer on the device at a time."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from llmcompressor.utils.dev import get_main_device
from pydantic import PrivateAttr
from torch import Tensor
from torch.utils.data import RandomSampler
from transformers import PreTrainedModel

from struprune_plugin.export.convert import adopt_paddings, wrap_save
from struprune_plugin.layerwise.passes import calibrating, enter_device_context
from struprune_plugin.model.layers import count_weight_bytes, find_layouts
from struprune_plugin.model.unit_kind import sort_groups
from struprune_plugin.modifiers.allocation_pass import AllocationPass
from struprune_plugin.modifiers.fields import PruningFields, StructuredModifier
from struprune_plugin.modifiers.needs import keep_on_device
from struprune_plugin.modifiers.setup import RunSetup, prepare_run
from struprune_plugin.modifiers.stage_modifier import list_modifiers
from struprune_plugin.pruning.prune_layer import Pruner
from struprune_plugin.runtime.distributed import check_one_process
from struprune_plugin.runtime.precision import describe_precision
from struprune_plugin.storage.files import check_room
from struprune_plugin.storage.manifest import Manifest, describe_versions, write_manifest
from struprune_plugin.storage.resume_store import ResumeStore, describe_run


class StruPruneModifier(PruningFields):
    """
    Modifier that removes coupled units (FFN channels; attention heads or value channels) from every decoder layer and
    re-solves the linears that consumed them, so that the model is physically smaller.

    For a linear with inputs P (kept ones P_S), target Y and dense weights W, the new weights minimise
    ``||Y - W_S P_S||^2 + lambda ||W_S - W||^2``. Layers are pruned in order, each on inputs from the pruned layers before it.
    The dense hidden states are kept beside the pruned ones, on the device as far as they fit.

    Fields as in :class:`PruningFields`.

    :param sparsity: required unless there is a ``budget`` or an earlier :class:`SparsityAllocatorModifier` stage
    """

    _stages: tuple[Sequence[Modifier], Sequence[Modifier]] = PrivateAttr(default=((), ()))  # before, behind
    _setup: RunSetup | None = PrivateAttr(default=None)
    _store: ResumeStore | None = PrivateAttr(default=None)
    _output: Path | None = PrivateAttr(default=None)
    _finish: Callable[[PreTrainedModel], Manifest] | None = PrivateAttr(default=None)  # set by a whole pass

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        self._stages = self.split_recipe()
        self._setup = prepare_run(self, state.model, state.data.calib, self._stages)
        self._check_room(self._setup, state.model)
        self._open_store(state, self._setup.batches)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        self.check_alone()
        model, setup = state.model, self._setup
        if not all(isinstance(other, StructuredModifier) for other in self._stages[0]):  # REAP has changed the model
            setup = self._setup = prepare_run(self, model, state.data.calib, self._stages)
        assert setup is not None
        recipe = setup.recipe
        with enter_device_context(model, recipe.offload, recipe.precision) as context, context.stage("whole pass"):
            context.on_device = keep_on_device(model, setup, setup.batches)
            allocation, sensitivity = AllocationPass(setup, model, context).decide(self._store)
            adopt_paddings(model, setup.groups)
            pruner = Pruner(recipe.make_config(self.reconstruct), allocation, sensitivity, context, setup.entries)
            with calibrating(model):
                all_groups = sort_groups([*setup.groups, *setup.resolve_only])
                records = pruner.prune_model(model, setup.batches, all_groups, self._store)
        context.stages["whole pass"] = context.stages.pop("whole pass")  # after its parts
        self._finish = partial(setup.finish, allocation, records, context)

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        if self._finish is None:
            return True  # llm-compressor finalises an aborted run: nothing to export
        wrap_save(state.model, partial(write_manifest, self._finish(state.model)))
        return True

    def set_output(self, folder: Path) -> None:
        """Set the folder that the run will write, whose disk is checked for room."""
        self._output = folder

    def _check_room(self, setup: RunSetup, model: PreTrainedModel) -> None:
        """Raise if the disks lack the room for the output, at 4 bits if it will be quantised, and for the finished layers."""
        size, layers = count_weight_bytes(model), [layer for layer, _ in find_layouts(model)]
        inside = sum(parameter.nbytes for layer in layers for parameter in layer.parameters())
        removed = setup.count_removed() * model.dtype.itemsize
        is_quantised = any(isinstance(other, QuantizationMixin) for other in self._stages[1])
        written = (size - removed) // (2 * model.dtype.itemsize if is_quantised else 1)
        wanted = [] if self._output is None else [("output_dir", self._output, written)]
        if self._store is not None:
            wanted.append(("checkpoint_dir", self._store.folder, max(0, inside - removed - self._store.count_bytes())))
        check_room(wanted)

    def set_store(self, store: ResumeStore) -> None:
        """Set the store of finished parts, from which a killed run resumes."""
        self._store = store

    def _open_store(self, state: State, batches: Sequence[dict[str, Tensor]]) -> None:
        """Begin or resume the run that the recipe describes; do nothing without a store.

        :raises ValueError: the store belongs to another run; the sampler shuffles; there are several processes
        """
        if self._store is None:
            return
        check_one_process("checkpoint_dir", "Remove it, or run one process.")
        if isinstance(getattr(state.data.calib, "sampler", None), RandomSampler):
            raise ValueError(
                "checkpoint_dir: calibration samples must come in the same order in every run, got a sampler that shuffles them. "
                "Pass shuffle_calibration_samples=False."
            )
        recipe = [{type(m).__name__: m.model_dump(exclude=set(Modifier.model_fields))} for m in list_modifiers()]
        assert self._setup is not None
        precision = self._setup.recipe.precision
        recipe.append({"computed_in": describe_precision(state.model.dtype, precision, get_main_device())})
        self._store.open(describe_run(recipe, describe_versions(), state.model, batches))
