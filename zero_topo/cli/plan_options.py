# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The options of ``zero-topo plan``, and the machine, model and job that they define."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from zero_topo.cli.inputs import LIKE_PARAMS, MOST_MICRO_BATCHES, machine, read_count, read_rates
from zero_topo.cli.options import MACHINES, MODEL_NAMES, SPARSE_NAMES, Overlap, Rare
from zero_topo.config import (
    SCHEMES,
    SPARSE_MODES,
    ResolvedConfig,
    ZeroTopoConfig,
    load_deepspeed_config,
    resolve_config,
)
from zero_topo.cost import Workload
from zero_topo.cost.footprint import InFlight
from zero_topo.cost.model_files import load_model
from zero_topo.cost.planner import RESERVE, Request
from zero_topo.cost.step import ATTENTIONS, Job
from zero_topo.cost.transformer import SEQUENCE, Transformer, scaled, with_shape
from zero_topo.strict import did_you_mean
from zero_topo.topology import Topology, preset_names
from zero_topo.topology.presets import load_machine

ITEMSIZE = 2  # 16-bit training
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=0.9)]


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``plan``."""

    params: Annotated[str | None, typer.Option(help="Parameters of the model, such as 20e9 or 20B.")] = None
    model: Annotated[
        str | None,
        typer.Option(
            autocompletion=MODEL_NAMES,
            metavar="NAME|FILE",
            help="Model name, Hugging Face config.json or GPT-NeoX YAML.",
        ),
    ] = None
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence; default: the model's, or 2048.")] = None
    micro_batch: Annotated[
        int, typer.Option(min=1, max=MOST_MICRO_BATCHES, help="Sequences per rank and micro-batch.")
    ] = 1
    micro_batches: Annotated[
        int, typer.Option(min=1, max=MOST_MICRO_BATCHES, help="Micro-batches per optimizer step.")
    ] = 1
    overlap: Overlap = None
    topology: Annotated[
        str,
        typer.Option(
            "--topology",
            "--machine",
            autocompletion=MACHINES,
            metavar="FILE|PRESET",
            help="Preset, .json file or JSON object that describes the machine.",
        ),
    ] = "auto"
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes.")] = None
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of ranks; default: the launcher's number.")] = (
        None
    )
    recommend: Annotated[
        bool, typer.Option("--recommend", help="List the fastest plans that fit, and explain the first.")
    ] = False
    max_params: Annotated[
        bool, typer.Option("--max-params", help="Show the largest model that each scheme can train.")
    ] = False
    lossy: Annotated[bool, typer.Option("--lossy", help="Allow quantized and sparse traffic in --recommend.")] = False
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the memory per rank.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False
    trainable: Annotated[str | None, Rare("trained parameters, the others are frozen")] = None
    layers: Annotated[Count | None, Rare("number of layers")] = None
    hidden: Annotated[Count | None, Rare("hidden size")] = None
    checkpointing: Annotated[bool, Rare("false keeps activations instead of recomputing them")] = True
    attention: Annotated[str, Rare("flash, or eager, which stores the score matrix", ("flash", "eager"))] = "flash"
    states_only: Annotated[bool, Rare("count weights, gradients and optimizer states alone, as papers do")] = False
    scheme: Annotated[tuple[str, ...], Rare("schemes to show, comma-separated; default: all", tuple(SCHEMES))] = ()
    reserve: Annotated[Share | None, Rare(f"share of the memory to leave free; default: {RESERVE}, of states 0")] = None
    sparse: Annotated[
        tuple[str, ...], Rare("modes of sparse sync to try as well, comma-separated; implies lossy", SPARSE_NAMES)
    ] = ()
    rates: Annotated[str | None, Rare("link rates, a file or JSON as simulate --calibrate prints them")] = None
    deepspeed_config: Annotated[str | None, Rare("DeepSpeed JSON whose bucket sizes and offload count")] = None
    force: Annotated[bool, Rare("write over any file")] = False


def found_machine(options: PlanOptions) -> Topology:
    """The machine that the options name.

    Raises:
        ValueError: if there is none, or its ranks do not add up.
    """
    if options.nodes is None:
        return machine(options.topology, options.world_size)
    world = options.nodes * _ranks_per_node(options)
    if options.world_size not in (None, world):
        raise ValueError(
            f"--nodes {options.nodes} of {options.topology} are {world} ranks, but --world-size is "
            f"{options.world_size}; give one of the two"
        )
    return machine(options.topology, world)


def _ranks_per_node(options: PlanOptions) -> int:
    if options.topology in preset_names():
        count = load_machine(options.topology).ranks_per_node
        if count is None:
            raise ValueError(f"--nodes {options.nodes}: {options.topology} has one node of any size; give --world-size")
        return count
    if options.topology == "auto":
        known = ", ".join(preset_names())
        raise ValueError(f"--nodes {options.nodes}: of which machine? give --machine (known: {known}; or a .json file)")
    described = machine(options.topology, None)
    if described.nodes != options.nodes:
        raise ValueError(
            f"--nodes {options.nodes}: {options.topology} describes {described.nodes} nodes; leave --nodes out, or "
            "change the description"
        )
    return described.ranks_per_node


def found_schemes(options: PlanOptions, topology: Topology) -> dict[str, ResolvedConfig]:
    """The schemes to show, by default all, on a machine."""
    blocks = {name: ZeroTopoConfig.parse({"scheme": name}) for name in options.scheme or SCHEMES}
    return {name: resolve_config(block, topology) for name, block in blocks.items()}


def found_params(options: PlanOptions) -> int:
    """Parameters of the model, exactly as given if they are.

    Raises:
        ValueError: if no model is named.
    """
    if options.params is not None and options.model is None:
        return read_count(options.params, "--params", LIKE_PARAMS)
    return found_model(options).params


def found_work(options: PlanOptions) -> Workload:
    """The parameters and the micro-batches: a model's as they are, a number as one matrix, or two if some are frozen.

    Raises:
        ValueError: as :func:`found_params`, or if more are trained than there are.
    """
    if options.trainable is None and options.params is None:
        model = found_model(options)
        return Workload.uniform(model.numels(), ITEMSIZE, options.micro_batches, model.dims())
    params = found_params(options)
    trained = params if options.trainable is None else read_count(options.trainable, "trainable", LIKE_PARAMS)
    if trained > params:
        raise ValueError(f"trainable {trained:,} is more than the {params:,} parameters of the model")
    of = partial(Workload.uniform, itemsize=ITEMSIZE, micro_batches=options.micro_batches)
    return replace(of([trained]), frozen=of([params - trained]) if trained < params else None)


def found_model(options: PlanOptions) -> Transformer:
    """The model that the options name or describe.

    Raises:
        ValueError: if none is, or several are.
    """
    if options.model is not None:
        if options.params or options.layers or options.hidden:
            raise ValueError(f"--model {options.model} has a shape of its own; leave --params, layers and hidden out")
        return load_model(options.model, options.seq)
    sequence = options.seq or SEQUENCE
    if options.params is not None:
        return scaled(read_count(options.params, "--params", LIKE_PARAMS), options.layers, options.hidden, sequence)
    if options.layers is None or options.hidden is None:
        raise ValueError("which model? give --params, such as 20B, or --model, or --set layers=44 --set hidden=6144")
    return with_shape(options.layers, options.hidden, sequence)


def found_request(options: PlanOptions) -> Request:
    """Machine, model and job for the planner.

    Raises:
        ValueError: as the functions above, for an unknown mode of sync, or a config that cannot be read.
    """
    known = [mode.MODE for mode in SPARSE_MODES]
    for mode in options.sparse:
        if mode not in known:
            raise ValueError(f"sparse {mode}: no sparse mode of sync; choose among {', '.join(known)}")
    if options.attention not in ATTENTIONS:
        near = did_you_mean(options.attention, ATTENTIONS)
        raise ValueError(f"attention {options.attention!r}{near} (choose one of {', '.join(ATTENTIONS)})")
    job = Job(found_model(options), options.micro_batch, options.micro_batches, options.checkpointing, ITEMSIZE)
    job = replace(job, attention=options.attention, overlap=options.overlap)
    flight = InFlight.read(load_deepspeed_config(options.deepspeed_config or {}))
    sparse = options.sparse
    usual = 0.0 if options.states_only else RESERVE
    topology = found_machine(options)
    own = None if options.rates is None else read_rates(options.rates, Request(topology, job).rates)
    return Request(
        topology,
        job,
        reserve=usual if options.reserve is None else options.reserve,
        sparse=sparse,
        flight=flight,
        states_only=options.states_only,
        own_rates=own,
    )
