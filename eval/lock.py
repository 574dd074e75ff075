"""Write a lock file: every package of this environment that StruPrune needs, with the hashes of its files.

    python -m eval.lock --output requirements-lock.txt --wheel torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl

Versions are the installed ones; the hashes of all their files come from the package index, by ``uv``, which must be on the path.
The index lacks some builds, such as torch's for a CPU: ``--wheel`` adds the hash of that file.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
EXTRAS = ("dev", "plots")
HEADER = """\
# What the tests ran with, on Python {python} and {system}, with the hashes of all files of these versions.
# Made by `make lock`; `make audit` looks its packages up among known vulnerabilities. To install exactly this:
#
#     pip install --require-hashes -r requirements-lock.txt --extra-index-url https://download.pytorch.org/whl/cpu
#
# The tests ran with torch's build for a CPU, which needs none of NVIDIA's packages; so the lock has none, and on Linux PyPI's own
# build of torch, which needs them, is refused beside it. With a GPU install as the README says, from constraints.txt.
"""


def read_needs(extras: Sequence[str] = EXTRAS) -> list[Requirement]:
    """Return what the package says that it needs, with some of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(text) for wanted in lists for text in wanted]


def list_installed(needs: Sequence[Requirement]) -> dict[str, Version]:
    """Return the installed versions of all that is needed, directly or not, by normalised name with the extras asked for.

    :raises ValueError: one of them is not installed
    """
    versions: dict[str, Version] = {}
    asked: dict[str, set[str]] = {}  # which pip, when it checks hashes, wants spelled
    open_ones, seen = [(need.name, tuple(sorted(need.extras))) for need in needs], set()
    while open_ones:
        current = name, extras = open_ones.pop()
        if current in seen:
            continue
        seen.add(current)
        try:
            held = distribution(name)
        except PackageNotFoundError:
            raise ValueError(
                f"lock: {name} must be installed, it is not. Run this in the environment that `make test` makes."
            ) from None
        versions[canonicalize_name(name)] = Version(held.version)
        asked.setdefault(canonicalize_name(name), set()).update(extras)
        for need in map(Requirement, held.requires or ()):
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                open_ones.append((need.name, tuple(sorted(need.extras))))
    named = {name: f"{name}[{','.join(sorted(extras))}]" if extras else name for name, extras in asked.items()}
    return {named[name]: version for name, version in sorted(versions.items())}


def find_hashes(versions: dict[str, Version]) -> str:
    """Return the lines of a requirements file with the hashes that the package index has of these versions.

    :raises ValueError: uv is not there, or does not find them
    """
    uv = shutil.which("uv")
    if uv is None:
        raise ValueError("lock: uv must be on the path, it is not. Run `make lock`, which installs it.")
    wanted = "".join(f"{name}=={version.public}\n" for name, version in versions.items())
    words = [uv, "pip", "compile", "-", "--no-deps", "--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
    words += [
        "--no-config",
        "--no-strip-extras",
        "--no-emit-index-url",
        "--no-emit-find-links",
        "--python-version",
        platform.python_version(),
    ]
    done = subprocess.run(words, input=wanted, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"lock: the index must have every version, got: {' '.join(done.stderr.split())[:500]}")
    return done.stdout


def add_wheel(lines: str, wheel: Path) -> str:
    """Add the hash of a wheel that the index does not have to those of its version.

    :raises ValueError: the lock holds another version of it, or none
    """
    name, version, *_ = parse_wheel_filename(wheel.name)
    pin = f"{name}=={version.public}"
    if not re.search(rf"^{re.escape(pin)} ", lines, re.MULTILINE):
        raise ValueError(f"lock: --wheel must be of a version that is installed, got {wheel.name}. Give the right one.")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    added = f"# and the hash of {wheel.name}, which the tests ran with\n"
    return re.sub(rf"^({re.escape(pin)} )", rf"{added}\1\\\n    --hash=sha256:{digest} ", lines, flags=re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "requirements-lock.txt", metavar="FILE")
    parser.add_argument(
        "--wheel",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="file of a build that the index lacks; may be repeated",
    )
    args = parser.parse_args()
    try:
        versions = list_installed(read_needs())
        lines = find_hashes(versions)
        for wheel in args.wheel:
            lines = add_wheel(lines, wheel)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    system = f"{platform.system()} {platform.machine()}"
    args.output.write_text(HEADER.format(python=platform.python_version(), system=system) + lines, encoding="utf-8")
    print(f"{args.output}: {len(versions)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
