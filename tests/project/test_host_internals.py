"""What we lean on inside the host is there."""

import importlib
import inspect
from importlib.metadata import version

import pytest
from helpers.host_internals import INTERNALS, Internal

DISTRIBUTIONS = {"compressed_tensors": "compressed-tensors"}


def describe_move(entry: Internal, what: str) -> str:
    package = entry.where.split(":")[0].split(".")[0]
    found = version(DISTRIBUTIONS.get(package, package))
    return (
        f"{package} {found} moved {entry.where}: {what}; we need it ({entry.why}). Adapt what names it in struprune_plugin/, "
        f"or hold {package} back in pyproject.toml."
    )


def resolve(where: str) -> object:
    module, _, names = where.partition(":")
    found = importlib.import_module(module)
    for name in names.split(".") if names else ():
        found = getattr(found, name)
    return found


def find_move(entry: Internal) -> str | None:
    """Say in one sentence what has moved; None where nothing has."""
    try:
        found = resolve(entry.where)
    except (ImportError, AttributeError) as error:
        return describe_move(entry, f"it is gone ({error})")
    if entry.takes:
        names = set(getattr(found, "model_fields", None) or getattr(found, "__dataclass_fields__", None) or ())
        names |= set(inspect.signature(found).parameters)
        if missing := [name for name in entry.takes if name not in names]:
            if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(found).parameters.values()):
                return None
            return describe_move(entry, f"it takes no {', '.join(missing)} any more")
    if entry.says and (missing := [text for text in entry.says if text not in inspect.getsource(found)]):
        return describe_move(entry, f"its source no longer speaks of {', '.join(missing)}")
    return None


def test_host_internals_are_where_we_lean_on_them():
    moves = list(filter(None, map(find_move, INTERNALS)))
    if moves:
        pytest.fail("\n".join(moves), pytrace=False)
