# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Finds which devices share a GPU package, and which hosts share an NVLink domain (never imports
torch).

A *package* is what the tree calls a GPU. The two GCDs of an AMD MI250X are two devices with PCI
addresses of their own, so a table of names has their number. The partitions of an MI300 (CPX, TPX,
DPX) share a PCI bus and device and differ in the function, which torch leaves out. So do the
instances of an NVIDIA GPU (MIG).
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES: Mapping[str, int] = {
    "MI250": 2,
    "MI200 (MCM)": 2,
    "Data Center GPU Max 1350": 2,
    "Data Center GPU Max 1450": 2,
    "Data Center GPU Max 1550": 2,
}
"""Part of a device's name, as torch reports it -> devices in its package: GCDs of an MI250 or
MI250X, which older drivers call MI200 (MCM), and tiles of an Intel GPU.
"""

PCI_DEVICES = Path("/sys/bus/pci/devices")


def devices_of_package(name: str, env: Mapping[str, str]) -> int:
    """Return the number of devices in the package of a device with this name; 1 if the table does
    not have it.

    Args:
        name: the device's name, as torch reports it.
        env: with ``ZE_FLAT_DEVICE_HIERARCHY``: by default each tile of an Intel GPU is a device,
            under ``COMPOSITE`` the whole GPU is one.
    """
    if "GPU Max" in name and env.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() == "COMPOSITE":
        return 1
    return next((count for part, count in PACKAGES.items() if part in name), 1)


def package_of(address: str, size: int, others: Sequence[str]) -> str:
    """Return an identifier of a device's package on its host: the address of the first device in
    it.

    Devices of one package follow each other in the order of their PCI addresses.

    Args:
        address: PCI domain, bus and device, such as "0000:c1:00"; "" if unknown.
        size: devices in a package.
        others: addresses of all devices of this model on the host, also of those that the rank
            cannot use.

    Returns:
        The identifier, or "" if the package is unknown: the address is, or devices are hidden.
    """
    if size == 1:
        return address
    known = sorted({*others})
    if address not in known or len(known) % size:
        return ""
    index = known.index(address)
    return known[index // size * size]


def same_model(address: str, root: Path = PCI_DEVICES) -> list[str]:
    """Return the addresses of all devices of a device's model on this host, as Linux lists them;
    empty if it does not.

    Variables such as ``ROCR_VISIBLE_DEVICES`` hide devices from torch, not from this list.
    """

    def model(folder: Path) -> tuple[str, ...]:
        return tuple((folder / part).read_text().strip() for part in ("vendor", "device"))

    try:
        own = model(root / f"{address}.0")
        found = [folder.name for folder in root.iterdir() if model(folder) == own]
    except OSError:  # a container without the host's /sys
        return []
    return [name.rpartition(".")[0] for name in found]


def nvlink_domain(address: str) -> str:
    """Return an identifier of the NVLink domain that joins a GPU's host to others; "" if there is
    none, or the module ``pynvml`` is not installed.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return ""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ""
    try:
        info = nvml.c_nvmlGpuFabricInfo_t()
        handle = nvml.nvmlDeviceGetHandleByPciBusId(f"{address}.0".encode())
        nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    except (nvml.NVMLError, AttributeError):  # an older driver or module
        return ""
    finally:
        nvml.nvmlShutdown()
    cluster = bytes(info.clusterUuid)
    joined = info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and not info.status
    # As NCCL reads it: without a cluster, NVLink ends at the host.
    return f"{cluster.hex()} {info.cliqueId}" if joined and any(cluster) else ""
