# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Trains an unmodified NeoX with zero_topo; NeoX's own launcher runs this file on each rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from zero_topo.launch.env import rank_environment
from zero_topo.neox import adapt
from zero_topo.neox.check import require
from zero_topo.neox.config import config_path


def launch(configs: Sequence[str], neox_path: str | None) -> None:
    """Start the ranks by NeoX's own launcher.

    Raises:
        ValueError: for configs that would not train as they are written.
    """
    require(configs)
    adapt.reach(neox_path)
    # DeepSpeed's launcher passes it to all nodes.
    found_in = filter(None, (sys.path[0], os.environ.get("PYTHONPATH")))
    os.environ["PYTHONPATH"] = os.pathsep.join(found_in)
    import_module("deepy").main([__file__, *configs])


def train(configs: Sequence[str], neox_path: str | None) -> None:
    """Train from YAML files on this rank, and end the process.

    Raises:
        ValueError: for configs that would not train as they are written, before a process group
            exists.
    """
    require(configs)
    adapt.reach(neox_path)
    start(configs, {})


def start(configs: Sequence[str], forced: Mapping[str, Any]) -> None:
    """Train from YAML files, whatever they hold.

    Args:
        configs: the files.
        forced: NeoX's keys in place of those of the files.
    """
    # A bare srun or mpirun sets no variable that torch.distributed reads.
    if "RANK" not in os.environ:
        with suppress(ValueError):
            os.environ.update(rank_environment(os.environ))
    keys = dict(forced)
    if "WORLD_SIZE" in os.environ:
        keys["global_num_gpus"] = int(os.environ["WORLD_SIZE"])
    paths = [str(config_path(name)) for name in configs]
    _run(import_module("megatron.neox_arguments").NeoXArgs.from_ymls(paths, keys))


def _run(neox_args: Any) -> None:
    """Do what NeoX's ``train.py`` does with its arguments."""
    from zero_topo.leaving import leave

    neox_args.configure_distributed_args()
    changed = adapt.use_the_only_device(neox_args)
    # In every distribution it is not its node's first
    if changed and neox_args.rank == neox_args.world_size - 1:
        print(f"zero_topo.neox: {changed}", flush=True)
    neox_args.build_tokenizer()
    neox_args.initialize_tensorboard_writer()
    neox_args.initialize_comet()
    import_module("megatron.training").pretrain(neox_args=neox_args)
    leave()


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose files would hide modules of other packages
    adapt.reach(None)
    _run(import_module("megatron.neox_arguments").NeoXArgs.consume_neox_args())
