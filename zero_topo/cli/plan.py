# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo plan``: what each scheme stores, sends and takes, and which plan is the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from zero_topo.cli.job import machine_of, model_of
from zero_topo.cli.options import AsJson, Machine, ModelName, Nodes, Params, Ranks
from zero_topo.cli.output import print_json, print_notes
from zero_topo.cli.tables import LEGEND, costs_json, plans_table
from zero_topo.config import AUTO, SCHEMES, ZeroTopoConfig, is_automatic, resolve_config
from zero_topo.config.schemes import DEFAULT_SCHEME
from zero_topo.cost.bounds import Cost, cost_of, rates_of
from zero_topo.cost.job import Job
from zero_topo.cost.memory import activation_bytes
from zero_topo.cost.rule import choose, plan_for, usable
from zero_topo.cost.tensor import tree_of
from zero_topo.observe.tables import table_text
from zero_topo.topology import Topology
from zero_topo.topology.discover import ALONE
from zero_topo.topology.presets import assumptions
from zero_topo.units import format_bytes

MOST_MICRO_BATCHES = 1024


def plan(
    model: ModelName = None,
    params: Params = None,
    machine: Machine = AUTO,
    nodes: Nodes = None,
    ranks: Ranks = None,
    micro_batches: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_MICRO_BATCHES, metavar="K", help="Micro-batches per optimizer step."
        ),
    ] = 1,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, metavar="N", help="Ranks that divide each layer among them.")
    ] = 1,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the memory of each plan.")
    ] = None,
) -> None:
    """Show memory, traffic and seconds of each scheme for a model, and the default with its reason.

    Training is in 16 bits with Adam. For the settings of a DeepSpeed config use check.
    """
    found = machine_of(machine, nodes, ranks)
    shape = model_of(model, params)
    if shape is None:
        raise ValueError("which model? give --params, such as 20B, or --model")
    job = Job(shape, micro_batches=micro_batches, tensor=tensor_parallel)
    tree = tree_of(found, tensor_parallel)
    costs, notes = costs_of_schemes(found, tree, job)
    default = AUTO if is_automatic(ZeroTopoConfig(), tree) else DEFAULT_SCHEME
    notes += [*shape.notes, *machine_notes(found), _kept(job)]
    if plot is not None:
        _draw(plot, costs)
    if as_json:
        print_json(
            {
                "topology": found.to_json(),
                "params": shape.params,
                "setting": job.describe(),
                "memory_limit": usable(found.memory_per_rank),
                "default": default,
                "notes": notes,
                "plans": {name: costs_json(cost) for name, cost in costs.items()},
            }
        )
        return
    size = f"{found.nodes} x {found.gpus_per_node} x {found.ranks_per_gpu}"
    title = f"{shape.params:,} parameters on {found.name}: {size} = {found.world_size} ranks"
    rows = {f"{name} *" if name == default else name: cost for name, cost in costs.items()}
    table = plans_table(rows, f"{title}, micro-batches a step: {micro_batches}")
    print(table_text(table))
    print_notes([f"* the default here; {job.describe()}", *LEGEND, *notes])
    if plot is not None:
        print(f"\nWritten: {plot}")


def costs_of_schemes(
    machine: Topology, tree: Topology, job: Job
) -> tuple[dict[str, Cost], list[str]]:
    """Return the costs of each named scheme and of the rule's plan, and what is to be said of the
    default.

    Args:
        machine: the whole machine.
        tree: the tree of a data-parallel group.
        job: what is trained.
    """
    configs = {
        name: resolve_config(ZeroTopoConfig.parse({"scheme": name}), tree) for name in SCHEMES
    }
    automatic = is_automatic(ZeroTopoConfig(), tree)
    notes = []
    try:
        block = ZeroTopoConfig.parse({} if automatic else {"scheme": AUTO})
        configs[AUTO] = choose(block, tree, job)
        notes.append(configs[AUTO].notes[0])
        if not automatic:
            notes.append(
                f"scheme {DEFAULT_SCHEME}, the default where a GPU has several ranks: weights stay "
                "inside a GPU"
            )
            default = plan_for(ZeroTopoConfig(), tree, job)
            notes += [note for note in default.notes if note.startswith("warning")]
    except ValueError as error:  # no plan fits, or the default does not
        notes.append(str(error))
    return {name: cost_of(config, job, machine) for name, config in configs.items()}, notes


def machine_notes(machine: Topology) -> list[str]:
    """Return what is assumed about a machine, or not known."""
    if machine.name == ALONE:
        return [
            f"no machine is named: one node, {machine.gpus_per_node} GPUs of one rank each; for "
            "another --machine frontier --nodes 48"
        ]
    notes = []
    if assumed := assumptions(machine.name):
        notes.append(f"assumed, not measured, for {machine.name}: {', '.join(assumed)}")
    if rates_of(machine) is None:
        notes.append(
            f"how fast a rank of {machine.name} computes is not known, so there are no seconds"
        )
    return notes


def _kept(job: Job) -> str:
    """Return what keeping the activations would take."""
    kept = activation_bytes(replace(job, checkpointing=False))
    more = kept - activation_bytes(job)
    return f"activations are recomputed; to keep them takes {format_bytes(more)} more"


def _draw(path: Path, costs: Mapping[str, Cost]) -> None:
    from zero_topo.observe.plots import memory_bars

    rows = {name: cost.memory for name, cost in costs.items()}
    memory_bars(rows).savefig(path, dpi=200)
