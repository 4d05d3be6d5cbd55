# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Builds an emulated cluster's network, reads its counters, and always takes it down again."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.emulated_cluster import commands
from benchmarks.emulated_cluster.commands import Command
from benchmarks.emulated_cluster.counters import Snapshot, take
from benchmarks.emulated_cluster.spec import LinkRates, Spec

NAMESPACES = Path("/run/netns")
FAST = LinkRates(10_000, 10_000, 10_000)
_REST_S = 0.1  # counters that stay equal for so long are at rest
_PATIENCE_S = 60.0


class EmulatedNetwork:
    """The network of an emulated cluster; use it in a ``with`` block.

    Attributes:
        spec: what it looks like.
        prefix: begins the names of its namespaces, and no other cluster's.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.prefix = _unused_prefix()

    def __enter__(self) -> EmulatedNetwork:
        require()
        try:
            for command in commands.build(self.spec, self.prefix):
                _run(command)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _remove(self) -> None:
        with signal_handled(signal.SIGINT, signal.SIG_IGN):
            for space in commands.spaces(self.spec, self.prefix):
                if (NAMESPACES / space).exists():
                    _run(("ip", "netns", "del", space))

    def space(self, rank: int) -> Path:
        """The file that stands for a rank's network namespace."""
        return NAMESPACES / commands.rank_space(self.prefix, rank)

    def set_rates(self, rates: LinkRates) -> None:
        """Give every link another rate, such as :data:`FAST` while nothing is measured."""
        for command in commands.limits(self.spec, self.prefix, rates):
            _run(command)

    def snapshot(self) -> Snapshot:
        """All counters now."""
        links = _run(("ip", "-n", commands.fabric(self.prefix), "-s", "-j", "link"))
        spaces = commands.spaces(self.spec, self.prefix)
        return take(links, [_run(("tc", "-n", space, "-s", "-j", "qdisc")) for space in spaces])

    def at_rest(self) -> Snapshot:
        """The counters as soon as nothing crosses any link.

        Raises:
            RuntimeError: if something still does after a minute.
        """
        deadline = time.monotonic() + _PATIENCE_S
        last = self.snapshot()
        while time.monotonic() < deadline:
            time.sleep(_REST_S)
            now = self.snapshot()
            if now.total == last.total:
                return now
            last = now
        raise RuntimeError(
            f"the links of the emulated cluster were not at rest for {_PATIENCE_S:.0f} s"
        )


def require() -> None:
    """Make sure that a cluster can be built here.

    Raises:
        ValueError: if not: one line that says what is missing.
    """
    missing = refusal()
    if missing is not None:
        raise ValueError(f"an emulated cluster cannot be built here: {missing}")


def refusal() -> str | None:
    """Why no cluster can be built on this machine, or None if one can."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux's network namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return (
            "it needs root, to make network namespaces and limit the rates of links; run it as root"
        )
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} not found; install iproute2"
    return _kernel_refusal()


def _kernel_refusal() -> str | None:
    """What the kernel (or the container around us) does not allow, found by trying it on a pair of
    links.
    """
    space = f"{_unused_prefix()}-probe"
    try:
        _run(("ip", "netns", "add", space))
    except RuntimeError as error:
        return f"network namespaces are not allowed: {error}"
    try:
        _run(("ip", "-n", space, "link", "add", "left", "type", "veth", "peer", "name", "right"))
        _run(("ip", "-n", space, "link", "add", "middle", "type", "bridge"))
        _run(("tc", "-n", space, "qdisc", "replace", "dev", "left", "root", *commands.bucket(100)))
    except RuntimeError as error:
        return f"the kernel lacks veth, bridge or tbf: {error}"
    finally:
        _run(("ip", "netns", "del", space))
    return None


def _unused_prefix() -> str:
    """A prefix that names this process and no cluster that is there."""
    for number in itertools.count():
        prefix = f"ztopo-{os.getpid()}-{number}"
        if not (NAMESPACES / commands.fabric(prefix)).exists():
            return prefix
    raise AssertionError("count does not end")


@contextmanager
def signal_handled(number: int, handler: Any) -> Iterator[None]:
    """A signal's handler within the block; does nothing in another thread than the main one, which
    alone gets any.
    """
    try:
        before = signal.signal(number, handler)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(number, before)


def _run(command: Command) -> str:
    """The command's output.

    Raises:
        RuntimeError: if it fails, with its own words.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
