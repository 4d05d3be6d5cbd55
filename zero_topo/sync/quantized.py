# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Quantized sync: what crosses between gradient domains is INT8 or INT4, and what that takes away is sent later.

Note [Error feedback]
    Let ``g`` be this rank's gradient shard and ``e`` what earlier steps took away. It sends ``q = Q(g + e)`` to the
    owners of its rows and keeps ``e' = (g + e) - q``, so that the sum of all it ever sent is the sum of all gradients
    minus the present ``e`` (1-bit SGD, Seide et al. 2014; EF-SGD, arXiv 1901.09847). Its own row it adds without
    quantizing, so there is no ``e`` for it. ``e'`` is computed only when the step is known not to be skipped: until
    then the messages and the gradients are kept, and ``e`` is what it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from zero_topo.collectives.handle import Handle
from zero_topo.collectives.meter import Counted
from zero_topo.collectives.pack import Span, span_pieces
from zero_topo.collectives.peers import Peers
from zero_topo.collectives.reduce_scatter import Sums, reduce_scatter
from zero_topo.collectives.wire import Wire
from zero_topo.config import QuantizedSync
from zero_topo.mesh import Hop, Route
from zero_topo.quant.pieces import Piece, total_numel
from zero_topo.quant.spec import Reduce
from zero_topo.sync.base import SyncContext, SyncMode, build_mode
from zero_topo.sync.dense import spread_back


@dataclass(frozen=True)
class _Sent:
    """What one run of parameters sent in this step, until the step is decided.

    Attributes:
        spans: their columns of a gradient shard.
        rows: what was to be sent, ``[members, ...]``: the gradient shard itself, or a table of these columns alone.
        places: their columns of ``rows``.
        messages: uint8 ``[members, bytes]``; nothing for this rank itself.
        scale: the loss scale in both.
        owing: whether the residual was added to the rows.
    """

    spans: tuple[Span, ...]
    rows: Tensor
    places: tuple[Span, ...]
    messages: Tensor
    scale: float
    owing: bool


class Quantized(SyncMode):
    """All-to-all of quantized rows to the optimizer shards, with error feedback.

    1. if a gradient domain is less than a node: dense reduce hop inside the node, ``(G, L)``;
    2. rows plus residual, quantized, one all-to-all over ``(max(G, L), N)``;
    3. the owner adds the messages, in tree order, to its own row in FP32;
    4. if optimizer shards are replicated: gather hop back to them, unquantized;
    5. after the step: residual = rows + residual - dequantized messages. See Note [Error feedback].

    Attributes:
        across: the hop over which messages are quantized.
        wire: their format.
    """

    def __init__(self, config: QuantizedSync, context: SyncContext) -> None:
        super().__init__(context)
        plan, mesh = context.plan, context.mesh
        self._spec = config.spec
        hops = mesh.route(plan.gradients, plan.world_size).hops
        self._inner = Route(hops[:-1]) if len(hops) > 1 else None
        self.across: Hop = hops[-1]
        self._down = mesh.route(plan.optimizer, plan.world_size)
        self._dense = Wire(context.quantizer, None, context.dtype)
        self.wire = Wire(context.quantizer, config.spec, context.dtype)
        self._residual: Tensor | None = None
        if config.error_feedback and self.across.size > 1:
            self._residual = torch.zeros(self.across.size - 1, context.columns, device=context.device)
        self._peers = Peers(self.across, Counted(context.meter, "sync"))
        self._sent: dict[tuple[Span, ...], _Sent] = {}
        self._paid: set[tuple[Span, ...]] = set()  # runs whose residual is in the gradients already

    def start(self, shard: Tensor, spans: Sequence[Span], scale: float) -> Handle[None]:
        """See :meth:`SyncMode.start`."""
        if self.across.group is None:
            return Handle(None, (), lambda: None)
        rows, places = self._rows(shard, spans)
        owing = self._residual is not None and tuple(spans) not in self._paid
        run = _Sent(tuple(spans), rows, places, rows.new_empty(0), scale, owing)
        run = replace(run, messages=self._encode(run))
        across = self._peers.scatter_later(run.messages)
        self._sent[run.spans] = run

        def finish() -> None:
            received = across.wait()
            others = [received[member] for member, _ in self._others()]
            own = self._pieces(rows[self.across.index], places)
            self.wire.reduce(others, own, Reduce(accumulate=True))
            self._settle(shard, run)

        return Handle(None, (), finish)

    def _rows(self, shard: Tensor, spans: Sequence[Span]) -> tuple[Tensor, tuple[Span, ...]]:
        """What the members of the hop across shall get, and which columns of it."""
        if self._inner is None and self._down.size == 1:
            return shard, tuple(spans)
        ends = accumulate((end - begin for begin, end in spans), initial=0)
        places = tuple(pairwise(ends))
        rows = shard.new_zeros(self.across.size, places[-1][1], dtype=torch.float32)
        if self._inner is None:  # what is sent back would overwrite rows that are needed until the step is decided
            for (begin, end), (first, past) in zip(spans, places, strict=True):
                rows[:, first:past] = shard[:, begin:end]
            return rows, places
        size = self._inner.size
        parts = [span_pieces(shard[member::size], spans) for member in range(size)]
        sums = Sums(span_pieces(rows, places), Counted(self.context.meter, "sync"))
        reduce_scatter(self._inner, parts, self._dense, sums).wait()
        return rows, places

    def _settle(self, shard: Tensor, run: _Sent) -> None:
        """Put the own row where it belongs, and bring it to the ranks that hold copies of it."""
        plan = self.context.plan
        if run.rows is not shard:
            own = plan.row(self.context.mesh.rank, plan.gradients)
            for (begin, end), (first, past) in zip(run.spans, run.places, strict=True):
                shard[own, begin:end] = run.rows[self.across.index, first:past]
        spread_back(self.context, self._down, [span_pieces(row[None], run.spans) for row in shard], self._dense)

    def _others(self) -> list[tuple[int, int]]:
        """(member, row of the residual) of every other member."""
        return [(member, k) for k, member in enumerate(m for m in range(self.across.size) if m != self.across.index)]

    def _pieces(self, row: Tensor, spans: Sequence[Span]) -> list[Piece]:
        return span_pieces(row[None], spans, self._spec.block_size)

    def _wanted(self, run: _Sent, member: int, k: int) -> list[Piece]:
        """What a member should get if nothing were lost: the rows, plus the residual if that is due."""
        pieces = self._pieces(run.rows[member], run.places)
        if not run.owing:
            return pieces
        assert self._residual is not None
        owed = self._pieces(self._residual[k], run.spans)
        return [_filled(p, r.flat.mul(run.scale).add_(p.flat)) for p, r in zip(pieces, owed, strict=True)]

    def _encode(self, run: _Sent) -> Tensor:
        """The message for each other member."""
        nbytes = self.wire.nbytes(total_numel(self._pieces(run.rows[0], run.places)))
        messages = torch.zeros(self.across.size, nbytes, dtype=torch.uint8, device=run.rows.device)
        for member, k in self._others():
            self.wire.encode(self._wanted(run, member, k), messages[member])
        return messages

    def _lost(self, run: _Sent, member: int, k: int) -> list[Piece]:
        """What a member should have got and did not, FP32, times the loss scale."""
        pieces = [_filled(p, p.flat.to(torch.float32, copy=True)) for p in self._wanted(run, member, k)]
        self.wire.reduce([run.messages[member]], pieces, Reduce(-1.0, accumulate=True))
        return pieces

    def reopen(self, shard: Tensor, spans: Sequence[Span]) -> None:
        """See :meth:`SyncMode.reopen`: what quantization took away stays in the rows, and the residual is spent."""
        run = self._sent.pop(tuple(spans), None)
        lost = [] if run is None or self._residual is None else [(m, self._lost(run, m, k)) for m, k in self._others()]
        super().reopen(shard, spans)
        rows = shard if self._inner is None else shard[self._inner.index :: self._inner.size]
        for member, pieces in lost:
            for piece, target in zip(pieces, self._pieces(rows[member], spans), strict=True):
                target.flat.copy_(piece.flat)
        self._paid.add(tuple(spans))

    def commit(self, skipped: bool) -> None:
        """Take over the residuals of this step, or forget it."""
        sent, self._sent = self._sent, {}
        self._paid.clear()
        if skipped or self._residual is None:
            return
        for run in sent.values():
            for member, k in self._others():
                residual = self._pieces(self._residual[k], run.spans)
                for piece, target in zip(self._lost(run, member, k), residual, strict=True):
                    target.flat.copy_(piece.flat.div_(run.scale))

    @property
    def residual(self) -> Tensor | None:
        """FP32 ``[other members, F]``: what this rank still owes each, unscaled."""
        return self._residual

    def state_bytes(self) -> int:
        """Bytes of the residual."""
        return 0 if self._residual is None else self._residual.nbytes

    def state_dict(self) -> dict[str, Tensor]:
        """The residual."""
        return {} if self._residual is None else {"residual": self._residual}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`SyncMode.load_state_dict`."""
        if self._residual is None:
            return super().load_state_dict(state)
        if not state:
            self._residual.zero_()
            return
        if set(state) != {"residual"} or state["residual"].shape != self._residual.shape:
            shapes = {name: tuple(value.shape) for name, value in state.items()}
            raise ValueError(f"quantized sync needs a residual of {tuple(self._residual.shape)}, not {shapes}")
        self._residual.copy_(state["residual"])


def _filled(like: Piece, flat: Tensor) -> Piece:
    """A piece of the same shape with other contents."""
    return Piece(flat, like.rows, like.columns, like.stride)


@build_mode.register
def _(config: QuantizedSync, context: SyncContext) -> Quantized:
    return Quantized(config, context)
