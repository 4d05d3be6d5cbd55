# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The machine, the model and the step that a command is about: options that mean the same in all
commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from pydantic import Field, PositiveInt

from zero_topo.cli.inputs import (
    LIKE_PARAMS,
    MOST_MICRO_BATCHES,
    counts,
    machine,
    read_count,
    read_rates,
)
from zero_topo.cli.options import MACHINES, MODEL_NAMES, Rare
from zero_topo.config.deepspeed_parts import half_precision
from zero_topo.cost.experts import expert_tree, experts_of, split
from zero_topo.cost.job import ATTENTIONS, Attention, Job, deepspeed_settings
from zero_topo.cost.model_files import load_model
from zero_topo.cost.planner import RESERVE, Request
from zero_topo.cost.tensor import tree_of
from zero_topo.cost.transformer import SEQUENCE, Model, scaled
from zero_topo.topology import Topology, preset_names
from zero_topo.topology.model import MOST_RANKS
from zero_topo.topology.presets import load_machine

ITEMSIZE = 2  # 16-bit training
NO_CONFIG: Mapping[str, Any] = {}
Share = Annotated[float, Field(ge=0, le=0.9)]
Machine = Annotated[
    str,
    typer.Option(
        "--machine",
        "--topology",
        autocompletion=MACHINES,
        metavar="PRESET|FILE|JSON",
        help="Preset, .json file or JSON object that describes the machine; auto is this job.",
    ),
]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        "--world-size",
        "--gcds",
        metavar="N",
        help="Number of ranks; in simulate a list.",
    ),
]


@dataclass(frozen=True)
class JobOptions:
    """Options of all commands that predict."""

    params: Annotated[
        str | None, typer.Option(help="Parameters of the model, such as 20e9 or 20B.")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            autocompletion=MODEL_NAMES,
            metavar="NAME|FILE",
            help="Model name, Hugging Face config.json or GPT-NeoX YAML.",
        ),
    ] = None
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence; default: the model's, or 2048.")
    ] = None
    micro_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_MICRO_BATCHES,
            help="Sequences per rank and micro-batch; default: the config's, or 1.",
        ),
    ] = None
    micro_batches: Annotated[
        str | None,
        typer.Option(
            metavar="K",
            help="Micro-batches per optimizer step; default: the config's, or 1. In simulate a "
            "list; default: 1,8.",
        ),
    ] = None
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Ranks that share each micro-batch by tensor parallelism; default: the config's, "
            "or 1.",
        ),
    ] = None
    overlap: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share that computation hides of the communication it may hide; default: 0.",
        ),
    ] = None
    machine: Machine = "auto"
    nodes: Annotated[str | None, typer.Option(metavar="N", help="Number of nodes.")] = None
    ranks: Ranks = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = (
        False
    )
    checkpointing: Annotated[
        bool | None, Rare("false keeps activations instead of recomputing them")
    ] = None
    attention: Annotated[
        Attention, Rare("flash, or eager, which stores the score matrix", ATTENTIONS)
    ] = "flash"
    fused_loss: Annotated[bool, Rare("true if the loss never stores all logits")] = False
    reserve: Annotated[
        Share | None, Rare(f"share of the memory to leave free; default: {RESERVE}, of states 0")
    ] = None
    expert_parallel: Annotated[
        PositiveInt | None,
        Rare("ranks that share the experts of each layer; default: the config's, or 1"),
    ] = None
    rates: Annotated[str | None, Rare("rates of a rank and its links, a file or JSON")] = None


def machines_of(options: JobOptions) -> list[Topology]:
    """The machine with each number of nodes or ranks that the options name.

    Raises:
        ValueError: if there is none, or its ranks do not add up.
    """
    ranks = None if options.ranks is None else counts(options.ranks, "--ranks", MOST_RANKS)
    if options.nodes is not None:
        nodes = counts(options.nodes, "--nodes", MOST_RANKS)
        found = [count * _ranks_per_node(options.machine, count) for count in nodes]
        if ranks not in (None, found):
            raise ValueError(
                f"--nodes {options.nodes} of {options.machine} are {', '.join(map(str, found))} "
                f"ranks, but --ranks is {options.ranks}; give one of the two"
            )
        ranks = found
    return [machine(options.machine, count) for count in ranks or (None,)]


def machine_of(options: JobOptions) -> Topology:
    """The machine that the options name, with one number of ranks."""
    return one(machines_of(options), f"--ranks {options.ranks or options.nodes}")


def one(found: list[Any], what: str) -> Any:
    """The only one.

    Raises:
        ValueError: if there are several.
    """
    if len(found) > 1:
        raise ValueError(f"{what}: this command takes one number; simulate takes several")
    return found[0]


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


def need_model(options: JobOptions) -> Model:
    """The model that the options name.

    Raises:
        ValueError: if they name none.
    """
    found = model_of(options)
    if found is None:
        raise ValueError("which model? give --params, such as 20B, or --model")
    return found


def request_of(
    options: JobOptions, topology: Topology, model: Model, loaded: Mapping[str, Any] = NO_CONFIG
) -> Request:
    """Machine, model and job; what neither the options nor the config say is 1, in 16 bits.

    Args:
        options: of the command.
        topology: the machine.
        model: the model.
        loaded: a DeepSpeed config; empty if there is none.

    Raises:
        ValueError: for wrong settings.
    """
    tensor = tensor_of(options, loaded)
    micro, steps = _batches(options, tree_of(topology, tensor).world_size, loaded)
    single = loaded and not half_precision(loaded)
    job = Job(
        model,
        micro,
        steps,
        checkpointing=options.checkpointing is not False,
        itemsize=2 * ITEMSIZE if single else ITEMSIZE,
        attention=options.attention,
        fused_loss=options.fused_loss,
        overlap=options.overlap,
        tensor=tensor,
        expert=expert_of(options, loaded, model, topology),
        **deepspeed_settings(loaded),
    )
    request = Request(
        topology, job, reserve=RESERVE if options.reserve is None else options.reserve
    )
    return (
        request
        if options.rates is None
        else replace(request, own_rates=read_rates(options.rates, request.rates))
    )


def tensor_of(options: JobOptions, loaded: Mapping[str, Any]) -> int:
    """The number of ranks that share each micro-batch by tensor parallelism."""
    if options.tensor_parallel is not None:
        return options.tensor_parallel
    block = loaded.get("tensor_parallel") or {}
    size = block.get("autotp_size") or (block.get("tp") or {}).get("tp_size")
    return size if isinstance(size, int) and size > 1 else 1


def expert_of(
    options: JobOptions, loaded: Mapping[str, Any], model: Model, topology: Topology
) -> int:
    """The number of ranks that share the experts of each layer; 1 if only a config has it, and the
    model no experts.

    Raises:
        ValueError: if it does not divide the experts, or the machine along its nodes and GPUs.
    """
    size = options.expert_parallel
    if size is None:
        block = loaded.get("expert_parallel") or {}
        stated = block.get("autoep_size") if block.get("enabled") is True else None
        size = stated if isinstance(stated, int) and experts_of(model) else 1
    if size > 1:
        split(model, size)
        expert_tree(topology, size)
    return size


def _batches(options: JobOptions, ranks: int, loaded: Mapping[str, Any]) -> tuple[int, int]:
    """Sequences of a micro-batch, and micro-batches of a step, of each of so many data-parallel
    ranks.
    """
    micro, steps = (
        value if isinstance(value := loaded.get(key), int) and value > 0 else None
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    micro = options.micro_batch or micro or 1
    batch = loaded.get("train_batch_size")
    sharing = loaded.get("sequence_parallel_size")
    if steps is None and isinstance(batch, int):
        steps = batch * (sharing if isinstance(sharing, int) else 1) // (micro * ranks)
    if options.micro_batches is not None:
        steps = one(
            counts(options.micro_batches, "--micro-batches", MOST_MICRO_BATCHES), "--micro-batches"
        )
    return micro, max(1, steps or 1)
