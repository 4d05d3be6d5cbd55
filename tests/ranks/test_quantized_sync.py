# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Quantized sync: nothing is lost, only late; skipped steps, loss scales and second thoughts change no state."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.harness import run_threads
from tests.ranks.test_sparse_modes import HIERARCHY
from tests.ranks.worlds import PLAIN, SLOTS, World, assert_changes_nothing, either_placement, owned, synced, world
from zero_topo.collectives.exchange import to_each
from zero_topo.collectives.pack import merged, span_pieces
from zero_topo.cost import memory_bytes, step_bytes
from zero_topo.engine.stage3 import Stage3
from zero_topo.quant import reference
from zero_topo.quant.messages import Messages, to_members
from zero_topo.quant.ops import Quantizer
from zero_topo.quant.pieces import Piece, piece_of, read_all
from zero_topo.quant.spec import BlockSpec, Format, Reduce
from zero_topo.sync.quantized import Quantized
from zero_topo.topology.model import Topology

Q4 = {"mode": "quantized", "bits": 4, "block_size": 64}


def block(setting: str = "topo", **sync: Any) -> dict[str, Any]:
    """A block with quantized sync and nothing else quantized."""
    return {**HIERARCHY[setting], "quantize": PLAIN, "sync": {**Q4, **sync}}


def mode(engine: Stage3) -> Quantized:
    """The mode of an engine."""
    assert isinstance(engine.gradients.mode, Quantized)
    return engine.gradients.mode


def residual(engine: Stage3) -> Tensor:
    """What the rank owes, ``[other peers, F]``."""
    debt = mode(engine).residual
    assert debt is not None
    return debt


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


@pytest.mark.parametrize(("how", "steps"), [("once", 5), ("late", 3), ("peek", 3)])
@pytest.mark.parametrize("setting", HIERARCHY)
@either_placement
def test_what_has_not_arrived_is_owed(setting: str, machine: Topology, how: str, steps: int) -> None:
    """Over any number of steps: the gradients' sum = what arrived + what all ranks still owe.

    Also where a step syncs twice: for a gradient that comes after its run was synced, or peeks before the step.
    """
    w, late = world(block(setting), machine), 0.5 * (how == "late")

    def before_sync(engine: Stage3, step: int) -> None:
        if late:
            engine.gradients.scatter((4,), [w.grads(engine.layout.rank, step)[4] * late], last=True)
        for _ in range(2 * (how == "peek")):
            engine.gradients.peek()

    def rank_main(rank: int) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        engine, arrived = train(w, rank, steps, before_sync)
        across = mode(engine).across
        others = [member for member in w.config.plan.group(rank, across.lo, across.hi) if member != rank]
        return arrived, list(zip(others, residual(engine), strict=True))

    results = run_threads(w.size, rank_main)
    owed: dict[int, Tensor] = defaultdict(lambda: torch.zeros(w.columns))
    for _, debts in results:
        for member, debt in debts:
            owed[member] += debt
    own = torch.ones(w.columns)
    own[-w.config.plan.shard_numel(w.numels[4]) :] += late
    for rank, (arrived, _) in enumerate(results):
        total = own * torch.stack([w.own_mean(rank, step) for step in range(steps)]).sum(0)
        assert owed[rank].abs().max() > 1e-3
        assert torch.allclose(arrived + owed[rank], total, atol=2e-6)


def test_each_senders_books_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per sender: the sum of its messages = the sum of its gradients minus its present residual, bit for bit late."""
    w, spec = world({**block(), "overlap": False}), BlockSpec(4, 64)
    sent: dict[int, list[Tensor]] = defaultdict(list)

    def noted(hop: Any, send: Tensor) -> Any:
        if send.dim() == 2:  # sync's; the scatter's are [members, destinations, bytes]
            sent[torch.distributed.get_rank()].append(send.clone())
        return to_each(hop, send)

    monkeypatch.setattr("zero_topo.collectives.peers.to_each", noted)

    def rank_main(rank: int) -> tuple[Tensor, Tensor, Any]:
        given: list[Tensor] = []
        engine, _ = train(w, rank, 4, lambda engine, _: given.append(engine.gradients.buffer.clone()))
        other = 1 - mode(engine).across.index
        return torch.stack(given)[:, other].sum(0), residual(engine)[0], (other, engine.layout)

    for rank, (given, debt, (other, layout)) in enumerate(run_threads(w.size, rank_main)):
        total = torch.zeros_like(given)
        for message in sent[rank]:
            values = torch.zeros(1, layout.columns)
            pieces = span_pieces(values, merged(layout.spans(SLOTS), 64), 64)
            reference.dequantize_reduce(to_members(message[other]), spec, pieces, Reduce())
            total += values[0]
        assert torch.allclose(total, given - debt, atol=1e-6)


@pytest.mark.parametrize("setting", HIERARCHY)
def test_overlap_changes_no_bit(setting: str) -> None:
    """Runs synced under the backward pass give what one sync at the step gives, residuals included."""

    def rank_main(rank: int, overlap: bool) -> Tensor:
        w = world({**block(setting), "overlap": overlap})
        engine = w.engine(chunk=600)
        for step in range(3):
            grads = w.grads(rank, step)
            for slots in [(4,), (3, 2), (1, 0)]:
                engine.gradients.scatter(slots, [grads[i] for i in slots], last=True)
            engine.gradients.sync()
            rows = engine.gradients.optimizer_rows().clone()
            engine.end_step(skipped=False)
        return torch.cat([rows, residual(engine)])

    assert_changes_nothing(world(block(setting)), rank_main)


def test_a_skipped_step_leaves_the_residual_as_it_was() -> None:
    """An overflow throws a step away, its residual too; NaN reaches the optimizer's row so that it is noticed."""
    w = world(block())

    def rank_main(rank: int) -> tuple[bool, bool]:
        engine, _ = train(w, rank, 2)
        debt = residual(engine)
        before = debt.clone()
        grads = [g * (torch.nan if rank == 3 else 1.0) for g in w.grads(rank, 7)]
        synced(engine, grads)
        seen = bool(owned(engine).isnan().any())
        engine.end_step(skipped=True)
        return torch.equal(debt, before), seen

    assert run_threads(w.size, rank_main) == [(True, True)] * 8


def test_residuals_are_kept_without_the_loss_scale() -> None:
    """A loss scale that changes between steps (a power of two) does not change what is owed."""
    w = world(block())

    def rank_main(rank: int, scaled: bool) -> Tensor:
        scale = 1.0
        engine = w.engine(loss_scale=lambda: scale)
        for step in range(3):
            scale = (64.0, 1024.0, 0.5)[step] if scaled else 1.0
            synced(engine, [g * scale for g in w.grads(rank, step)])
            row = owned(engine) / scale
            engine.end_step(skipped=False)
        return torch.cat([row[None], residual(engine)])

    assert_changes_nothing(w, rank_main)


class Coarse:
    """A backend of two bits: values are -1, 0 or 1 times their block's largest, sent in a format for four."""

    def quantize(self, pieces: Sequence[Piece], spec: Format, out: Messages) -> None:
        x = read_all(pieces)
        if isinstance(spec, BlockSpec):
            blocks = pad(x, (0, -x.shape[1] % spec.block_size)).unflatten(1, (-1, spec.block_size))
            top = blocks.abs().amax(2, keepdim=True).clamp(min=1e-30)
            x = ((blocks / top).round() * top).flatten(1)[:, : x.shape[1]].contiguous()
        whole = piece_of(x[:, None])
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
            mode(engine).wire = replace(mode(engine).wire, quantizer=Quantizer("coarse", Coarse()))
            total = torch.zeros(engine.layout.columns)
            steps = 40
            for _ in range(steps):
                synced(engine, w.grads(rank, 0))  # the same gradient again and again
                total += owned(engine)
                engine.end_step(skipped=False)
            wanted = w.own_mean(rank, 0)
            return float((total / steps - wanted).norm() / wanted.norm())

        error[feedback] = max(run_threads(w.size, rank_main))
    assert error[True] < 0.05 < 0.3 < error[False]


def test_no_block_holds_values_of_two_parameters() -> None:
    """A norm's gradients beside a matrix's a thousand times larger keep their own scale."""
    w = world(block(block_size=256, error_feedback=False), numels=(8 * 100, 8 * 100))

    def rank_main(rank: int) -> float:
        engine = w.engine()
        small, large = w.grads(rank, 0)
        synced(engine, [small * 1e-3, large * 1e3])
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
        fresh.load_state_dict(saved)
        debt, restored = residual(engine), residual(fresh)
        same = torch.equal(debt, restored) and bool(debt.any())
        saved["zero_topo"]["degrees"] = {"weights": 4}
        fresh.load_state_dict(saved)
        return same and not restored.any()

    assert all(run_threads(w.size, rank_main))
    with pytest.raises(ValueError, match=r"needs a residual of \(1, \d+\), not \{'residual': \(2, 3\)\}"):
        run_threads(w.size, lambda rank: mode(w.engine()).load_state_dict({"residual": torch.zeros(2, 3)}))


@pytest.mark.parametrize("damaged", [{"residual": torch.zeros(2, 3)}, {"residual": None}, {}])
def test_one_damaged_residual_starts_all_ranks_afresh(
    damaged: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that went on with theirs would send what another does not expect; one line says so, with the rank."""
    w = world(block())

    def rank_main(rank: int) -> bool:
        engine, _ = train(w, rank, 2)
        saved = copy.deepcopy(engine.state_dict())
        if rank == 5:
            saved["zero_topo"]["sync"] = damaged
            saved["zero_topo"]["degrees"] = damaged and saved["zero_topo"]["degrees"]
        fresh = w.engine()
        residual(fresh).fill_(1)
        fresh.load_state_dict(saved)
        return bool(residual(fresh).any())

    assert not any(run_threads(w.size, rank_main))
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert said.startswith(
        "zero_topo: sync starts without the checkpoint's state on all ranks: ranks do not agree with "
    )
    assert "rank 5 of host" in said and said.endswith("look at their files of this checkpoint")


def test_memory_and_bytes_are_the_formulas() -> None:
    """The residual is counted, and the meter's sync bytes are the formula's."""
    w = world(block())

    def rank_main(rank: int) -> None:
        engine, _ = train(w, rank, 1)
        work = engine.workload((False,) * len(w.numels), 1)
        expected = {key: n for key, n in step_bytes(w.config, work).items() if key[0] in ("sync", "scatter")}
        assert {k: n for k, n in engine.meter.last_step().items() if k[0] in ("sync", "scatter")} == expected
        held = memory_bytes(w.config, work, 4)
        assert engine.memory()["residual"] == held["residual"] > 0

    run_threads(w.size, rank_main)
