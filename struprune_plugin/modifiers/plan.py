"""Plan of a run, from shapes and measured units alone: sizes of the result, bytes that the run holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llmcompressor.modifiers import Modifier
from llmcompressor.recipe import Recipe
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from struprune_plugin.export.any_class import build_dense
from struprune_plugin.model.layers import count_parameters, count_weight_bytes, find_layouts
from struprune_plugin.model.structure.tiny import find_class
from struprune_plugin.model.unit_kind import UNIT_KINDS
from struprune_plugin.modifiers import StruPruneModifier, budgets
from struprune_plugin.modifiers.allocator import check_allocator
from struprune_plugin.modifiers.checks import check_pruned
from struprune_plugin.modifiers.needs import Needs, Workload, count_needs
from struprune_plugin.modifiers.setup import set_up
from struprune_plugin.reporting import tables
from struprune_plugin.runtime.torch_state import reset_torch
from struprune_plugin.storage.checkpoint import check_checkpoint, find_checkpoint, find_custom_class, is_packed
from struprune_plugin.storage.files import format_bytes, measure_weight_bytes
from struprune_plugin.storage.manifest import LimitRecord, RoundingRecord
from struprune_plugin.vocabulary.trim_plan import TrimPlan


@dataclass(frozen=True)
class RunPlan:
    """Sizes of a run's result, with the same cut in all modules of a kind, and what the run needs.

    :param sparsity: share of the prunable parameters that goes
    :param parameters: parameters of the model with all rows of its vocabulary, and of the result
    :param bytes: bytes of the weights on the disk in the dtype of the run, before and after, before a quantiser
    :param embeddings: parameters of embeddings and head in the result
    :param entries: by their label, text that says how many entries of lists of modules stay; empty if all do
    :param layers: numbers of the layers, by what can be removed or stays whole there, as text
    """

    sparsity: float
    parameters: tuple[int, int]
    bytes: tuple[int, int]
    embeddings: int
    entries: dict[str, str]
    rounding: list[RoundingRecord]
    limit: LimitRecord | None
    needs: Needs
    layers: dict[str, list[int]]


@reset_torch()
def plan_run(
    path: str,
    modifiers: Sequence[Modifier],
    work: Workload,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    trim: TrimPlan | None = None,
) -> RunPlan:
    """Return the plan of a run on a model, from its configuration.

    The spread of a budget over layers needs calibration data, its sum does not. So all modules are assumed to lose the same share.

    :param trim: rows of the vocabulary that go first
    :raises ValueError: no configuration, an unsupported architecture, quantised weights; the recipe prunes nothing; a budget is
        not given, or cannot be met
    """
    config = check_checkpoint(path, trust_remote_code)
    whole = model = build_shapes(path, config, dtype)
    if trim is not None:
        budgets.fix_budgets(modifiers, count_parameters(whole))
        model = build_shapes(path, trim.resize(config), str(whole.dtype).removeprefix("torch."))
    check_pruned(modifiers, config)
    check_allocator(modifiers)
    place = next((place for place, each in enumerate(modifiers) if isinstance(each, StruPruneModifier)), None)
    if place is None:
        raise ValueError("recipe: must have a StruPruneModifier, whose run is planned, got none. Add it.")
    pruning: StruPruneModifier = modifiers[place]
    setup = set_up(pruning, model, (modifiers[:place], modifiers[place + 1 :]))
    removed, entries = setup.count_removed(), dict[str, str]()
    if setup.entries is not None:
        entries[setup.entries.label] = f"{setup.budget.num_entries} of {setup.entries.counts[0]} stay in every layer"
    parameters, left = count_parameters(whole), count_parameters(model) - removed
    left_bytes = count_weight_bytes(model) - removed * model.dtype.itemsize
    return RunPlan(
        sparsity=setup.budget.sparsity,
        parameters=(parameters, left),
        bytes=(count_weight_bytes(whole), left_bytes),
        embeddings=_count_embeddings(model),
        entries=entries,
        rounding=budgets.describe_roundings(setup.groups, setup.roundings),
        limit=budgets.describe_limit(setup.recipe, parameters, left, left_bytes),
        needs=count_needs(model, setup, work),
        layers=_list_units(model),
    )


def count_from_whole(path: str, recipe: Recipe, trust_remote_code: bool = False) -> Recipe:
    """Return a recipe whose budgets of parameters count from a model before rows of its vocabulary go; changed in place."""
    whole = build_shapes(path, check_checkpoint(path, trust_remote_code))
    budgets.fix_budgets(recipe.modifiers, count_parameters(whole))
    return recipe


def build_shapes(path: str, config: PretrainedConfig, dtype: str = "auto") -> PreTrainedModel:
    """Return a model without its weights, on the meta device, in the dtype in which it is loaded."""
    model = build_dense(*find_class(config, find_custom_class(path, config)))
    chosen = config.dtype if dtype == "auto" else getattr(torch, dtype)
    if chosen is None:  # not in the configuration: by the size of the files
        stored = measure_weight_bytes(find_checkpoint(path) or path)
        narrow = is_packed(config) or 0 < stored < 3 * count_parameters(model)
        chosen = torch.bfloat16 if narrow else torch.float32
    return model.to(chosen)


def _count_embeddings(model: PreTrainedModel) -> int:
    """Return the parameters of embeddings and head, tied ones once."""
    modules = [m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


# -- what is shown ---------------------------------------------------------------------------------------------------


def _list_units(model: nn.Module) -> dict[str, list[int]]:
    """Return the layers that have units of a kind, or a linear that stays whole, by the text that says so."""
    layers: dict[str, list[int]] = {}
    for index, (layer, layout) in enumerate(find_layouts(model)):
        lines = [UNIT_KINDS.parse(unit.kind).describe_unit(unit, layer) for unit in layout.units]
        lines += [f"{linear} stays whole: {reason}" for linear, reason in layout.unprunable.items()]
        for line in lines or ["nothing can go"]:
            layers.setdefault(line, []).append(index)
    return layers


def format_plan(plan: RunPlan) -> list[Any]:
    """Return a plan as a table of before and after, and facts."""
    sizes = (("parameters", plan.parameters, "{:,}".format), ("weights", plan.bytes, format_bytes))
    rows = [[name, show(old), show(new), f"{new / old - 1:+.1%}"] for name, (old, new), show in sizes]
    facts = plan.needs.describe()
    for text, layers in plan.layers.items():
        facts.append((f"layers {layers[0]} to {layers[-1]} ({len(layers)})", text))
    share = plan.embeddings / plan.parameters[0]
    facts.append(("embeddings and head", f"{share:.1%} of the model's parameters, from which only --vocabulary takes"))
    facts += plan.entries.items()
    facts += [(f"budget: {plan.limit.name}", tables.show_limit(plan.limit))] if plan.limit else []
    facts += [("widths", tables.describe_rounding(entry)) for entry in plan.rounding]
    return [tables.Table(["", "now", "after", "change"], rows), tables.format_facts(facts)]
