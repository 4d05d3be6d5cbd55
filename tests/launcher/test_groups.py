# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The optimizer's groups as a script lists them: in any order, on any rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch.distributed as dist
from torch import nn

from tests.launcher.training import (
    Job,
    Net,
    advance,
    assert_equal,
    block,
    ds_config,
    run,
    running,
    train,
)
from tests.marks import core


def listed(model: nn.Module, reversed_on: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Two groups, the second of equal shapes, which some ranks list from its end."""
    assert isinstance(model, Net)
    blocks = list(model.blocks.parameters())
    kinds = [blocks[1::4], blocks[0::4], blocks[2::4], blocks[3::4]]
    if dist.get_rank() in reversed_on:
        for index in (0, 1, 3):
            kinds[index].reverse()
    ends = [*model.inp.parameters(), *model.out.parameters()]
    return [{"params": ends, "lr": 2e-2}, {"params": [*chain(*kinds)], "weight_decay": 0.0}]


@pytest.mark.parametrize("scheme", [core("topo"), "zero++", "hsdp"])
def test_a_rank_may_list_its_parameters_in_another_order(scheme: str) -> None:
    """As a ``set`` of them does: they train as under stock ZeRO-3, where shards are of one
    parameter everywhere.
    """
    job = Job(steps=3, groups=partial(listed, reversed_on=(1,)))
    assert_equal(run(job.under(block(scheme))), run(job))


def test_a_checkpoint_is_loaded_in_its_own_order(shared_path: Path) -> None:
    """Of ranks that differed, by ranks that differ in another way; ranks that all have another
    order are sent to the universal checkpoint.
    """
    mixed, other, alike = (
        Job(steps=4, groups=partial(listed, reversed_on=ranks), zero_topo=block("topo"))
        for ranks in ((1,), (0, 2), tuple(range(dist.get_world_size())))
    )
    with running(mixed) as engine:
        advance(mixed, engine, 0, 2)
        engine.save_checkpoint(str(shared_path), tag="mixed")
        expected = advance(mixed, engine, 2, 4)
    with running(other) as engine:
        engine.load_checkpoint(str(shared_path), tag="mixed")
        assert advance(other, engine, 2, 4) == expected
    with running(alike) as engine, pytest.raises(ValueError, match=r"another order.*universal"):
        engine.load_checkpoint(str(shared_path), tag="mixed")


# The process group that ``zero.Init`` shards over: the argument's name, and DeepSpeed's older name
@pytest.mark.parametrize("name", ["data_parallel_group", "sequence_data_parallel_group"])
def test_a_model_in_a_smaller_group_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``deepspeed.initialize`` without tensor parallelism, before it builds an optimizer."""
    monkeypatch.setattr(deepspeed.DeepSpeedEngine, "_configure_optimizer", None)
    half, _ = dist.new_subgroups(dist.get_world_size() // 2)
    with deepspeed.zero.Init(**{name: half}):
        model = Net()
    with pytest.raises(
        ValueError,
        match=r"inp\.weight is partitioned over \d ranks, but the data-parallel group has",
    ):
        deepspeed.initialize(model=model, config=ds_config(Job(zero_topo=block("topo"))))


def test_a_group_of_all_ranks_trains() -> None:
    """As the world itself does."""
    job = Job(steps=2, zero_topo=block("topo"))

    def in_a_group() -> Net:
        group = dist.new_group()
        with deepspeed.zero.Init(config_dict_or_path=ds_config(job), data_parallel_group=group):
            return Net()

    assert train(replace(job, model=in_a_group)) == train(replace(job, zero_init=True))
