# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Runs NeoX's ``train.py`` on each rank, with zero_topo."""

from __future__ import annotations

import base64
import binascii
import json
import os
from argparse import Namespace
from importlib import import_module
from typing import Any

from zero_topo.launch.env import rank_environment
from zero_topo.neox import adapt, cpu
from zero_topo.neox.check import require
from zero_topo.neox.config import config_path
from zero_topo.topology.launchers import launcher_view


def train(options: Namespace) -> None:
    """Train, from base64 arguments or from YAML files, and end the process.

    Raises:
        ValueError: for missing arguments or configs that would not train, before a process group
            exists.
    """
    if bool(options.configs) == bool(options.megatron_config):
        raise ValueError(
            "train needs either CONFIG.yml files or --megatron_config; `launch` writes the latter"
        )
    if options.configs:
        require(options)
    adopt_launcher()
    adapt.reach(options)
    from zero_topo.leaving import leave

    neox_args = arguments(options)
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


def arguments(options: Namespace) -> Any:
    """Return NeoX's arguments object.

    Raises:
        ValueError: if the text is not base64 of JSON.
    """
    neox_args = import_module("megatron.neox_arguments").NeoXArgs
    forced = dict(cpu.OVERRIDES) if options.cpu else {}
    if options.megatron_config is None:
        if "WORLD_SIZE" in os.environ:
            forced["global_num_gpus"] = int(os.environ["WORLD_SIZE"])
        return neox_args.from_ymls([str(config_path(path)) for path in options.configs], forced)
    return neox_args.from_dict(decode(options.megatron_config) | forced)


def decode(text: str) -> dict[str, Any]:
    """Decode a dict from URL-safe base64 of JSON.

    Raises:
        ValueError: for anything else.
    """
    try:
        value = json.loads(base64.urlsafe_b64decode(text))
    except (binascii.Error, UnicodeError, ValueError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(
            f"--megatron_config {text[:20]!r}...: not base64 of a JSON object; let `launch` write "
            "it"
        )
    return value


def adopt_launcher() -> None:
    """Set the variables that torch.distributed reads, under a bare srun or mpirun, which set none
    of them.

    Raises:
        ValueError: if the launcher's variables contradict each other.
    """
    if "RANK" not in os.environ and launcher_view(os.environ) is not None:
        os.environ.update(rank_environment(os.environ))
