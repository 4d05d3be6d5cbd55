# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Installs the hook into DeepSpeed; one of the files (see ``seam.py``) that use its private names.

The seam
    ``DeepSpeedEngine._configure_zero_optimizer`` imports the stage-3 class by name. During that
    call, and only for a config with a ``zero_topo`` block, this name is bound to
    :class:`TopoStage3`; for an engine without an optimizer, the name of DeepSpeed's parameter
    offload class is bound to :class:`TopoInference`. Both only override methods.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import engine as ds_engine
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3 as ds_stage3
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor
from torch.utils.file_baton import FileBaton

from zero_topo.config import deepspeed_hints
from zero_topo.hook.inference import TopoInference, follows_plan
from zero_topo.hook.initialize import checked_first
from zero_topo.hook.loading import loading_together
from zero_topo.hook.optimizer import TopoStage3
from zero_topo.hook.parameters import by_owner
from zero_topo.hook.saving import saving_atomically
from zero_topo.hook.seam import check_deepspeed, replaced, wrapping
from zero_topo.hook.start import agreed, meeting
from zero_topo.hook.stats import report_steps
from zero_topo.leaving import unlink_shared_memory
from zero_topo.observe.log import LOGGER, log_notes, one_line, refusals, show_log
from zero_topo.strict import cut
from zero_topo.sync import OPTIMIZERS
from zero_topo.versions import untried

LOCK_S = 30.0
"""Seconds of waiting for a lock after which a line names it."""


def enable() -> None:
    """Install the hook into DeepSpeed; after ``import zero_topo`` an import of DeepSpeed installs
    it too.

    Later calls do nothing.

    Raises:
        ImportError: if the hook does not fit the installed DeepSpeed, naming the differences.
    """
    if getattr(DeepSpeedEngine, "_zero_topo_hook", False):
        return
    check_deepspeed()
    DeepSpeedEngine._zero_topo_hook = True
    DeepSpeedEngine._configure_distributed_model = meeting(
        DeepSpeedEngine._configure_distributed_model
    )
    DeepSpeedEngine._configure_zero_optimizer = _choosing_class(
        DeepSpeedEngine._configure_zero_optimizer
    )
    DeepSpeedEngine.load_module_state_dict = _loading(DeepSpeedEngine.load_module_state_dict)
    DeepSpeedEngine._get_param_fragment_func = _cut_out(DeepSpeedEngine._get_param_fragment_func)
    DeepSpeedEngine.load_checkpoint = loading_together(DeepSpeedEngine.load_checkpoint)
    DeepSpeedEngine.save_checkpoint = saving_atomically(DeepSpeedEngine.save_checkpoint)
    # A refusal ends a script in one line, not in a traceback.
    sys.excepthook = one_line(sys.excepthook)
    # The deepspeed launcher, if this process is one, passes variables with these beginnings to
    # other nodes.
    accelerator = get_accelerator()
    accelerator.export_envs = _exporting(accelerator.export_envs)
    FileBaton.wait = _reporting(FileBaton.wait)  # type: ignore
    ZERO_SUPPORTED_OPTIMIZERS.extend(OPTIMIZERS.values())
    deepspeed.initialize = checked_first(deepspeed.initialize)
    Init.__init__ = checked_first(Init.__init__)
    Init._convert_to_deepspeed_param = by_owner(Init._convert_to_deepspeed_param)


def _exporting(export_envs: Callable[[], list[str]]) -> Callable[[], list[str]]:
    """Add zero_topo's to the beginnings of variables that DeepSpeed's launcher passes to other
    nodes.

    The launcher quotes a value with quotation marks that a shell of the other node removes, and the
    value's with them.
    """

    @refusals()
    def exported() -> list[str]:
        for name, value in os.environ.items():
            if name.startswith("ZERO_TOPO_") and '"' in value:
                raise ValueError(
                    f"{name} = {cut(value)}: the deepspeed launcher loses its quotation marks on "
                    "the way to other "
                    f"nodes; put it into a file that every node reads, and set {name}=FILE.json"
                )
        return [*export_envs(), "ZERO_TOPO_"]

    return exported


def _reporting(wait: Callable[[FileBaton], None]) -> Callable[[FileBaton], None]:
    """Log which lock torch's compiler waits for, after :data:`LOCK_S`, on one rank of each node.

    DeepSpeed compiles its shared-memory collectives as it starts. A launch that is killed while it
    compiles leaves the lock, for which later ones wait without end.
    """

    @wraps(wait)
    def waited(baton: FileBaton) -> None:
        lock = baton.lock_file_path
        line = (
            "zero_topo: this launch has waited %d s for %s, the lock of a compiler; if no process "
            "compiles there, its owner was killed: rm %s"
        )
        timer = threading.Timer(LOCK_S, LOGGER.warning, (line, LOCK_S, lock, shlex.quote(lock)))
        timer.daemon = True
        if os.environ.get("LOCAL_RANK", "0") == "0":
            timer.start()
        wait(baton)
        timer.cancel()

    return waited


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Install the hook and call ``deepspeed.initialize`` with these arguments.

    Raises:
        ValueError: for an invalid ``zero_topo`` block or machine, before any process group exists.
    """
    enable()
    return deepspeed.initialize(*args, **kwargs)


def init_context(*args: Any, **kwargs: Any) -> Any:
    """Install the hook and return ``deepspeed.zero.Init``, which partitions parameters as they are
    built.
    """
    enable()
    return deepspeed.zero.Init(*args, **kwargs)


@wrapping
def _choosing_class(configure: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    with refusals():
        configs = agreed(engine, optimizer)
    if not configs:
        return configure(engine, optimizer)
    resolved = configs[0]
    rank = dist.get_rank()
    unlink_shared_memory(rank)  # all ranks have agreed, so each has opened the buffers of its host
    show_log(rank)
    log_notes(rank, filter(None, [untried("deepspeed", deepspeed.__version__)]))
    if optimizer is None and not follows_plan(engine):
        log_notes(
            rank,
            [
                "this engine has no optimizer and its weights are not ours to shard: stock ZeRO-3 "
                "gathers them"
            ],
        )
        return configure(engine, None)
    if optimizer is None:
        kind = partial(
            TopoInference,
            configs=[plan.without_training() for plan in configs],
            names=engine.param_names,
        )
        # DeepSpeed builds what this name is bound to.
        with replaced(ds_engine, "DeepSpeedZeRoOffload", kind):
            built = configure(engine, None)
        # To export and load its weights
        engine.checkpoint_engine = TorchCheckpointEngine(engine._config)
    else:
        # They are about speed on GPUs.
        on_cpu = get_accelerator().is_synchronized_device()
        log_notes(
            rank,
            [
                f"machine: {resolved.machine.name}, {resolved.machine.shape}",
                *resolved.notes,
                *([] if on_cpu else deepspeed_hints(engine._config._param_dict)),
            ],
        )
        kind = partial(TopoStage3, configs=configs)
        with replaced(ds_stage3, "DeepSpeedZeroOptimizer_Stage3", kind):
            built = configure(engine, optimizer)
    log_notes(rank, filter(None, [*built.notes(), *built.topo.notes()]))
    for plan in configs[1:]:
        log_notes(rank, [f"experts: {note}" for note in plan.notes])
    report_steps(engine, built)
    return built


@wrapping
def _loading(load: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap DeepSpeed's ``load``: it fills each rank's own shards of frozen parameters, which are
    then published.
    """
    load(engine, *args, **kwargs)
    if isinstance(engine.optimizer, TopoStage3):
        for topo in engine.optimizer.engines():
            topo.restart_frozen()


@wrapping
def _cut_out(fragment: Callable[..., Tensor], engine: Any, param: Any) -> Tensor:
    """Wrap DeepSpeed's ``fragment``: clone a frozen shard that is a view, so its whole storage is
    not saved.
    """
    found = fragment(engine, param)
    return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()


enable()  # importing this module installs the hook, in any order of imports
