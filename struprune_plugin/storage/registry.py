"""Settings and registries of methods: one frozen object per method, used by the recipe, the code and the manifest alike."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from struprune_plugin.storage.files import shorten_value

_TRAINED = (
    "Adapters are trained by the cross entropy on the calibration text, one decoder layer on the device at a time. For other "
    "training give the output folder to transformers.Trainer."
)
_GONE = {  # what to use -> fields, methods and modifiers that recipes no longer have
    _TRAINED: "checkpoint_steps clipping compute data loss memory patience state_dtype state_folder weights",
    "Use LoRARecoveryModifier, or transformers.Trainer on the output folder.": "RecoveryModifier",
    "Set batch_size of the run: as many sequences are on the device at a time.": "micro_batch_size",
    "Train the output folder, for instance by a recovery stage behind the pruning.": "ffn_tuning",
    "A smaller cache needs fewer heads: set `attention_unit: head` and sparsity.": "cache",
    "Give `budget: {speedup: 1.3, costs: FILE}`; `python -m eval.costs`, in the checkout, makes it.": "engine phase",
    "Set `offload: true`: moments, solves and embeddings are on the host then.": "memory_budget",
    "Remove layers in transformers (docs/models.md), then prune widths.": "sublayers whole_layers",
    "Run the output's own recipe.yaml on the same calibration text.": "replay",
    "Use more calibration text, so that every expert sees enough tokens.": "calibrate_all_experts",
    "Set `experts: whole`, ranked by REAP's score, or `experts: channels`.": "both criterion",
    "Engines hold all experts of a layer in one tensor. Set `widths: per_layer`.": "per_expert",
    "Set `allocation: error_curve`.": "owl block_influence",
    "Set `importance: obs`, `wanda` or `snip`.": "fluctuation taylor wanda_l2",
}
GONE = {name: remedy for remedy, names in _GONE.items() for name in names.split()}


def refuse_gone(names: Iterable[object]) -> None:
    """Raise for the first name that recipes no longer have.

    :param names: fields that a recipe sets, or the name of a method
    :raises ValueError: one of them is in :data:`GONE`
    """
    for name in names:
        if isinstance(name, str) and name in GONE:
            raise ValueError(f"`{name}` is gone. {GONE[name]}")


def _refuse_value(value: Any) -> Any:
    refuse_gone([value])
    return value


NotGone = BeforeValidator(_refuse_value)  # for fields whose earlier values are in GONE


def _check_patterns(names: list[str]) -> list[str]:
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"must hold names or valid patterns, got {name!r}: {error}. Correct the pattern."
            ) from None
    return names


Patterns = Annotated[list[str], AfterValidator(_check_patterns)]  # plain names, and patterns as ``re:<pattern>``


class Config(BaseModel):
    """Frozen settings of one method; unknown fields raise an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_gone(cls, values: Any) -> Any:
        refuse_gone([name for name in values if name not in cls.model_fields] if isinstance(values, dict) else ())
        return values


C = TypeVar("C", bound=Config)
T = TypeVar("T", bound=Config)


class Registry(dict[str, type[C]]):
    """Registry of the methods of one kind, by the names that recipes use.

    A method is a subclass of the kind's base whose key field is a ``Literal`` of its name. A recipe gives the name alone, or a
    mapping of the name and the method's own fields.

    :param base: class of all methods
    :param key: field that holds the name
    :param needs: functions, one of which a method must define
    """

    def __init__(self, base: type[C], key: str = "method", needs: Sequence[str] = ()):
        super().__init__()
        self.base, self.key, self.needs = base, key, needs

    def register(self, method: type[T]) -> type[T]:
        """Register a method; use it as a decorator.

        :raises ValueError: the method has no name as default of its key field, lacks a function, or the name is taken
        """
        name = method.model_fields[self.key].default
        if not isinstance(name, str):
            raise ValueError(
                f"{method.__name__}: {self.key} must have the method's name as default, as in Literal['x'] = 'x', got {name!r}."
            )
        if self.needs and all(getattr(method, need) is getattr(self.base, need) for need in self.needs):
            raise ValueError(
                f"{method.__name__}: the class must define {' or '.join(self.needs)}, got neither. Add one."
            )
        if name in self:
            raise ValueError(
                f"{self.key}: {name!r} must be registered once, got {method!r} and {self[name]!r}. Rename one of them."
            )
        self[name] = method  # type: ignore[assignment]
        return method

    def parse(self, value: Any) -> C:
        """Return the settings for a recipe's value: a name, a mapping, or settings.

        :raises ValueError: an unknown name, a field that the method does not have, or an invalid value
        """
        if isinstance(value, self.base):
            return value
        given = {self.key: value} if isinstance(value, str) else value
        if not isinstance(given, dict) or not isinstance(given.get(self.key), str):
            raise ValueError(
                f"must be a name or a mapping with {self.key!r}, got {shorten_value(value)}. {self._list()}"
            )
        name = given[self.key]
        if name not in self:
            refuse_gone([name])
            raise ValueError(f"must be a known {self.key}, got {name!r}. {suggest(name, self) or self._list()}")
        method = self[name]
        refuse_gone([field for field in given if field not in method.model_fields])
        for field in given.keys() - method.model_fields.keys():
            others = [other for other, cls in self.items() if field in cls.model_fields]
            known = suggest(str(field), method.model_fields) or f"Its fields are {', '.join(method.model_fields)}."
            if not others:
                raise ValueError(f"{name} has no field {show_name(field)}. {known}")
            raise ValueError(
                f"`{show_name(field)}: {shorten_value(given[field])}` has no effect with `{self.key}: {name}`. Remove it, or set "
                f"{' or '.join(f'`{self.key}: {other}`' for other in others)}."
            )
        return method.model_validate(given)

    def _list(self) -> str:
        return f"The names are {', '.join(self)}; a method of your own must be imported first."


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a question about the nearest known name; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {near[0]}?" if near else ""


def show_name(name: object) -> str:
    """Return a name as printable text, for a one-line message."""
    return str(name) if str(name).isprintable() else repr(name)


def describe_error(error: ValidationError, kinds: Mapping[str, type[BaseModel]]) -> str:
    """Return a message for a pydantic error: place, contract, value, remedy.

    :param kinds: classes by name, whose field names are suggested for unknown ones
    """
    problems = []
    for e in error.errors():
        loc = [part for part in e["loc"] if not re.search(r"\[|^constrained-", str(part))]  # not pydantic's own types
        place = ".".join(map(show_name, loc)) or error.title
        if e["type"] == "value_error":
            message = e["msg"].removeprefix("Value error, ")
            problems.append(f"{place} {message}" if message.startswith(("must ", "has ")) else f"{place}: {message}")
        elif e["type"] == "extra_forbidden":
            kind = kinds.get(error.title) if len(loc) == 1 else None
            holder = error.title if len(loc) == 1 else ".".join(map(show_name, loc[:-1]))
            remedy = (kind and suggest(str(loc[0]), kind.model_fields)) or "Correct its name, or remove it."
            problems.append(f"{place} is not a field of {holder}. {remedy}")
        else:
            wanted = re.sub(r"^(Input|Field) should", "must", e["msg"])
            told = wanted if wanted != e["msg"] else f"must be valid ({e['msg']})"
            problems.append(f"{place} {told}, got {shorten_value(e['input'])}")
    return "; ".join(problems)
