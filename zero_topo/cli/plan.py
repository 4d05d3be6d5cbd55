# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo plan``: what each rank stores under a scheme, memory and bytes sent, and which plan to take.

To add a view, write it in ``plan_views.py`` and name the option that asks for it in :data:`VIEWS`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zero_topo.cli.options import refuse_others, taking
from zero_topo.cli.output import print_json
from zero_topo.cli.plan_options import (
    ITEMSIZE,
    PlanOptions,
    found_machine,
    found_model,
    found_request,
    found_schemes,
    found_work,
)
from zero_topo.cli.plan_views import largest_models, recommendation
from zero_topo.cli.tables import memory_table, places_table, show, volume_table
from zero_topo.cost import Workload, by_domain, memory_bytes, step_bytes
from zero_topo.cost.footprint import predict_memory
from zero_topo.observe.files import MEMORY, check_files, write_png
from zero_topo.topology import Topology
from zero_topo.topology.discover import ALONE

VIEWS: tuple[tuple[str, Callable[[PlanOptions], None]], ...] = (
    ("recommend", recommendation),
    ("max_params", largest_models),
)

OF_A_JOB = (
    *("micro_batch", "checkpointing", "overlap", "attention", "states_only"),
    *("reserve", "lossy", "sparse", "rates", "deepspeed_config"),
)
"""Options that the plain view, which is formulas of the parameters, does not ask."""


@taking(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Show memory and traffic of each scheme for a model. --recommend ranks all plans that fit.

    Training is in 16 bits with Adam.
    """
    asked = [(name, view) for name, view in VIEWS if getattr(options, name)]
    if len(asked) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name, _ in asked)
        raise ValueError(f"{names} are different views; ask for one at a time")
    if asked or options.plot is not None:
        refuse_others(options, lambda name: name != "trainable", "leave out --recommend, --max-params, --plot")
    if options.plot is not None:
        _draw(options, options.plot)
    elif not (options.recommend or options.max_params):
        refuse_others(options, lambda name: name not in OF_A_JOB, "add --recommend, --max-params or --plot")
    (asked[0][1] if asked else schemes)(options)


def schemes(options: PlanOptions) -> None:
    """The plain view: degrees, memory per rank and bytes sent of each scheme."""
    work, found = found_work(options), found_machine(options)
    configs = found_schemes(options, found)
    memory = {name: memory_bytes(config, work, accumulation_itemsize=ITEMSIZE) for name, config in configs.items()}
    sent = {name: step_bytes(config, work) for name, config in configs.items()}
    if options.as_json:
        counts = {"params": _params(work), "trainable": sum(work.numels), "micro_batches": options.micro_batches}
        head = {"topology": found.to_json(), **counts}
        rows = [
            {
                **config.to_json(),
                "memory": memory[name],
                "sent": [{"phase": phase, "domain": domain, "bytes": n} for (phase, domain), n in sent[name].items()],
                "sent_by_domain": by_domain(sent[name]),
            }
            for name, config in configs.items()
        ]
        print_json({**head, "schemes": rows})
        return
    show(places_table(configs, _title(found, work)))
    show(memory_table(memory, found.memory_per_rank))
    show(volume_table({name: by_domain(of) for name, of in sent.items()}, options.micro_batches))
    if found.name == ALONE:
        print("- no machine is named, and this is no job: one rank; for another --machine frontier --nodes 48")
    for note in found_model(options).notes if options.model else ():
        print(f"- {note}")
    if len(configs) == 1:
        for note in next(iter(configs.values())).notes:
            print(f"- {note}")


def _title(found: Topology, work: Workload) -> str:
    shape = f"{found.nodes} x {found.gpus_per_node} x {found.ranks_per_gpu} = {found.world_size} ranks"
    trained = "" if work.frozen is None else f", {sum(work.numels):,} of them trained,"
    return f"{_params(work):,} parameters{trained} on {found.name}: {shape}"


def _params(work: Workload) -> int:
    return sum(work.numels) + (0 if work.frozen is None else sum(work.frozen.numels))


def _draw(options: PlanOptions, path: Path) -> None:
    """Bars of what each scheme holds, activations and buffers included."""
    from zero_topo.observe.memory_figure import memory_bars
    from zero_topo.observe.plots import job_line

    check_files([(path, ".png", MEMORY)], options.force)
    request = found_request(options)
    job, machine = request.job, request.topology
    configs = found_schemes(options, machine)
    held = {name: predict_memory(config, request.work, job, request.flight) for name, config in configs.items()}
    title = f"{job.model.params:,} parameters on {machine.world_size} ranks of {machine.name}"
    notes = job_line(job, [machine.world_size], [job.micro_batches])
    write_png(memory_bars(held, machine.memory_per_rank, title, notes), path, MEMORY)
