# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tensors that leave the accelerator for a while, and come back to the same place of the same shards.

Note [Emptied storages]
    Shards are read through many views: gathers, publish, DeepSpeed's flat buffers, masters that are the weights
    themselves. To give a view another tensor would leave the others with the memory. So a storage is copied to the host
    and emptied under all its views, which are right again when it is filled; who reads one in between reads nothing.
    The tensors that are known outside (``param.ds_tensor``, masters, optimizer states) are given the host's copy for so
    long, as stock ZeRO-3 gives it: they can be read and edited, and tell where they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from zero_topo.collectives.queue import on_gpu


class HostCopies:
    """What of a device's tensors is on the host now.

    Args:
        device: the tensors'; others stay where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: list[tuple[Tensor, Tensor]] = []  # and what each is on the device
        self._storages: list[tuple[UntypedStorage, Tensor]] = []  # and its bytes

    def offload(self, tensors: Iterable[Tensor], pin_memory: bool) -> None:
        """Copy the storages of some tensors to the host, and free them; waits for the device once.

        Args:
            tensors: of any shapes; they are the host's copy until :meth:`reload`. Other tensors that share their
                storages must not be read until then.
            pin_memory: whether copies are page-locked; on a CPU they are not.
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
        """Bring all back to where it was, with what was edited meanwhile.

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
