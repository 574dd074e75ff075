"""Forms of an output: those that a recipe names (``output``), and those that ``struprune convert`` makes of a pruned folder."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from struprune_plugin.export import stock_config, stock_units
from struprune_plugin.export.any_class import grow_padded, release_padding, replace_conv1d
from struprune_plugin.export.convert import adopt_config, adopt_stock, carry_files, keep_generation_settings
from struprune_plugin.export.llama_cpp_gguf import FILE_NAME, check_gguf, write_gguf
from struprune_plugin.model.experts import linearize_experts
from struprune_plugin.model.groups import list_groups
from struprune_plugin.model.layers import count_weight_bytes
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.locate import is_pruned, make_dense_config
from struprune_plugin.model.surgery import grow_group, pick_first
from struprune_plugin.model.unit_kind import ALIGNED, UnitGroup, UnitKind, list_kinds
from struprune_plugin.runtime.torch_state import reset_torch
from struprune_plugin.storage.checkpoint import check_written, load_whole, read_config
from struprune_plugin.storage.files import check_room


class PerLayerOutput:
    """Every layer has its own size, and our modelling file travels with the folder."""

    default_allocation: str | None = None  # of a recipe that names no rule; None: the modifier's

    def find_obstacle(self, model: PreTrainedModel, kind: UnitKind) -> str:
        """Return why modules that shrink by numbers of their own cannot lose units of a kind in this form; empty where they can."""
        return ""

    def select(self, model: PreTrainedModel, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
        """Return the groups that can be pruned in this form."""
        return list(groups)

    def check(
        self, recipe: Any, model: PreTrainedModel, groups: Sequence[UnitGroup], is_quantised: bool
    ) -> Iterator[tuple[bool, str]]:
        """Yield (condition, sentence) of what a recipe cannot ask for in this form.

        :param is_quantised: whether llm-compressor quantises the model in a later stage
        """
        return iter(())

    def allocate(self, model: PreTrainedModel) -> Callable[[str, int], bool] | None:
        """Return whether modules of a pool may keep n units, the same in all layers; None where each layer has its own number."""
        return None

    def adopt(self, model: PreTrainedModel) -> None:
        """Give a pruned model the class and the configuration with which it is saved."""
        adopt_config(model)


class UniformOutput(PerLayerOutput):
    """All layers have the same size, and stock classes load the folder."""

    default_allocation = "uniform"

    def find_obstacle(self, model: PreTrainedModel, kind: UnitKind) -> str:
        return stock_units.find_obstacle(model, kind)

    def select(self, model: PreTrainedModel, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
        """Return the groups that a stock class can shrink in all layers alike, and those whose units all stay."""
        if not _are_layers_alike(model):
            return list(groups)  # refused by :meth:`check`
        cut = [group for group in groups if not group.unit.drops_entries]
        chosen = {group.name: group for group in (stock_config.select_configurable(model, cut) if cut else cut)}
        return [chosen.get(group.name, group) for group in groups if group.name in chosen or group not in cut]

    def check(
        self, recipe: Any, model: PreTrainedModel, groups: Sequence[UnitGroup], is_quantised: bool
    ) -> Iterator[tuple[bool, str]]:
        name, rule = model.config.model_type, recipe.allocation
        mixers = [group for group in groups if group.unit.is_mixer and not group.tensors]
        heads = max((group.num_units for group in mixers), default=0)
        start = "`output: uniform`"
        resized = {group.kind: group.unit for group in groups if group.tensors}
        obstacles = [f"{n} ({why})" for n, kind in resized.items() if (why := self.find_obstacle(model, kind))]
        yield (
            bool(obstacles),
            f"{start} needs sizes that the stock configuration states, got units: {', '.join(obstacles)}. Remove them, or set "
            "`output: per_layer`.",
        )
        yield (
            rule.measures,
            f"{start} gives all layers one size, got `allocation: {rule.rule}`. Set `allocation: uniform`.",
        )
        yield (
            any(kind.is_mixer and kind.splits_blocks for kind in recipe.list_units()),
            f"{start} needs values as wide as queries and keys, got `attention_unit: value_channels`. Set `attention_unit: head` "
            "or `attention_unit: none`.",
        )
        yield (
            is_quantised and any(hasattr(module, "nf") for module in model.modules()),
            f"{start} gives {name} its stock class, whose transposed weights llm-compressor does not quantise. Set `output: "
            "per_layer`.",
        )
        yield (
            not _are_layers_alike(model),
            f"{start} needs layers that are all the same, got layers of different sizes, values narrower than queries, or mixers "
            "that have lost units. Convert the model first (struprune convert --to uniform-padded).",
        )
        has_choice = recipe.targets != ["re:.*"] or bool(recipe.ignore)
        yield has_choice, f"{start} must cover all decoder layers. Remove targets and ignore."
        can_hold = self.allocate(model)
        yield (
            any(kind in stock_config.list_head_kinds() for kind in recipe.list_units())
            and not any(can_hold("attention", n) for n in range(1, heads)),
            f"{start} needs all heads of {name}, got `attention_unit: head`. Set it to none.",
        )

    def allocate(self, model: PreTrainedModel) -> Callable[[str, int], bool]:
        resized = {kind.pool for kind in stock_units.list_resized_kinds(model)}

        def can_hold(pool: str, n: int) -> bool:
            if pool in resized:
                return stock_units.can_hold_units(model, pool, n)
            return pool != "attention" or stock_config.can_hold_heads(model, n)

        return can_hold

    def adopt(self, model: PreTrainedModel) -> None:
        release_padding(model)
        heads = {size.num_key_value_heads for size in stock_config.list_sizes(model)} - {0}
        changes = stock_config.change_heads(model, heads.pop()) if len(heads) == 1 else {}  # else no head was removed
        changes |= stock_units.read_unit_changes(model)
        adopt_stock(model, stock_config.find_stock_config(model, changes))


class UniformPadded:
    """All layers padded with zeros to the largest; stock classes load it."""

    takes_stock = False  # whether a folder of a stock class can be converted, too

    def check(self, config: Any, source: Path) -> None:
        """Raise ValueError where a folder cannot be converted.

        :param config: of the dense model
        """

    def write(self, model: PreTrainedModel, source: Path, output: Path) -> None:
        """Write a loaded model, which is changed, to an empty folder."""
        _pad_layers(model)
        check_room([("output_dir", output, count_weight_bytes(model))])
        with keep_generation_settings():
            model.save_pretrained(output)
        check_written(output, model)
        carry_files(str(source), output, model.config)


class GGUF(UniformPadded):
    """One file for llama.cpp with per-layer FFN widths and heads, values padded to the width of keys."""

    takes_stock = True  # llama.cpp's converter knows no trimmed vocabulary

    def check(self, config: Any, source: Path) -> None:
        check_gguf(config, source / "tokenizer.json")

    def write(self, model: PreTrainedModel, source: Path, output: Path) -> None:
        config = make_dense_config(model.config)
        _grow_resized(model)
        grow_padded(model)
        check_room([("output_dir", output, count_weight_bytes(model))])
        write_gguf(model, config, source, output / FILE_NAME)


OUTPUTS = {"per_layer": PerLayerOutput(), "uniform": UniformOutput()}
CONVERSIONS = {"uniform-padded": UniformPadded(), "gguf": GGUF()}


@reset_torch()
def convert_folder(source: Path, form: str, output: Path, trust_remote_code: bool = False) -> None:
    """Write a pruned folder in another form, with the same function and other shapes.

    :param form: a name of :data:`CONVERSIONS`
    :param output: an empty folder
    :param trust_remote_code: run the code that comes with the folder, which a class outside transformers needs
    :raises ValueError: the folder is not a pruned one in the per-layer form, is quantised, or cannot be converted, before it is
        loaded; or it is not whole
    """
    config = read_config(str(source), trust_remote_code=trust_remote_code)  # refuses in its own words
    if not (is_pruned(type(config)) or CONVERSIONS[form].takes_stock):
        name = (config.architectures or [type(config).__name__])[0]
        raise ValueError(
            f"{source}: must be a pruned folder in the per-layer form, got a stock {name}. It loads as it is, without a "
            "conversion."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{source}: must not be quantised, got a quantised model. Convert first, and quantise afterwards."
        )
    CONVERSIONS[form].check(make_dense_config(config), source)
    model = load_whole(AutoModelForCausalLM, str(source), dtype="auto", trust_remote_code=trust_remote_code)
    CONVERSIONS[form].write(model, source, output)


def _are_layers_alike(model: PreTrainedModel) -> bool:
    """Return whether all layers of a model have sizes that one configuration of its stock class can state."""
    if not is_pruned(type(model)):
        return True
    try:
        return stock_config.are_layers_alike(model) and not stock_units.read_unit_changes(model)
    except ValueError:
        return False


def _pad(model: PreTrainedModel, groups: Sequence[UnitGroup], wanted: Sequence[int]) -> None:
    """Grow groups of heads or channels in place to at least ``wanted`` units each, by zeros after the present ones of a block."""
    for group, num_units in zip(groups, wanted, strict=True):
        if group.num_units < num_units:
            wide = group.resize(num_units)
            grow_group(model.get_submodule(group.layer_name), wide, pick_first(wide, group.num_units))


def _pad_layers(model: PreTrainedModel) -> None:
    """Pad values to the dense width, heads to the largest number of any layer, FFNs of equal dense width to a common width."""
    dense, changes = stock_config.build_stock(model, {})[0], dict[str, int]()
    replace_conv1d(dense)
    _grow_resized(model)
    release_padding(model)
    grow_padded(model)
    now, before = stock_config.list_sizes(model), stock_config.list_sizes(dense)
    if any(size.num_heads < dense_size.num_heads for size, dense_size in zip(now, before, strict=True)):
        most, every = (max(size.num_key_value_heads for size in sizes) for sizes in (now, before))
        heads = next(count for count in range(most, every + 1) if stock_config.can_hold_heads(model, count))
        changes = stock_config.change_heads(model, heads)
        groups = list_groups(model, stock_config.list_head_kinds())
        _pad(model, groups, [heads] * len(groups))
    whole = [group.num_units for group in _list_ffns(dense)]
    if whole:
        groups, widths = _list_ffns(model), dict[int, int]()
        for group, wide in zip(groups, whole, strict=True):
            widths[wide] = max(widths.get(wide, 0), group.num_units)
        for wide in {wide for group, wide in zip(groups, whole, strict=True) if group.mixture}:
            widths[wide] = min(-(-widths[wide] // ALIGNED) * ALIGNED, wide)
        _pad(model, groups, [widths[wide] for wide in whole])
    try:
        config = stock_config.find_stock_config(model, changes)
    except ValueError:  # no key of the configuration holds the width
        if not whole:
            raise
        _pad(model, _list_ffns(model), whole)
        config = stock_config.find_stock_config(model, changes)
    adopt_stock(model, config)


def _grow_resized(model: PreTrainedModel) -> None:
    """Restore the dense sizes of modules that shrink by tensors of their own, with zeros; the function does not change."""
    for kind in stock_units.list_resized_kinds(model):
        whole = list_groups(stock_config.build_stock(model, {})[0], [kind])
        _pad(model, list_groups(model, [kind]), [group.num_units for group in whole])


def _list_ffns(model: PreTrainedModel) -> list[UnitGroup]:
    """Return the groups of a model's FFNs and of its experts, which are split in place; empty where it has none."""
    structure = find_structure(model)
    if structure.has_mixtures:
        linearize_experts(model)
    known = {unit.kind for unit in structure.list_units()}
    kinds = [kind for kind in list_kinds() if not kind.is_mixer and kind.kind in known]
    return list_groups(model, kinds) if kinds else []
