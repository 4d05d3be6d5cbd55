# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A run that goes on with another number of nodes loses nothing of what its sparse sync still
not sent.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import Tensor

from tests.marks import often
from tests.ranks.sync_cases import (
    HIERARCHY,
    Step,
    mode_of,
    observed,
    residuals_of,
    summed,
    sync_world,
)
from tests.ranks.trainer import Trainer
from tests.ranks.worlds import PLAIN, World, residual_table, shards, shuffled, synced, world
from zero_topo.cli import main
from zero_topo.cli.residuals import carry
from zero_topo.engine.residual_transfer import FILE, STATE_KEY, age_rows, carried
from zero_topo.engine.shards import Layout
from zero_topo.plan import Plan
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import emulated

RESIDUAL: dict[str, dict[str, Any]] = {
    "ternary": {},
    "oktopk": {"tau": 64},
    "radius": {"value_dtype": "fp32", "interval": 64},
    "tagc": {"value_dtype": "fp32", "theta": None},
}
EXACT = {"value_dtype": "fp32"}
# More nodes; fewer ranks; another placement; another plan.
OTHERS = [
    ("topo", emulated(3, 2, 2)),
    ("topo", emulated(2, 1, 2)),
    ("gradients in a GPU", shuffled(emulated(2, 2, 2))),
    ("data parallel", emulated(5, 1, 1)),
]


def sparse(place: str, machine: Topology, mode: str, **sync: Any) -> World:
    """A world with a sparse mode on a machine."""
    return sync_world(mode, place, machine=machine, **{**RESIDUAL[mode], **sync})


def residuals_after(
    w: World, folder: Path | None, steps: int, save: Path | None = None
) -> dict[str, Tensor]:
    """The residuals of all ranks, summed, by parameter, after some steps; each rank's state saved
    as DeepSpeed would.
    """

    def rank_main(rank: int) -> list[tuple[int, Tensor]]:
        trainer = Trainer(w, rank)
        engine = trainer.engine
        engine.load_state_dict({}, None if folder is None else str(folder))
        for step in range(steps):
            trainer.step(step)
        if save is not None:
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save(
                {"optimizer_state_dict": {"partition_count": w.size, **engine.state_dict()}},
                save / name,
            )
        return residuals_of(engine)

    rows, begin, sums = torch.stack(summed(w, w.on_ranks(rank_main))), 0, {}
    for index, numel in enumerate(w.numels):
        width = w.config.plan.shard_numel(numel)
        sums[f"p{index}"] = rows[:, begin : begin + width].reshape(-1)[:numel]
        begin += width
    return sums


@pytest.mark.parametrize("mode", RESIDUAL)
@pytest.mark.parametrize(
    "place", often(("topo", "replicated optimizer"), (*HIERARCHY, "data parallel"))
)
def test_the_sum_of_residuals_stays(place: str, mode: str, tmp_path: Path) -> None:
    """Element by element, from any plan to any other: parameters of odd sizes, ranks placed at
    random.
    """
    before = residuals_after(
        sparse(place, emulated(2, 2, 2), mode), None, 4 if mode == "radius" else 3, tmp_path
    )
    sums, _ = carry(tmp_path, tmp_path)
    assert any(value.any() for value in sums.values())
    afters = [residuals_after(sparse(to, machine, mode), tmp_path, 0) for to, machine in OTHERS]
    for name, value in before.items():
        torch.testing.assert_close(
            sums.get(name, torch.zeros_like(value)), value, atol=1e-6, rtol=1e-6
        )
        for after in afters:
            torch.testing.assert_close(after[name], value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("mode", "was", "now", "said"),
    [
        ("scape", {"select": "all"}, {"select": "run"}, "its mask was selected of other parts"),
        ("oktopk", {"sharded": False}, {"sharded": True}, ""),
        ("radius", EXACT, {**EXACT, "place": "data parallel"}, "zero-topo carry"),
        ("radius", EXACT, {**EXACT, "numels": (270, 330)}, "zero-topo carry"),
    ],
)
def test_state_of_other_settings_is_not_misread(
    mode: str, was: dict[str, Any], now: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors of the same shapes: no element goes to another, and the next step loses nothing. A
    mask of another plan is not taken over: that step is dense.
    """
    shapes = {"place": "owned", "peers": 3, "numels": (300, 300), "chunk": 300}
    old, new = (sync_world(mode, **{**shapes, **sync}) for sync in (was, now))

    def rank_main(rank: int) -> tuple[Tensor, Step]:
        engine = old.engine()
        for step in range(3):
            synced(engine, old.grads(rank, step))
            engine.end_step(skipped=False)
        saved, engine = engine.state_dict(), new.engine()
        engine.load_state_dict(saved)
        loaded = residual_table(mode_of(engine))
        synced(engine, new.grads(rank, 3))
        return loaded, observed(engine)

    results = new.on_ranks(rank_main)
    assert said in caplog.text and bool(said) == bool(caplog.text)
    for owner, (_, seen) in enumerate(results):
        due = new.own_mean(owner, 3) + sum(loaded[owner] for loaded, _ in results)
        left = sum(dict(step.residuals)[owner] for _, step in results)
        torch.testing.assert_close(seen.own + left, due, atol=1e-5, rtol=1e-5)
        assert mode != "radius" or not torch.as_tensor(left).any()


def test_what_cannot_be_carried_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong folder, a missing one, and a run without residuals; by the command in one line."""
    with pytest.raises(ValueError, match="name the folder of one tag"):
        carry(tmp_path / "nowhere", tmp_path)
    saved(tmp_path, 0, 1, **{STATE_KEY: {}})
    with pytest.raises(ValueError, match="ds_to_universal"):
        carry(tmp_path, tmp_path / "universal")
    assert main(["carry", str(tmp_path), str(tmp_path)]) == 2
    assert "no rank kept a residual" in capsys.readouterr().err
    assert carried(tmp_path) == carried(None) == ({}, {})


def saved(
    folder: Path, rank: int, ranks: int, alongside: dict[str, Any] | None = None, **more: Any
) -> Path:
    """A rank's file as a run of a sparse mode leaves it, with DeepSpeed's own objects next to
    it.
    """
    unsent = {"owners": (rank,), "parameters": {"p": (3 * ranks, 0, 3)}}
    state = {"sync": {"residual": torch.ones(3)}, "residual_owners": unsent} | (alongside or {})
    own = {
        "zero_stage": ZeroStageEnum.weights,
        "loss_scaler": LossScaler(1.0),
        "partition_count": ranks,
    }
    path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {**own, STATE_KEY: state, **more}}, path)
    return path


def test_ages_stay_with_their_elements(tmp_path: Path) -> None:
    """Of two sub-groups on three ranks, the last shard not full: each element's on any other plan
    and placement.
    """
    numels = {"p": 8, "q": 4}
    ages = {name: torch.arange(1, numel + 1, dtype=torch.uint8) for name, numel in numels.items()}
    columns = {"p": (8, 0, 3), "q": (4, 3, 2)}
    cut = Plan.build(emulated(3, 1, 1), ("rank", None, "rank", "world"))
    tables = [shards(cut, value) for value in ages.values()]
    for rank in range(3):
        states = {index: {"age": table[rank]} for index, table in enumerate(tables)}
        saved(tmp_path, rank, 3, {"columns": columns}, optimizer_state_dict={"state": states})
    carry(tmp_path, tmp_path)
    _, saved_ages = carried(tmp_path)
    for machine in (emulated(2, 2, 2), shuffled(emulated(2, 2, 2))):
        for place in ("topo", "replicated optimizer"):
            plan = sparse(place, machine, "ternary").config.plan
            tables = [shards(plan, value) for value in ages.values()]
            for rank in range(8):
                layout = Layout(plan, rank, tuple(numels.values()))
                rows = age_rows(saved_ages, layout, list(numels))
                own = plan.rows(rank, plan.optimizer)
                assert torch.equal(rows, torch.cat([table[own] for table in tables], dim=1))


class Runs:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return subprocess.getoutput, (self._command,)


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    """Neither by ``carry`` nor at a load; DeepSpeed's own objects, and a stranger's, are passed
    over.
    """
    touch = Runs(f"touch {tmp_path}/was_run")
    saved(tmp_path, 0, 2)
    saved(tmp_path, 1, 2, stranger=touch)
    assert carry(tmp_path, tmp_path)[0]["p"].tolist() == [1] * 6
    torch.save({"residuals": {"p": touch}, "ages": {}}, tmp_path / FILE)
    with pytest.raises(ValueError, match="run that again"):
        carried(tmp_path)
    assert not (tmp_path / "was_run").exists()


def test_a_missing_ranks_file_is_noticed(tmp_path: Path) -> None:
    """The sums would be wrong and nothing would show it: not the first's, the last's, nor with a
    stranger next to them.
    """
    saved(tmp_path, 0, 3)
    saved(tmp_path, 1, 3)
    with pytest.raises(
        ValueError, match=r"of the run's 3 ranks .* of rank 2 is missing \(1 in all\)"
    ):
        carry(tmp_path, tmp_path)
    saved(tmp_path, 3, 3)
    with pytest.raises(ValueError, match="rank 2 is missing"):
        carry(tmp_path, tmp_path)
    saved(tmp_path, 2, 3)
    with pytest.raises(ValueError, match=r"4 .* of a run of 3 ranks"):
        carry(tmp_path, tmp_path)
    assert not (tmp_path / FILE).exists()


def test_damaged_files_are_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut anywhere, with single bytes changed, or of the wrong content: exit status 2, never a
    traceback.
    """
    path = saved(tmp_path, 0, 1)
    whole = path.read_bytes()
    flipped = (
        whole[:i] + bytes([whole[i] ^ 0xFF]) + whole[i + 1 :] for i in range(0, len(whole), 97)
    )
    for content in (b"", *(whole[:n] for n in range(1, len(whole), 211)), *flipped):
        path.write_bytes(content)
        status = main(["carry", str(tmp_path), str(tmp_path)])
        said = capsys.readouterr().err.splitlines()
        assert (status, len(said)) in ((2, 1), (0, 0)), said
        assert status == 0 or str(tmp_path) in said[0]
    contents: list[dict[str, Any]] = [
        {"partition_count": "x"},
        {STATE_KEY: []},
        {STATE_KEY: {"sync": 1}},
    ]
    for wrong in contents:
        saved(tmp_path, 0, 1, **wrong)
        assert main(["carry", str(tmp_path), str(tmp_path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    (tmp_path / FILE).write_bytes(whole[:100])
    with pytest.raises(ValueError, match=rf"{FILE}: cannot be read"):
        carried(tmp_path)


@pytest.mark.parametrize(
    ("sync", "what", "name", "message"),
    [
        ({}, "residuals", "p1", r"delete zero_topo_residuals\.pt"),
        ({"mode": "ternary"}, "residuals", "p4", r"7 elements for p4, which has 1280"),
        ({"mode": "ternary"}, "ages", "p4", r"7 elements for p4, which has 1280"),
    ],
)
def test_what_does_not_fit_is_refused(
    sync: dict[str, Any], what: str, name: str, message: str, tmp_path: Path
) -> None:
    """Neither what another mode has no place for, nor what has another size is dropped silently."""
    torch.save({"residuals": {}, "ages": {}, what: {name: torch.zeros(7)}}, tmp_path / FILE)
    w = world({"scheme": "topo", "quantize": PLAIN, "sync": sync})

    def rank_main(rank: int) -> None:
        with pytest.raises(ValueError, match=message):
            w.engine().load_state_dict({}, str(tmp_path))

    w.on_ranks(rank_main)


def test_residuals_without_a_place_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """One gradient domain syncs nothing: of all ranks one says so, and says who it is."""
    w = sparse("topo", emulated(1, 2, 2), "ternary")
    w.on_ranks(lambda rank: mode_of(w.engine()).inherit({}))
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert said.startswith("zero_topo: residuals of another run are dropped")
