# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Each launcher's environment, alone and inside another's, gives the tree it started; the setting
decides over it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.steps import shape
from zero_topo.topology import discover, emulated, load_preset, resolve_topology

SAMPLES = Path(__file__).parents[1] / "data" / "launchers"
EMULATED = {"emulated": {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 2}}


def sample(name: str, **changes: str) -> dict[str, str]:
    """A captured environment from tests/data/launchers, with changes."""
    lines = (SAMPLES / f"{name}.env").read_text(encoding="utf-8").splitlines()
    return {**dict(line.split("=", 1) for line in lines if not line.startswith("#")), **changes}


DEEPSPEED = sample("deepspeed")


@pytest.mark.parametrize(
    ("name", "expected", "hosts", "placed_by"),
    [
        (
            "slurm_frontier_cyclic",
            (3, 4, 2),
            ("frontier00017", "frontier00018", "frontier04351"),
            "slurm: SLURM_STEP_",
        ),
        ("slurm_batch_deepspeed", (1, 4, 2), None, "preset lumi-g"),
        ("slurm_torchrun", (2, 4, 1), None, "torchrun: LOCAL_WORLD_SIZE"),
        ("slurm_env_script", (2, 2, 1), ("gpu3", "gpu9"), "slurm: SLURM_STEP_TASKS_PER_NODE"),
        ("torchrun", (1, 4, 1), None, "torchrun: LOCAL_WORLD_SIZE"),
        ("deepspeed", (2, 8, 1), None, "deepspeed: LOCAL_SIZE"),
        ("deepspeed_mpich", (2, 2, 1), None, "deepspeed: LOCAL_SIZE"),
        ("openmpi", (2, 4, 1), None, "openmpi: OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("openmpi_torchrun", (2, 2, 1), None, "torchrun: LOCAL_WORLD_SIZE"),
        ("mpich_hydra", (2, 2, 1), None, "mpich: MPI_LOCALNRANKS"),
        ("mpich_pals", (2, 12, 1), None, "mpich: PALS_LOCAL_SIZE"),
        ("flux", (2, 4, 1), None, "flux: FLUX_JOB_SIZE / FLUX_JOB_NNODES"),
        ("mvapich", (2, 2, 1), None, "mvapich: MV2_COMM_WORLD_LOCAL_SIZE"),
        ("plain", (1, 2, 1), None, "assumed: one node"),
    ],
)
def test_each_launcher_gives_its_tree(
    name: str, expected: tuple[int, int, int], hosts: tuple[str, ...] | None, placed_by: str
) -> None:
    topology = discover(sample(name))
    assert shape(topology) == expected
    assert topology.hosts == hosts
    assert any(source.startswith(placed_by) for source in topology.sources.values())
    assert ("warning" in topology.sources) == (name == "plain")


def test_what_accelerate_sets_on_cpus_is_not_torchruns() -> None:
    """LOCAL_WORLD_SIZE=1 next to the deepspeed launcher, which would put each rank on a node of its
    own.
    """
    assert shape(discover({**DEEPSPEED, "LOCAL_WORLD_SIZE": "1"})) == (2, 8, 1)


def test_a_cyclic_step_on_frontier_is_known_to_the_last_detail() -> None:
    topology = discover(sample("slurm_frontier_cyclic"))
    assert topology.name == "frontier" and topology.links == load_preset("frontier", 8).links
    expected = {0: (0, 0, 0), 1: (1, 0, 0), 2: (2, 0, 0), 3: (0, 0, 1), 7: (1, 1, 0)}
    assert {rank: topology.coordinates(rank) for rank in expected} == expected
    assert topology.sources["order"] == "slurm: SLURM_DISTRIBUTION=cyclic"


def test_variables_set_from_slurms_keep_slurms_placement() -> None:
    for distribution, nodes in (("cyclic", [0, 1, 0, 1]), ("block", [0, 0, 1, 1])):
        topology = discover(sample("slurm_env_script", SLURM_DISTRIBUTION=distribution))
        assert [topology.coordinates(rank)[0] for rank in range(4)] == nodes
        assert topology.sources["order"] == f"slurm: SLURM_DISTRIBUTION={distribution}"


def test_no_launcher_is_one_rank() -> None:
    topology = discover({"HOME": "/", "SLURM_CLUSTER_NAME": "frontier"})
    assert shape(topology) == (1, 1, 1)
    assert topology.name == "one process"
    assert all("no launcher started this process" in source for source in topology.sources.values())


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("deepspeed", "LOCAL_SIZE=8 CROSS_SIZE=1 CROSS_RANK=0", "WORLD_SIZE is 1 but LOCAL_SIZE 8"),
        ("torchrun", "LOCAL_WORLD_SIZE=4", "WORLD_SIZE is 1 but LOCAL_WORLD_SIZE 4"),
        ("plain", "SLURM_JOB_ID=7 SLURM_NTASKS=9 SLURM_TASKS_PER_NODE=5,4", None),
        ("plain", "SLURM_JOB_ID=7 SLURM_NTASKS=56 SLURM_NNODES=1", None),
    ],
)
def test_a_job_of_one_process_is_a_rank_of_its_own(
    name: str, changes: str, said: str | None
) -> None:
    """A process apart, such as an evaluation or a test, in the environment of a larger job; its
    device is any.
    """
    env = {**sample(name), **dict(change.split("=") for change in changes.split())}
    topology = discover({**env, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "3"})
    assert shape(topology) == (1, 1, 1) and topology == resolve_topology(
        "auto", {**env, "WORLD_SIZE": "1", "RANK": "0"}
    )
    assert said is None or f"{said} on this node: a rank of its own" in topology.sources["warning"]


@pytest.mark.parametrize("name", ["torchrun", "deepspeed", "openmpi", "mpich_hydra", "plain"])
def test_every_rank_discovers_the_same(name: str) -> None:
    env = sample(name)
    whole = discover(env)
    keys = {
        "rank": ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        "local": ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
        "node": ("GROUP_RANK", "CROSS_RANK"),
    }
    for rank in range(whole.world_size):
        node, local = divmod(rank, whole.ranks_per_node)
        numbers = {"rank": rank, "local": local, "node": node}
        changed = {
            key: str(numbers[what]) for what, names in keys.items() for key in names if key in env
        }
        assert discover({**env, **changed}) == whole


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        (
            "slurm_env_script",
            "WORLD_SIZE=8",
            "8 ranks (environment: WORLD_SIZE) but 4 (slurm: SLURM_STEP_NUM_TASKS)",
        ),
        (
            "slurm_env_script",
            "WORLD_SIZE=1 RANK=0",
            "1 ranks (environment: WORLD_SIZE) but 4 (slurm: SLURM_STEP_NUM_TASK",
        ),
        (
            "slurm_env_script",
            "RANK=1",
            "1 as this process's rank (environment: RANK) but 3 (slurm: SLURM_PROCID)",
        ),
        ("slurm_env_script", "LOCAL_SIZE=1", "1 ranks per node (deepspeed: LOCAL_SIZE) but 2"),
        (
            "slurm_torchrun",
            "SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2)",
            "8 ranks (torchrun: WORLD",
        ),
        (
            "deepspeed",
            "LOCAL_SIZE=4",
            "of 16 ranks (WORLD_SIZE) on 2 nodes (CROSS_SIZE), this node, number 1",
        ),
        ("deepspeed", "LOCAL_WORLD_SIZE=16 GROUP_RANK=0", "rank 9 has local rank 1"),
        ("deepspeed", "WORLD_SIZE=sixteen", "WORLD_SIZE is 'sixteen'"),
        ("deepspeed", "RANK=16", "rank 16 (deepspeed: RANK) is out of range"),
        ("deepspeed", "RANK=1", "rank 1 has node 1 (deepspeed: CROSS_RANK)"),
        ("torchrun", "LOCAL_WORLD_SIZE=3", "unequal numbers of ranks"),
        (
            "openmpi",
            "OMPI_COMM_WORLD_LOCAL_RANK=3",
            "rank 6 has local rank 3 (openmpi: OMPI_COMM_WORLD_LOCAL_RANK)",
        ),
        ("openmpi", "OMPI_COMM_WORLD_SIZE=9", "unequal numbers of ranks"),
        (
            "openmpi",
            "WORLD_SIZE=16",
            "16 ranks (environment: WORLD_SIZE) but 8 (openmpi: OMPI_COMM_WORLD_SIZE)",
        ),
        (
            "deepspeed_mpich",
            "MPI_LOCALNRANKS=4",
            "2 ranks per node (deepspeed: LOCAL_SIZE) but 4 (mpich",
        ),
    ],
)
def test_contradicting_launchers_are_refused(name: str, changes: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        discover(sample(name, **dict(change.split("=") for change in changes.split())))


def test_auto_without_a_launcher_takes_the_group_for_one_warned_node() -> None:
    topology = resolve_topology("auto", {}, 4)
    assert shape(topology) == (1, 4, 1)
    assert "one flat node" in topology.sources["warning"]
    assert "warning" not in resolve_topology("auto", {}, 1).sources


def test_a_preset_takes_its_nodes_from_the_ranks() -> None:
    assert resolve_topology("frontier", {}, 16) == load_preset("frontier", 16)
    assert resolve_topology("dgx-a100", DEEPSPEED).nodes == 2
    assert resolve_topology("single-node", {}).world_size == 1


@pytest.mark.parametrize(
    ("setting", "env", "world_size", "complaint"),
    [
        ("frontier", {}, 12, "world size 12 does not fill whole nodes of preset 'frontier'"),
        (EMULATED, {}, 4, "2 nodes x 2 GPUs x 2 ranks = 8 ranks but the job has 4"),
        (EMULATED, DEEPSPEED, None, "8 ranks but the job has 16"),
        (
            {"nodes": 1, "gpus_per_node": 3, "ranks_per_gpu": 1},
            {},
            4,
            "= 3 ranks but the job has 4; start 3 ranks",
        ),
        ("frontire", {}, 8, "topology 'frontire' is unknown; did you mean 'frontier'"),
        ("Auto", {}, 8, "did you mean 'auto'"),
        ({"emulated": 3}, {}, 8, "emulated is 3; it must be an object"),
        ({"emulated": {"nodes": 2}}, {}, 8, "missing key 'gpus_per_node'"),
        ({"preset": "frontier"}, {}, 8, "preset: unknown key"),
        (None, {}, 8, "topology is None; it must be 'auto', a preset"),
        ("auto", {}, 0, "world size: must be a whole number of at least 1, got 0"),
        (
            "auto",
            DEEPSPEED,
            8,
            "the job has 8 ranks but its environment describes 16 (deepspeed: WORLD_SIZE)",
        ),
        (f"{SAMPLES}/", {}, 4, "cannot be read"),
    ],
)
def test_wrong_settings_are_refused(
    setting: Any, env: dict[str, str], world_size: int | None, complaint: str
) -> None:
    """Without a given world size the launcher is the judge; a folder is no topology."""
    with pytest.raises(ValueError, match=re.escape(complaint)):
        resolve_topology(setting, env, world_size)


def test_a_stated_tree_gets_the_launchers_placement() -> None:
    stated = {"nodes": 3, "gpus_per_node": 4, "ranks_per_gpu": 2}
    env = sample("slurm_frontier_cyclic")
    for setting in ("frontier", stated):
        topology = resolve_topology(setting, env, 24)
        assert topology.order == discover(env).order and topology.hosts == discover(env).hosts
        assert topology.sources["order"] == "slurm: SLURM_DISTRIBUTION=cyclic"


def test_a_stated_order_is_kept_even_where_launchers_contradict_each_other() -> None:
    env = sample("slurm_env_script", RANK="1")
    order = [3, 2, 1, 0]
    topology = resolve_topology(
        {"nodes": 2, "gpus_per_node": 2, "ranks_per_gpu": 1, "order": order}, env, 4
    )
    assert topology.order == tuple(order)


def test_an_emulated_tree_is_left_alone() -> None:
    env = sample("slurm_frontier_cyclic")
    setting = {"emulated": {"nodes": 3, "gpus_per_node": 4, "gcds_per_gpu": 2}}
    assert resolve_topology(setting, {}) == emulated(3, 4, 2)
    assert resolve_topology(setting, env, 24) == resolve_topology(setting, env) == emulated(3, 4, 2)


@pytest.mark.parametrize("name", ["machine.json", "machine"])
def test_a_path_is_read(tmp_path: Path, name: str) -> None:
    topology = load_preset("lumi-g", 8)
    (tmp_path / name).write_text(json.dumps(topology.to_json()), encoding="utf-8")
    assert resolve_topology(str(tmp_path / name), {}, 8) == topology
    (tmp_path / name).write_text(json.dumps(EMULATED), encoding="utf-8")
    assert resolve_topology(str(tmp_path / name), {}, 8) == emulated(2, 2, 2)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read (No such file"),
        (b"{nodes: 2}", "Expecting property name"),
        (b"[1]", "holds a list; it must hold an object"),
        (b"\xff\xfe", "is no UTF-8 text"),
        (b'{"nodez": 2}', "did you mean 'nodes'"),
        (json.dumps(EMULATED).encode(), "2 nodes x 2 GPUs x 2 ranks = 8 ranks but the job has 4"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "machine.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(complaint)) as error:
        resolve_topology(str(path), {}, 4)
    assert str(path) in str(error.value)
