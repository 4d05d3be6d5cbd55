# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Give every bad config of a JSON file to every way in, and write what each said; end with an error
that escapes.

Usage: refused.py CASES.json DIRECTORY; each rank writes DIRECTORY/<rank>.json.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import zero_topo
from tests.e2e.programs.plain import meet

Call = Callable[[], Any]
Json = dict[str, Any]


class Pipeline:
    """A Megatron-like mpu with two stages."""

    def get_pipe_parallel_world_size(self) -> int:
        """Pipeline stages."""
        return 2


def engine(
    config: Any, initialize: Callable[..., Any] = zero_topo.initialize, width: int = 4, **more: Any
) -> Any:
    """What `initialize` makes of a small model."""
    model = torch.nn.Linear(4, width)
    return initialize(model=model, model_parameters=model.parameters(), config=config, **more)[0]


def ways_in(config: Json, path: Path) -> dict[str, Call]:
    """Every call that takes a config, and every form in which it takes it."""
    import deepspeed

    path.write_text(json.dumps(config))
    return {
        "zero_topo.initialize": lambda: engine(config),
        "deepspeed.initialize": lambda: engine(config, deepspeed.initialize),
        "config_params": lambda: engine(None, deepspeed.initialize, config_params=str(path)),
        "args": lambda: engine(
            None, deepspeed.initialize, args=Namespace(deepspeed_config=str(path))
        ),
        "zero.Init": lambda: deepspeed.zero.Init(config_dict_or_path=config),
        "zero_topo.Init": lambda: zero_topo.Init(config_dict_or_path=str(path)),
    }


def arguments(good: Json) -> dict[str, Call]:
    """Arguments of the calls that a good config cannot work with."""
    return {
        "mpu": lambda: engine(good, mpu=Pipeline()),
        "mesh_param": lambda: engine(good, mesh_param=(1, 2)),
        "remote_device": lambda: zero_topo.Init(config_dict_or_path=good, remote_device="cpu"),
    }


def odd(good: Json, rank: int) -> dict[str, Call]:
    """Calls that rank 1 makes with something else than rank 0."""
    return {
        "block": lambda: engine(
            {
                **good,
                "zero_topo": {**good["zero_topo"], "accumulation_dtype": ("fp32", "bf16")[rank]},
            }
        ),
        "model": lambda: engine(good, width=4 + rank),
        "machine": lambda: engine({**good, "zero_topo": {"scheme": "zero3", "weights": 3}}),
        "hosts": lambda: on_two_hosts(good, rank),
        "nothing": lambda: trains(
            {**good, "steps_per_print": 1 + rank, "wall_clock_breakdown": rank == 1}
        ),
    }


def on_two_hosts(good: Json, rank: int) -> Any:
    """What `initialize` says of one node, as each rank says that it runs on a host of its own."""
    one_node = {"nodes": 1, "gpus_per_node": int(os.environ["WORLD_SIZE"]), "ranks_per_gpu": 1}
    with patch.dict(os.environ, NCCL_HOSTID=f"host {rank}"):
        return engine({**good, "zero_topo": {"topology": one_node, "scheme": "zero3"}})


def trains(config: Json) -> float:
    """A step of an engine."""
    made = engine(config)
    made.backward(made(torch.ones(1, 4)).sum())
    made.step()
    return float(made.global_steps)


def outcome(call: Call) -> Json:
    """What a call raised, and whether a process group existed afterwards."""
    try:
        value = call()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error), "group": dist.is_initialized()}
    return {"type": "none", "text": f"returned {value!r}", "group": dist.is_initialized()}


def optimizer_class(good: Json) -> str:
    """Module and class of the optimizer of an engine whose config has no block."""
    optimizer = engine({key: value for key, value in good.items() if key != "zero_topo"}).optimizer
    return f"{type(optimizer).__module__}.{type(optimizer).__name__}"


def main(cases: Path, directory: Path) -> None:
    """Try all; then, with groups, what only the ranks together can see."""
    rank = os.environ["RANK"]
    given = json.loads(cases.read_text())
    good = given.pop("good")
    path = directory / f"config_{rank}.json"
    said: Json = {
        name: {way: outcome(c) for way, c in ways_in(bad, path).items()}
        for name, bad in given.items()
    }
    said["arguments"] = {name: outcome(call) for name, call in arguments(good).items()}
    said["without_block"] = optimizer_class(good)
    said["odd"] = {name: outcome(call) for name, call in odd(good, int(rank)).items()}
    (directory / f"{rank}.json").write_text(json.dumps(said))
    meet(directory / "end")
    two_nodes = {"nodes": int(os.environ["WORLD_SIZE"]), "gpus_per_node": 1, "ranks_per_gpu": 1}
    engine({**good, "zero_topo": {"topology": two_nodes}})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
