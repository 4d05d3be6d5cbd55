# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Mistakes of every kind: each is one line that names its value and the way out.

``tests/data/mistakes.json`` has the rows of each kind: what is given, and the words of the line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Run
from tests.data import table
from tests.launching import ROOT
from tests.plans import TREE, resolve
from zero_topo import AdamS, AgedAdamW
from zero_topo.cli.inputs import read_count
from zero_topo.config import ZeroTopoConfig, deepspeed_problems, load_deepspeed_config
from zero_topo.config.deepspeed_json import with_environment_block
from zero_topo.cost.job import deepspeed_settings
from zero_topo.cost.model_files import load_model
from zero_topo.cost.rule import before_a_model
from zero_topo.cost.transformer import Transformer
from zero_topo.doctor.refusals import deepspeed_refusals
from zero_topo.launch.env import rank_environment
from zero_topo.neox import __main__ as neox
from zero_topo.neox.config import load_configs
from zero_topo.plan import Plan
from zero_topo.quant.spec import BlockSpec
from zero_topo.topology import load_preset, resolve_topology
from zero_topo.topology.groups import Groups
from zero_topo.topology.model import Topology

DATA = ROOT / "tests/data"
TABLE = table("mistakes")
GOOD = TABLE["good"]
"""Kind -> what its rows change."""
CASES = [(kind, *row) for kind, rows in TABLE["mistakes"].items() for row in rows]
NAMES = [f"{kind} {given}"[:70] for kind, given, *_ in CASES]


def written(text: str, name: str) -> str:
    """The name of a file of this text in the current folder."""
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text, "latin-1")
    return name


def optimizers(settings: dict[str, Any]) -> None:
    """Both refuse a setting alike, in their own name."""
    for optimizer in (AgedAdamW, AdamS):
        with pytest.raises(ValueError, match=optimizer.__name__) as caught:
            optimizer([], **settings)
    raise caught.value


MACHINE = Topology("m", nodes=4, gpus_per_node=3, ranks_per_gpu=2)
MAKERS: dict[str, Callable[[Any], Any]] = {
    "block": ZeroTopoConfig.parse,
    "resolved": lambda block: resolve(**block),
    "automatic": lambda block: before_a_model(ZeroTopoConfig.parse(block), TREE),
    "settings": deepspeed_settings,
    "plan": lambda degrees: Plan(*degrees),
    "degrees": lambda degrees: Plan.build(MACHINE, tuple(degrees)),
    "group": MACHINE.among,
    "groups": lambda groups: Groups(TREE, tuple(map(tuple, groups))),
    "machine": Topology.from_json,
    "topology": lambda setting: resolve_topology(setting, 4),
    "machine file": lambda text: resolve_topology(written(text, "machine.json"), 4),
    "ranks": lambda ranks: load_preset("frontier", ranks),
    "config": deepspeed_problems,
    "DeepSpeed": lambda config: deepspeed_refusals(config, 4),
    "file": lambda text: load_deepspeed_config(written(text, "broken.json")),
    "source": load_deepspeed_config,
    "environment": lambda text: with_environment_block(GOOD["config"], {"ZERO_TOPO_BLOCK": text}),
    "rank": rank_environment,
    "NeoX": lambda config: neox.main(["check", written(json.dumps(config), "x.yml"), "--ranks=8"]),
    "NeoX file": lambda text: load_configs([written(text, "x.yml")]),
    "model": lambda text: load_model(written(text, "model.yml")),
    "shape": lambda sizes: Transformer(*sizes),
    "count": lambda text: read_count(text, "n"),
    "format": lambda arguments: BlockSpec(*arguments),
    "optimizer": optimizers,
}


@pytest.mark.parametrize(
    ("kind", "given", "words"), [(*row[:2], row[2:]) for row in CASES], ids=NAMES
)
def test_a_mistake_is_one_line_that_names_it(
    kind: str,
    given: Any,
    words: list[str],
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the value, and the nearest right one where there is one; a command ends with status 2
    and prints, writes and starts nothing before it.
    """
    monkeypatch.chdir(tmp_path)
    if kind.startswith("NeoX"):
        pytest.importorskip("yaml")
    if kind in GOOD:
        given = GOOD[kind] | given
    if kind == "command":
        for name, text in TABLE["files"].items():
            written(text, name)
        status, out, line = run(*given.replace("DATA", str(DATA)).split())
        assert (status, out) == (2, "")
    else:
        reported = said(MAKERS[kind], given)
        seen = capsys.readouterr()
        line = reported or seen.err
        assert not seen.out
    assert [word for word in words if word not in line] == []
    assert "\n" not in line.removesuffix("\n") and len(line) < 700


def said(maker: Callable[[Any], Any], given: Any) -> str | None:
    """The one line of an error or of a list of problems; None of a command."""
    try:
        problems = maker(given)
    except ValueError as error:
        return str(error)
    if problems == 2:
        return None
    (line,) = problems
    return str(line)
