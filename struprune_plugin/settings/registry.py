"""Settings and registries of methods: one frozen object per method, used by the recipe, the code and the manifest alike."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError


def _check_pattern(name: str) -> str:
    try:
        re.compile(name.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"must be a name or a valid pattern, got {name!r}: {error}. Correct the pattern.") from None
    return name


Patterns = list[Annotated[str, AfterValidator(_check_pattern)]]  # plain names, and patterns as ``re:<pattern>``


class Config(BaseModel):
    """Frozen settings of one method; unknown fields raise an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


C = TypeVar("C", bound=Config)
T = TypeVar("T", bound=Config)


class Registry(dict[str, type[C]]):
    """Registry of the methods of one kind, by the names that recipes use.

    A method is a subclass of the kind's base whose key field is a ``Literal`` of its name. A recipe gives the name alone, or a
    mapping of the name and the method's own fields.

    :param base: class of all methods
    :param key: field that holds the name
    """

    def __init__(self, base: type[C], key: str = "method"):
        super().__init__()
        self.base, self.key = base, key

    def register(self, method: type[T]) -> type[T]:
        """Register a method; use it as a decorator.

        :raises ValueError: the method has no name as default of its key field, or the name is taken
        """
        name = method.model_fields[self.key].default
        if not isinstance(name, str) or name in self:
            raise ValueError(
                f"{method.__name__}: {self.key} must have a new name as default, as in Literal['x'] = 'x', got {name!r}."
            )
        self[name] = method  # type: ignore[assignment]
        return method

    def parse(self, value: Any) -> C:
        """Return the settings for a recipe's value: a name, a mapping, or settings.

        :raises ValueError: an unknown name, a field that the method does not have, or an invalid value
        """
        if isinstance(value, self.base):
            return value
        settings = {self.key: value} if isinstance(value, str) else value
        name = settings.get(self.key) if isinstance(settings, dict) else None
        if not isinstance(name, str) or name not in self:
            remedy = suggest(str(name), self) or f"The names are {', '.join(self)}; import a method of your own first."
            raise ValueError(f"must be a known {self.key} or a mapping with it, got {shorten_value(value)}. {remedy}")
        fields = self[name].model_fields
        for field in settings.keys() - fields.keys():
            remedy = suggest(str(field), fields) or f"Its fields are {', '.join(fields)}."
            raise ValueError(f"{name} has no field {show_name(field)}. {remedy}")
        return self[name].model_validate(settings)


def shorten_value(value: object) -> str:
    """Return a value as text of at most 100 characters, for a one-line message."""
    text = repr(value)
    if len(text) <= 100:
        return text
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, dict)) else f"{text[:99]}…"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a question for the known name nearest to an unknown one; an empty text if none is near."""
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
            known = kinds[error.title].model_fields if len(loc) == 1 and error.title in kinds else ()
            remedy = suggest(str(loc[-1]), known) or "Correct its name, or remove it."
            problems.append(f"{place} is not a field of {error.title}. {remedy}")
        else:
            contract, is_one = re.subn(r"^(Input|Field) should", "must", e["msg"])
            contract = contract if is_one else f"must be valid ({contract})"
            problems.append(f"{place} {contract}, got {shorten_value(e['input'])}")
    return "; ".join(problems)
