# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One optimizer step as a program of tasks, module by module, for a rank that stands for all.

Note [A step]
    1. *publish* of the weights updated last, module by module under the first forward pass; without overlap, before it.
       Of codes, first of all a message that says how large the others are.
    2. For every micro-batch, forward through the modules and backward again. A module's *gather* may run once the
       module ``prefetch + 1`` before it is done, which bounds what is held. After a module's backward, its *scatter*.
       The next micro-batch begins when all is scattered, as DeepSpeed waits at the end of a backward pass.
    3. *sync* of a module after its last scatter; without overlap, and in modes that work on all gradients at once,
       after all of them.
    4. The optimizer.
    Every collective is packed (quantized) before it is sent and unpacked after, over memory.
    Gathers, scatters, and sync with publish have a stream each; links are what they have in common.

Note [Stock]
    DeepSpeed's own ZeRO-3 and ZeRO++ send otherwise than this engine: all ranks are one ring, whatever the machine (no
    two hops, but for ZeRO++'s quantized scatter, which has them by design); each linear layer fetches its weights by
    itself, so a layer makes a gather for each of its matrices, and one more for each matrix's scales if it is quantized
    (``partition_parameters.py``); a gradient that fills ``reduce_bucket_size`` alone, as matrices do with the 10^7 of
    DeepSpeed's ZeRO++ tutorial, is reduced by itself, by a ring if it is not quantized. Vectors go with a matrix here;
    DeepSpeed keeps them whole (``stage3_param_persistence_threshold``), and its ZeRO++ reduces each by itself, which is
    left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, get_args

from zero_topo.config import ResolvedConfig
from zero_topo.cost.events import COMPUTE, Task
from zero_topo.cost.time import HopTime, Network
from zero_topo.cost.transformer import Transformer
from zero_topo.cost.volume import ITEMSIZES, Columns, Move, Workload, count_moves, gather_spec, phase_moves

Attention = Literal["flash", "eager"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
PERSISTENT = 10**5  # elements: DeepSpeed's stage3_param_persistence_threshold
SCALES_PER_BYTES = 256 // 4  # bytes of values to a byte of their scales
CODED_BYTES = 2 * (4 + 1) + 1  # masters and codes are read to choose scales and again for the codes, which are written
OPTIMIZER_BYTES = 2 * 12 + 4 + 2  # Adam reads and writes FP32 master, momentum and variance; reads the gradient


_STREAMS: Mapping[str, str] = MappingProxyType(
    {
        "gather_forward": "gathers",
        "gather_backward": "gathers",
        "scatter": "scatters",
        "sync": "steps",
        "publish": "steps",
    }
)


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        model: its shape.
        micro_batch: sequences per rank and micro-batch.
        micro_batches: micro-batches per optimizer step (``K``).
        checkpointing: whether layers run forward again before their backward.
        itemsize: bytes per weight and gradient.
        prefetch: modules gathered ahead (DeepSpeed's ``stage3_prefetch_bucket_size``).
        overlap_scatter: whether the backward pass goes on beside scatters (DeepSpeed's ``overlap_comm``).
        attention: "flash", or "eager", which keeps the matrix of scores for the backward pass.
        stock: whether everything is sent as DeepSpeed's own engine does, see Note [Stock].

    Raises:
        ValueError: if a number is out of range.
    """

    model: Transformer
    micro_batch: int
    micro_batches: int
    checkpointing: bool = True
    itemsize: int = 2
    prefetch: int = 1
    overlap_scatter: bool = True
    attention: Attention = "flash"
    stock: bool = False

    def __post_init__(self) -> None:
        for key, least in (("micro_batch", 1), ("micro_batches", 1), ("itemsize", 1), ("prefetch", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"job: {key} is {getattr(self, key)}; it must be at least {least}")

    @property
    def flops(self) -> float:
        """Model FLOPs of one rank in a step: forward and backward, what is computed twice counted once."""
        tokens = self.micro_batch * self.model.sequence
        return 3.0 * self.micro_batches * sum(self.model.module_flops(tokens))


@dataclass(frozen=True)
class Packet:
    """One collective of one module.

    Attributes:
        phase: as the meter's.
        before, after: seconds to pack and unpack.
        hops: in the order they run.
    """

    phase: str
    before: float
    after: float
    hops: tuple[HopTime, ...]


@dataclass(frozen=True)
class Packets:
    """Builds the collectives of modules; equal modules are built once."""

    config: ResolvedConfig
    job: Job
    network: Network
    _known: dict[tuple[str, Columns], Packet] = field(default_factory=dict, init=False, compare=False, repr=False)

    def of(self, phase: str, columns: Columns) -> Packet:
        """The collective of a phase for a module of these parameters."""
        if (phase, columns) not in self._known:
            self._known[phase, columns] = self._packet(phase, columns)
        return self._known[phase, columns]

    def counts(self) -> Packet:
        """What goes before all publishes of codes: how large they are."""
        hops = (self.network.hop(m.lo, m.hi, float(m.sent), "direct") for m in count_moves(self.config.plan, 1))
        return Packet("publish", 0.0, 0.0, tuple(hops))

    def _packet(self, phase: str, columns: Columns) -> Packet:
        config, itemsize, rates = self._sent_by(phase), self._itemsize(phase), self.network.rates
        moves, message = phase_moves(config, phase, columns, itemsize)
        found = [move for move in moves if move.sent]
        if not found and not (columns.coded and phase.startswith("gather")):  # who holds all decodes his own codes
            return Packet(phase, 0.0, 0.0, ())
        before, after = self._touched(phase, columns, message, sum(move.sent for move in found))
        if self.job.stock and phase in ("gather_forward", "gather_backward", "scatter"):
            matrices = self._matrices(columns.all)
            apart = [phase_moves(config, phase, Columns((width,)), itemsize)[0] for width in matrices]
            scaled = phase != "scatter" and gather_spec(config, phase) is not None
            scales = [[move._replace(sent=move.sent // SCALES_PER_BYTES) for move in moves] for moves in apart]
            found = [move for moves in (*apart, *(scales if scaled else ())) for move in moves if move.sent]
        hops = (self.network.hop(m.lo, m.hi, float(m.sent), self._pattern(phase, m)) for m in found)
        return Packet(phase, before / rates.memory, after / rates.memory, tuple(hops))

    def _sent_by(self, phase: str) -> ResolvedConfig:
        """The config by whose routes a phase goes: those of stock are straight but for a quantized scatter."""
        config = self.config
        if not self.job.stock or (phase == "scatter" and config.gradients_spec is not None):
            return config
        return replace(config, plan=replace(config.plan, inner=None))

    def _pattern(self, phase: str, move: Move) -> str:
        exact = phase == "sync" or self.config.gradients_spec is None
        reduces = "reduce ring" if self.job.stock and exact else "direct"
        return self.network.rates.gather if move.gathers else reduces

    def _matrices(self, widths: Sequence[int]) -> list[int]:
        """Columns that each message of stock is about; vectors go with the first matrix."""
        least = PERSISTENT / self.config.plan.world_size
        large = [width for width in widths if width > least] or [sum(widths)]
        return [large[0] + sum(width for width in widths if width <= least), *large[1:]] if len(large) > 1 else large

    def _itemsize(self, phase: str) -> int:
        config = self.config
        sync = getattr(config.sync, "dtype", None) or config.accumulation_dtype
        name = {"sync": sync, "publish": config.publish.dtype}.get(phase)
        return self.job.itemsize if name is None else ITEMSIZES[name]

    def _touched(self, phase: str, columns: Columns, message: int, sent: int) -> tuple[int, int]:
        """Bytes of memory that packing and unpacking go over."""
        plan, whole = self.config.plan, sum(columns.all) * self.job.itemsize
        if phase == "sync":
            return 2 * sent, 2 * sent
        if phase == "publish":
            own, held = (plan.world_size // degree * sum(columns.coded) for degree in (plan.optimizer, plan.weights))
            return CODED_BYTES * own + message, 2 * held + sent
        if phase == "scatter":
            return plan.world_size * whole + sent, plan.world_size * whole + sent
        members = plan.hop(phase)[1]
        shard = plan.world_size // members * whole
        stored = phase == "gather_backward" and plan.secondary is not None
        packs = gather_spec(self.config, phase) is not None and not stored and not columns.coded
        return (shard + message) * packs, members * (shard + message)


class Program:
    """The tasks of a step, in the order of Note [A step].

    Attributes:
        tasks: of the step.
    """

    def __init__(self, config: ResolvedConfig, job: Job, network: Network) -> None:
        self._config, self._job, self._network = config, job, network
        self._packets = Packets(config, job, network)
        self._modules = job.model.modules()
        self._columns = _columns(config, job)
        self._flops = job.model.module_flops(job.micro_batch * job.model.sequence)
        self._computed: list[int] = []
        self._scattered: list[int] = []
        self._synced: list[int] = []
        self.tasks: list[Task] = []
        self._build()

    def _build(self) -> None:
        if any(columns.coded for columns in self._columns):
            self._transmit("counts", self._packets.counts(), ())
        published = self._publish_all() if not self._config.overlap else ()
        for micro_batch in range(self._job.micro_batches):
            self._micro_batch(micro_batch, published)
        self._sync_rest()
        columns = sum(sum(of.all) for of in self._columns)
        rows = self._config.plan.world_size // self._config.plan.optimizer
        seconds = rows * columns * OPTIMIZER_BYTES / self._network.rates.memory
        after = (*self._computed[-1:], *self._scattered[-1:], *self._synced[-1:])
        self._compute("optimizer", "optimizer", seconds, after)

    def _publish_all(self) -> tuple[int, ...]:
        ends = [self._send("publish", index, ()) for index in range(len(self._modules))]
        return tuple(end for end in ends[-1:] if end is not None)

    def _micro_batch(self, micro_batch: int, published: tuple[int, ...]) -> None:
        """Forward and backward; ``visits`` are (phase of the gather, module)."""
        count, ahead = len(self._modules), self._job.prefetch
        visits = [("gather_forward", index) for index in range(count)]
        visits += [("gather_backward", index) for index in reversed(range(count))]
        start = (*self._computed[-1:], *self._scattered[-1:])
        done: list[int] = []
        gathered: list[int | None] = []
        for visit, (phase, index) in enumerate(visits):
            while len(gathered) <= min(visit + ahead, len(visits) - 1):
                after = (done[-1],) if done else (*start, *(published if not micro_batch else ()))
                gathered.append(self._fetch(*visits[len(gathered)], after, first=micro_batch == 0))
            waits = tuple(found for found in (gathered[visit], *(done[-1:] or start)) if found is not None)
            done.append(self._visit(phase, index, waits))
            if phase == "gather_backward":
                self._reduce(index, done[-1], micro_batch)
                done[-1] = done[-1] if self._job.overlap_scatter else self._scattered[-1]
        self._computed += done

    def _fetch(self, phase: str, index: int, after: tuple[int, ...], first: bool) -> int | None:
        """The gather of a module, behind its publish where that is still under way."""
        if first and phase == "gather_forward" and self._config.overlap:
            published = self._send("publish", index, ())
            after = after if published is None else (*after, published)
        end = self._send(phase, index, after)
        return end if end is not None else max(after, default=None)

    def _visit(self, phase: str, index: int, after: tuple[int, ...]) -> int:
        forward = phase == "gather_forward"
        layer = 0 < index < len(self._modules) - 1
        times = 1 if forward else 3 if self._job.checkpointing and layer else 2
        seconds = times * self._flops[index] / self._network.rates.flops
        return self._compute(
            f"{'forward' if forward else 'backward'} {self._modules[index][0]}", "compute", seconds, after
        )

    def _reduce(self, index: int, computed: int, micro_batch: int) -> None:
        """Scatter, and in the last micro-batch sync, of a module whose backward is the task ``computed``."""
        end = self._send("scatter", index, (computed,))
        self._scattered.append(computed if end is None else end)
        if micro_batch == self._job.micro_batches - 1 and self._early:
            self._sync_one(index, (self._scattered[-1],))

    @property
    def _early(self) -> bool:
        """Whether a module's sync need not wait for the other modules."""
        return self._config.overlap and not self._config.sync.WHOLE

    def _sync_rest(self) -> None:
        after = (*self._computed[-1:], *self._scattered[-1:])
        if self._config.sync.WHOLE:
            packet = self._packets.of("sync", Columns(tuple(width for of in self._columns for width in of.all)))
            self._synced += [end for end in (self._transmit("sync", packet, after),) if end is not None]
        elif not self._early:
            for index in reversed(range(len(self._modules))):
                self._sync_one(index, after)

    def _sync_one(self, index: int, after: tuple[int, ...]) -> None:
        end = self._send("sync", index, after)
        self._synced += [] if end is None else [end]

    def _compute(self, name: str, phase: str, seconds: float, after: tuple[int, ...]) -> int:
        return self._add(Task(name, phase, COMPUTE, seconds, {COMPUTE: seconds}, after))

    def _send(self, phase: str, index: int, after: tuple[int, ...]) -> int | None:
        return self._transmit(self._modules[index][0], self._packets.of(phase, self._columns[index]), after)

    def _transmit(self, name: str, packet: Packet, after: tuple[int, ...]) -> int | None:
        """All tasks of a collective; the index of the last, or None if there is nothing to do."""
        if not packet.hops and not packet.after:
            return None
        end = self._pack(f"pack {name}", packet.phase, packet.before, after)
        for hop in packet.hops:
            holds = {_STREAMS[packet.phase]: hop.seconds, **hop.busy}
            end = self._add(
                Task(f"{packet.phase} {name}", packet.phase, hop.domain, hop.seconds, holds, (end,), hop.nbytes)
            )
        return self._pack(f"unpack {name}", packet.phase, packet.after, (end,))

    def _pack(self, name: str, phase: str, seconds: float, after: tuple[int, ...]) -> int:
        holds = {_STREAMS[phase]: seconds, **({COMPUTE: seconds} if self._network.rates.host_codec else {})}
        return self._add(Task(name, phase, "pack", seconds, holds, after))

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


def _columns(config: ResolvedConfig, job: Job) -> list[Columns]:
    """Of each module's parameters; stock DeepSpeed holds no codes."""
    numels, dims = job.model.numels(), job.model.dims()
    coded = iter(
        Workload.uniform(numels, dims=dims).coded(replace(config, resident_spec=None) if job.stock else config)
    )
    return [Columns.of(config.plan, [(numel, next(coded)) for numel in module]) for _, module in job.model.modules()]
