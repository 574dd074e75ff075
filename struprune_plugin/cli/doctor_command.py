"""``struprune doctor``: the state of the machine."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from importlib.util import find_spec
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from struprune_plugin.cli.console import Screen, show_error
from struprune_plugin.reporting.tables import Table
from struprune_plugin.storage.files import format_bytes

_PACKAGE = "struprune-plugin"
_EXTRAS = ("gguf", "plots")  # extras whose packages are checked, too
_BINARIES = ("llama-cli", "llama-server", "llama-quantize")  # of llama.cpp


@dataclass(frozen=True)
class Package:
    """Package that StruPrune depends on.

    :param installed: installed version; None if missing
    :param supported: versions that StruPrune supports
    :param needed: whether StruPrune itself needs it, not only an extra
    """

    name: str
    installed: str | None
    supported: str
    needed: bool

    @property
    def state(self) -> str:
        if self.installed is None:
            return "missing" if self.needed else "not installed"
        return "ok" if SpecifierSet(self.supported).contains(self.installed, prereleases=True) else "not supported"

    @property
    def is_problem(self) -> bool:
        return self.state in ("missing", "not supported")


def doctor(screen: Screen) -> int:
    """Check the packages, devices, engines and hub settings of this machine.

    Exit status 1 if a required package is missing or its version is not supported.
    """
    packages, devices, engines = list_packages(), list_devices(), list_engines()
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    problems = [
        f"{package.name}: must be {package.supported or 'installed'}, got {package.installed or 'none'}. "
        f'Run `pip install "{package.name}{package.supported}"`.'
        for package in packages
        if package.is_problem
    ]
    record = {
        "packages": [{**asdict(package), "state": package.state} for package in packages],
        "devices": devices,
        "engines": engines,
        "hub": {"offline": offline},
        "problems": problems,
    }
    rows = [[package.name, package.installed or "", package.supported, package.state] for package in packages]
    memory = [[d["name"], *(format_bytes(d[part]) if d[part] else "" for part in ("free", "total"))] for d in devices]
    screen.show(
        record,
        Table(["package", "installed", "supported", "state"], rows),
        Table(["device", "free", "memory"], memory),
        Table(["engine", "found"], [[name, found or "no"] for name, found in engines.items()]),
        f"hub: {'offline, as HF_HUB_OFFLINE is set' if offline else 'online; what is not in the cache is downloaded'}",
    )
    for problem in problems:
        show_error(problem)
    return int(bool(problems))


def list_packages() -> list[Package]:
    """Return Python, StruPrune and the packages that its installed metadata names, with the supported versions."""
    try:
        wanted = [Requirement(line) for line in requires(_PACKAGE) or ()]
        python = Package("python", platform.python_version(), metadata(_PACKAGE)["Requires-Python"] or "", True)
    except PackageNotFoundError:
        return [Package(_PACKAGE, None, "", True)]
    packages = [Package(_PACKAGE, version(_PACKAGE), "", True), python]
    for need in wanted:
        extras = [extra for extra in ("", *_EXTRAS) if need.marker is None or need.marker.evaluate({"extra": extra})]
        if extras:
            packages.append(Package(need.name, _find_version(need.name), str(need.specifier), extras[0] == ""))
    return packages


def _find_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def list_devices() -> list[dict[str, Any]]:
    """Return the host and every accelerator, with their free and total bytes."""
    devices: list[dict[str, Any]] = []
    if find_spec("psutil") is not None:
        import psutil

        memory = psutil.virtual_memory()
        name = f"cpu, {psutil.cpu_count()} cores"
        devices.append({"name": name, "free": memory.available, "total": memory.total})
    if find_spec("torch") is not None:
        import torch

        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            devices.append({"name": f"cuda:{index}, {torch.cuda.get_device_name(index)}", "free": free, "total": total})
    return devices


def list_engines() -> dict[str, str | None]:
    """Return, by engine, its path or version; None if it is not found."""
    engines = {"vLLM": _find_version("vllm") if find_spec("vllm") is not None else None}
    return engines | {f"llama.cpp: {name}": shutil.which(name) for name in _BINARIES}
