# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m zero_topo.neox launch` and `train`: the words they build, without NeoX."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.launching import ROOT
from tests.steps import deal, step, task
from zero_topo.neox.__main__ import main, parser
from zero_topo.neox.adapt import use_the_only_device, with_ours
from zero_topo.neox.check import require
from zero_topo.neox.launch import (
    MODULE,
    deepspeed_arguments,
    number_of_ranks,
    rank_arguments,
    srun_command,
)
from zero_topo.neox.train import adopt_launcher, decode

WORDS = [
    "--num_gpus",
    "8",
    "--master_port",
    "29501",
    MODULE,
    "--deepspeed_config",
    "AA==",
    "--megatron_config",
    "BB==",
]


def options(*words: str, path: Path | str = "a.yml") -> Namespace:
    """The options of a launch."""
    return parser().parse_args(["launch", str(path), "--neox-path=", *words])


def test_deepspeeds_launcher_gets_a_module_and_no_local_rank() -> None:
    """Its own options come first; ranks run `train` with what NeoX encoded."""
    words = deepspeed_arguments(WORDS, options("--cpu", "--neox-path", "/opt/neox"))
    added = [MODULE, "train", "--neox-path", "/opt/neox", "--cpu"]
    assert words == ["--no_local_rank", "--module", *WORDS[:4], *added, *WORDS[5:]]


def test_ranks_become_the_launchers_number_of_gpus_unless_it_has_one() -> None:
    """`--ranks` of one machine need no `num_gpus` in the YAML."""
    plain = [MODULE, *WORDS[5:]]
    assert deepspeed_arguments(plain, options("--ranks=4"))[2:4] == ["--num_gpus", "4"]
    assert deepspeed_arguments(WORDS, options("--ranks=4")).count("--num_gpus") == 1
    hosts = ["--hostfile", "hosts", *plain]
    assert "--num_gpus" not in deepspeed_arguments(hosts, options("--ranks=16"))


def test_a_baseline_needs_no_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`--plain` takes a YAML that never heard of zero_topo, and takes the block out of one that has
    it.
    """
    pytest.importorskip("yaml")
    merged: list[dict[str, Any]] = []

    class NeoXArgs(SimpleNamespace):
        use_wandb = False

        @classmethod
        def from_ymls(cls, paths: list[str], overwrite: dict[str, Any]) -> NeoXArgs:
            merged.append(overwrite)
            return cls(get_deepspeed_main_args=lambda: WORDS)

    arguments: Any = ModuleType("megatron.neox_arguments")
    arguments.NeoXArgs = NeoXArgs
    monkeypatch.setitem(sys.modules, "megatron.neox_arguments", arguments)
    text = (ROOT / "neox_configs/frontier-20b.yml").read_text()
    stock = re.sub(r'"deepspeed_extra_args": .*?\n  },', "", text, flags=re.DOTALL).replace(
        'clipping": 1.0', 'clipping": 0.5'
    )
    for name, content in (("with.yml", text), ("without.yml", stock)):
        (tmp_path / name).write_text(content)
        plain = options("--plain", path=tmp_path / name)
        require(plain)
        assert rank_arguments(plain) == WORDS
    assert [sorted(each["deepspeed_extra_args"]) for each in merged] == [
        ["gradient_clipping", "timers"],
        [],
    ]
    with pytest.raises(ValueError, match="zero_topo is missing"):
        require(options(path=tmp_path / "without.yml"))


def test_srun_binds_tasks_to_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher stands between srun and the ranks."""
    monkeypatch.setenv("SLURM_NNODES", "2")
    bound = options("--ranks=16", "--srun=-c7 --gpus-per-task=1 --gpu-bind=closest")
    started = ["srun", "-N", "2", "-n", "16", "-c7", "--gpus-per-task=1", "--gpu-bind=closest"]
    assert srun_command(bound, WORDS) == [
        *started,
        sys.executable,
        "-u",
        "-m",
        MODULE,
        "train",
        *WORDS[5:],
    ]


def test_srun_takes_no_config_for_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse gives an option with an optional value the word after it."""
    with pytest.raises(SystemExit):
        main(["launch", "--srun", "a.yml", "b.yml"])
    assert "'a.yml' is no option of srun; put the configs before --srun" in capsys.readouterr().err


def test_srun_needs_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Slurm, or from the command line."""
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    with pytest.raises(ValueError, match="give --ranks 16"):
        number_of_ranks(options("--srun="))
    monkeypatch.setenv("SLURM_NTASKS", "64")
    assert number_of_ranks(options("--srun=")) == 64
    assert number_of_ranks(options()) is None


def test_arguments_come_back_from_base64() -> None:
    """And what is none is refused in one line."""
    encoded = base64.urlsafe_b64encode(json.dumps({"num_layers": 2}).encode()).decode()
    assert decode(encoded) == {"num_layers": 2}
    for broken in ("%%%", "AAAA", base64.urlsafe_b64encode(b"[1]").decode()):
        with pytest.raises(ValueError, match="not base64 of a JSON object"):
            decode(broken)


def test_train_wants_one_source_of_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is imported."""
    assert main(["train"]) == 2
    assert "either CONFIG.yml files or --megatron_config" in capsys.readouterr().err


def test_a_bare_srun_is_read_from_slurms_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `launch`'s worker reads them (test_launch_env.py); not without a launcher, nor where RANK
    is set.
    """
    dealt, environ = deal(2, 8, 8), dict[str, str]()
    monkeypatch.setattr(os, "environ", environ)
    adopt_launcher()
    assert environ == {}
    for rank in (11, 12):
        environ |= step(2, 8) | task(dealt, rank)
        adopt_launcher()
        assert [environ[name] for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR")] == [
            "11",
            "3",
            "n0",
        ]


@pytest.mark.parametrize(("devices", "placement", "reported"), [(1, 3, 0), (1, 0, 0), (8, 3, 3)])
def test_one_visible_device_is_device_0(
    monkeypatch: pytest.MonkeyPatch, devices: int, placement: int, reported: int
) -> None:
    """With `--gpus-per-task=1` NeoX and DeepSpeed are given 0, and only the node's first task
    compiles helpers.
    """
    import torch

    compiled: list[int] = []
    helpers: Any = ModuleType("megatron.data.data_utils")
    helpers.compile_helper = lambda: compiled.append(1)
    monkeypatch.setitem(sys.modules, "megatron.data.data_utils", helpers)
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
    model: Any = ModuleType("megatron.model")
    model.get_params_for_weight_decay_optimization = lambda *_: groups
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.model", model)
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
