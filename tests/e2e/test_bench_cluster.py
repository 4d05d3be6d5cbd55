# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A real emulated cluster, small: its links have their rates, its counters count, training in it
moves what it should.

Skipped where no cluster can be built: it needs root, `ip` and `tc`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records
from benchmarks.emulated_cluster import network
from benchmarks.emulated_cluster.counters import between
from benchmarks.emulated_cluster.network import EmulatedNetwork
from benchmarks.emulated_cluster.spec import LEVELS, MBIT, LinkRates, Spec
from tests.launching import ROOT

REASON = network.refusal()
pytestmark = [pytest.mark.long, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

SPEC = Spec("tiny", 2, 2, 2, LinkRates(120, 80, 40))
PAYLOAD = 2_500_000
HEADERS = 1.02  # of TCP/IP, in frames of 9000 bytes
RECEIVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
connection.sendall(b"!")
"""
SENDER = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
began = time.perf_counter()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.perf_counter() - began)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedNetwork]:
    """Two nodes of two GPUs of two GCDs."""
    with EmulatedNetwork(SPEC) as built:
        yield built


def send(cluster: EmulatedNetwork, source: int, target: int) -> float:
    """Seconds in which the payload goes from one rank to another."""
    address = SPEC.address(target)
    inside = [
        ["ip", "netns", "exec", cluster.space(rank).name, sys.executable, "-c"]
        for rank in (source, target)
    ]
    receiver = subprocess.Popen([*inside[1], RECEIVER, address], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    with receiver.stdout as ready:
        assert ready.readline() == "ready\n"
        sent = [*inside[0], SENDER, address, str(PAYLOAD)]
        seconds = float(subprocess.run(sent, capture_output=True, text=True, check=True).stdout)
    assert receiver.wait() == 0
    return seconds


@pytest.mark.parametrize(("target", "level"), [(1, "gcd"), (2, "gpu"), (4, "node")])
def test_a_link_has_its_rate_and_counts(cluster: EmulatedNetwork, target: int, level: str) -> None:
    """Rank 0 reaches its GPU's other die, its node's other GPU and the other node at the rate of
    the slowest link.

    Within 15% of it, and the kernel counts the payload on the links up to that level and on no
    other.
    """
    before = cluster.at_rest()
    seconds = min(send(cluster, 0, target) for _ in range(2))
    traffic = between(SPEC, before, cluster.at_rest())
    rate = SPEC.rates_mbit.bytes_per_s(level)
    assert 0.85 * rate < PAYLOAD / seconds < 1.15 * rate, f"{PAYLOAD / seconds / MBIT:.1f} Mbit/s"
    for other in LEVELS:
        crossed = traffic.out[other][0]
        if LEVELS.index(other) <= LEVELS.index(level):
            assert 2 * PAYLOAD < crossed < 2 * PAYLOAD * HEADERS
        else:
            assert crossed < 0.001 * PAYLOAD
    assert traffic.drops == 0


# Two nodes of one GPU of two GCDs. Links are fast, so that the test is.
TRAINING = Spec("pairs", 2, 1, 2, LinkRates(800, 800, 400))
WORDS = ["--micro-batches", "2", "--steps", "2", "--params", "265e3", "--layers", "1"]


def bench(folder: Path) -> list[str]:
    """A benchmark's command line without its schemes."""
    path = folder / "spec.json"
    path.write_text(json.dumps(TRAINING.to_json()))
    files = ["--record", str(folder / "record.json")]
    return [sys.executable, "-m", "benchmarks", "cluster", "--spec", str(path), *WORDS, *files]


def test_training_moves_the_bytes_of_the_formula(tmp_path: Path) -> None:
    """Stock with the ring, zero3 and topo, and two of them with TP 2 inside the GPU: the kernel
    counts on each uplink what the formulas say, and no drop. The pair sees the samples of both, so
    losses with TP are those without.
    """
    names = ["stock-ring", "zero3", "topo", "stock-ring-tp2", "topo-tp2"]
    words = [*bench(tmp_path), "--schemes", ",".join(names), "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    records.write(tmp_path / "printed.json", content)  # numbers of lists have six digits there
    assert (tmp_path / "printed.json").read_text() == (tmp_path / "record.json").read_text()
    assert [row["scheme"] for row in content["results"]] == names
    losses = {row["scheme"]: row["loss"] for row in content["results"]}
    for name in ("stock-ring", "topo"):
        assert losses[f"{name}-tp2"] == pytest.approx(losses[name], rel=0.02)
    for row in content["results"]:
        assert row["drops"] == 0 and row["micro_batches"] == 2
        assert 0 < row["step_s"]["min"] <= row["step_s"]["median"] <= row["step_s"]["max"]
        uplink = row["uplink_bytes_per_step_per_node"]
        assert row["uplink_formula"] < uplink < 1.05 * row["uplink_formula"] + PROTOCOL
        metered = {
            phase: reported["metered"]
            for phase, reported in row["phases"].items()
            if "metered" in reported
        }
        assert bool(metered) == (not row["scheme"].startswith("stock"))
    assert content["message_bytes"] == 2 * 264_960 and content["spec"] == TRAINING.to_json()


PROTOCOL = (
    20_000  # barriers, norms, acknowledgements: what hundreds of small messages cost in a step
)
