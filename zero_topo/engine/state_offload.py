# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Offloads tensors from the accelerator to the host, and reloads them into their old storages.

Note [Emptied storages]
    Shards are read through many views: gathers, publish, DeepSpeed's flat buffers, masters that are
    the weights themselves. Replacing the data of one view would not free the memory, which the
    other views share. A storage is therefore copied to the host and resized to zero under all its
    views; they are valid again after the reload, and must not be read before. Tensors that users
    can access (``param.ds_tensor``, masters, optimizer states) use the host's copy in the meantime,
    as in stock ZeRO-3: they can be read and edited, and their ``device`` is the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, UntypedStorage

from zero_topo.collectives.queue import on_gpu


def offload(
    tensors: Iterable[Tensor],
    device: torch.device,
    pin_memory: bool,
) -> Callable[[bool], None]:
    """Copy the storages of some tensors to the host, and free them; one host synchronization.

    Args:
        tensors: of any shapes; their data are the host's copy until the reload. Other tensors that
            share their storages must not be read until then.
        device: tensors of other devices are not moved.
        pin_memory: whether copies are page-locked; ignored on a CPU.

    Returns:
        A function that copies all tensors back into their storages, with any edits. With True it
        only queues the copies, on the current stream.
    """
    stored = {
        id(t): t for t in tensors if t.device.type == device.type and t.untyped_storage().nbytes()
    }
    if not on_gpu(device):
        # On a CPU, optimizer states of a checkpoint are in memory of `torch.load`, which cannot be
        # resized. They stay.
        stored = {key: t for key, t in stored.items() if t.untyped_storage().resizable()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in stored.values()}
    copies = {}
    for address, storage in storages.items():
        pinned = pin_memory and on_gpu(device)
        copies[address] = torch.empty(
            storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pinned
        )
        copies[address].copy_(_bytes_of(storage), non_blocking=True)
    if on_gpu(device):
        torch.accelerator.synchronize()
    # Each with its data on the device
    there = [(tensor, tensor.data) for tensor in stored.values()]
    for tensor in stored.values():
        copy = copies[tensor.untyped_storage().data_ptr()].untyped_storage()
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        on_host = torch.empty(0, dtype=tensor.dtype, device="cpu")
        tensor.data = on_host.set_(copy, *place)
    for storage in storages.values():
        storage.resize_(0)

    def reload(non_blocking: bool) -> None:
        for address, storage in storages.items():
            storage.resize_(copies[address].numel())
            _bytes_of(storage).copy_(copies[address], non_blocking=True)
        for tensor, data in there:
            tensor.data = data
        if on_gpu(device) and not non_blocking:
            torch.accelerator.synchronize()

    return reload


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
