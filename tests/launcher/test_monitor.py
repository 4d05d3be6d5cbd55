# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's own monitors and its log tell of zero_topo: every step, at DeepSpeed's own count
of samples.

And what ``"scheme": "auto"`` says of the plan it chose, on every rank the same, for the model it
has.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch.distributed as dist

import zero_topo
from tests.launcher.training import Job, advance, block, largest_difference, running, train
from tests.marks import core
from zero_topo.cost import by_domain
from zero_topo.observe.runlog import read_metrics, read_report
from zero_topo.observe.tables import render
from zero_topo.units import format_count

STEPS, MICRO_BATCHES = 3, 2
RADIUS = {"mode": "radius", "density": 0.1, "interval": 2}


def table(folder: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one file of the CSV monitor."""
    rows = list(csv.reader((folder / "job" / f"{name}.csv").read_text().splitlines()))[1:]
    return [int(step) for step, _ in rows], [float(value) for _, value in rows]


def test_monitors_get_bytes_times_and_densities_of_each_step(rank: int, shared_path: Path) -> None:
    """Rank 0's meter by domain, on the axis of the learning rate that DeepSpeed logs."""
    metered: list[dict[str, int]] = []
    csv_monitor = {"enabled": True, "output_path": str(shared_path), "job_name": "job"}
    ds = {"csv_monitor": csv_monitor, "steps_per_print": 2}
    job = Job(zero_topo=block("topo", sync=RADIUS), micro_batches=MICRO_BATCHES, ds=ds)
    with running(job) as engine:
        for step in range(STEPS):
            advance(job, engine, step, step + 1)
            metered.append(by_domain(engine.optimizer.topo.meter.last_step))
    dist.barrier()
    if rank == 0:
        axis, _ = table(shared_path, "Train_Samples_lr")
        assert axis == [4 * MICRO_BATCHES * dist.get_world_size() * step for step in (1, 2, 3)]
        assert {"gpu", "world"} <= set(metered[0])
        for domain in metered[0]:
            assert table(shared_path, f"zero_topo_bytes_{domain}") == (
                axis,
                [sent[domain] for sent in metered],
            )
        for phase in ("gather_forward", "scatter", "sync", "publish"):
            steps, milliseconds = table(shared_path, f"zero_topo_ms_{phase}")
            assert steps == axis and min(milliseconds) > 0
        assert min(table(shared_path, "zero_topo_peak_bytes")[1]) > 1e6
        densities = [path for path in (shared_path / "job").glob("zero_topo_sync_*density*.csv")]
        assert densities and all(table(shared_path, path.stem)[0] == axis for path in densities)


def test_the_key_report_leaves_a_run_with_losses_and_a_page(rank: int, shared_path: Path) -> None:
    """Rank 0 alone, from its own measurements, when the engine is destroyed.

    Other ranks write nothing, and their engines keep DeepSpeed's own step.
    """
    folder = shared_path / "run"
    job = Job(zero_topo=block("topo", report=str(folder)), steps=STEPS, micro_batches=MICRO_BATCHES)
    with running(job) as engine:
        advance(job, engine, 0, STEPS)
        sent = zero_topo.stats(engine).step_bytes
        assert ("step" in vars(engine)) == (rank == 0)
    dist.barrier()
    steps = [line for line in read_metrics(folder) if "lr" in line]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2, 3]
    last = {f"{phase}/{domain}": nbytes for (phase, domain), nbytes in sent.items()}
    assert rank or steps[-1]["sent"] == last
    report = read_report(folder)
    assert report["zero_topo"]["ranks"] == 1 and report["steps"] == STEPS
    assert {"report.html", "loss.png", "bytes.png"} <= {path.name for path in folder.iterdir()}
    assert "Sent by one rank per optimizer step" in render(folder)


@pytest.mark.parametrize("zero_init", [False, core(True)])
def test_auto_chooses_explains_and_trains_as_zero3(
    rank: int, zero_init: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Unquantized: within 1e-5 of stock ZeRO-3, also where the model is partitioned before there is
    an engine.
    """
    job = Job(
        zero_topo=block("auto", sync={"mode": "dense"}),
        steps=STEPS,
        zero_init=zero_init,
    )
    with running(job) as engine:
        found = zero_topo.stats(engine)
        losses = advance(job, engine, 0, STEPS)
        numel = sum(parameter.ds_numel for parameter in engine.module.parameters())
    said = [line for line in caplog.messages if "scheme auto: weights on " in line]
    assert bool(said) == (rank == 0)
    for line in said[:1]:
        assert "optimizer states on 4 ranks; needs " in line
        assert f"counted for {format_count(numel)} parameters, as " in line
    assert (found.config.sync.MODE, found.config.weights_spec) == ("dense", None)
    assert largest_difference(losses, train(job.under(None))) <= 1e-5
