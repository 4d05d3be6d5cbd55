# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The machine and the model that a command is about: options that mean the same in all commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from zero_topo.cli.inputs import LIKE_PARAMS, machine, read_count
from zero_topo.cli.options import MACHINES, MODEL_NAMES
from zero_topo.config.deepspeed_parts import half_precision
from zero_topo.cost.job import Job, deepspeed_settings
from zero_topo.cost.model_files import load_model
from zero_topo.cost.transformer import SEQUENCE, Model, scaled
from zero_topo.topology import Topology, preset_names
from zero_topo.topology.model import MOST_RANKS
from zero_topo.topology.presets import load_machine

Ranks = Annotated[
    str | None,
    typer.Option("--ranks", "--world-size", metavar="N", help="Number of ranks."),
]


@dataclass(frozen=True)
class JobOptions:
    """Options of all commands that predict."""

    model: Annotated[
        str | None,
        typer.Option(
            autocompletion=MODEL_NAMES,
            metavar="NAME|FILE",
            help="Model name, Hugging Face config.json or GPT-NeoX YAML.",
        ),
    ] = None
    params: Annotated[
        str | None, typer.Option(metavar="N", help="Parameters of the model, such as 20e9 or 20B.")
    ] = None
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence; default: the model's, or 2048.")
    ] = None
    machine: Annotated[
        str,
        typer.Option(
            autocompletion=MACHINES,
            metavar="PRESET|FILE|JSON",
            help="Preset, .json file or JSON object that describes the machine; auto is this job.",
        ),
    ] = "auto"
    nodes: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of nodes.")] = None
    ranks: Ranks = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = (
        False
    )

    @property
    def counted(self) -> bool:
        """Return whether the options have a number of nodes or ranks."""
        return self.ranks is not None or self.nodes is not None


def machine_of(options: JobOptions) -> Topology:
    """The machine that the options name.

    Raises:
        ValueError: if there is none, or its ranks do not add up.
    """
    ranks = None
    if options.ranks is not None:
        ranks = read_count(options.ranks, "--ranks", most=MOST_RANKS)
    if options.nodes is not None:
        found = options.nodes * _ranks_per_node(options.machine, options.nodes)
        if ranks not in (None, found):
            raise ValueError(
                f"--nodes {options.nodes} of {options.machine} are {found} ranks, but --ranks is "
                f"{ranks}; give one of the two"
            )
        ranks = found
    return machine(options.machine, ranks)


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


def model_of(options: JobOptions) -> Model | None:
    """The model that the options name or describe, if they do.

    Raises:
        ValueError: if it is not known, or named twice.
    """
    if options.model is not None:
        if options.params is not None:
            raise ValueError(f"--model {options.model} has a shape of its own; leave --params out")
        return load_model(options.model, options.seq)
    if options.params is None:
        return None
    return scaled(read_count(options.params, "--params", LIKE_PARAMS), options.seq or SEQUENCE)


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
