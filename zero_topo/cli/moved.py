# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Commands and options of earlier releases, and what to type instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

IN_A_CHECKOUT = "benchmarks are not installed with zero_topo; run in a checkout: python -m benchmarks"
SET_OF_PLAN = ("trainable", "layers", "hidden", "attention", "scheme", "reserve", "sparse", "rates", "deepspeed-config")
VARIABLES = 'type: eval "$(zero-topo launch env --machine NAME)";'
MOVED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "bench": {
            name: f"{IN_A_CHECKOUT} {name}" for name in ("quantizers", "cluster", "convergence", "scale", "sparse")
        },
        "launch": {
            "mpirun": f"{VARIABLES} mpirun -n RANKS --rank-by slot "
            "python -m zero_topo.launch.worker -- python train.py",
            "deepspeed": f"{VARIABLES} deepspeed --no_local_rank --num_accelerators RANKS train.py",
            "torchrun": f"{VARIABLES} torchrun --nnodes NODES --nproc-per-node RANKS --rdzv-backend c10d "
            "--rdzv-endpoint $MASTER_ADDR:$MASTER_PORT train.py, or torchrun --standalone ... on one node",
        },
        "plan": {
            **{f"--{name}": f"type --set {name}=VALUE" for name in SET_OF_PLAN},
            "--states-only": "type --set states-only=true",
            "--no-checkpointing": "type --set checkpointing=false",
            "--force": "type --set force=true",
            "--table": "the paper's tables are tests now, in a checkout: tests/paper.py",
        },
        "simulate": {
            "--rates": "type --set rates=FILE",
            "--force": "type --set force=true",
            "--prefetch": "type --set prefetch=MODULES",
            "--latency": "type --set latency=SECONDS",
            "--no-checkpointing": "type --set checkpointing=false",
            **{name: f"{IN_A_CHECKOUT} fit RECORD {name} SCHEMES" for name in ("--on", "--predict")},
        },
    }
)
"""Command -> subcommand or option -> what to type instead."""


def check_moved(words: Sequence[str]) -> None:
    """Refuse a command line that has a word of an earlier release.

    Raises:
        ValueError: with what to type instead.
    """
    for name in (word.partition("=")[0] for word in (*words[1:2], *(w for w in words[2:] if w.startswith("-")))):
        if instead := MOVED.get(words[0], {}).get(name):
            raise ValueError(f"{words[0]} {name}: {instead}")
