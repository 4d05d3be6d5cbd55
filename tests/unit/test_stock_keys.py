# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's keys for ZeRO++, LoCo and MiCS: what they become, and what contradicts them."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Run
from tests.data import table
from tests.plans import printed
from zero_topo.config.stock_keys import ZERO, switched_on

ZEROPP = {
    "zero_quantized_weights": True,
    "zero_hpz_partition_size": 8,
    "zero_quantized_gradients": True,
}


def stock(block: Any, **zero: Any) -> dict[str, Any]:
    """A config of stage 3 with stock keys, and a block."""
    return {ZERO: {"stage": 3, **zero}, "zero_topo": block}


TRANSLATED = table("stock_keys")
"""Stock keys, the block next to them, which is empty if none is named, and what it becomes."""


@pytest.mark.parametrize("name", TRANSLATED)
def test_check_shows_the_config_that_the_keys_become(name: str, run: Run, tmp_path: Path) -> None:
    """No key with an effect is left for DeepSpeed, and none that 0.19.8 refuses; the config that is
    shown is valid on 8 and on 384 ranks.
    """
    row = TRANSLATED[name]
    path = tmp_path / "ds.json"
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "timers": {"throughput": {"synchronized": False}},
    }
    path.write_text(json.dumps({**settings, **stock(row.get("next to", {}), **row["zero"])}))
    shown = printed(run, "check", str(path), "--machine", "frontier", "--ranks", "8")["config"]
    assert shown["zero_topo"] == row["block"] and switched_on(shown) == {}
    assert not {"mics_shard_size", "zeropp_loco_param"} & set(shown[ZERO])
    path.write_text(json.dumps(shown))
    for ranks in ("8", "384"):
        status, out, err = run("check", str(path), "--machine", "frontier", "--ranks", ranks)
        assert (status, err) == (0, "") and out.endswith("ok\n")


@pytest.mark.parametrize("carried_by", ["config", "config_params", "args"])
def test_deepspeed_gets_the_config_without_the_keys(
    carried_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would act on them or refuse them itself. The caller's dict and arguments are not
    changed.
    """
    from deepspeed.utils import logger

    from zero_topo.hook.initialize import checked_first

    seen: list[Any] = []
    said: list[str] = []

    def initialize(
        args: Any = None, optimizer: Any = None, config: Any = None, config_params: Any = None
    ) -> None:
        seen.append(config or config_params or args.deepspeed_config)

    monkeypatch.setattr(logger, "warning", said.append)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(stock({"scheme": "topo"}, **ZEROPP)))
    args = Namespace(deepspeed_config=str(path))
    given: dict[str, Any] = {"args": args} if carried_by == "args" else {carried_by: str(path)}
    checked_first(initialize)(**given)
    assert switched_on(seen[0]) == {} and seen[0]["zero_topo"]["secondary"] == 8
    assert args.deepspeed_config == str(path)
    assert len(said) == 3 and all("is taken as" in line for line in said)
    monkeypatch.setenv("RANK", "1")
    checked_first(initialize)(**given)
    assert len(said) == 3, "another rank says nothing"
