# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m zero_topo.neox`, without NeoX: what it finds in YAML files, and how it adapts NeoX."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.data import table
from tests.steps import deal, step, task
from zero_topo.neox import train
from zero_topo.neox.__main__ import main
from zero_topo.neox.adapt import use_the_only_device, with_ours
from zero_topo.neox.check import problems
from zero_topo.neox.config import deepspeed_config, load_configs

pytest.importorskip("yaml")

GOOD = table("mistakes")["good"]["NeoX"]


def write(path: Path, content: object) -> str:
    """A file and its name."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> Any:
    """A module of NeoX's, with some of its members."""
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_neox_drops_its_own_defaults() -> None:
    """As NeoX does: clipping of 1.0 would not arrive but for the extra arguments, which win."""
    assert "gradient_clipping" not in deepspeed_config({"gradient_clipping": 1.0})
    merged = {"gradient_clipping": 0.5, "deepspeed_extra_args": {"gradient_clipping": 1.0}}
    assert deepspeed_config(merged)["gradient_clipping"] == 1.0
    assert deepspeed_config({"precision": "bfloat16"})["bf16"] == {"enabled": True}
    assert list(problems(GOOD)) == []


def test_files_are_merged_as_neox_merges_them(tmp_path: Path) -> None:
    """Dashes become underscores, `.yml` may be left out, and what two files give is refused."""
    one = write(tmp_path / "one.yml", '{"num-layers": 2, # a comment\n "eps": 1.0e-8,}')
    two = write(tmp_path / "two.yml", "num_layers: 3")
    assert load_configs([one.removesuffix(".yml")]) == {"num_layers": 2, "eps": 1e-8}
    with pytest.raises(ValueError, match="num_layers"):
        load_configs([one, two])


def test_neoxs_own_launcher_runs_our_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the checkout where the ranks of other nodes look for it."""
    started: list[list[str]] = []
    stand_in(monkeypatch, "deepy", main=started.append)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(train.adapt, "reach", lambda path: None)
    monkeypatch.setenv("PYTHONPATH", "/other")
    file = write(tmp_path / "x.yml", GOOD)
    assert main(["launch", file]) == 0
    assert started == [[train.__file__, file]]
    assert os.environ["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/other"


def test_a_bare_srun_is_read_from_slurms_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `launch`'s worker reads them (test_launch_env.py); not without a launcher, nor where RANK
    is set.
    """
    dealt, environ = deal(2, 8, 8), dict[str, str]()
    monkeypatch.setattr(os, "environ", environ)
    arguments = SimpleNamespace(from_ymls=lambda paths, forced: forced)
    stand_in(monkeypatch, "megatron.neox_arguments", NeoXArgs=arguments)
    forced: list[Any] = []
    monkeypatch.setattr(train, "_run", forced.append)
    train.start([], {})
    assert environ == {}
    for rank in (11, 12):
        environ |= step(2, 8) | task(dealt, rank)
        train.start([], {})
        found = [environ[name] for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR")]
        assert found == ["11", "3", "n0"]
    assert forced[-1] == {"global_num_gpus": 16}


@pytest.mark.parametrize(("devices", "placement", "reported"), [(1, 3, 0), (1, 0, 0), (8, 3, 3)])
def test_one_visible_device_is_device_0(
    monkeypatch: pytest.MonkeyPatch, devices: int, placement: int, reported: int
) -> None:
    """With `--gpus-per-task=1` NeoX and DeepSpeed are given 0, and only the node's first task
    compiles helpers.
    """
    import torch

    compiled: list[int] = []
    compile_helper = partial(compiled.append, 1)
    helpers = stand_in(monkeypatch, "megatron.data.data_utils", compile_helper=compile_helper)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setenv("LOCAL_RANK", str(placement))
    args = SimpleNamespace(local_rank=placement)
    line = use_the_only_device(args)
    assert (args.local_rank, os.environ["LOCAL_RANK"]) == (reported, str(reported))
    assert (line is not None) == (reported != placement)
    helpers.compile_helper()
    assert bool(compiled) == (reported == placement)


@pytest.mark.parametrize("name", ["AdamS", "AgedAdamW"])
def test_our_optimizers_are_built_where_neox_would_refuse_them(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With NeoX's parameter groups and its weight decay; every other optimizer stays NeoX's own."""
    import torch

    from zero_topo.sync import OPTIMIZERS

    weight, bias = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    groups = ({"params": [weight, frozen]}, {"params": [bias], "weight_decay": 0.0})
    stand_in(monkeypatch, "megatron")
    split = {"get_params_for_weight_decay_optimization": lambda *_: groups}
    stand_in(monkeypatch, "megatron.model", **split)
    settings = {"lr": 0.5, "betas": [0.9, 0.95]}
    args = SimpleNamespace(
        optimizer_type=name, no_load_optim=False, weight_decay=0.1, optimizer={"params": settings}
    )
    build = with_ours(lambda *_: ("NeoX's own", []))
    optimizer, _ = build("model", args)
    assert isinstance(optimizer, OPTIMIZERS[name.lower()])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["params"] for group in optimizer.param_groups] == [[weight], [bias]]
    args.optimizer_type = "Adam"
    assert build("model", args)[0] == "NeoX's own"
