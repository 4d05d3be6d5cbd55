# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""NVML by way of the ``pynvml`` module of the nvidia-ml-py package, if it is installed: NVLink with
its generation.

NVML reports for each link what is at its other end: a GPU, or a switch, which connects all GPUs
with as many links.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from zero_topo.topology.devices import DeviceLink, DeviceTree, normal_bus_id
from zero_topo.topology.tools import Runner, Tool
from zero_topo.units import GB

NAME = "nvml"
RATES: Mapping[int, int] = {1: 20 * GB, 2: 25 * GB, 3: 25 * GB, 4: 25 * GB, 5: 50 * GB}
"""NVLink generation -> bytes/s of one link in each direction (NVIDIA's P100 to B200
whitepapers).
"""

LEVELS: Mapping[int, str] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""``nvmlGpuTopologyLevel_t`` -> kind; 0 is two GPUs on one board."""

MOST_LINKS = 18
"""``NVML_NVLINK_MAX_LINKS`` of nvml.h, for modules that do not say."""


def read(nvml: Any) -> DeviceTree | None:
    """The devices that NVML sees, or None if there is none.

    Args:
        nvml: the module ``pynvml``, or something with its functions.

    Raises:
        ValueError: if NVML fails.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ValueError(f"NVML cannot be used ({error})") from None
    try:
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        bus_ids = tuple(
            normal_bus_id(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)) for handle in handles
        )
        return _tree(nvml, handles, bus_ids) if handles else None
    except nvml.NVMLError as error:
        raise ValueError(f"NVML failed ({error})") from None
    finally:
        nvml.nvmlShutdown()


def ask(_run: Runner) -> DeviceTree | None:
    """Ask NVML if its module is installed; runs no program."""
    try:
        return read(importlib.import_module("pynvml"))
    except ImportError:
        return None


TOOL = Tool(NAME, ask)


def _tree(nvml: Any, handles: list[Any], bus_ids: tuple[str, ...]) -> DeviceTree:
    peers = [_nvlinks(nvml, handle) for handle in handles]
    rates = [_rate(nvml, handle) for handle in handles]
    links = {}
    for a in range(len(handles)):
        for b in range(a + 1, len(handles)):
            direct = peers[a][bus_ids[b]]
            count = direct or min(peers[a]["switch"], peers[b]["switch"])
            rate = min(rates[a], rates[b])
            links[a, b] = (
                DeviceLink("NVLINK", count, float(count * rate) or None)
                if count
                else DeviceLink(_level(nvml, handles[a], handles[b]))
            )
    return DeviceTree(
        NAME,
        len(handles),
        tuple(range(len(handles))),
        {pair: link for pair, link in links.items() if link.kind != "NONE"},
        bus_ids=bus_ids,
        sources={"packages": f"{NAME}: every device is a GPU"},
    )


def _nvlinks(nvml: Any, handle: Any) -> Counter[str]:
    """Active links of a device by what is at the other end: a bus id, or "switch"."""
    ends: Counter[str] = Counter()
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", MOST_LINKS)):
        if not _try(nvml, "nvmlDeviceGetNvLinkState", handle, link):
            continue
        remote = _try(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        kind = _try(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        switch = getattr(nvml, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2)
        ends[
            "switch" if kind == switch or remote is None else normal_bus_id(_text(remote.busId))
        ] += 1
    return ends


def _rate(nvml: Any, handle: Any) -> int:
    """Bytes/s of one link in each direction; 0 for an unknown generation."""
    return RATES.get(_try(nvml, "nvmlDeviceGetNvLinkVersion", handle, 0) or 0, 0)


def _level(nvml: Any, one: Any, other: Any) -> str:
    level = _try(nvml, "nvmlDeviceGetTopologyCommonAncestor", one, other)
    return "NONE" if level is None else LEVELS.get(level, "PCIE")


def _try(nvml: Any, function: str, *arguments: Any) -> Any:
    """Return the result of an NVML function; None if this device, driver or module does not support
    it.
    """
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
