# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A run that goes on with another number of nodes loses nothing of what its sparse sync still owed."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.ranks.test_sparse_modes import PLACES, mode_of
from tests.ranks.worlds import PLAIN, World, shuffled, synced, world
from zero_topo.cli import main
from zero_topo.engine.residual_transfer import FILE, carried, carry
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import emulated

RESIDUAL = {"topk_a": {"density": 0.05}, "oktopk": {"density": 0.05}, "radius": {"density": 0.1}, "tagc": {}}
# More nodes; fewer ranks; another placement; another plan.
OTHERS = [
    ("topo", emulated(3, 2, 2)),
    ("topo", emulated(2, 1, 2)),
    ("gradients in a GPU", shuffled(emulated(2, 2, 2))),
    ("data parallel", emulated(5, 1, 1)),
]


def sparse(place: str, machine: Topology, mode: str) -> World:
    """A world with a sparse mode on a machine."""
    return world({**PLACES[place], "quantize": PLAIN, "sync": {"mode": mode, **RESIDUAL[mode]}}, machine)


def owed_after(w: World, folder: Path | None, steps: int, save: Path | None = None) -> dict[str, Tensor]:
    """What all ranks owe together, by parameter, after some steps; each rank's state saved as DeepSpeed would."""

    def rank_main(rank: int) -> list[tuple[int, Tensor]]:
        engine = w.engine()
        engine.load_state_dict({}, None if folder is None else str(folder))
        for step in range(steps):
            rows = synced(engine, w.grads(rank, step))
            weights = torch.zeros_like(rows)
            with engine.watched(weights.view(-1), 0, 0.1):  # Radius chooses by the update
                weights.sub_(rows, alpha=0.1)
            engine.end_step(skipped=False)
        if save is not None:
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": engine.state_dict()}, save / name)
        owed = mode_of(engine).owed()
        assert owed is not None
        return list(zip(owed.owners, mode_of(engine).debts(), strict=True))

    total: dict[int, Tensor] = defaultdict(lambda: torch.zeros(w.columns))
    for debts in run_threads(w.size, rank_main):
        for owner, debt in debts:
            total[owner] += debt
    rows, begin, sums = torch.stack([total[owner] for owner in range(w.size)]), 0, {}
    for index, numel in enumerate(w.numels):
        width = w.config.plan.shard_numel(numel)
        sums[f"p{index}"] = rows[:, begin : begin + width].reshape(-1)[:numel]
        begin += width
    return sums


@pytest.mark.parametrize("mode", RESIDUAL)
@pytest.mark.parametrize("place", PLACES)
def test_the_sum_of_what_is_owed_stays(place: str, mode: str, tmp_path: Path) -> None:
    """Element by element, from any plan to any other: parameters of odd sizes, ranks placed at random."""
    universal = tmp_path / "universal"
    universal.mkdir()
    before = owed_after(sparse(place, emulated(2, 2, 2), mode), None, 4 if mode == "radius" else 3, tmp_path)
    sums = carry(tmp_path, universal)
    assert any(value.any() for value in sums.values())
    afters = [owed_after(sparse(to, machine, mode), universal, 0) for to, machine in OTHERS]
    for name, value in before.items():
        torch.testing.assert_close(sums.get(name, torch.zeros_like(value)), value, atol=1e-6, rtol=1e-6)
        for after in afters:
            torch.testing.assert_close(after[name], value, atol=1e-6, rtol=1e-6)


def test_what_cannot_be_carried_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong folder, a missing one, and a run without residuals; by the command in one line."""
    with pytest.raises(ValueError, match="name the folder of one tag"):
        carry(tmp_path / "nowhere", tmp_path)
    torch.save({"optimizer_state_dict": {}}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(ValueError, match="ds_to_universal"):
        carry(tmp_path, tmp_path / "universal")
    assert main(["carry", str(tmp_path), str(tmp_path)]) == 2
    assert "no rank kept a residual" in capsys.readouterr().err
    assert carried(tmp_path) == {} and carried(None) == {}


@pytest.mark.parametrize(
    ("sync", "owed", "message"),
    [
        ({}, {"p1": torch.zeros(7)}, r"delete zero_topo_owed\.pt"),
        ({"mode": "topk_a"}, {"p4": torch.zeros(7)}, r"7 elements for p4, which has 1280"),
    ],
    ids=["another mode has no place for it, the file may be deleted", "a parameter of another size"],
)
def test_what_does_not_fit_is_refused(
    sync: dict[str, Any], owed: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    """Nothing is dropped silently."""
    torch.save(owed, tmp_path / FILE)
    w = world({"scheme": "topo", "quantize": PLAIN, "sync": sync})

    def rank_main(rank: int) -> None:
        with pytest.raises(ValueError, match=message):
            w.engine().load_state_dict({}, str(tmp_path))

    run_threads(w.size, rank_main)
