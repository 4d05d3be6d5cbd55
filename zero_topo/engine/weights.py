# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The weight shards: primary, secondary, what is gathered from which, and publish.

Note [Quantized gathers]
    Each slot is quantized by itself: blocks never straddle two parameters, so the value a layer computes with does not
    depend on which bucket or prefetch carried it, and a norm's weights never share a scale with a matrix. Parameters
    that DeepSpeed keeps resident (``stage3_param_persistence_threshold``) are gathered exactly.

Note [Which copy is read]
    Forward gathers read the primary shards, also when DeepSpeed's prefetch starts them in the forward pass for use in
    the backward pass. Every gather inside the backward pass, the recomputation of activation checkpoints included,
    reads the secondary shards if there are any. A secondary at least as wide as the weights
    domain (S a multiple of W) is a subset of the primary: it is requantized locally right after publish, and with
    S = W and equal specs the forward sends those same bytes, so weights are quantized once per optimizer step. A
    narrower one (ZeRO++: weights over the world, secondary over the node) is captured from the forward gather, and is
    stamped with the version of the weights: a slot that no forward has gathered since the last publish is gathered
    from the primary again, never from a stale copy.

Note [Publish before gather]
    On a GPU DeepSpeed starts gathers on a stream of its own, which knows nothing of the stream that publishes. Every
    change of the primary shards therefore records an event, and every gather makes its stream wait for it first. On a
    CPU collectives block, and there is no event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from zero_topo.collectives.all_gather import Counted, all_gather, all_gather_rows
from zero_topo.collectives.handle import Handle
from zero_topo.collectives.lane import Lane
from zero_topo.collectives.meter import Meter
from zero_topo.collectives.pack import flat_of, members, rows_of
from zero_topo.collectives.wire import Wire
from zero_topo.engine.publish import Publisher, PublishOptions
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Mesh, Route
from zero_topo.quant.spec import BlockSpec


@dataclass(frozen=True)
class WeightOptions:
    """Formats of the primary and secondary gathers (None is unquantized) and of publish, and elements per publish."""

    primary: BlockSpec | None
    secondary: BlockSpec | None
    publish: Wire
    run_numel: int


@dataclass(frozen=True)
class Source:
    """What a gather sends: rows of a shard, quantized on the fly by ``spec``, or wire bytes kept in ``stored``."""

    route: Route
    rows: Tensor | None
    spec: BlockSpec | None
    stored: Tensor | None = None


class Weights:
    """This rank's weight shards.

    Attributes:
        primary: ``[N / W, F]`` in the model's dtype; row ``t // W`` is DeepSpeed's flat parameter buffer.
    """

    def __init__(
        self, layout: Layout, mesh: Mesh, meter: Meter, options: WeightOptions, like: Tensor, lane: Lane
    ) -> None:
        plan = layout.plan
        self.layout = layout
        self.primary = like.new_zeros(layout.shape(plan.weights))
        self._mesh, self._meter, self._options = mesh, meter, options
        self._quantizer = options.publish.quantizer
        route = mesh.route(1, plan.weights)
        self._primary_source = Source(route, self.primary, options.primary)
        self._exact_source = Source(route, self.primary, None)
        publish = PublishOptions(options.publish, options.run_numel)
        self._publisher = Publisher(layout, mesh, self.primary, publish, meter, lane)
        self._version = [0] * len(layout.numels)
        self._updated: torch.Event | None = None
        self._captured = [-1] * len(layout.numels)
        self._ends: list[int] = []  # where each slot's message begins in a stored secondary, plus the end
        self._secondary = self._build_secondary()

    # -- the secondary copy ----------------------------------------------------------------------------------------

    @property
    def _captures(self) -> bool:
        """Whether the secondary is captured from forward gathers (S < W) rather than cut from the primary."""
        plan = self.layout.plan
        return plan.secondary is not None and plan.secondary % plan.weights != 0

    def _build_secondary(self) -> Source | None:
        plan, spec = self.layout.plan, self._options.secondary
        if plan.secondary is None or plan.weights == 1:
            return None
        route = self._mesh.route(1, plan.secondary)
        if spec is not None:
            rows = plan.world_size // plan.secondary
            self._ends = list(accumulate((spec.nbytes(rows * w) for w in self.layout.widths), initial=0))
            return Source(route, None, spec, torch.zeros(self._ends[-1], dtype=torch.uint8, device=self.primary.device))
        if self._captures:
            return Source(route, self.primary.new_zeros(self.layout.shape(plan.secondary)), None)
        return Source(route, self.layout.subset(self.primary, plan.weights, plan.secondary), None)

    def _store(self, index: int, rows: Tensor) -> None:
        """Quantize or copy a slot's secondary rows (``[N / S, width]``) into the secondary copy."""
        source = self._secondary
        assert source is not None
        if source.stored is None:
            assert source.rows is not None
            self.layout.slot(source.rows, index).copy_(rows)
            return
        assert source.spec is not None
        self._quantizer.quantize(rows, source.spec, source.stored[self._ends[index] : self._ends[index + 1]])

    def refresh_secondary(self, slots: Sequence[int] | None = None) -> None:
        """Bring the secondary up to date with the primary, for the given slots or for all. Local, no collective."""
        source, plan = self._secondary, self.layout.plan
        if source is None or self._captures or source.stored is None:
            return
        assert plan.secondary is not None
        subset = self.layout.subset(self.primary, plan.weights, plan.secondary)
        for index in range(len(self.layout.numels)) if slots is None else slots:
            self._store(index, self.layout.slot(subset, index))
            self._captured[index] = self._version[index]

    def _capture(self, index: int, rows: Tensor) -> None:
        """Keep this rank's secondary rows of a slot that a forward gather brought whole (``rows``: ``[N, width]``)."""
        degree = self.layout.plan.secondary
        assert degree is not None
        self._store(index, self.layout.subset(rows, 1, degree))
        self._captured[index] = self._version[index]

    # -- gather ----------------------------------------------------------------------------------------------------

    def gather(self, slots: Sequence[int], phase: str) -> Handle[list[Tensor]]:
        """Gather whole parameters; one collective for all of them (two if captured secondaries are partly stale).

        Args:
            slots: the parameters, in the same order on every rank.
            phase: "gather_forward", "gather_backward" or "gather_exact" (see Note [Which copy is read]).

        Returns:
            On ``wait``: one flat tensor ``[numel]`` per slot, in the model's dtype.
        """
        self.settle(slots)
        if self._updated is not None:
            self._updated.wait()  # see Note [Publish before gather]
        if phase == "gather_backward" and self._secondary is not None:
            fresh = [i for i in slots if self._is_fresh(i)]
            if len(fresh) < len(slots):
                return self._gather_mixed(slots, fresh)
            return self._gather(self._secondary, slots, phase)
        if phase == "gather_exact":
            return self._gather(self._exact_source, slots, phase)
        return self._gather(self._forward_source(), slots, phase)

    def _is_fresh(self, index: int) -> bool:
        assert self._secondary is not None
        if self._captured[index] == self._version[index] or (self._secondary.stored is None and not self._captures):
            return True
        if not self._captures:
            raise RuntimeError(f"the secondary shard of slot {index} was not refreshed after the last publish")
        return False

    def _forward_source(self) -> Source:
        plan, secondary = self.layout.plan, self._secondary
        same = secondary is not None and plan.secondary == plan.weights and secondary.spec == self._options.primary
        return secondary if secondary is not None and same else self._primary_source

    def _gather_mixed(self, slots: Sequence[int], fresh: Sequence[int]) -> Handle[list[Tensor]]:
        assert self._secondary is not None
        stale = [i for i in slots if i not in set(fresh)]
        parts = [(stale, self._gather(self._primary_source, stale, "gather_backward"))]
        if fresh:
            parts.append((list(fresh), self._gather(self._secondary, fresh, "gather_backward")))

        def finish() -> list[Tensor]:
            found = {i: full for part, handle in parts for i, full in zip(part, handle.wait(), strict=True)}
            return [found[i] for i in slots]

        return Handle(None, (), finish)

    def _gather(self, source: Source, slots: Sequence[int], phase: str) -> Handle[list[Tensor]]:
        captures = self._captures and phase == "gather_forward"
        if source.route.size == 1:
            return Handle(None, (), lambda: [self._local(i) for i in slots])
        message, ends = self._message(source, slots)
        handle = all_gather(source.route, message, self._meter, phase)
        versions = [self._version[i] for i in slots]

        def finish() -> list[Tensor]:
            pieces = handle.wait()
            whole = []
            for index, version, (begin, end) in zip(slots, versions, pairwise(ends), strict=True):
                rows = self._assemble(source, index, [piece[begin:end] for piece in pieces])
                if captures and version == self._version[index]:
                    self._capture(index, rows)
                whole.append(flat_of(rows, self.layout.numels[index], self.layout.plan))
            return whole

        return Handle(None, (), finish)

    def _local(self, index: int) -> Tensor:
        rows = self.layout.slot(self.primary, index)
        return flat_of(rows.clone(), self.layout.numels[index], self.layout.plan)

    def _message(self, source: Source, slots: Sequence[int]) -> tuple[Tensor, list[int]]:
        """One message of all slots, and where each slot's part begins (plus the end)."""
        rows = self.layout.plan.world_size // source.route.hi
        if source.spec is None:
            assert source.rows is not None
            ends = list(accumulate((rows * self.layout.widths[i] for i in slots), initial=0))
            message = self.primary.new_empty(ends[-1])
            for index, (begin, end) in zip(slots, pairwise(ends), strict=True):
                message[begin:end].view(rows, -1).copy_(self.layout.slot(source.rows, index))
            return message, ends
        ends = list(accumulate((source.spec.nbytes(rows * self.layout.widths[i]) for i in slots), initial=0))
        if source.stored is not None:
            return torch.cat([source.stored[self._ends[i] : self._ends[i + 1]] for i in slots]), ends
        assert source.rows is not None
        message = torch.empty(ends[-1], dtype=torch.uint8, device=self.primary.device)
        for index, (begin, end) in zip(slots, pairwise(ends), strict=True):
            self._quantizer.quantize(self.layout.slot(source.rows, index), source.spec, message[begin:end])
        return message, ends

    def _assemble(self, source: Source, index: int, pieces: Sequence[Tensor]) -> Tensor:
        """A slot's rows ``[N, width]`` from the members' parts; dequantize, interleave and round in one pass."""
        rows = self.primary.new_empty(self.layout.plan.world_size, self.layout.widths[index])
        for target, piece in zip(members(rows, source.route.size), pieces, strict=True):
            if source.spec is None:
                target.copy_(piece.view(target.shape))
            else:
                self._quantizer.dequantize(piece, source.spec, target)
        return rows

    # -- updates ---------------------------------------------------------------------------------------------------

    def optimizer_rows(self) -> Tensor:
        """The rows the optimizer of this rank updates, ``[N / O, F]``, a strided view of the primary shard."""
        plan = self.layout.plan
        return self.layout.subset(self.primary, plan.weights, plan.optimizer)

    @property
    def publishes_differences(self) -> bool:
        """Whether :meth:`publish` needs the FP32 masters; it updates the optimizer's rows itself then."""
        return self._publisher.sends_differences

    def publish(self, slots: range | None = None, masters: Tensor | None = None) -> None:
        """Begin to bring updated optimizer rows to the primary shards; see :meth:`Publisher.start`. Collective.

        Args:
            slots: consecutive slots; None is all.
            masters: their FP32 masters, for differences.
        """
        slots = range(len(self.layout.numels)) if slots is None else slots
        self.settle(slots)
        self._publisher.start(slots, masters)

    def settle(self, slots: Sequence[int] | None = None) -> None:
        """Finish what publish has under way for some slots, or for all, and bring the secondary up to date."""
        changed = self._publisher.settle(slots)
        if changed:
            self._renew(changed)

    def publish_world(self) -> None:
        """Rebuild the primary shards from each rank's own world shard: at start-up and after a load."""
        self.settle()
        self._rebuild(self.primary)
        self._renew(range(len(self.layout.numels)))

    def publish_slot(self, index: int) -> None:
        """The same for one slot whose world shards were edited in place."""
        self.settle([index])
        self._rebuild(self.layout.slot(self.primary, index))
        self._renew([index])

    def _rebuild(self, rows: Tensor) -> None:
        plan = self.layout.plan
        counted = Counted(self._meter, "publish", self._options.run_numel)
        all_gather_rows(self._mesh.route(plan.weights, plan.world_size), rows, counted)

    def _renew(self, slots: Sequence[int]) -> None:
        """The primary shards of some slots changed: older secondaries are stale, those cut from it are cut anew."""
        for index in slots:
            self._version[index] += 1
        if not self._captures:
            self.refresh_secondary(slots)
        self._updated = recorded_event(self.primary.device)

    def write_back(self, index: int, full: Tensor) -> None:
        """Take over a parameter that every rank holds whole and alike (an edit under ``GatheredParameters``)."""
        plan = self.layout.plan
        rows = rows_of(full.detach().reshape(-1), plan)
        self.settle([index])
        self.layout.slot(self.primary, index).copy_(self.layout.subset(rows, 1, plan.weights))
        self._renew([index])

    # -- accounting ------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Bytes of the primary ("weights") and secondary copies on this rank; a view of the primary costs nothing."""
        source = self._secondary
        kept = 0
        if source is not None and source.stored is not None:
            kept = source.stored.nbytes
        elif source is not None and self._captures and source.rows is not None:
            kept = source.rows.nbytes
        return {"weights": self.primary.nbytes, "secondary": kept}

    def copies(self) -> list[Tensor]:
        """Tensors that must be bit-identical on all ranks that share them (for debug checks)."""
        source = self._secondary
        stored = source.stored if source is not None and not self._captures else None
        return [self.primary] if stored is None else [self.primary, stored]


def recorded_event(device: torch.device) -> torch.Event | None:
    """An event recorded on the device's current stream; None on a CPU, which has no streams."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event
