# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Lists the supported releases of torch and DeepSpeed, which pip, the import, `doctor` and `check`
enforce.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType


@dataclass(frozen=True)
class Releases:
    """The supported releases of a package, each to as many places as decide: ``"2.15"`` has all of
    2.15.

    Attributes:
        oldest: the first that works.
        newest: the last that was tried.
        pinned: the one that everything is tested with.
        seam: whether a newer one is tried, because ``hook/seam.py`` refuses it if it lacks what is
            relied on.
    """

    oldest: str
    newest: str
    pinned: str
    seam: bool = False

    def __contains__(self, version: str) -> bool:
        places = self.oldest.count(".") + 1
        found = release(version)[:places]
        return release(self.oldest) <= found and (self.seam or found <= release(self.newest))


SUPPORTED: Mapping[str, Releases] = MappingProxyType(
    {
        "torch": Releases(oldest="2.6", newest="2.15", pinned="2.13"),
        "deepspeed": Releases(oldest="0.18.0", newest="0.19.8", pinned="0.19.8", seam=True),
    }
)

RECORDED = ("torch", "deepspeed", "numpy", "triton")
"""Packages that records and reports list in addition to Python and zero_topo."""

TORCH_SINCE: Mapping[str, str] = MappingProxyType(
    {"torch.distributed.split_group(backend=)": "2.13"}
)
"""What of torch is used only where it is there -> the release from which on it is relied on.

Before, groups are made by ``new_group``: as right, and slower on thousands of GPUs. DeepSpeed's
differences are in the seam, which alone names its privates.
"""


def release(version: str) -> tuple[int, ...]:
    """Return a version's numbers: ``"2.13.0a0+cu130"`` gives (2, 13, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def torch_has(name: str, version: str) -> bool:
    """Return whether a release of torch has a feature that :data:`TORCH_SINCE` lists."""
    return release(version) >= release(TORCH_SINCE[name])


def installed(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def refusal(package: str, version: str) -> str | None:
    """Return one line with why a release is not supported and what to install; None if it is
    supported.

    Args:
        package: a key of :data:`SUPPORTED`.
        version: version as the package reports it.
    """
    known = SUPPORTED[package]
    if version in known:
        return None
    return (
        f"{package} {version} is installed, but zero_topo works with {known.oldest} to "
        f"{known.newest}: install {package} {known.pinned}, or a zero_topo for your version"
    )


def untried(package: str, version: str) -> str | None:
    """A warning for a supported release of a package that is newer than those that were tried; None
    for others.
    """
    known = SUPPORTED[package]
    if release(version) <= release(known.newest) or refusal(package, version):
        return None
    return (
        f"warning: {package} {version} is newer than {known.newest}, the last release that was "
        "tried"
    )


def installed_refusals() -> Iterator[str]:
    """A line for each package that is installed here and not supported; what is not installed is
    not missed.
    """
    for package in SUPPORTED:
        version = installed(package)
        if version is not None and (problem := refusal(package, version)):
            yield problem


def check_loaded(modules: Mapping[str, object]) -> None:
    """Refuse imported packages that are not supported.

    Args:
        modules: of ``sys.modules``.

    Raises:
        ImportError: a line for each, with what was found, what is supported and the way out.
    """
    found = {package: getattr(modules.get(package), "__version__", None) for package in SUPPORTED}
    problems = [
        line
        for package, version in found.items()
        if version and (line := refusal(package, str(version)))
    ]
    if problems:
        raise ImportError("; ".join(problems))


def used() -> dict[str, str | None]:
    """Versions of Python, zero_topo and the libraries of :data:`RECORDED`; None for what is not
    installed.
    """
    ours = {
        "python": platform.python_version(),
        "zero_topo": installed("zero-topo"),
    }
    return ours | {name: installed(name) for name in RECORDED}
