# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Finds an unmodified NeoX and adapts it to train under zero_topo, by wrapping it from outside.

1. ``GPT2ModelPipe.to_sequential`` builds all layers a second time, outside ``zero.Init``: every
   rank would store them unsharded until ``deepspeed.initialize``. Here the second build runs under
   ``zero.Init`` as the first does.
2. ``"optimizer": {"type": "AdamS"}``: NeoX builds its own optimizer from a closed list, to which
   AdamS and AgedAdamW are added.
3. One visible device for each task (``srun --gpus-per-task=1``): NeoX asserts that the local rank
   is ``rank % device_count``, and DeepSpeed uses it as a device index. Both then get 0, and the C++
   helpers, which NeoX has local rank 0 compile, are still compiled by one rank of each node.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args


def reach(neox_path: str | None) -> None:
    """Make ``megatron`` importable, install zero_topo's hook and apply the adaptations to NeoX.

    Args:
        neox_path: a checkout; None if ``megatron`` can be imported.

    Raises:
        ValueError: if there is no NeoX, or something it imports is not installed.
    """
    if neox_path is not None:
        sys.path.insert(0, str(Path(neox_path).resolve()))
    if importlib.util.find_spec("megatron") is None:
        raise ValueError(
            f"NEOX_PATH = {neox_path}: no GPT-NeoX is there; set NEOX_PATH or --neox-path to a "
            "checkout of EleutherAI/gpt-neox"
        )
    from zero_topo.hook.install import enable

    enable()
    try:
        install()
    except ModuleNotFoundError as error:
        raise ValueError(
            f"GPT-NeoX imports {error.name}, which is not installed; install its requirements "
            "(with setuptools<81, which still has pkg_resources)"
        ) from error


def install() -> None:
    """Put the adaptations around NeoX; after ``megatron`` can be imported, before its arguments are
    read.
    """
    from zero_topo.sync import OPTIMIZERS

    training: Any = import_module("megatron.training")
    pipe = import_module("megatron.model").GPT2ModelPipe
    neox_args = import_module("megatron.neox_arguments").NeoXArgs
    pipe.to_sequential = partitioned(pipe.to_sequential)
    training.get_optimizer = with_ours(training.get_optimizer)
    field = neox_args.__dataclass_fields__["optimizer_type"]
    field.type = Literal[(*get_args(field.type), *OPTIMIZERS)]


def use_the_only_device(neox_args: Any) -> str | None:
    """Give NeoX and DeepSpeed device 0 if this process sees one device and is not the first of its
    node.

    The machine's tree is not affected: on Slurm the place of a rank on its node is read from
    SLURM_LOCALID.

    Args:
        neox_args: NeoX's arguments, after ``configure_distributed_args``.

    Returns:
        What was changed, for the log; None if nothing.
    """
    import torch

    placement = int(neox_args.local_rank or 0)
    if placement == 0 or torch.cuda.device_count() != 1:
        return None
    os.environ["LOCAL_RANK"] = "0"
    neox_args.local_rank = 0
    helpers: Any = import_module("megatron.data.data_utils")
    helpers.compile_helper = lambda: None
    return (
        "one device is visible to each task, so NeoX and DeepSpeed get local_rank 0 in place "
        f"of {placement}"
    )


def partitioned(to_sequential: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(to_sequential)
    def wrapper(pipe: Any) -> Any:
        import deepspeed
        import torch.distributed as dist

        if pipe.neox_args.zero_stage != 3:
            return to_sequential(pipe)
        with deepspeed.zero.Init(config_dict_or_path=pipe.neox_args.deepspeed_config):
            model = to_sequential(pipe)
        parameters = list(model.parameters())
        if dist.get_rank() == 0:
            done = sum(hasattr(parameter, "ds_id") for parameter in parameters)
            print(
                f"zero_topo.neox: {done} of {len(parameters)} parameters partitioned as they were "
                "built",
                flush=True,
            )
        return model

    return wrapper


def with_ours(get_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(get_optimizer)
    def wrapper(model: Any, neox_args: Any, dummy: bool = False) -> Any:
        from zero_topo.sync import OPTIMIZERS

        ours = OPTIMIZERS.get(str(neox_args.optimizer_type).lower())
        if neox_args.no_load_optim or dummy or ours is None:
            return get_optimizer(model, neox_args, dummy)
        groups = import_module("megatron.model").get_params_for_weight_decay_optimization(
            model, neox_args
        )
        for group in groups:
            group["params"] = [
                parameter for parameter in group["params"] if parameter.requires_grad
            ]
            for parameter in group["params"]:
                parameter.model_parallel = getattr(parameter, "model_parallel", False)
        settings = {"weight_decay": neox_args.weight_decay, **neox_args.optimizer["params"]}
        return ours(groups, **settings), groups

    return wrapper
