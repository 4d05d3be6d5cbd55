# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Every config that ships loads as it stands, in zero_topo and in DeepSpeed; GPT-NeoX's twins say
the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data import table
from tests.launching import ROOT
from tests.schema import json_schema
from zero_topo.config import (
    ZeroTopoConfig,
    deepspeed_hints,
    deepspeed_problems,
    load_deepspeed_config,
)
from zero_topo.cost.rule import before_a_model
from zero_topo.doctor.refusals import deepspeed_refusals
from zero_topo.neox.check import require
from zero_topo.neox.config import deepspeed_config, load_configs
from zero_topo.topology import resolve_topology
from zero_topo.topology.placements import Placement

CONFIGS = sorted((ROOT / "configs").glob("*.json"))
TWINS = sorted((ROOT / "neox_configs").glob("*.yml"))
MODELS = sorted((ROOT / "neox_configs/models").glob("*.yml"))
STATED = table("configs")
"""By the stem of a file, what it is named after: ``schemes`` (others have the stem's, null is the
fastest for the machine), ``modes`` of sync (others are dense), ``optimizers`` (others have AdamW),
of each of the ``papers``' runs the config with its model, and ``twins`` in
JSON (others have the stem's).
"""


def by_stem(paths: list[Path]) -> Any:
    """Parametrizes a test with files, named by their stems."""
    return pytest.mark.parametrize("path", paths, ids=[path.stem for path in paths])


def ranks(path: Path) -> int:
    """Ranks that fit a config: 8 for an emulated machine, else two nodes of 8."""
    return 8 if path.stem.startswith(("demo", "laptop")) else 16


def neox_config(path: Path) -> dict[str, Any]:
    """A GPT-NeoX config, which is YAML in its flow form: JSON but for the comment lines."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    return dict(json.loads("\n".join(lines)))


@by_stem(CONFIGS)
def test_configs_resolve_on_their_machine(path: Path) -> None:
    """Each block gives a plan of the scheme and the mode that its file is named after, with the
    optimizer that the mode loses least with; neither we nor DeepSpeed refuse the config.

    All are for 16-bit training with clipping, and overlap what they can; the demo must not build
    DeepSpeed's own Adam.
    """
    given = load_deepspeed_config(path)
    assert not deepspeed_problems(given)
    block = ZeroTopoConfig.from_ds_config(given)
    assert block is not None
    hosts = [Placement(f"n{rank // 8}", f"{rank // 8}") for rank in range(ranks(path))]
    config = before_a_model(block, resolve_topology(block.topology, ranks(path), hosts))
    assert STATED["schemes"].get(path.stem, path.stem) in (None, config.scheme)
    assert STATED["modes"].get(path.stem, "dense") == config.sync.MODE
    assert STATED["optimizers"].get(path.stem, "AdamW") == given["optimizer"]["type"]
    assert config.plan.world_size == ranks(path)
    assert deepspeed_hints(given) == deepspeed_refusals(given, ranks(path)) == []
    # The paper trains in FP16; the demo in FP32, for CPUs without BF16
    assert given.get("bf16") == {"enabled": True} or path.stem in ("paper-run", "demo")
    assert given["gradient_clipping"] == 1.0
    assert ranks(path) != 8 or given["optimizer"]["params"]["torch_adam"] is True


@pytest.mark.parametrize(("name", "model"), STATED["papers"].items())
def test_the_papers_run_differs_in_layout_precision_and_attention(name: str, model: str) -> None:
    """The model is that of Frontier's config of the same size; nothing but what the paper states is
    different.
    """
    ours = neox_config(ROOT / f"neox_configs/{name}.yml")
    theirs = neox_config(ROOT / f"neox_configs/{model}.yml")
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
    model = [] if path.stem in STATED["twins"] else [str(MODELS[0])]
    require([str(path), *model])


@by_stem(CONFIGS)
def test_editors_complete_the_configs(path: Path) -> None:
    """Each names the schema of the docs, which is that of the config's models."""
    schema = path.parent / json.loads(path.read_text())["$schema"]
    same = json.loads(schema.read_text()) == json_schema(whole_file=True)
    assert same, "write it anew: make docs"


@by_stem(TWINS)
def test_neox_twins_equal_their_json(path: Path) -> None:
    """GPT-NeoX hands DeepSpeed the same block, sharding, batch sizes, precision and clipping as the
    JSON.
    """
    neox = neox_config(path)
    ours = load_deepspeed_config(
        ROOT / "configs" / f"{STATED['twins'].get(path.stem, path.stem)}.json"
    )
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
    if path.stem in STATED["twins"]:
        theirs["lr"] = settings["lr"]
    assert settings == theirs
