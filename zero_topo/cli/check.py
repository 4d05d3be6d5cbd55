# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo check``: would this DeepSpeed config start, and with which plan?"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from zero_topo.cli.inputs import machine
from zero_topo.cli.output import print_json
from zero_topo.cli.tables import places_table, show
from zero_topo.config import (
    ZeroTopoConfig,
    deepspeed_problems,
    deepspeed_refusals,
    load_deepspeed_config,
    resolve_config,
)
from zero_topo.config.deepspeed_json import limits
from zero_topo.config.stock_keys import translate
from zero_topo.topology import preset_names
from zero_topo.topology.launchers import launcher_view
from zero_topo.topology.render import render_tree
from zero_topo.versions import installed_refusals


def check(
    ds_config: Annotated[str, typer.Argument(metavar="DS_CONFIG", help="DeepSpeed JSON with a zero_topo block.")],
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks; default: what the launcher says.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the resolved plan as JSON.")] = False,
) -> None:
    """Validate a DeepSpeed config and show the plan its zero_topo block makes."""
    loaded = load_deepspeed_config(ds_config)
    _refuse([*installed_refusals(), *deepspeed_problems(loaded), *deepspeed_refusals(loaded, world_size)])
    translated = translate(loaded).lines
    block = ZeroTopoConfig.from_ds_config(loaded)
    if block is None:
        raise ValueError(f'{ds_config}: has no "zero_topo" block; add one, such as "zero_topo": {{"scheme": "topo"}}')
    found = machine(block.topology, world_size)
    anywhere = isinstance(block.topology, str) and block.topology in ("auto", *preset_names())
    if not anywhere or launcher_view(os.environ) is not None:
        _refuse(deepspeed_refusals(loaded, found.world_size))
    resolved = resolve_config(block, found)
    if as_json:
        print_json({"topology": found.to_json(), **resolved.to_json(), "translated": list(translated)})
        return
    print(render_tree(found))
    print()
    show(places_table({resolved.scheme or "free form": resolved}, "Who holds what"))
    for note in (*translated, *resolved.notes, *limits(loaded)):
        print(f"- {note}")
    print("ok")


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError("\n".join(problems))
