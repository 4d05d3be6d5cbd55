# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`zero-topo launch`: the script for Frontier as a golden file, bindings against the machines,
commands, refusals.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.commands import Run
from tests.data import table
from tests.launching import ROOT, ended, output
from tests.steps import step, task
from zero_topo.launch.batch import BatchJob, script
from zero_topo.launch.machines import load_launch_machine, machine_names
from zero_topo.topology.presets import load_machine, preset_names

DATA = ROOT / "tests/data/launch"
TRAIN = ("python", "train.py", "--deepspeed_config", "configs/frontier.json")
# OLCF Frontier User Guide: blocks of 8 cores, and the GCD next to each
FRONTIER_L3_TO_GCD = (4, 5, 2, 3, 6, 7, 0, 1)


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command line in an empty folder and returns (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return run


def program(folder: Path, name: str, body: str) -> None:
    """Writes a shell script that can be started by its name."""
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def printed(text: str, folder: Path, **env: str) -> list[str]:
    """The lines that a script prints, which finds the programs of a folder."""
    path = f"{folder}:{os.environ['PATH']}"
    return output(["bash"], input=text, env={"PATH": path, **env}, cwd=folder).splitlines()


def test_the_script_for_frontier_is_this(run: Run) -> None:
    """Regenerate with: zero-topo launch slurm ... (see the words below)."""
    words = "--nodes 48 --machine frontier --account ABC123 --time 2:00:00"
    status, out, _ = run("launch", "slurm", *words.split(), "--", *TRAIN)
    assert status == 0
    assert out == (DATA / "frontier-48.sbatch").read_text()


@pytest.mark.parametrize("name", [*machine_names(), str(DATA / "half-frontier.json")])
def test_every_script_is_bash_and_every_setting_has_its_reason(name: str) -> None:
    """`bash -n` accepts it; each variable, module and machine's option stands right under a comment
    with a source.
    """
    machine = load_launch_machine(name)
    environment = "env.tar.gz" if machine.disk else None
    ranks = machine.ranks_per_node or 4
    scheduler = machine.scheduler or "slurm"
    queue = "debug" if scheduler == "pbs" else None
    job = BatchJob(scheduler, machine, 3, TRAIN, ranks, "ABC123", queue, "2:00:00", environment)
    lines = script(job).splitlines()
    checked = ended(["bash", "-n"], input="\n".join(lines))
    assert (checked.returncode, checked.stderr) == (0, "")
    disk = (*machine.disk, *machine.disk_job)
    for setting in (
        *machine.modules,
        *machine.job,
        *machine.step,
        *machine.variables,
        *machine.doctors,
        *disk,
    ):
        name, _, value = setting.use.partition("=")
        written = setting.use if name.startswith("-") or not value else f'export {name}="{value}"'
        above = lines[max(index for index, line in enumerate(lines) if written in line) - 1].strip()
        assert above.startswith("# ") and above.rstrip(".:").endswith(")"), f"{written}: {above}"
    assert all(setting.bash in lines for setting in machine.address)
    exported = [line for line in lines if line.startswith("export ")]
    assert len(exported) == 1 + len(machine.variables) + len(machine.doctors) + 2 * len(
        machine.disk
    )


def test_the_scripts_command_survives_the_shell(tmp_path: Path) -> None:
    """Spaces, quotes, dollars and globs in arguments reach the rank as they were given."""
    words = ["printf", "%s\n", "a b", "$HOME", "it's", "*", ""]
    text = script(BatchJob("slurm", load_launch_machine("generic"), 1, words, 1))
    program(tmp_path, "srun", 'while [ "$1" != python ]; do shift; done; exec "$@"')
    program(tmp_path, "python", 'shift 3; exec "$@"')
    program(tmp_path, "hostname", "echo 10.0.0.1 10.0.0.2")
    assert printed(text, tmp_path) == words[2:]


def test_an_environment_is_unpacked_on_each_node(tmp_path: Path, run: Run) -> None:
    """A conda-pack archive: ranks take their Python from the node's disk, after its paths were
    mended there.
    """
    packed, disk = tmp_path / "env" / "bin", tmp_path / "disk"
    packed.mkdir(parents=True)
    disk.mkdir()
    program(packed, "python", 'echo "python of $(dirname "$0")"')
    program(packed, "conda-unpack", 'touch "$(dirname "$0")/mended"')
    output(["tar", "-czf", "env.tar.gz", "-C", "env", "."], cwd=tmp_path)
    machine = table("launch/half-frontier")
    setting = {"use": f"NODE_DISK={disk}", "reason": "a disk", "source": "us"}
    constraint = {"use": "--constraint=nvme", "reason": "asks for it", "source": "us"}
    (tmp_path / "m.json").write_text(
        json.dumps(machine | {"disk": [setting], "disk_job": [constraint]})
    )
    words = "--machine m.json --nodes 2 --environment env.tar.gz --account ABC123 --time 2:00:00"
    status, text, _ = run("launch", "slurm", *words.split(), "--", *TRAIN)
    assert status == 0 and "#SBATCH --constraint=nvme" in text
    program(tmp_path, "sbcast", '[ "$1 $2" = "--force --preserve" ] && cp "$3" "$4"')
    program(tmp_path, "srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    program(tmp_path, "module", "true")
    where = disk / "zero-topo-7" / "bin"
    # The build, and the ranks
    assert printed(text, tmp_path, SLURM_JOB_ID="7", USER="u") == [f"python of {where}"] * 2
    assert (where / "mended").exists() and not list(disk.glob("*.tar"))


def test_every_preset_can_be_launched_on() -> None:
    """Same name, same ranks per node; a rack of GB200 is a node of the preset, and 18 hosts of the
    launcher.
    """
    names = [name for name in preset_names() if load_machine(name).launch is not None]
    assert {*names, "generic"} == set(machine_names())
    for name in names:
        machine = load_launch_machine(name)
        assert (machine.name, machine.preset) == (name, name)
        hosts = 18 if name == "gb200-nvl72" else 1
        assert (
            machine.ranks_per_node is None
            or machine.ranks_per_node * hosts == load_machine(name).ranks_per_node
        )


SCRIPTS = table("launch/schedulers")
"""Options, and lines of the script that they make."""


@pytest.mark.parametrize("scheduler", SCRIPTS)
def test_other_schedulers_have_their_own_directives(scheduler: str, run: Run) -> None:
    """Time limit, ranks of a node and host of rank 0 as each has them; every rank sees all GPUs."""
    row = SCRIPTS[scheduler]
    status, out, _ = run("launch", scheduler, *row["options"].split(), "--", *TRAIN)
    assert status == 0 and out.endswith(f"  {' '.join(TRAIN)}\n")
    lines = {line.removesuffix(" \\").removeprefix("export ") for line in out.splitlines()}
    assert not {*row["lines"]} - lines


@pytest.mark.parametrize("name", ["frontier", "lumi-g"])
def test_amd_ranks_get_the_cores_next_to_their_gcd(name: str) -> None:
    """Local rank i uses GCD i; its 7 cores are those of the GCD's L3 region without the first,
    which is reserved.
    """
    machine = load_launch_machine(name)
    (binding,) = [setting.use for setting in machine.step if setting.name == "--cpu-bind"]
    masks = binding.rpartition(":")[2].split(",")
    for rank, mask in enumerate(masks):
        cores = {core for core in range(128) if int(mask, 16) >> core & 1}
        block = FRONTIER_L3_TO_GCD.index(rank)
        assert cores == set(range(8 * block + 1, 8 * block + 8))
        assert len(cores) == machine.cpus_per_rank


def test_options_after_the_program_are_the_programs(run: Run) -> None:
    """Also without the two dashes before it, as srun takes them."""
    words = "launch slurm --machine dgx-h100 python train.py --lr 3 --nodes 2"
    _, out, _ = run(*words.split())
    assert "#SBATCH --nodes=1" in out and out.endswith("  python train.py --lr 3 --nodes 2\n")


STEP = step(2, 1, SLURM_JOB_ID="7") | task([0, 1], 1)
STEPS = [("frontier", {}), ("frontier", STEP), ("generic", {})]


@pytest.mark.parametrize(("name", "of_slurm"), STEPS)
def test_a_shell_takes_a_machines_variables(
    name: str, of_slurm: dict[str, str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the user has set stay; where a Slurm job's nodes are known, so is where its ranks
    meet.
    """
    machine = load_launch_machine(name)
    wanted = {setting.name for setting in (*machine.variables, *machine.doctors)}
    for variable, value in {**dict.fromkeys(wanted, ""), **of_slurm}.items():
        monkeypatch.setenv(variable, value) if value else monkeypatch.delenv(
            variable, raising=False
        )
    if wanted:
        monkeypatch.setenv(min(wanted), "mine")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    status, out, err = run("launch", "env", "--machine", name)
    assert (status, err) == (0, "")
    lines = output(["bash", "-c", 'eval "$1"; env', "bash", out]).splitlines()
    seen = dict(line.split("=", 1) for line in lines if "=" in line)
    assert wanted <= set(seen) and (not wanted or seen[min(wanted)] == "mine")
    assert (seen.get("MASTER_ADDR"), seen.get("MASTER_PORT")) == (
        ("n0", "3442") if of_slurm else (None, None)
    )
