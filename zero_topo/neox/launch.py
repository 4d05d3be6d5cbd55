# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Starts a run: passes NeoX's own arguments to DeepSpeed's launcher or to ``srun``."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from argparse import Namespace
from importlib import import_module
from typing import Any

from zero_topo.config.parts import ROOT
from zero_topo.launch.env import PORT
from zero_topo.neox import cpu
from zero_topo.neox.adapt import reach
from zero_topo.neox.check import require
from zero_topo.neox.config import EXTRA, config_path, load_configs, part

MODULE = "zero_topo.neox"


def launch(options: Namespace) -> int:
    """Start the ranks, or print what would start them; returns the exit status.

    Raises:
        ValueError: for configs that would not train, or if the number of ranks is not known.
    """
    require(options)
    reach(options)
    words = rank_arguments(options)
    if options.srun is not None:
        return _by_srun(srun_command(options, words), options.dry_run)
    command = deepspeed_arguments(words, options)
    if options.dry_run:
        print(shlex.join(["deepspeed", *command]))
        return 0
    from deepspeed.launcher import runner

    runner.main(command)
    return 0


def rank_arguments(options: Namespace) -> list[str]:
    """Return NeoX's launcher arguments: the launcher's options, :data:`MODULE`, base64 arguments of
    each rank.
    """
    forced: dict[str, Any] = dict(cpu.OVERRIDES) if options.cpu else {}
    forced["user_script"] = MODULE
    ranks = number_of_ranks(options)
    if ranks is not None:
        forced["global_num_gpus"] = ranks
    if options.plain:
        extra = part(load_configs(options.configs), EXTRA)
        forced[EXTRA] = {key: value for key, value in extra.items() if key != ROOT}
    neox_args = import_module("megatron.neox_arguments").NeoXArgs.from_ymls(
        [str(config_path(path)) for path in options.configs], forced
    )
    _share_wandb_key(neox_args)
    return [str(word) for word in neox_args.get_deepspeed_main_args()]


def number_of_ranks(options: Namespace) -> int | None:
    """Return the ranks of all nodes: ``--ranks``, or Slurm's number of tasks with srun; None leaves
    it to NeoX.
    """
    if options.ranks is not None or options.srun is None:
        return options.ranks
    tasks = os.environ.get("SLURM_NTASKS")
    if tasks is None:
        raise ValueError(
            "--srun: neither --ranks nor SLURM_NTASKS says how many ranks there are; give --ranks "
            "16"
        )
    return int(tasks)


def deepspeed_arguments(words: list[str], options: Namespace) -> list[str]:
    """Return the arguments for DeepSpeed's launcher: ranks run
    ``python -m zero_topo.neox train``.
    """
    at = words.index(MODULE)
    own = words[:at]
    if options.ranks is not None and "--num_gpus" not in own and "--hostfile" not in own:
        own = [*own, "--num_gpus", str(options.ranks)]
    return [
        "--no_local_rank",
        "--module",
        *own,
        MODULE,
        "train",
        *_train_options(options),
        *words[at + 1 :],
    ]


def srun_command(options: Namespace, words: list[str]) -> list[str]:
    """Return the ``srun`` that starts the ranks without another launcher, so that its binding
    options apply.
    """
    own = shlex.split(options.srun or "")
    nodes = os.environ.get("SLURM_NNODES")
    size = [*(["-N", nodes] if nodes else []), "-n", str(number_of_ranks(options))]
    rank = [sys.executable, "-u", "-m", MODULE, "train", *_train_options(options)]
    return ["srun", *size, *own, *rank, *words[words.index(MODULE) + 1 :]]


def _train_options(options: Namespace) -> list[str]:
    path = ["--neox-path", os.path.abspath(options.neox_path)] if options.neox_path else []
    return [*path, *(["--cpu"] if options.cpu else [])]


def _by_srun(command: list[str], dry_run: bool) -> int:
    if dry_run:
        print(f"export MASTER_ADDR=$(hostname -i) MASTER_PORT={PORT}")
        print(shlex.join(command))
        return 0
    env = dict(os.environ)
    env.setdefault("MASTER_ADDR", socket.gethostbyname(socket.gethostname()))
    env.setdefault("MASTER_PORT", str(PORT))
    return subprocess.run(command, env=env, check=False).returncode


def _share_wandb_key(neox_args: Any) -> None:
    """Pass the key to the ranks by their environment, like NeoX's deepy.py."""
    from deepspeed.launcher import runner

    key = (
        import_module("megatron.utils").get_wandb_api_key(neox_args=neox_args)
        if neox_args.use_wandb
        else None
    )
    if key is not None:
        runner.EXPORT_ENVS.append("WANDB_API_KEY")
        os.environ["WANDB_API_KEY"] = key
