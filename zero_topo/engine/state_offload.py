# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Offloads tensors from the accelerator to the host, and reloads them into their old storages.

Note [Emptied storages]
    Shards are read through many views: gathers, publish, DeepSpeed's flat buffers, masters that are the weights
    themselves. Replacing the data of one view would not free the memory, which the other views share. A storage is
    therefore copied to the host and resized to zero under all its views; they are valid again after the reload, and
    must not be read before. Tensors that users can access (``param.ds_tensor``, masters, optimizer states) use the
    host's copy in the meantime, as in stock ZeRO-3: they can be read and edited, and their ``device`` is the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from zero_topo.collectives.queue import on_gpu


class HostCopies:
    """The tensors of a device that are on the host now.

    Args:
        device: tensors of other devices are not moved.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: list[tuple[Tensor, Tensor]] = []  # each with its data on the device
        self._storages: list[tuple[UntypedStorage, Tensor]] = []  # each with its bytes on the host

    def offload(self, tensors: Iterable[Tensor], pin_memory: bool) -> None:
        """Copy the storages of some tensors to the host, and free them; one host synchronization.

        Args:
            tensors: of any shapes; their data are the host's copy until :meth:`reload`. Other tensors that share their
                storages must not be read until then.
            pin_memory: whether copies are page-locked; ignored on a CPU.
        """
        held = {id(t): t for t in tensors if t.device.type == self._device.type and t.untyped_storage().nbytes()}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in held.values()}
        gpu = on_gpu(self._device)
        copies = {}
        for address, storage in storages.items():
            copies[address] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin_memory and gpu)
            copies[address].copy_(_bytes_of(storage), non_blocking=True)
        if gpu:
            torch.accelerator.synchronize()
        for tensor in held.values():
            copy = copies[tensor.untyped_storage().data_ptr()].untyped_storage()
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            self._tensors.append((tensor, tensor.data))
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(copy, *place)
        for address, storage in storages.items():
            storage.resize_(0)
            self._storages.append((storage, copies[address]))

    def reload(self, non_blocking: bool) -> None:
        """Copy all tensors back into their storages, with any edits.

        Args:
            non_blocking: only queue the copies, on the current stream.
        """
        for storage, copy in self._storages:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        for tensor, there in self._tensors:
            tensor.data = there
        if on_gpu(self._device) and not non_blocking:
            torch.accelerator.synchronize()
        self._storages.clear()
        self._tensors.clear()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
