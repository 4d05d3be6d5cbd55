# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What ranks agree on at their start: by digests, and in the store they met in where some may not
know of zero_topo.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from tests.harness import run_threads
from zero_topo.engine import agreement
from zero_topo.engine.agreement import agree, check_blocks
from zero_topo.hook import start
from zero_topo.topology.placements import Placement

CPU = torch.device("cpu")
HOST = socket.gethostname()


def same_on_all(size: int, say: Any) -> str:
    """What all ranks read when each agrees to `say(rank)` in vain."""

    def rank_main(rank: int) -> str:
        with pytest.raises(ValueError) as caught:
            agree(say(rank), CPU)
        return str(caught.value)

    with patch.object(socket, "gethostname", lambda: f"n{dist.get_rank() // 2}"):
        (said,) = set(run_threads(size, rank_main))
    return said


def test_ranks_that_say_the_same_gather_digests_alone() -> None:
    """32 bytes a rank, however long the text, and no object is sent."""
    gather = dist.all_gather_into_tensor
    with (
        patch.object(dist, "all_gather_into_tensor", side_effect=gather) as gathered,
        patch.object(dist, "broadcast_object_list", side_effect=AssertionError),
    ):
        run_threads(4, lambda rank: agree({"order": list(range(100_000))}, CPU))
    assert [call.args[1].nbytes for call in gathered.call_args_list] == [32] * 4


def test_one_rank_of_each_kind_tells_what_it_has() -> None:
    """Two texts are sent for two kinds among six ranks; most ranks are right, whichever rank 0
    belongs to.
    """
    broadcast = dist.broadcast_object_list
    with patch.object(dist, "broadcast_object_list", side_effect=broadcast) as sent:
        said = same_on_all(6, lambda rank: {"zero": {"bucket": 5 if rank < 2 else 7, "stage": 3}})
    leaders = sorted(call.kwargs["src"] for call in sent.call_args_list)
    assert leaders == [0] * 6 + [2] * 6
    assert said.startswith(
        "ranks do not agree with rank 2 of host n1 and 3 more: rank 0 of host n0 and 1 more has "
    )
    assert "has zero.bucket 5 in place of 7; give" in said and "stage" not in said


def test_what_only_one_kind_has_is_named() -> None:
    """A parameter that the others do not have, and no more of a long list than helps."""
    said = same_on_all(3, lambda rank: {"model": {f"w{i}": [2] for i in range(3 if rank else 9)}})
    assert "rank 0 of host n0 has model.w3 [2] in place of absent, " in said
    assert "w6" in said and "w7" not in said


def test_a_rank_that_refuses_is_heard_everywhere() -> None:
    """What only one rank can see ends all, with its words."""
    said = same_on_all(4, lambda rank: {"refused": "no memory"} if rank == 3 else {"zero_topo": ""})
    assert said.startswith("rank 3 of host n1 refuses: no memory; ")


Gpus = list[tuple[str, int | None]]
"""Of each device its name, and its PCI bus; Intel's have no address in torch."""


def module_of(gpus: Gpus) -> SimpleNamespace:
    """A torch module of these devices."""

    def properties(device: torch.device | int) -> SimpleNamespace:
        name, bus = gpus[device if isinstance(device, int) else device.index]
        address = {} if bus is None else {"pci_domain_id": 1, "pci_bus_id": bus, "pci_device_id": 0}
        return SimpleNamespace(name=name, **address)

    return SimpleNamespace(device_count=lambda: len(gpus), get_device_properties=properties)


MI250X = "AMD Instinct MI250X"


@pytest.mark.parametrize(
    ("device", "gpus", "package", "size"),
    [
        ("cpu", [], "", 1),
        ("cuda:1", [("NVIDIA H100", 0x1B), ("NVIDIA H100", 0x43)], "0001:43:00", 1),
        ("cuda:1", [(MI250X, 0xC1), (MI250X, 0xC6)], "0001:c1:00", 2),
        ("cuda:0", [(MI250X, 0xC6)], "", 2),  # neither torch nor Linux lists the other GCD
        ("xpu:1", [("Intel(R) Data Center GPU Max 1550", None)] * 12, "", 2),
    ],
)
def test_a_rank_reads_where_it_runs_from_torch(
    device: str, gpus: Gpus, package: str, size: int
) -> None:
    with (
        patch.object(torch, "get_device_module", lambda _: module_of(gpus)),
        patch.object(agreement, "same_model", lambda address: []),
    ):
        found = agreement.own_placement(torch.device(device))
    assert (found.package, found.size, found.domain) == (package, size, "")
    assert found.host == socket.gethostname() and found.machine


def test_every_rank_gets_the_placements_of_all() -> None:
    """In one collective; hosts are those that NCCL takes for one."""
    hosts = {0: "a", 1: "b" * 64, 2: "a"}
    longest = Placement(hosts[1], f"{1:016}", "10000:c1:00", 255, "f" * 16)

    def own(device: torch.device) -> Placement:
        rank = dist.get_rank()
        return longest if rank == 1 else Placement(hosts[rank], f"{0:016}")

    with patch.object(agreement, "own_placement", own):
        found = run_threads(3, lambda rank: agreement.gather_placements(CPU))
    assert found[0] == found[1] == found[2]
    assert [placement.host for placement in found[0]] == list(hosts.values())
    assert found[0][1] == longest


def test_a_host_is_what_nccl_takes_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = []
    for host, nccl in [("a", ""), ("b", ""), ("a", "one"), ("b", "one")]:
        monkeypatch.setattr(socket, "gethostname", lambda name=host: name)
        monkeypatch.setenv("NCCL_HOSTID", nccl)
        machines.append(agreement.own_placement(CPU).machine)
    assert machines[2] == machines[3] and len({*machines}) == 3


# -- settings of DeepSpeed and of the optimizer ----------------------------------------------------

TRAINING: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "communication_data_type": "fp32",
    "managed_gradient_accumulation": True,
    "data_types": {"grad_accum_dtype": "fp32", "param_dtype": None},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "checkpoint": {"tag_validation": "Warn", "load_universal": False},
    "zero_allow_untested_optimizer": True,
    "dataloader_drop_last": False,
    "a_key_of_tomorrow": {"inside": 1},
    "fp16": DeepSpeedFP16Config().model_dump(),
    "bf16": DeepSpeedBF16Config().model_dump(),
    "zero_optimization": {
        **DeepSpeedZeroConfig().model_dump(),
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig().model_dump(),
    },
}
OF_A_RANK: dict[str, Any] = {
    **DeepSpeedMonitorConfig().model_dump(),
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "zero_topo": {"topology": "machine.json", "overlap": True},
    "comms_logger": CommsLoggerConfig().model_dump(),
    "timers": {"throughput": DeepSpeedThroughputTimerConfig().model_dump()},
    "flops_profiler": {"enabled": False, "profile_step": 1, "output_file": None},
    "data_efficiency": {"data_sampling": {"index_to_sample_path": "/data"}},
    "autotuning": {"results_dir": "autotuning_results"},
    "aio": {"block_size": 1 << 20},
    **dict.fromkeys(
        ("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"), False
    ),
    **{"steps_per_print": 10, "log_level": "info"},
}
LOCAL_OF_ZERO = {"log_trace_cache_warnings", "offload_optimizer.nvme_path"}


def leaves(block: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The way to each value of nested dicts."""
    for key, value in block.items():
        inner = isinstance(value, dict) and value
        yield from leaves(value, (*path, key)) if inner else [(*path, key)]


def changed(block: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The block with another value at the end of the way."""
    made = deepcopy(block)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "another"
    return made


def seen_by(config: dict[str, Any], steps: int = 1) -> dict[str, Any]:
    """What an engine of this config, and of a small model, tells the others."""
    zero = SimpleNamespace(model_dump=lambda: config["zero_optimization"])
    made = SimpleNamespace(_param_dict=config, zero_config=zero)
    return start._settings(SimpleNamespace(_config=made, gradient_accumulation_steps=lambda: steps))


def test_every_leaf_of_the_json_is_agreed_on_or_local() -> None:
    """Changed on one rank, each is refused on all by its name and both values, or is a rank's own
    for a reason.
    """
    config = TRAINING | OF_A_RANK
    paths = list(leaves(config))
    assert len(paths) > 100

    def rank_main(rank: int) -> list[str]:
        said = []
        for path in paths:
            try:
                agree(seen_by(changed(config, path) if rank == 1 else config), CPU)
                said.append("")
            except ValueError as error:
                said.append(str(error))
        return said

    first, *others = run_threads(3, rank_main)
    assert others == [first] * 2
    local = set()
    for path, line in zip(paths, first, strict=True):
        name = ".".join(path)
        if line:
            assert (
                f'rank 1 of host {HOST} has {name} "another" in place of ' in line
                and "\n" not in line
            )
        else:
            local.add(name)
    zero = {f"zero_optimization.{name}" for name in LOCAL_OF_ZERO}
    assert local == {".".join(path) for path in leaves(OF_A_RANK)} | zero


def test_accumulation_and_the_models_order_are_agreed_on() -> None:
    """The number of micro-batches that DeepSpeed derives, whatever key says it; and which parameter
    comes first.
    """
    said = same_on_all(3, lambda rank: seen_by(TRAINING, steps=2 if rank == 1 else 1))
    assert "rank 1 of host n0 has gradient_accumulation_steps 2 in place of 1; " in said

    def reordered(rank: int) -> dict[str, Any]:
        layer = torch.nn.Module()
        for name in ("a", "b") if rank else ("b", "a"):
            layer.register_parameter(name, torch.nn.Parameter(torch.zeros(3)))
        return start._model(layer)

    assert 'has model_order.0 "b" in place of "a", ' in same_on_all(3, reordered)


def trained(model: torch.nn.Module, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What ranks tell of an optimizer of these groups."""
    return start._trained(
        torch.optim.AdamW(groups, lr=torch.tensor(0.5)), {p: n for n, p in model.named_parameters()}
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"lr": 0.25}, "param_groups.1.lr 0.25 in place of 0.5"),
        ({"betas": (0.5, 0.9)}, "param_groups.1.betas [0.5, 0.9] in place of [0.9, 0.999]"),
        ({"mine": object}, "param_groups.1.mine \"<class 'object'>\" in place of absent"),
        ({"params": []}, "param_group_of.bias absent in place of 1"),
    ],
)
def test_settings_and_members_of_groups_are_agreed_on(change: dict[str, Any], line: str) -> None:
    """Another rate, decay or key of one group; a parameter left out. A rate in a tensor counts by
    its value, and an object of each rank's own not by its address.
    """

    def say(rank: int) -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        groups: list[dict[str, Any]] = [
            {"params": [model.weight], "own": object(), "call": lambda: rank},
            {"params": [model.bias]},
        ]
        if rank == 1:
            groups[1] |= change
        return trained(model, groups)

    assert f"rank 1 of host n0 has {line}; " in same_on_all(3, say)


# -- a rank that may not know of zero_topo ---------------------------------------------------------


def meet(
    blocks: list[bool | None], store: dist.Store | None = None, variable: str | None = None
) -> list[str]:
    """What ranks with and without a block read; None does not come."""
    store = store or dist.HashStore()

    def rank_main(rank: int, has_block: bool) -> str:
        try:
            check_blocks(store, rank, len(blocks), has_block, variable)
        except (ValueError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        return "goes on"

    with ThreadPoolExecutor(len(blocks)) as pool:
        said = [
            pool.submit(rank_main, rank, has) for rank, has in enumerate(blocks) if has is not None
        ]
        return [one.result() for one in said]


def test_ranks_with_the_block_name_those_without() -> None:
    """Those without go on at once."""
    said = meet([True, False, True, False])
    assert said[1] == said[3] == "goes on"
    assert said[0] == said[2]
    assert said[0].startswith(
        'ValueError: 2 of 4 ranks have no "zero_topo" block in their DeepSpeed config, such as '
    )
    assert "rank 1 of host " in said[0] and "rank 3 of host " in said[0]


def test_a_variable_that_did_not_reach_a_node_is_named_with_the_line_that_sets_it() -> None:
    """Not the JSON, which every rank has: DeepSpeed's launcher, run here, sets the block from that
    line.
    """
    runner = pytest.importorskip("deepspeed.launcher.multinode_runner").PDSHRunner
    block = '{"scheme": "topo", "report": "$HOME\\\\`x`"}'
    said = meet([True, False], variable=block)
    assert said[1] == "goes on"
    assert said[0].startswith(
        "ValueError: ZERO_TOPO_BLOCK is not set on 1 of 2 ranks, such as rank 1 of host "
    )
    assert "JSON" not in said[0] and "~/.deepspeed_env" in said[0] and "\n" not in said[0]
    name, _, value = said[0].rpartition("there: ")[2].partition("=")
    launch = SimpleNamespace(exports={})
    runner.add_export(launch, name, value)
    shell = f"export {name}={launch.exports[name]}; printenv {name}"
    assert (
        subprocess.run(
            ["sh", "-c", shell], capture_output=True, text=True, check=True
        ).stdout.strip()
        == block
    )


def test_engine_after_engine_meets_anew() -> None:
    """A second engine is not taken for the first: what was left in the store belongs to one
    engine.
    """
    store = dist.HashStore()
    assert meet([False, False], store) == ["goes on"] * 2
    assert meet([True, True], store) == ["goes on"] * 2
    assert meet([True, False], store)[0].startswith("ValueError: 1 of 2")


def test_a_rank_that_does_not_come_is_named() -> None:
    """Its script may not import zero_topo: after the store's timeout the others say so.

    A rank without a block never waits: whoever imports zero_topo for a plan must not change how
    DeepSpeed starts.
    """
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    *said, without = meet([True, None, True, False], store)
    assert said == [said[0]] * 2 and without == "goes on"
    assert said[0].startswith("TimeoutError: ranks [1] did not begin the engine")


def test_all_ranks_plan_for_the_smallest_device() -> None:
    """Devices of one job may differ by a little, and ranks that planned each for its own would not
    agree.
    """
    device = deepspeed.accelerator.get_accelerator()
    with patch.object(device, "total_memory", lambda: 10**11 + dist.get_rank()):
        assert run_threads(3, lambda rank: start.least_memory(CPU)) == [10**11] * 3
