# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The machine, the model and the job that a command is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_topo.cli.inputs import LIKE_PARAMS, machine, read_count
from zero_topo.config.deepspeed_parts import half_precision
from zero_topo.cost.job import Job, deepspeed_settings
from zero_topo.cost.model_files import load_model
from zero_topo.cost.transformer import SEQUENCE, Model, scaled
from zero_topo.topology import Topology, preset_names
from zero_topo.topology.model import MOST_RANKS
from zero_topo.topology.presets import load_machine


def machine_of(setting: Any, nodes: int | None, ranks: str | None) -> Topology:
    """The machine that a command's options name, or that is described.

    Args:
        setting: as the option ``--machine``, or the config's ``topology``.
        nodes: the number of nodes.
        ranks: the number of ranks, as written.

    Raises:
        ValueError: if there is none, or its ranks do not add up.
    """
    count = None if ranks is None else read_count(ranks, "--ranks", most=MOST_RANKS)
    if nodes is not None:
        found = nodes * _ranks_per_node(setting, nodes)
        if count not in (None, found):
            raise ValueError(
                f"--nodes {nodes} of {setting} are {found} ranks, but --ranks is {count}; give one "
                "of the two"
            )
        count = found
    return machine(setting, count)


def _ranks_per_node(setting: str, nodes: int) -> int:
    if setting in preset_names():
        count = load_machine(setting).ranks_per_node
        if count is None:
            raise ValueError(f"--nodes {nodes}: {setting} has one node of any size; give --ranks")
        return count
    if setting == "auto":
        known = ", ".join(preset_names())
        raise ValueError(
            f"--nodes {nodes}: of which machine? give --machine (known: {known}; or a .json file)"
        )
    described = machine(setting, None)
    if described.nodes != nodes:
        raise ValueError(
            f"--nodes {nodes}: {setting} describes {described.nodes} nodes; leave --nodes out, or "
            "change the description"
        )
    return described.ranks_per_node


def model_of(model: str | None, params: str | None, seq: int | None = None) -> Model | None:
    """The model that a command's options name or describe, if they do.

    Raises:
        ValueError: if it is not known, or named twice.
    """
    if model is not None:
        if params is not None:
            raise ValueError(f"--model {model} has a shape of its own; leave --params out")
        return load_model(model, seq)
    if params is None:
        return None
    return scaled(read_count(params, "--params", LIKE_PARAMS), seq or SEQUENCE)


def job_of_config(loaded: Mapping[str, Any], model: Model, ranks: int) -> Job:
    """The job of a DeepSpeed config; what the config does not say is 1.

    Args:
        loaded: the config.
        model: the model.
        ranks: the data-parallel ranks.

    Raises:
        ValueError: for wrong settings.
    """
    micro = _positive(loaded, "train_micro_batch_size_per_gpu")
    steps = _positive(loaded, "gradient_accumulation_steps")
    batch = _positive(loaded, "train_batch_size")
    if steps is None and batch is not None:
        sharing = _positive(loaded, "sequence_parallel_size") or 1
        steps = batch * sharing // ((micro or 1) * ranks)
    return Job(
        model,
        micro or 1,
        max(1, steps or 1),
        itemsize=2 if half_precision(loaded) else 4,
        tensor=tensor_of(loaded),
        **deepspeed_settings(loaded),
    )


def _positive(loaded: Mapping[str, Any], key: str) -> int | None:
    value = loaded.get(key)
    return value if isinstance(value, int) and value > 0 else None


def tensor_of(loaded: Mapping[str, Any]) -> int:
    """The number of ranks that share each micro-batch by tensor parallelism."""
    block = loaded.get("tensor_parallel") or {}
    size = block.get("autotp_size") or (block.get("tp") or {}).get("tp_size")
    return size if isinstance(size, int) and size > 1 else 1
