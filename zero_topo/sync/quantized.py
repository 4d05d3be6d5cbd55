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
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_topo.collectives.handle import Handle
from zero_topo.collectives.pack import Span, merged, places_of, span_pieces
from zero_topo.collectives.wire import wire_of
from zero_topo.config import QuantizedSync
from zero_topo.quant.pieces import Piece, total_numel
from zero_topo.quant.spec import Reduce
from zero_topo.sync.base import SyncContext, build_mode
from zero_topo.sync.crossing import Crossing, exact, spread_back


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


class Quantized(Crossing[_Sent]):
    """All-to-all of quantized rows to the optimizer shards, with error feedback.

    1. if a gradient domain is less than a node: dense reduce hop inside the node, ``(G, L)``;
    2. rows plus residual, quantized, one all-to-all over ``(max(G, L), N)``;
    3. the owner adds the messages, in tree order, to its own row in FP32;
    4. if optimizer shards are replicated: gather hop back to them, unquantized;
    5. after the step: residual = rows + residual - dequantized messages. See Note [Error feedback].

    Attributes:
        wire: format of the messages.
        residual: FP32 ``[other members, F]``: what this rank still owes each, unscaled; None without error feedback.
    """

    def __init__(self, config: QuantizedSync, context: SyncContext) -> None:
        super().__init__(context, wire_of(context.quantizer, None, context.dtype))
        self._down = context.mesh.route(context.plan.optimizer, context.plan.world_size)
        self.wire = wire_of(context.quantizer, config.spec, context.dtype)
        self.residual: Tensor | None = None
        if config.error_feedback and self.peers.size > 1:
            self.residual = torch.zeros(self.peers.size - 1, context.columns, device=context.device)

    def start(self, shard: Tensor, spans: Sequence[Span], scale: float) -> Handle[None]:
        """Send the messages of a run; what comes is added when waited for."""
        if self.peers.size == 1:
            return Handle(None, (), lambda: None)
        run = self._encoded(shard, tuple(spans), scale)
        self._runs[run.spans] = run
        across, own = self.peers.scatter_later(run.messages), self.peers.index

        def finish() -> None:
            total = [piece.member(own) for piece in self._pieces(run.rows, run.places)]
            self.wire.reduce(across.wait(), total, Reduce(accumulate=True), without=own)
            if run.rows is not shard:
                self.deliver(shard, run.spans, run.rows, slice(own, own + 1))
            spread_back(self.context, shard, run.spans, self._down, self._dense_wire)

        return Handle(None, (), finish)

    def _encoded(self, shard: Tensor, spans: tuple[Span, ...], scale: float) -> _Sent:
        """A run with the message for each other member."""
        # What is sent back would overwrite rows that are needed until the step is decided: those are copied.
        whole = self._inner is None and self._down.size == 1
        rows, places = (shard, spans) if whole else (self.table(shard, spans), places_of(spans))
        owing = self.residual is not None and spans not in self._paid
        numel = total_numel(self._pieces(rows, places))
        messages = torch.empty(self.peers.size, self.wire.nbytes(numel), dtype=torch.uint8, device=rows.device)
        run = _Sent(spans, rows, places, messages, scale, owing)
        sent, columns = (self._wanted(run), places_of(spans)) if owing else (rows, places)
        self.wire.encode(self._pieces(sent, columns), messages, without=self.peers.index)
        return run

    def _pieces(self, rows: Tensor, spans: Sequence[Span]) -> list[Piece]:
        """Some columns of the rows ``[P, ...]``, one row for each member, each span filled up to whole blocks."""
        return span_pieces(rows[:, None], merged(spans, self.wire.block), self.wire.block)

    def _halves(self) -> tuple[tuple[slice, slice], ...]:
        """The members but this rank, before it and after it, and their rows of the residual."""
        own = self.peers.index
        return (slice(own), slice(own)), (slice(own + 1, None), slice(own, None))

    def _wanted(self, run: _Sent) -> Tensor:
        """What members should get if nothing were lost, FP32 ``[P, C]``: the rows, plus the residual if it is due."""
        wanted = self.columns(run.rows, run.places)
        if run.owing:
            assert self.residual is not None
            spans, add = merged(run.spans), Reduce(run.scale, accumulate=True)
            for (begin, end), place in zip(spans, places_of(spans), strict=True):
                owed = self.residual[:, begin:end].view(torch.uint8)
                for others, rows in self._halves():
                    exact(self.context).decode(owed[rows], span_pieces(wanted[others, None], [place]), add)
        return wanted

    def _lost(self, run: _Sent) -> Tensor:
        """What members should have got and did not, FP32 ``[P, C]``, times the loss scale; the own row is of no use."""
        lost = self._wanted(run)
        pieces = self._pieces(lost, places_of(run.spans))
        self.wire.decode(run.messages, pieces, Reduce(-1.0, accumulate=True), without=self.peers.index)
        return lost

    def undelivered(self, run: _Sent) -> Tensor | None:
        """What quantization took away, nothing for this rank itself; without error feedback it is dropped."""
        if self.residual is None:
            return None
        lost = self._lost(run)
        lost[self.peers.index] = 0
        return lost

    def give_back(self, rows: Tensor, spans: Sequence[Span], left: Tensor) -> None:
        """To the rows of the others: the own one was delivered whole."""
        for others, _ in self._halves():
            self._put(rows[others], spans, left[others])

    def keep(self, run: _Sent) -> None:
        """What quantization took away, without the loss scale."""
        if self.residual is None:
            return
        lost = self._lost(run)
        if run.scale != 1:
            lost.div_(run.scale)
        for others, rows in self._halves():
            self._put(self.residual[rows], run.spans, lost[others])

    def _put(self, rows: Tensor, spans: Sequence[Span], table: Tensor) -> None:
        """A table ``[r, C]`` -> some columns of rows ``[r, F]``."""
        exact(self.context).decode(table.view(torch.uint8), span_pieces(rows[:, None], merged(spans)))

    def state_bytes(self) -> int:
        """Bytes of the residual."""
        return 0 if self.residual is None else self.residual.nbytes

    def state_dict(self) -> dict[str, Tensor]:
        """The residual."""
        return {} if self.residual is None else {"residual": self.residual}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the residual, or start with none owed; refuse another shape."""
        if self.residual is None:
            return super().load_state_dict(state)
        if not state:
            self.residual.zero_()
            return
        if set(state) != {"residual"} or state["residual"].shape != self.residual.shape:
            shapes = {name: tuple(value.shape) for name, value in state.items()}
            raise ValueError(f"quantized sync needs a residual of {tuple(self.residual.shape)}, not {shapes}")
        self.residual.copy_(state["residual"])


build_mode.register(QuantizedSync, Quantized)
