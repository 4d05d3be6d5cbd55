# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What all ranks must hold after each call of the engine, computed in one process.

A parameter is a table ``[N, width]`` of world shards in tree order. There is no group, queue,
stream or shard: a gather of degree ``d`` passes the rows ``t::d`` through a format, and the
post-step all-gather rounds masters. It takes as given what other tests hold: the kernels
(`quantize`, `dequantize`), `Plan.stages`, and how a block is resolved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ranks.phase_cases import Case
from zero_topo.config import resolve
from zero_topo.plan import Phase, coded_params
from zero_topo.quant import ops
from zero_topo.quant.operands import DTYPES
from zero_topo.quant.spec import BlockSpec, Cast, Format


def through(values: Tensor, wire: Format, dtype: torch.dtype) -> Tensor:
    """What one message brings of these values, in row-major order."""
    if isinstance(wire, Cast):
        return values.to(DTYPES[wire.dtype]).to(dtype)
    flat = values.reshape(-1).contiguous()
    decoded = torch.empty(flat.shape, dtype=dtype)
    ops.dequantize(ops.quantize(flat, wire), wire, decoded)
    return decoded.view(values.shape)


def by_rank(parts: list[Tensor], ranks: Sequence[int], wire: Format) -> Tensor:
    """The sum in the order of the ranks, in the type sent."""
    assert isinstance(wire, Cast)
    places = sorted(range(len(parts)), key=ranks.__getitem__)
    return in_order([through(parts[place], wire, DTYPES[wire.dtype]) for place in places]).float()


def in_order(parts: list[Tensor]) -> Tensor:
    """The sum, from the first to the last."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@dataclass
class Int8:
    """One parameter that is stored as INT8 alone.

    Attributes:
        values: whole numbers ``[N, blocks, block]``, FP32.
        scales: ``[N, blocks]``, FP32.
    """

    values: Tensor
    scales: Tensor

    def follow(self, masters: Tensor) -> None:
        """Take over masters ``[N, width]``, FP32, by the rule of Note [Codes] in ``quant/ops.py``.

        A scale is kept as long as the largest value of its block is 90 to 127.49 steps of it.
        """
        rows, width = masters.shape
        blocks = torch.zeros(rows, self.values[0].numel())
        blocks[:, :width] = masters
        blocks = blocks.view(self.values.shape)
        largest = blocks.abs().amax(-1)
        kept = (90.0 * self.scales <= largest) & (largest <= 127.49 * self.scales)
        zero = torch.zeros(())
        steps = torch.full_like(largest, 127.0)
        fresh = torch.where(largest < 2.0**-100, zero, largest * 1.0625 / steps)
        self.scales = torch.where(kept, self.scales, fresh)
        inverse = torch.where(self.scales == 0, zero, 1.0 / self.scales)
        self.values = (blocks * inverse[..., None]).round().clamp(-127, 127)

    def decoded(self, width: int, dtype: torch.dtype) -> Tensor:
        """The weights ``[N, width]``."""
        return (self.values * self.scales[..., None]).to(dtype).flatten(1)[:, :width]


class Model:
    """What all ranks hold.

    Attributes:
        tables: each parameter's exact weights ``[N, width]``.
        int8: those that are stored as INT8 alone, by index.
        secondary: the degree of secondary copies; 0 if there are none.
        captures: whether a copy is shared by ranks that together store a part of the weights.
            Forward gathers then store it, since the own weights do not contain it.
        captured: secondary copies that forward gathers have stored, by index.
        sums: for each gradient domain, each trained parameter's accumulated gradient.
        synced: gradients after the sync, by index.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.config = case.config
        self.plan = case.config.plan
        self.world = self.plan.world_size
        self.parameters = case.parameters
        self.count = len(case.trained)
        self.widths = [-(-p.numel // self.world) for p in self.parameters]
        self.tables: list[Tensor] = []
        self.captured: dict[int, Tensor] = {}
        self.int8 = self._int8()
        self.secondary = self.plan.secondary or 0
        if self.config.resident_spec is not None or self.plan.weights == 1:
            self.secondary = 0
        self.captures = self.secondary % self.plan.weights != 0
        accumulated = case.config.accumulation_dtype
        self.accumulated = DTYPES[accumulated] if accumulated else case.dtype
        sync_dtype = getattr(case.config.sync, "dtype", None)
        self.sync_dtype = DTYPES[sync_dtype] if sync_dtype else self.accumulated
        self.synced: dict[int, Tensor] = {}
        self.sums: list[list[Tensor]] = []
        for _ in range(self.world // self.plan.gradients):
            trained = self.widths[: self.count]
            zeros = [torch.zeros(self.world, width, dtype=self.accumulated) for width in trained]
            self.sums.append(zeros)

    def _int8(self) -> dict[int, Int8]:
        spec = self.config.resident_spec
        if spec is None:
            return {}
        numels = [p.numel for p in self.parameters]
        dims = [p.dims for p in self.parameters]
        persistent = [p.persistent for p in self.parameters]
        size = spec.block_size
        found = {}
        for index, is_int8 in enumerate(coded_params(self.plan, numels, dims, persistent, size)):
            if is_int8:
                blocks = -(-self.widths[index] // size)
                values = torch.zeros(self.world, blocks, size)
                found[index] = Int8(values, torch.zeros(self.world, blocks))
        return found

    # -- tables ------------------------------------------------------------------------------------

    def table(self, full: Tensor) -> Tensor:
        """A whole parameter as world shards in tree order, zero-padded."""
        width = -(-full.numel() // self.world)
        padding = full.new_zeros(self.world * width - full.numel())
        by_rank = torch.cat([full, padding]).view(self.world, width)
        return by_rank[list(self.plan.rank_at)]

    def whole(self, table: Tensor, index: int) -> Tensor:
        """A whole parameter from its world shards."""
        positions = [self.plan.position(rank) for rank in range(self.world)]
        return table[positions].reshape(-1)[: self.parameters[index].numel]

    def rows(self, table: Tensor, rank: int, degree: int) -> Tensor:
        """The world shards that a rank stores of a table sharded over ``degree`` ranks."""
        return table[self.plan.position(rank) % degree :: degree]

    # -- weights -----------------------------------------------------------------------------------

    def load(self, tables: list[Tensor], masters: list[Tensor], keeps_scales: bool) -> None:
        """Start from each rank's own row; ``keeps_scales`` continues from a saved state."""
        self.tables = [table.clone() for table in tables]
        for index, int8 in self.int8.items():
            if not keeps_scales or index >= self.count:
                int8.scales = torch.zeros_like(int8.scales)
            source = masters if index < self.count else tables
            int8.follow(source[index].float())
        self.captured.clear()

    def gather(self, indices: Sequence[int], phase: Phase) -> list[Tensor]:
        """Return whole parameters as this phase brings them; a forward gather may store copies."""
        found = []
        for index in indices:
            if phase == "gather_exact":
                table = self.tables[index]
            elif phase == "gather_backward":
                table = self._backward(index)
            else:
                table = self._forward(index)
                if self.captures and index not in self.captured:
                    wire = self.config.secondary_spec or self._plain(index)
                    self.captured[index] = self._sent(table, self.secondary, wire)
            found.append(self.whole(table, index))
        return found

    def _plain(self, index: int) -> Cast:
        return ops.cast_to(self.parameters[index].sent or self.case.dtype)

    def _sent(self, table: Tensor, degree: int, wire: Format) -> Tensor:
        """A table after a gather of this degree: one message for each row ``t::degree``."""
        received = torch.empty_like(table)
        for t in range(degree):
            received[t::degree] = through(table[t::degree], wire, table.dtype)
        return received

    def _gathered(self, table: Tensor, degree: int, spec: BlockSpec | None, index: int) -> Tensor:
        if degree == 1 and spec is not None:
            return table  # one rank stores all of it: nothing is quantized
        return self._sent(table, degree, spec or self._plain(index))

    def _forward(self, index: int) -> Tensor:
        if index in self.int8:
            return self.int8[index].decoded(self.widths[index], self.case.dtype)
        if index >= self.count and index in self.captured:
            return self.captured[index]  # of a frozen parameter both passes read the copy
        spec = self.config.weights_spec
        return self._gathered(self.tables[index], self.plan.weights, spec, index)

    def _backward(self, index: int) -> Tensor:
        if not self.secondary:
            return self._forward(index)
        if self.captures:
            return self.captured[index] if index in self.captured else self._forward(index)
        spec = self.config.secondary_spec
        return self._gathered(self.tables[index], self.secondary, spec, index)

    def publish(self, indices: Sequence[int], masters: list[Tensor]) -> None:
        """Weights follow masters ``[N, width]``, FP32."""
        for index, master in zip(indices, masters, strict=True):
            self.captured.pop(index, None)
            if index in self.int8:
                self.int8[index].follow(master)
            self.tables[index] = master.to(self.case.dtype)

    def edit(self, index: int, full: Tensor) -> None:
        """A user writes a whole parameter."""
        table = self.table(full)
        changed = not torch.equal(table.view(torch.uint8), self.tables[index].view(torch.uint8))
        self.tables[index] = table
        if index in self.int8:
            if changed:
                self.int8[index].scales.zero_()
                self.int8[index].follow(table.float())
            return
        self.captured.pop(index, None)

    # -- gradients ---------------------------------------------------------------------------------

    def _reduced(
        self,
        parts: list[Tensor],
        degrees: tuple[int, int],
        wire: Format,
        ranks: Sequence[int] = (),
        to: int = 0,
    ) -> Tensor:
        """The sum over a group's members in tree order; each exchange sends in the format. With the
        members' ranks and the place of the one that gets it, the backend adds in some groups.
        """
        for lo, hi in self.plan.stages(*degrees):
            size = hi // lo
            sent = [through(part, wire, torch.float32) for part in parts]
            groups = [slice(start, start + size) for start in range(0, len(sent), size)]
            if ranks and self._adds(lo, hi):
                parts = [by_rank(sent[group], ranks[group], wire) for group in groups]
            else:
                parts = [in_order(sent[group]) for group in groups]
            # Of the members that send in the next group
            ranks = ranks[to % size :: size]
            to //= size
        (total,) = parts
        return total

    def _adds(self, lo: int, hi: int) -> bool:
        """Whether the backend adds gradients in a group, if they are not quantized."""
        return self.config.topology.domain(hi) != "world" or hi // lo <= resolve.BACKEND_ADDS

    def scatter(self, indices: Sequence[int], grads: list[list[Tensor]]) -> None:
        """Add the mean of all ranks' gradients, ``grads[rank][k]`` of parameter ``indices[k]``."""
        for k, index in enumerate(indices):
            if index in self.synced:
                self._reopen(index)
            sent = self.parameters[index].sent or self.case.scatter_dtype
            wire = self.config.gradients_spec or ops.cast_to(sent)
            for domain in range(len(self.sums)):
                self._add(domain, index, [grads[rank][k] for rank in range(self.world)], wire)

    def _add(self, domain: int, index: int, grads: list[Tensor], wire: Format) -> None:
        degree = self.plan.gradients
        first = domain * degree
        members = self.plan.rank_at[first : first + degree]
        tables = [self.table(grads[rank]) for rank in members]
        mean = torch.tensor(1.0 / self.world, dtype=torch.float32)
        ranks = () if wire.lossy or degree == 1 else members
        adds = [self._adds(*stage) for stage in self.plan.stages(1, degree)]
        if ranks and wire == Cast("fp16") and any(adds):
            tables = [table.half() * mean for table in tables]
            mean = torch.tensor(1.0)
        for t in range(degree):
            parts = [table[t::degree].float() for table in tables]
            total = self._reduced(parts, (1, degree), wire, ranks, t) if degree > 1 else parts[0]
            rows = self.sums[domain][index][t::degree]
            rows.copy_((rows.float() + total * mean).to(rows.dtype))

    def _reopen(self, index: int) -> None:
        """Go on after a sync: its owner keeps the synced sum, to which more is added."""
        degree = self.plan.gradients
        delivered = self.synced.pop(index)
        for domain, sums in enumerate(self.sums):
            own = slice(domain * degree, (domain + 1) * degree)
            sums[index].zero_()
            sums[index][own] = delivered[own]

    def sync(self) -> list[Tensor]:
        """The gradient of each trained parameter that optimizers read."""
        for index in range(self.count):
            if index not in self.synced:
                self.synced[index] = self._synced(index)
        return [self.synced[index] for index in range(self.count)]

    def _synced(self, index: int) -> Tensor:
        parts = [sums[index].float() for sums in self.sums]
        if len(parts) == 1:
            return parts[0].to(self.accumulated, copy=True)
        wire = ops.cast_to(self.sync_dtype)
        total = self._reduced(parts, (self.plan.gradients, self.world), wire)
        if self.plan.optimizer < self.world:
            # Owners send the sum to the ranks that store the same optimizer states, and keep what
            # those receive.
            total = through(total.to(self.accumulated).float(), wire, torch.float32)
        return total.to(self.accumulated)

    def end_step(self) -> None:
        """Gradients are zero again."""
        self.synced.clear()
        for sums in self.sums:
            for table in sums:
                table.zero_()
