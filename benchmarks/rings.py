# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks rings``: fits the rates of rings to outputs of rccl-tests and nccl-tests.

Note [Rings of a machine]
    ``T = (P - 1) a + S (P - 1) / (P B)``: ``P`` ranks, ``S`` bytes in all, ``a`` seconds for each
    step of the ring, ``B`` bytes/s. ``B`` is fitted separately inside a node and across nodes.
    ``a`` has one value, and another for small messages, which RCCL and NCCL send by a separate
    protocol (LL) up to a size that is fitted too. The fit minimizes the sum of squared logarithms
    of model over measurement, so that short and long messages count equally. The model is linear in
    ``a`` and ``1 / B``: each round solves least squares of errors relative to the round before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import mul
from pathlib import Path

from zero_topo.cli.output import print_json
from zero_topo.strict import read_text
from zero_topo.topology.rates import Collective, Ring

COLLECTIVES: Mapping[str, Collective] = {"all_gather": "gather", "reduce_scatter": "reduce"}
SMALL_CLASSES = (0, 2**14, 2**15, 2**16)
"""Candidates for the largest message of a rank, in bytes, that the faster protocol sends."""

ENOUGH_POINTS = 4
ROUNDS = 20
TINY = 1e-15  # seconds for a step or a byte: less than on any machine

_NAME = re.compile(
    r"(all_gather|reduce_scatter)|(all_reduce|alltoall|broadcast|sendrecv|gather|scatter|reduce)_perf"
)
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s.*?\son\s+(\S+)\s", re.MULTILINE)
_ROW = re.compile(
    r"^\s*(\d+)\s+\d+\s+[a-z]\w*\s+(?:[a-z]\w*\s+)?(?:-?\d+\s+)?([\d.]+)\s+[\d.]+\s+[\d.]+\s",
    re.MULTILINE,
)
"""Size, count, type, since 2.11 the operation and the root, then time and bandwidths."""


@dataclass(frozen=True)
class Timed:
    """Describes one measured collective: ``ranks`` on ``nodes`` nodes, ``nbytes`` in all,
    ``seconds``.
    """

    collective: Collective
    ranks: int
    nodes: int
    nbytes: float
    seconds: float

    @property
    def message(self) -> float:
        """Return the bytes of a rank's message."""
        return self.nbytes / self.ranks

    @property
    def domain(self) -> str:
        """Return the domain whose links set the pace."""
        return "world" if self.nodes > 1 else "node"

    def ratio(self, rings: Mapping[str, Ring]) -> float:
        """Return the seconds that the ring of the domain would take, over the measured ones."""
        return rings[self.domain].seconds(self.ranks, self.message) / self.seconds


def read_tests(path: Path) -> list[Timed]:
    """Return the out-of-place rows of one output of ``all_gather_perf`` or ``reduce_scatter_perf``.

    Raises:
        ValueError: if the file is neither, or lacks the list of ranks.
    """
    text = read_text(path, str(path), errors="replace")
    named = _NAME.search(text) or _NAME.search(path.name)
    ranks = dict(_RANK.findall(text))
    rows = [(int(nbytes), float(us)) for nbytes, us in _ROW.findall(text)]
    if named is None or named[1] is None or not rows or not ranks:
        missing = (
            "rows of times"
            if not rows
            else "its '# Rank' lines"
            if not ranks
            else "the name of its collective"
        )
        what = f"of {named[2]}" if named and named[2] else f"without {missing}"
        raise ValueError(
            f"{path}: output {what}, from which no ring's rate can be computed; give outputs of "
            "all_gather_perf or reduce_scatter_perf of rccl-tests or nccl-tests, with the "
            "collective in their text or file name"
        )
    world = len(ranks)
    nodes = len(set(ranks.values()))
    collective = COLLECTIVES[named[1]]
    if world != 1 + max(map(int, ranks)):
        raise ValueError(
            f"{path}: lists {world} of {1 + max(map(int, ranks))} ranks; give the whole output"
        )
    return [
        Timed(collective, world, nodes, float(nbytes), us * 1e-6) for nbytes, us in rows if nbytes
    ]


def fit_rings(timed: Iterable[Timed]) -> dict[Collective, dict[str, Ring]]:
    """Fit the rings to measured collectives, by collective and domain; see Note [Rings of a
    machine].

    Raises:
        ValueError: if a collective has too few measurements for the parameters to fit.
    """
    of: dict[Collective, list[Timed]] = {}
    for row in timed:
        of.setdefault(row.collective, []).append(row)
    return {collective: _fit(rows) for collective, rows in of.items()}


def _fit(rows: Sequence[Timed]) -> dict[str, Ring]:
    rows = [row for row in rows if row.ranks > 1]
    if len(rows) < ENOUGH_POINTS or len({row.nbytes for row in rows}) < ENOUGH_POINTS:
        raise ValueError(
            f"{len(rows)} measurements of a collective cannot separate latency from bandwidth; "
            f"measure at least {ENOUGH_POINTS} sizes, such as with `-b 1M -e 1G -f 4`"
        )
    found = min((_fit_class(rows, small) for small in SMALL_CLASSES), key=lambda tried: tried[0])[1]
    shares = {
        name: [abs(row.ratio(found) - 1) for row in rows if row.domain == name] for name in found
    }
    return {
        name: replace(found[name], spread=min(1.0, sum(off) / len(off) or 1e-9))
        for name, off in shares.items()
    }


def _fit_class(rows: Sequence[Timed], small: int) -> tuple[float, dict[str, Ring]]:
    """Return the error and the rings if messages up to ``small`` bytes have a separate step
    time.
    """
    domains = list(dict.fromkeys(row.domain for row in rows))
    large = {(row.domain, row.nbytes) for row in rows if row.message > small}
    if any(sum(name == domain for name, _ in large) < 2 for domain in domains):
        small = 0  # too few long messages to fit a bandwidth
    steps = [False, True] if any(row.message <= small for row in rows) else [False]
    # Columns: seconds of a step, of a small message's step, then of a byte in each domain.
    matrix = [
        [row.ranks - 1.0 if (row.message <= small) == few else 0.0 for few in steps]
        + [(row.ranks - 1) * row.message if row.domain == domain else 0.0 for domain in domains]
        for row in rows
    ]
    model = [row.seconds for row in rows]
    found = [0.0]
    for _ in range(ROUNDS):
        weighted = [
            [cell / seconds for cell in cells] for cells, seconds in zip(matrix, model, strict=True)
        ]
        wanted = [
            1 - math.log(seconds / row.seconds) for row, seconds in zip(rows, model, strict=True)
        ]
        found = [max(value, TINY) for value in _least_squares(weighted, wanted)]
        model = [sum(map(mul, cells, found)) for cells in matrix]
    step, *few = found[: len(steps)]
    below = {"small": small, "small_step": min(step, few[0])} if few else {}
    bandwidths = dict(zip(domains, found[len(steps) :], strict=True))
    rings = {name: Ring(1 / of_byte, step, **below) for name, of_byte in bandwidths.items()}  # type: ignore[arg-type]
    return sum(math.log(row.ratio(rings)) ** 2 for row in rows), rings


def _least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Return the ``x`` that minimizes the squares of ``rows x - wanted``, by elimination in the
    normal equations.
    """
    width = range(len(rows[0]))
    table = [
        [
            *(sum(row[i] * row[j] for row in rows) for j in width),
            sum(map(mul, (row[i] for row in rows), wanted)),
        ]
        for i in width
    ]
    for i in width:
        for j in (j for j in width if j != i):
            share = table[j][i] / table[i][i]
            table[j] = [a - share * b for a, b in zip(table[j], table[i], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(table)]


def show_rings(files: Iterable[Path]) -> None:
    """Fit rings to outputs of rccl-tests or nccl-tests, and print them as ``--set rates=FILE``
    reads them.

    Raises:
        ValueError: if a file is no such output.
    """
    found = fit_rings(row for path in files for row in read_tests(path))
    print_json(
        {
            "rings": {
                kind: {name: asdict(ring) for name, ring in of.items()}
                for kind, of in found.items()
            }
        }
    )
