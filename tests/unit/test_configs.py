# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Every config that ships loads as it stands, in zero_topo and in DeepSpeed; GPT-NeoX's twins say
the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT
from tests.schema import json_schema
from zero_topo.config import (
    ResolvedConfig,
    ZeroTopoConfig,
    deepspeed_hints,
    deepspeed_problems,
    load_deepspeed_config,
)
from zero_topo.cost.rule import before_a_model
from zero_topo.neox.check import require
from zero_topo.neox.config import deepspeed_config, load_configs
from zero_topo.topology import resolve_topology
from zero_topo.topology.placements import Placement

CONFIGS = sorted((ROOT / "configs").glob("*.json"))
TWINS = sorted((ROOT / "neox_configs").glob("*.yml"))
MODELS = sorted((ROOT / "neox_configs/models").glob("*.yml"))
FRONTIER = {"frontier-125m": 2, "frontier-1-3b": 2, "frontier-10b": 8, "frontier-20b": 48}  # nodes
PAPERS_RUN = {"paper-10b": "frontier-10b", "paper-20b": "frontier-20b"}  # the model of each
# The others have their JSON's name.
JSON_TWIN = dict.fromkeys(FRONTIER, "frontier") | dict.fromkeys(PAPERS_RUN, "paper-run")
SCHEME_OF: dict[str, str | None] = {
    "zeropp": "zero++",
    "demo": "topo",
    "frontier": "topo",
}
SPARSE = {f"topo-{mode}": mode for mode in ("oktopk", "radius", "scape", "tagc", "ternary")}
SCHEME_OF |= {
    **dict.fromkeys(["topo-nf4", "laptop", *SPARSE], "topo"),
    "paper-run": "paper",
    **dict.fromkeys(["default", "dgx-h100"]),
}
MODES = {"topo": "dense", "topo-nf4": "quantized"} | SPARSE


def by_stem(paths: list[Path]) -> Any:
    """Parametrizes a test with files, named by their stems."""
    return pytest.mark.parametrize("path", paths, ids=[path.stem for path in paths])


def ranks(path: Path) -> int:
    """Ranks that fit a config: 8 for an emulated machine, else two nodes of 8."""
    return 8 if path.stem.startswith(("demo", "laptop")) else 16


def hosts_of_8(count: int) -> list[Placement]:
    """Ranks on hosts with eight of them each."""
    return [Placement(f"n{rank // 8}", f"{rank // 8}") for rank in range(count)]


def resolved(path: Path) -> ResolvedConfig:
    """What the engine would run on."""
    config = load_deepspeed_config(path)
    assert not deepspeed_problems(config)
    block = ZeroTopoConfig.from_ds_config(config)
    assert block is not None
    return before_a_model(
        block,
        resolve_topology(block.topology, ranks(path), hosts_of_8(ranks(path))),
    )


def neox_config(path: Path) -> dict[str, Any]:
    """A GPT-NeoX config, which is YAML in its flow form: JSON but for the comment lines."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    return dict(json.loads("\n".join(lines)))


@by_stem(CONFIGS)
def test_configs_resolve_on_their_machine(path: Path) -> None:
    """Each block gives a plan of the scheme its file is named after, and DeepSpeed's part is not
    refused next to it.

    All are for 16-bit training with clipping, and overlap what they can; the demo must not build
    DeepSpeed's own Adam.
    """
    config, given = resolved(path), load_deepspeed_config(path)
    # None: the fastest for the machine
    assert SCHEME_OF.get(path.stem, path.stem) in (None, config.scheme)
    assert config.plan.world_size == ranks(path)
    assert deepspeed_hints(given) == []
    # The paper trains in FP16; the demo in FP32, for CPUs without BF16
    assert given.get("bf16") == {"enabled": True} or path.stem in ("paper-run", "demo")
    assert given["gradient_clipping"] == 1.0
    assert ranks(path) != 8 or given["optimizer"]["params"]["torch_adam"] is True


@pytest.mark.parametrize(("name", "mode"), MODES.items())
def test_the_configs_of_a_mode_have_it(name: str, mode: str) -> None:
    """A file named after a mode of sync runs it, and with the one optimizer it works with, or loses
    least with.
    """
    path = ROOT / "configs" / f"{name}.json"
    sync = resolved(path).sync
    assert mode == sync.MODE
    fitting = sync.OPTIMIZER or ("AgedAdamW" if mode in ("oktopk", "ternary") else "AdamW")
    assert load_deepspeed_config(path)["optimizer"]["type"] == fitting


@pytest.mark.parametrize(("name", "nodes"), FRONTIER.items())
def test_frontier_configs_say_for_how_many_nodes_they_are(name: str, nodes: int) -> None:
    """Each resolves on its nodes: weights over a package, gradients over a node, optimizer states
    over the world.
    """
    path = ROOT / "neox_configs" / f"{name}.yml"
    assert f"for {nodes} nodes ({8 * nodes} GCDs)" in path.read_text().splitlines()[0]
    block = ZeroTopoConfig.from_ds_config(neox_config(path)["deepspeed_extra_args"])
    assert block is not None
    plan = before_a_model(
        block, resolve_topology(block.topology, 8 * nodes, hosts_of_8(8 * nodes))
    ).plan
    assert (plan.weights, plan.secondary, plan.gradients, plan.optimizer) == (2, None, 8, 8 * nodes)


@pytest.mark.parametrize(("name", "model"), PAPERS_RUN.items())
def test_the_papers_run_differs_in_layout_precision_and_attention(name: str, model: str) -> None:
    """The model is that of Frontier's config of the same size; nothing but what the paper states is
    different.
    """
    ours, theirs = (
        neox_config(ROOT / f"neox_configs/{name}.yml"),
        neox_config(ROOT / f"neox_configs/{model}.yml"),
    )
    assert {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)} == {
        "attention_config",
        "precision",
        "fp16",
        "bf16",
        "deepspeed_extra_args",
    }
    assert ours["attention_config"] == [[["flash"], ours["num_layers"]]]
    assert ours["deepspeed_extra_args"]["zero_topo"] == {"topology": "frontier", "scheme": "paper"}


@by_stem(TWINS)
def test_neox_would_train_the_twins(path: Path) -> None:
    """`python -m zero_topo.neox check` is content, next to a model where the file names none.

    YAML 1.1 takes `1e-8` for a text and `yes` for true, and refuses tabs and repeated keys: YAML
    and JSON read alike.
    """
    pytest.importorskip("yaml")
    assert load_configs([str(path)]) == neox_config(path)
    assert deepspeed_hints(deepspeed_config(neox_config(path))) == []
    model = [] if path.stem in (*FRONTIER, *PAPERS_RUN) else [str(MODELS[0])]
    require([str(path), *model])


@by_stem(CONFIGS)
def test_editors_complete_the_configs(path: Path) -> None:
    """Each names the schema of the docs, which is that of the config's models."""
    schema = path.parent / json.loads(path.read_text())["$schema"]
    same = json.loads(schema.read_text()) == json_schema(whole_file=True)
    assert same, "write it anew: make docs"


@by_stem(CONFIGS)
def test_deepspeed_reads_the_configs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed itself accepts each file: no unknown key, batch sizes that fit, stage 3."""
    from deepspeed.runtime import config as deepspeed_config

    monkeypatch.setattr(deepspeed_config.dist, "get_world_size", lambda group=None: 8)
    monkeypatch.setattr(deepspeed_config.dist, "get_rank", lambda group=None: 0)
    parsed = deepspeed_config.DeepSpeedConfig(str(path))
    batch = parsed.train_micro_batch_size_per_gpu * parsed.gradient_accumulation_steps * 8
    assert parsed.train_batch_size == batch
    assert parsed.zero_optimization_stage == 3


@by_stem(TWINS)
def test_neox_twins_equal_their_json(path: Path) -> None:
    """GPT-NeoX hands DeepSpeed the same block, sharding, batch sizes, precision and clipping as the
    JSON.
    """
    neox = neox_config(path)
    ours = load_deepspeed_config(ROOT / "configs" / f"{JSON_TWIN.get(path.stem, path.stem)}.json")
    extra = neox["deepspeed_extra_args"]
    assert extra["zero_topo"] == ours["zero_topo"]
    merged = neox | extra
    same = set(ours) - {"optimizer", "$schema"}
    assert {key: merged.get(key) for key in same} == {key: ours[key] for key in same}
    # GPT-NeoX's Adam is AdamW, and takes the decay from a key of its own; learning rates go by size
    # of model.
    types = ours["optimizer"]["type"], neox["optimizer"]["type"]
    assert types[0] == types[1] or types == ("AdamW", "Adam")
    settings = neox["optimizer"]["params"] | {"weight_decay": neox["weight_decay"]}
    theirs = dict(ours["optimizer"]["params"])
    if path.stem in (*FRONTIER, *PAPERS_RUN):
        theirs["lr"] = settings["lr"]
    assert settings == theirs
