# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Quantized sync: nothing is lost, only late; skipped steps, loss scales and second thoughts change no state."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.ranks.worlds import NUMELS, World, shuffled, world
from zero_topo.collectives.exchange import to_each
from zero_topo.collectives.pack import span_pieces
from zero_topo.engine.stage3 import Stage3
from zero_topo.quant import reference
from zero_topo.quant.ops import Quantizer
from zero_topo.quant.pieces import Piece, piece_of, read_all
from zero_topo.quant.spec import BlockSpec
from zero_topo.sync.quantized import Quantized
from zero_topo.topology.presets import emulated

SLOTS = tuple(range(len(NUMELS)))
PLAIN = {"weights": None, "secondary": None, "gradients": None}
Q4 = {"mode": "quantized", "bits": 4, "block_size": 64}
SETTINGS: dict[str, dict[str, Any]] = {
    "topo": {"scheme": "topo"},
    "gpu": {"scheme": "mics", "weights": "gpu"},  # two copies of gradients in a node: a dense hop comes first
    "replicated optimizer": {"scheme": "topo", "optimizer": "node"},
}


def block(setting: str = "topo", **sync: Any) -> dict[str, Any]:
    """A block with quantized sync and nothing else quantized."""
    return {**SETTINGS[setting], "quantize": PLAIN, "sync": {**Q4, **sync}}


def mode(engine: Stage3) -> Quantized:
    """The mode of an engine."""
    assert isinstance(engine.gradients.mode, Quantized)
    return engine.gradients.mode


def owned(engine: Stage3) -> Tensor:
    """The rank's own row, synced."""
    gradients = engine.gradients
    return gradients.buffer[gradients.layout.row(gradients.layout.plan.gradients)].clone()


def train(w: World, rank: int, steps: int, each: Callable[[Stage3, int], None] | None = None) -> tuple[Stage3, Tensor]:
    """Sync `steps` times; the engine and the sum of what arrived in the rank's own row."""
    engine = w.engine()
    arrived = torch.zeros(engine.layout.columns)
    for step in range(steps):
        engine.gradients.scatter(SLOTS, w.grads(rank, step), last=True)
        if each is not None:
            each(engine, step)
        engine.gradients.sync()
        arrived += owned(engine)
        engine.end_step(skipped=False)
    return engine, arrived


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mixed_up", [False, True], ids=["block", "shuffled"])
def test_what_has_not_arrived_is_owed(setting: str, mixed_up: bool) -> None:
    """Over any number of steps: the gradients' sum = what arrived + what all ranks still owe."""
    machine = emulated(2, 2, 2)
    w = world(block(setting), shuffled(machine) if mixed_up else machine)
    steps = 5

    def rank_main(rank: int) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        engine, arrived = train(w, rank, steps)
        debts = mode(engine).residual
        assert debts is not None
        across = mode(engine).across
        members = w.config.plan.group(rank, across.lo, across.hi)
        others = [member for member in members if member != rank]
        return arrived, list(zip(others, debts, strict=True))

    results = run_threads(w.size, rank_main)
    owed: dict[int, Tensor] = defaultdict(lambda: torch.zeros_like(results[0][0]))
    for _, debts in results:
        for member, debt in debts:
            owed[member] += debt
    for rank, (arrived, _) in enumerate(results):
        total = sum(w.own_mean(rank, step) for step in range(steps))
        assert owed[rank].abs().max() > 1e-3
        assert torch.allclose(arrived + owed[rank], torch.as_tensor(total), atol=2e-6)


def test_each_senders_books_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per sender: the sum of its messages = the sum of its gradients minus its present residual, bit for bit late."""
    w = world(block())
    spec = BlockSpec(4, 64)
    sent: dict[int, list[Tensor]] = defaultdict(list)

    def noted(hop: Any, send: Tensor) -> Any:
        if send.dim() == 2:  # sync's; the scatter's are [members, destinations, bytes]
            sent[w_rank()].append(send.clone())
        return to_each(hop, send)

    def w_rank() -> int:
        return int(torch.distributed.get_rank())

    monkeypatch.setattr("zero_topo.collectives.peers.to_each", noted)

    def rank_main(rank: int) -> tuple[Tensor, Tensor, Any]:
        given: list[Tensor] = []
        engine, _ = train(w, rank, 4, lambda e, _: given.append(before_sync(e)))
        debt = mode(engine).residual
        assert debt is not None
        other = 1 - mode(engine).across.index
        return torch.stack(given)[:, other].sum(0), debt[0], (other, engine.layout)

    def before_sync(engine: Stage3) -> Tensor:
        return engine.gradients.buffer.clone()

    w = world({**block(), "overlap": False})
    for rank, (given, debt, (other, layout)) in enumerate(run_threads(w.size, rank_main)):
        total = torch.zeros_like(given)
        for message in sent[rank]:
            values = torch.zeros(1, layout.columns)
            pieces = span_pieces(values, layout.spans(SLOTS), 64)
            reference.dequantize(message[other], spec, pieces)
            total += values[0]
        assert torch.allclose(total, given - debt, atol=1e-6)


@pytest.mark.parametrize("setting", SETTINGS)
def test_overlap_changes_no_bit(setting: str) -> None:
    """Runs synced under the backward pass give what one sync at the step gives, residuals included."""
    results = []
    for overlap in (True, False):
        w = world({**block(setting), "overlap": overlap})

        def rank_main(rank: int, w: World = w) -> tuple[Tensor, Tensor]:
            engine = w.engine(chunk=600)
            for step in range(3):
                grads = w.grads(rank, step)
                for slots in [(4,), (3, 2), (1, 0)]:
                    engine.gradients.scatter(slots, [grads[i] for i in slots], last=True)
                engine.gradients.sync()
                rows = engine.gradients.optimizer_rows().clone()
                engine.end_step(skipped=False)
            debt = mode(engine).residual
            assert debt is not None
            return rows, debt

        results.append(run_threads(w.size, rank_main))
    for (rows, debt), (rows_late, debt_late) in zip(*results, strict=True):
        assert torch.equal(rows, rows_late) and torch.equal(debt, debt_late)


def test_a_skipped_step_leaves_the_residual_as_it_was() -> None:
    """An overflow throws a step away, its residual too; NaN reaches the optimizer's row so that it is noticed."""
    w = world(block())

    def rank_main(rank: int) -> tuple[bool, bool]:
        engine, _ = train(w, rank, 2)
        debt = mode(engine).residual
        assert debt is not None
        before = debt.clone()
        grads = [g * (torch.nan if rank == 3 else 1.0) for g in w.grads(rank, 7)]
        engine.gradients.scatter(SLOTS, grads, last=True)
        engine.gradients.sync()
        seen = bool(owned(engine).isnan().any())
        engine.end_step(skipped=True)
        return torch.equal(debt, before), seen

    results = run_threads(w.size, rank_main)
    assert all(same for same, _ in results)
    assert {rank for rank, (_, seen) in enumerate(results) if seen} == set(range(8))


def test_residuals_are_kept_without_the_loss_scale() -> None:
    """A loss scale that changes between steps (a power of two) does not change what is owed."""
    w = world(block())

    def rank_main(rank: int, scales: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        scale = iter(scales)
        current = [1.0]
        engine = w.engine(loss_scale=lambda: current[0])
        for step in range(3):
            current[0] = next(scale)
            engine.gradients.scatter(SLOTS, [g * current[0] for g in w.grads(rank, step)], last=True)
            engine.gradients.sync()
            rows = owned(engine) / current[0]
            engine.end_step(skipped=False)
        debt = mode(engine).residual
        assert debt is not None
        return rows, debt

    plain = run_threads(w.size, rank_main, (1.0, 1.0, 1.0))
    scaled = run_threads(w.size, rank_main, (64.0, 1024.0, 0.5))
    for (rows, debt), (rows_scaled, debt_scaled) in zip(plain, scaled, strict=True):
        assert torch.equal(rows, rows_scaled) and torch.equal(debt, debt_scaled)


@pytest.mark.parametrize("setting", ["topo", "gpu"])
@pytest.mark.parametrize("how", ["late", "peek"])
def test_a_second_sync_in_a_step_loses_nothing(setting: str, how: str) -> None:
    """A gradient that comes after its run was synced, or a peek before the step: still arrived + owed = given."""
    w = world(block(setting))

    def rank_main(rank: int) -> tuple[Tensor, Any]:
        engine = w.engine()
        arrived = torch.zeros(engine.layout.columns)
        for step in range(3):
            grads = w.grads(rank, step)
            engine.gradients.scatter(SLOTS, grads, last=True)
            if how == "late":
                engine.gradients.scatter((4,), [grads[4] * 0.5], last=True)
            else:
                engine.gradients.peek()
                engine.gradients.peek()
            engine.gradients.sync()
            arrived += owned(engine)
            engine.end_step(skipped=False)
        debt = mode(engine).residual
        assert debt is not None
        across = mode(engine).across
        others = [m for m in w.config.plan.group(rank, across.lo, across.hi) if m != rank]
        return arrived, list(zip(others, debt, strict=True))

    results = run_threads(w.size, rank_main)
    for rank, (arrived, _) in enumerate(results):
        owed = sum((debt for _, debts in results for m, debt in debts if m == rank), torch.zeros_like(arrived))
        total = torch.zeros_like(arrived)
        for r in range(w.size):
            for s in range(3):
                grads = w.grads(r, s)
                if how == "late":
                    grads[4] = grads[4] * 1.5
                total += w.own_columns(rank, grads) / w.size
        assert torch.allclose(arrived + owed, total, atol=4e-6)


class Coarse:
    """A backend of two bits: values are -1, 0 or 1 times their block's largest, sent in a format for four."""

    def quantize(self, pieces: Sequence[Piece], spec: BlockSpec, out: Tensor) -> None:
        x = read_all(pieces)
        blocks = torch.cat([x, x.new_zeros(-x.numel() % spec.block_size)]).view(-1, spec.block_size)
        top = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
        rounded = ((blocks / top).round() * top).view(-1)[: x.numel()]
        whole = piece_of(rounded)
        assert whole is not None
        reference.quantize([whole], spec, out)

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)


def test_two_bits_need_error_feedback() -> None:
    """Where quantization is coarse, feeding the error back is the difference between a mean and a bias."""
    error = {}
    for feedback in (True, False):
        w = world(block(error_feedback=feedback))

        def rank_main(rank: int, w: World = w) -> float:
            engine = w.engine()
            mode(engine).wire.quantizer = Quantizer("coarse", Coarse())
            total = torch.zeros(engine.layout.columns)
            steps = 40
            for _ in range(steps):
                engine.gradients.scatter(SLOTS, w.grads(rank, 0), last=True)  # the same gradient again and again
                engine.gradients.sync()
                total += owned(engine)
                engine.end_step(skipped=False)
            wanted = w.own_mean(rank, 0)
            return float((total / steps - wanted).norm() / wanted.norm())

        error[feedback] = max(run_threads(w.size, rank_main))
    assert error[True] < 0.05 < 0.3 < error[False]


def test_no_block_holds_values_of_two_parameters() -> None:
    """A norm's gradients beside a matrix's a thousand times larger keep their own scale."""
    w = World(world(block(block_size=256, error_feedback=False)).config, (8 * 100, 8 * 100))

    def rank_main(rank: int) -> float:
        engine = w.engine()
        small, large = w.grads(rank, 0)
        engine.gradients.scatter((0, 1), [small * 1e-3, large * 1e3], last=True)
        engine.gradients.sync()
        wanted = 1e-3 * w.own_mean(rank, 0)[:100]
        return float((owned(engine)[:100] - wanted).abs().max() / wanted.abs().max())

    assert max(run_threads(w.size, rank_main)) < 0.1


def test_state_goes_to_a_checkpoint_and_back() -> None:
    """The residual restores; of another shape or mode it is refused; of another plan it starts afresh."""
    w = world(block())

    def rank_main(rank: int) -> bool:
        engine, _ = train(w, rank, 2)
        saved = copy.deepcopy(engine.state_dict())
        fresh = w.engine()
        row = torch.zeros(fresh.layout.columns)
        fresh.load_state_dict(saved, row)
        debt, restored = mode(engine).residual, mode(fresh).residual
        assert debt is not None and restored is not None
        same = torch.equal(debt, restored) and bool(debt.any())
        saved["zero_topo"]["degrees"] = {"weights": 4}
        fresh.load_state_dict(saved, row)
        return same and not restored.any()

    assert all(run_threads(w.size, rank_main))
    with pytest.raises(ValueError, match=r"needs a residual of \(1, \d+\), not \{'residual': \(2, 3\)\}"):
        run_threads(w.size, lambda rank: mode(w.engine()).load_state_dict({"residual": torch.zeros(2, 3)}))


def test_memory_and_bytes_are_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual is counted, and the meter's sync bytes are the formula's."""
    from zero_topo.cost import memory_bytes, step_bytes

    w = world(block())

    def rank_main(rank: int) -> None:
        engine, _ = train(w, rank, 1)
        work = engine.workload((False,) * len(w.numels), 1)
        expected = {key: n for key, n in step_bytes(w.config, work).items() if key[0] in ("sync", "scatter")}
        assert {k: n for k, n in engine.meter.last_step().items() if k[0] in ("sync", "scatter")} == expected
        held = memory_bytes(w.config, work, 4)
        assert engine.memory()["residual"] == held["residual"] > 0

    run_threads(w.size, rank_main)
