# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Counts what a step asks of a device, without one: operations, calls of kernels, collectives, host
syncs, memory.

Note [What is a launch]
    An ATen operation that is neither a view nor an allocation, a call of a backend's kernel, a
    collective: each is queued on a device by itself. What a kernel does inside is not counted. An
    operator that GPUs have no kernel for counts, in launches and memory, as the reference's
    operations.

What is a host sync
    An operation whose result, or the size of it, the host must know before it goes on; or a tensor
    made of Python's numbers, which a device gets from memory that is not pinned. On a CPU nothing
    waits: they are known by their names.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.bare import BareStep, fake_world
from zero_topo.config import ResolvedConfig
from zero_topo.quant import reference_sparse
from zero_topo.quant.operators import OPS

FREE = frozenset(
    (
        "empty",
        "empty_like",
        "empty_strided",
        "lift_fresh",
        "new_empty",
        "new_empty_strided",
        "record_stream",
        "resize_",
        "_unsafe_view",  # no view to autograd alone
    )
)
SYNCS = frozenset(
    (
        "_local_scalar_dense",
        "_unique2",
        "equal",
        "is_nonzero",
        "lift_fresh",
        "masked_select",
        "nonzero",
        "unique_dim",
    )
)
MASKED = frozenset(("index", "index_put", "index_put_"))
BY_REFERENCE: dict[Any, Callable[..., Any]] = {
    OPS.ternary_encode.default: reference_sparse.ternary_encode,
    OPS.ternary_decode.default: reference_sparse.ternary_decode,
}
# That a CPU's tensors do not dispatch
HOST_READS = frozenset((Tensor.tolist, Tensor.numpy, Tensor.cpu))


@dataclass
class Counts:
    """Of one phase of a step.

    Attributes:
        operations: of ATen, that are neither views nor allocations.
        kernels: calls of a backend of quantization.
        collectives: of torch.distributed.
        syncs: of the host with the device.
        allocations: tensors that were made.
        allocated_bytes: theirs.
        peak_bytes: the most bytes allocated within the phase, less those before it.
    """

    operations: int = 0
    kernels: int = 0
    collectives: int = 0
    syncs: int = 0
    allocations: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0

    @property
    def launches(self) -> int:
        """See Note [What is a launch]."""
        return self.operations + self.kernels + self.collectives


class Allocations(TorchDispatchMode):
    """Follows the storages that operations make within the mode, until they are freed.

    Attributes:
        live: bytes allocated now.
        peak: the most since :meth:`reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in BY_REFERENCE:
            with self:
                return BY_REFERENCE[func](*args)
        result = func(*args, **(kwargs or {}))
        # What is changed in place, or seen in another way, was made before; lift_fresh brings in
        # what Python made.
        if (
            not (func._schema.is_mutable or func.is_view)
            or func is torch.ops.aten.lift_fresh.default
        ):
            for made in result if isinstance(result, list | tuple) else (result,):
                if isinstance(made, Tensor):
                    self._follow(made.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        nbytes = storage.nbytes()
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage, lambda _: self._freed(key, nbytes))
        self.made(nbytes)

    def made(self, nbytes: int) -> None:
        """A storage was made."""
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int, nbytes: int) -> None:
        del self._known[key]
        self.live -= nbytes

    def reset(self) -> None:
        """Set the peak to what is allocated now."""
        self.peak = self.live


class Launches(Allocations):
    """Counts by phase; see the notes above.

    Attributes:
        phases: name -> what was counted in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases: defaultdict[str, Counts] = defaultdict(Counts)
        self._now: Counts | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._now is not None:
            space, _, name = func._schema.name.partition("::")
            if space == "c10d":
                self._now.collectives += 1
            elif space == "zero_topo":
                self._now.kernels += func not in BY_REFERENCE
            elif not func.is_view and name not in FREE:
                self._now.operations += 1
            unsized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
            self._now.syncs += unsized or name in SYNCS or (name in MASKED and _by_mask(args[1]))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def made(self, nbytes: int) -> None:
        """A storage was made."""
        super().made(nbytes)
        if self._now is not None:
            self._now.allocations += 1
            self._now.allocated_bytes += nbytes

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is done inside is counted under a name; not to be nested."""
        self._now = self.phases[name]
        before = self.live
        self.reset()
        try:
            with self, _HostReads(self._now):
                yield
        finally:
            self._now.peak_bytes = max(self._now.peak_bytes, self.peak - before)
            self._now = None


class _HostReads(TorchFunctionMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._counts.syncs += func in HOST_READS
        return func(*args, **(kwargs or {}))


def _by_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


WARM_UP = 1  # steps: buffers and tables that are made once, masks that are chosen at a first step


def count(
    config: ResolvedConfig, numels: Sequence[int], together: int | None = None, steps: int = 2
) -> Mapping[str, Counts]:
    """Counts by phase of the optimizer step, of some, that launches most; rank 0 of a pretended
    world.

    Args:
        config: as for :class:`BareStep`, which takes ``numels`` and ``together`` as well.
        numels: elements of each parameter.
        together: parameters in one collective.
        steps: to count, after one that is not.
    """
    launches = Launches()
    counted: list[Mapping[str, Counts]] = []
    with fake_world(config.plan.world_size):
        step = BareStep(config, numels, together)
        for _ in range(WARM_UP + steps):
            launches.phases.clear()
            for name, do in step.phases().items():
                with launches.phase(name):
                    do()
            counted.append(dict(launches.phases))
    return max(counted[WARM_UP:], key=total)


def total(phases: Mapping[str, Counts]) -> int:
    """Launches of all phases."""
    return sum(counts.launches for counts in phases.values())
