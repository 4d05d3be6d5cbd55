# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint on all ranks or on none: every rank reads and checks its files before any
state changes.

Note [A load that fails]
    DeepSpeed's load alternates between reads, copies and collectives. If one rank cannot read its
    file, it raises an error while the others wait in the next collective. Here each rank first
    reads its files, without a collective, and checks them against this run. Then all ranks compare
    their files' contents: names, dtypes and shapes, and the counts that must be equal. If one rank
    fails or differs, all raise the same error before any state has changed, so a caller who catches
    it can continue. Otherwise DeepSpeed's load uses the files that were read.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import engine as ds_engine
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from zero_topo.engine.agreement import all_can
from zero_topo.engine.residual_transfer import carried, first_line
from zero_topo.engine.stage3 import Stage3
from zero_topo.hook.seam import MODEL_FILES, replaced, wrapping
from zero_topo.sync import Parameter

logger = logging.getLogger(__name__)
COUNTS = ("global_steps", "skipped_steps", "global_samples", "dp_world_size", "mp_world_size")
WAY_OUT = "nothing has changed; copy that rank's files anew, or name another tag"
FRAGMENTS = "frozen_param_fragments"
CONVERT = (
    "convert it with DeepSpeed's ds_to_universal, and load that with "
    '"checkpoint": {"load_universal": true}'
)
RESUME = "with expert_parallel resume with the ranks and the settings that saved it"
Group = dict[str, Any]
Contents = dict[Path, Any]
"""What DeepSpeed gets for a file; some of these files do not exist."""


@wrapping
def loading_together(load: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap DeepSpeed's ``load_checkpoint``: our engines load as in Note [A load that fails].

    Weights loaded without optimizer states come from the named tag on every rank. DeepSpeed would
    load those of the latest tag, and with ``load_module_only`` none (deepspeedai/DeepSpeed#8499).
    """
    if not isinstance(getattr(engine.optimizer, "topo", None), Stage3):
        return load(engine, *args, **kwargs)
    call = inspect.signature(load).bind(engine, *args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    without_optimizer = not engine.optimizer.topo.parameters
    # An engine without an optimizer has no states to load.
    given["load_module_only"] |= without_optimizer
    given["load_optimizer_states"] &= not given["load_module_only"]
    contents: Contents = {}
    tag, groups = _agreed(
        engine, contents, Path(given["load_dir"]), given["tag"], given["load_optimizer_states"]
    )
    given["tag"] = tag
    if tag is not None and not contents:
        if dist.get_rank() == 0:
            logger.warning(
                f"zero_topo: {given['load_dir']}/{tag} does not exist: this engine has no "
                "optimizer, and its weights stay as they are"
            )
        return None, {}
    with _serving(engine, contents, tag):
        loaded = load(*call.args, **call.kwargs)
    if groups:
        _restore_groups(engine.optimizer.param_groups, groups)
    return loaded


def file_name(rank: int, kind: str, tensor_rank: int = 0) -> str:
    """Return DeepSpeed's name of a rank's file of "model" or "optim" states, without the prefix of
    BF16.

    Args:
        rank: its number in the data-parallel group.
        kind: "model" or "optim".
        tensor_rank: its number in the tensor-parallel group.
    """
    return f"zero_pp_rank_{rank}_mp_rank_{tensor_rank:02d}_{kind}_states.pt"


def mapped(path: Path) -> Any:
    """Load a file of ``torch.save``; tensors are memory-mapped."""
    with named(path):
        # As DeepSpeed reads it
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Convert any error inside the context to a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({first_line(error)})") from None


@contextmanager
def _serving(engine: Any, contents: Contents, tag: str | None) -> Iterator[None]:
    """Let DeepSpeed's load use the files that were read, within the context."""
    universal = engine.load_universal_checkpoint()
    whole = ds_engine.get_fp32_state_dict_from_zero_checkpoint
    stock = engine.checkpoint_engine
    search = getattr(DeepSpeedEngine, MODEL_FILES)

    def weights_alone(folder: str) -> dict[str, Tensor]:
        return {} if universal else whole(folder, tag)

    def read_before(path: str, map_location: Any = None) -> Any:
        if Path(path) in contents:
            return contents[Path(path)]
        return stock.load(path, map_location=map_location)

    def model_file(engine: Any, *place: Any) -> list[str]:
        """Return the first file that was read, and those of the other tensor-parallel ranks.

        Fewer ranks may have saved the checkpoint.
        """
        if universal or not contents:
            return list(search(engine, *place)) if universal else []
        own = next(iter(contents))
        # The name says which rank's file was read: the others of that model part lie next to it.
        rank = int(re.findall(r"zero_pp_rank_(\d+)_", own.name)[0])
        names = [file_name(rank, "model", of) for of in range(engine.mp_world_size)]
        return [str(own.with_name(name)) for name in names]

    with (
        replaced(ds_engine, "get_fp32_state_dict_from_zero_checkpoint", weights_alone),
        replaced(DeepSpeedEngine, MODEL_FILES, model_file),
        replaced(engine, "checkpoint_engine", SimpleNamespace(load=read_before)),
    ):
        yield


def _read(engine: Any, path: Path, contents: Contents) -> Any:
    with named(path):
        contents[path] = engine.checkpoint_engine.load(str(path), map_location="cpu")
    return contents[path]


def _agreed(
    engine: Any,
    contents: Contents,
    load_dir: Path,
    tag: str | None,
    states: bool,
) -> tuple[str | None, list[Group]]:
    """Read and check this rank's files, and compare them with the other ranks'. Collective.

    Args:
        engine: DeepSpeed's engine.
        contents: filled with the files that DeepSpeed will read; first, except for a universal
            checkpoint, the file of this rank's model states.
        load_dir: the folder with the folders of all tags.
        tag: the tag to load; None is the latest.
        states: whether optimizer states are loaded.

    Returns:
        The tag, or None if there is no latest; and the optimizer's parameter groups, of a universal
        checkpoint only.

    Raises:
        ValueError: on every rank, naming a rank that cannot load its part.
    """
    facts: dict[str, Any] = {}
    groups: list[Group] = []
    problem = None
    try:
        universal = engine.load_universal_checkpoint()
        latest = load_dir / ("latest_universal" if universal else "latest")
        if tag is None and latest.is_file():
            tag = latest.read_text().strip()
        facts["tag"] = tag
        if tag is not None:
            read, groups = _files(engine, contents, load_dir / str(tag), states)
            facts |= read
    # Kept, not raised: the other ranks wait in the comparison below.
    except Exception as error:  # a damaged file has any content
        problem = f"{load_dir}/{tag}: {first_line(error)}"
        if isinstance(error, ValueError):
            problem = str(error)
    # Tensor-parallel ranks have different parts of the model, of different shapes if a size does
    # not divide.
    groups_of_ranks = [*engine.optimizer.topo.mesh.plans]
    compared = groups_of_ranks if len(groups_of_ranks) > 1 else ()
    if refused := all_can(problem, facts, engine.device, WAY_OUT, compared):
        raise ValueError(f"zero_topo: the checkpoint is not loaded: {refused}")
    return tag, groups


def _files(
    engine: Any,
    contents: Contents,
    folder: Path,
    states: bool,
) -> tuple[dict[str, Any], list[Group]]:
    """Read and check this rank's files of a tag; return the facts that must be equal on all ranks,
    and the parameter groups of a universal checkpoint.
    """
    parameters = engine.optimizer.topo.parameters
    if not engine.load_universal_checkpoint():
        if parameters or folder.exists():
            return _own_files(engine, contents, folder, states), []
        return {"skipped": folder.name}, []  # a save skips an engine without an optimizer
    if len(engine.optimizer.engines()) > 1:
        raise ValueError(
            f"{folder}: with expert_parallel load the run's own checkpoint, not a universal one"
        )
    name = file_name(0, "model", _tensor_rank(engine))
    facts = _model(_read(engine, folder / name, contents))
    groups = _universal(parameters, folder, states, engine.mp_world_size)
    facts["parameter groups"] = _kind_of(groups)
    facts["carried"] = _kind_of([*carried(folder, parameters)])
    return facts, groups


def _own_files(engine: Any, contents: Contents, folder: Path, states: bool) -> dict[str, Any]:
    """Read this rank's files; return the facts that must be equal on all ranks.

    Raises:
        ValueError: if other ranks saved them, or in another order: shards are then cut elsewhere.
    """
    mesh = engine.optimizer.topo.mesh
    tensor_rank = _tensor_rank(engine)
    rank = mesh.rank
    ranks = len(mesh.ranks)
    path, first = (folder / file_name(of, "model", tensor_rank) for of in (rank, 0))
    if not path.is_file() and first.is_file() and mapped(first)["dp_world_size"] <= rank:
        path = first  # fewer ranks saved it
    found = _read(engine, path, contents)
    facts = _model(found)
    if not states:  # frozen weights are then loaded by name with the other weights
        # Without fragments DeepSpeed does not look for frozen weights of its own layout.
        contents[path] = {**found, FRAGMENTS: None}
        return facts
    prefix = "bf16_" if engine.bfloat16_enabled() else ""
    optimizer = folder / f"{prefix}{file_name(rank, 'optim', tensor_rank)}"
    own = engine.optimizer.fp16_groups
    shapes = [{engine.param_names[param]: param.ds_shape for param in group} for group in own]
    way = RESUME if len(engine.optimizer.engines()) > 1 else CONVERT
    if (saved := found.get("dp_world_size", ranks)) != ranks:
        raise ValueError(f"{path} was saved by {saved} ranks, this run has {ranks}: {way}")
    if _sizes(found.get("param_shapes") or shapes) != _sizes(shapes):
        raise ValueError(
            f"{path} has other parameters, or has them in other sub-groups or another order: give "
            "this run the model, the parameter groups and the sub_group_size of the one that saved "
            f"it, or {way}"
        )
    stored = _read(engine, optimizer, contents)
    return {**facts, "optimizer": _optimizer(optimizer, stored, engine.optimizer)}


def _sizes(shapes: Sequence[Mapping[str, Any]]) -> list[list[tuple[str, int]]]:
    """Return the parameters of each sub-group with their sizes: where shards are cut."""
    return [[(name, math.prod(shape)) for name, shape in of.items()] for of in shapes]


def _tensor_rank(engine: Any) -> int:
    """Return this rank's number in its tensor-parallel group, by which DeepSpeed names files."""
    return int(engine.mpu.get_model_parallel_rank()) if engine.mp_world_size > 1 else 0


def _model(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about a model file that must be equal on all ranks; modules' extra state may
    differ.
    """
    module = {
        name: value for name, value in found["module"].items() if not name.endswith("_extra_state")
    }
    kinds = {
        "module": module,
        "frozen": found.get(FRAGMENTS),
        "scheduler": "lr_scheduler" in found,
    }
    return {**_kind_of(kinds), **{key: found[key] for key in COUNTS if key in found}}


def _optimizer(path: Path, found: Mapping[str, Any], optimizer: Any) -> Any:
    """Return the facts about an optimizer file that must be equal on all ranks.

    Raises:
        ValueError: if the saved masters have other sizes than this run's.
    """
    saved = found["optimizer_state_dict"]
    stored = [flat.numel() for flat in saved["fp32_flat_groups"]]
    own = [*optimizer.fp16_partitioned_groups_flat_numel]
    if stored != own:
        raise ValueError(
            f"{path} holds {sum(stored)} masters in sub-groups of {_cut(stored)}, this run has "
            f"{sum(own)} in {_cut(own)}: give it the same model, parameter groups, sub_group_size "
            "and ranks, or load a universal checkpoint"
        )
    return _kind_of(saved)


def _universal(
    parameters: Sequence[Parameter],
    folder: Path,
    states: bool,
    tensor: int,
) -> list[Group]:
    """Check every file of a universal checkpoint without reading its tensors; return the saved
    parameter groups.

    Files have whole parameters, of which each of ``tensor`` tensor-parallel ranks has a part, not
    always an equal one.

    Raises:
        ValueError: for a file that is missing, damaged, or of another size, which would shift all
            later parameters.
    """
    zero = folder / "zero"
    for name, numel in ((p.name, p.numel) for p in parameters):
        for key in ("fp32", "exp_avg", "exp_avg_sq") if states else ("fp32",):
            path = zero / name / f"{key}.pt"
            found = mapped(path)
            saved = found["param"] if isinstance(found, dict) else found
            # A file has the whole parameter, of which a tensor-parallel rank has a part.
            split = tensor > 1 and saved.numel() > numel
            if saved.numel() != numel and not split:
                raise ValueError(
                    f"{path} holds {saved.numel()} elements, but {name} has {numel}: convert it "
                    "anew"
                )
    if not states:
        return []
    groups: list[Group] = mapped(zero / "optimizer_state.pt")["optimizer_state_dict"][
        "param_groups"
    ]
    return groups


def _cut(numbers: list[int]) -> str:
    return f"{numbers[:4]}" if len(numbers) <= 4 else f"{str(numbers[:4])[:-1]}, ...]"


def _kind_of(value: Any) -> Any:
    """Describe some content by names, types, dtypes and shapes, without its values."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {[*value.shape]}"
    if isinstance(value, Mapping):
        return {str(key): _kind_of(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        if any(isinstance(inner, Tensor | Mapping | list | tuple) for inner in value):
            return {str(index): _kind_of(inner) for index, inner in enumerate(value)}
        return f"{len(value)} values"
    return type(value).__name__


def _restore_groups(own: list[Group], saved: list[Group]) -> None:
    """Restore each parameter group's saved settings; DeepSpeed gives the first group's settings to
    all.
    """
    if len(saved) != len(own):
        if dist.get_rank() == 0:
            logger.warning(
                "zero_topo: the universal checkpoint was saved with %d parameter groups, this run "
                "has %d: all have the "
                "settings of the first (learning rate %s); set them after load_checkpoint",
                len(saved),
                len(own),
                saved[0].get("lr"),
            )
        return
    for mine, theirs in zip(own, saved, strict=False):
        mine.update({key: value for key, value in theirs.items() if key != "params"})
