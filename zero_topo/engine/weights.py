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
    On a GPU gathers run on a stream of their own, publish on another, and edits and loads where they are made. Every
    change of the shards therefore records an event, and whoever reads or changes them next makes its stream wait for it
    first, so that the last event stands for all. On a CPU collectives block, and there is no event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from zero_topo.collectives.all_gather import all_gather_rows
from zero_topo.collectives.handle import Handle
from zero_topo.collectives.lane import Lane
from zero_topo.collectives.meter import Counted, Meter
from zero_topo.collectives.pack import rows_of
from zero_topo.collectives.wire import Wire, wire_of
from zero_topo.engine.gathers import gathered, together
from zero_topo.engine.publish import Publisher, PublishOptions
from zero_topo.engine.secondary import build_secondary
from zero_topo.engine.shards import Layout
from zero_topo.engine.sources import Rows, Source
from zero_topo.mesh import Mesh
from zero_topo.quant.spec import BlockSpec


@dataclass(frozen=True)
class WeightOptions:
    """Formats of the primary and secondary gathers (None is unquantized) and of publish, and elements per publish.

    Gathers of all shards run in one lane: their second hops have one order on all ranks (Note [In order]).
    """

    primary: BlockSpec | None
    secondary: BlockSpec | None
    publish: Wire
    run_numel: int
    gathering: Lane


class Weights:
    """This rank's weight shards.

    Attributes:
        primary: ``[N / W, F]`` in the model's dtype.
        secondary: what the backward pass gathers from.
        exact: what gathers of exact weights send.
        rows: what gathers of the primary send.
        escaped: blocks of codes that had to be sent whole: there are none.
    """

    escaped: tuple[int, ...] | None = None

    def __init__(
        self, layout: Layout, mesh: Mesh, meter: Meter, options: WeightOptions, like: Tensor, lane: Lane
    ) -> None:
        plan = layout.plan
        self.layout = layout
        self.primary = like.new_zeros(layout.shape(plan.weights))
        self._mesh, self._meter, self._options = mesh, meter, options
        publish = PublishOptions(options.publish, options.run_numel)
        self._publisher = Publisher(layout, mesh, self.primary, publish, meter, lane)
        self._updated: torch.Event | None = None
        exact = wire_of(None, self.primary.dtype)
        self.exact = Rows(layout, mesh.route(1, plan.weights), self.primary, exact)
        self.rows = replace(self.exact, wire=wire_of(options.primary, self.primary.dtype))
        self.secondary = build_secondary(mesh, self.rows, options.secondary)
        same = plan.secondary == plan.weights and self.secondary.source.wire == self.rows.wire
        self._forward: Source = self.secondary.source if same else self.rows

    # -- gather ----------------------------------------------------------------------------------------------------

    def gather(self, slots: Sequence[int], phase: str) -> Handle[list[Tensor]]:
        """Gather whole parameters; one collective for all of them (two if captured secondaries are partly stale).

        Args:
            slots: the parameters, in the same order on every rank.
            phase: "gather_forward", "gather_backward" or "gather_exact" (see Note [Which copy is read]).

        Returns:
            On ``wait``: one flat tensor ``[numel]`` per slot, in the model's dtype.
        """
        return self._options.gathering.run(partial(self._begin, slots, phase))

    def _begin(self, slots: Sequence[int], phase: str) -> Handle[list[Tensor]]:
        self.finish(slots)  # a publish that runs under this forward ends where its weights are needed
        if phase == "gather_exact":
            return self._gather(self.exact, slots, phase)
        if phase == "gather_forward":
            return self._gather(self._forward, slots, phase)
        # Of slots that were not captured since they changed, from the primary.
        fresh, stale = list[int](), list[int]()
        for index in slots:
            (fresh if self.secondary.is_fresh(index) else stale).append(index)
        parts = [(self.secondary.source, fresh), (self._forward, stale)]
        return together(slots, [(part, self._gather(source, part, phase)) for source, part in parts if part])

    def _gather(self, source: Source, slots: Sequence[int], phase: str) -> Handle[list[Tensor]]:
        if self.layout.plan.weights == 1:  # every rank holds all weights: nothing is sent, nor rounded by a format
            return Handle(None, (), lambda: [self._local(i) for i in slots])
        capture = self.secondary.capturing(slots) if phase == "gather_forward" else None
        return gathered(self.layout, source, slots, self.primary, Counted(self._meter, phase), capture)

    def _local(self, index: int) -> Tensor:
        rows = self.layout.slot(self.primary, index).clone()  # the model may write to what it gets, not to the shard
        return self.layout.flat_of(rows, index)

    # -- updates ---------------------------------------------------------------------------------------------------

    @property
    def own_row(self) -> Tensor:
        """The rank's own world shard, ``[F]``, a view: DeepSpeed's flat parameter buffer."""
        return self.primary[self.layout.row(self.layout.plan.weights)]

    def optimizer_rows(self) -> Tensor:
        """The rows the optimizer of this rank updates, ``[N / O, F]``, a strided view of the primary shard."""
        plan = self.layout.plan
        return self.layout.subset(self.primary, plan.weights, plan.optimizer)

    @property
    def needs_masters(self) -> bool:
        """Whether :meth:`publish` needs the FP32 masters; it updates the optimizer's rows itself then."""
        return self._options.publish.lossy

    def begin(self) -> None:
        """Begin to publish all that was updated; collective."""
        self._publisher.begin()

    def publish(self, slots: range | None = None, masters: Tensor | None = None) -> None:
        """Take note of updated optimizer rows, for :meth:`begin`, which brings them to the primary shards.

        Args:
            slots: consecutive slots; None is all.
            masters: their masters, for differences; unchanged until the step has ended.
        """
        slots = range(len(self.layout.numels)) if slots is None else slots
        self.finish(slots)
        self._publisher.start(slots, masters, self.layout.begins[slots[0]] if slots else 0)
        self._updated = recorded_event(self.optimizer_rows().device)  # who begins may be on another stream

    def finish(self, slots: Sequence[int] | None = None) -> None:
        """Finish what publish has under way for some slots, or for all, and bring the secondary up to date.

        On a GPU the current stream waits for all that was changed (Note [Publish before gather]).
        """
        if self._updated is not None:
            self._updated.wait()
        changed = self._publisher.finish(slots)
        if changed:
            self._renew(changed)

    def publish_world(self, index: int | None = None, masters: Tensor | None = None) -> None:
        """Rebuild the primary shards from each rank's own world shard: at start-up, after a load, after an edit.

        Args:
            index: of the one slot that was edited; None is all.
            masters: FP32 ``[F]``, those of the own row if they are known; here the row says all.
        """
        plan, slots = self.layout.plan, range(len(self.layout.numels)) if index is None else [index]
        self.finish(slots)
        rows = self.primary if index is None else self.layout.slot(self.primary, index)
        counted = Counted(self._meter, "publish")
        all_gather_rows(self._mesh.route(plan.weights, plan.world_size), rows, counted, self._options.run_numel)
        self._renew(slots)

    def _renew(self, slots: Sequence[int]) -> None:
        """The primary shards of some slots changed: older secondaries are stale, those cut from it are cut anew."""
        self.secondary.expire(slots)
        self.secondary.refresh(slots)
        self._updated = recorded_event(self.primary.device)

    def write_back(self, index: int, full: Tensor) -> None:
        """Take over a parameter that every rank holds whole and alike (an edit under ``GatheredParameters``)."""
        plan = self.layout.plan
        rows = rows_of(full.detach().reshape(-1), plan)
        self.finish([index])
        self.layout.slot(self.primary, index).copy_(self.layout.subset(rows, 1, plan.weights))
        self._renew([index])

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside masters: with differences the own row, which is not them rounded."""
        return {"held": self.own_row.detach().clone()} if self.needs_masters else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`state_dict` into the own row, before :meth:`publish_world`; without it that row stays."""
        if self.needs_masters and "held" in state:
            self.own_row.copy_(state["held"])

    # -- accounting ------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Bytes of the primary ("weights") and secondary copies on this rank; a view of the primary costs nothing."""
        return {"weights": self.primary.nbytes, "secondary": sum(tensor.nbytes for tensor in self.secondary.tensors)}

    def tensors(self) -> list[Tensor]:
        """What is held; views of these are not."""
        return [self.primary, *self.secondary.tensors]

    def copies(self) -> list[Tensor]:
        """Tensors that must be bit-identical on all ranks that share them (for debug checks)."""
        return [self.primary, *self.secondary.shared]


def recorded_event(device: torch.device) -> torch.Event | None:
    """An event recorded on the device's current stream; None on a CPU, which has no streams."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event
