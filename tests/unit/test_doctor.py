# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Each check of the doctor in front of something broken: it says what and how to mend it, and
leaves the rest alone.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Run
from zero_topo.doctor import (
    FAIL,
    OK,
    WARN,
    Finding,
    Surroundings,
    examine,
    files,
    software,
)
from zero_topo.doctor.variables import Rule, load_rules, variables
from zero_topo.strict import read
from zero_topo.topology import preset_names
from zero_topo.units import GB, MB
from zero_topo.versions import SUPPORTED

REPORTED: Mapping[str, Any] = {
    "torch": "2.13.0",
    "platform": "cpu",
    "devices": 0,
    "gloo": True,
    "nccl": False,
    "mpi4py": False,
    "triton": None,
    "seam": None,
    "kernels": {"zt_cpu": "built", "zt_gpu": "there is no GPU compiler"},
}
GPU = {**REPORTED, "platform": "rocm", "devices": 8, "nccl": True, "triton": "3.7.1"}


def surroundings(tmp_path: Path, **changes: Any) -> Surroundings:
    """A machine on which all is well, but for the changes."""
    (tmp_path / "dev" / "shm").mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache").mkdir(exist_ok=True)
    env = {
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"),
        **changes.pop("env", {}),
    }
    well: dict[str, Any] = {
        "env": env,
        "root": tmp_path,
        "which": lambda name: f"/usr/bin/{name}",
        "version": lambda name: SUPPORTED[name].pinned,
        "free": lambda folder: 8 * GB,
        "torch": lambda: REPORTED,
        "python": "3.11.7",
    }
    return Surroundings(**{**well, **changes})


def worst(findings: Iterable[Finding]) -> Finding:
    """The finding that matters most; its fix is there exactly if it is a problem."""
    ranked = sorted(findings, key=lambda finding: (OK, WARN, FAIL).index(finding.state))
    assert bool(ranked[-1].fix) == (ranked[-1].state != OK)
    return ranked[-1]


def test_all_is_well_on_a_good_machine(tmp_path: Path) -> None:
    findings = list(examine(surroundings(tmp_path)))
    assert [finding for finding in findings if finding.state != OK] == []
    assert len({finding.subject for finding in findings}) == len(findings)


@pytest.mark.parametrize(
    ("changes", "subject", "state", "words"),
    [
        ({"python": "3.10.14"}, "python", FAIL, "too old; install Python 3.11"),
        ({"version": lambda name: None}, "deepspeed", FAIL, "not installed"),
        (
            {"torch": lambda: {"error": "Segmentation fault"}},
            "torch",
            FAIL,
            "do not start: Segmentation fault",
        ),
        (
            {"torch": lambda: {**REPORTED, "seam": "built for 0.19.8, but 0.20"}},
            "deepspeed",
            FAIL,
            "built for 0.19.8",
        ),
        (
            {"version": {"torch": "2.5.1+cpu", "deepspeed": "0.19.8"}.get},
            "torch",
            FAIL,
            "works with 2.6 to 2.15: ",
        ),
        (
            {"version": {"torch": "2.13.0", "deepspeed": "0.17.6"}.get},
            "deepspeed",
            FAIL,
            "works with 0.18.0 to 0.19.8",
        ),
        ({"torch": lambda: {**REPORTED, "gloo": False}}, "gloo", FAIL, "without gloo"),
        ({"torch": lambda: {**GPU, "nccl": False}}, "rccl", FAIL, "GPUs cannot talk"),
        ({"torch": lambda: {**GPU, "triton": None}}, "triton", WARN, "pip install triton"),
        (
            {"torch": lambda: {**REPORTED, "kernels": {"zt_cpu": "not compiled"}}},
            "kernels zt_cpu",
            WARN,
            "zero-topo build",
        ),
        (
            {"torch": lambda: {**REPORTED, "kernels": {"zt_cpu": "no ninja"}}},
            "kernels zt_cpu",
            WARN,
            "no ninja; runs use",
        ),
        (
            {"torch": lambda: {**GPU, "kernels": {"zt_gpu": "no hipcc"}}},
            "kernels zt_gpu",
            WARN,
            "Triton's",
        ),
        ({"which": lambda name: None}, "c++", WARN, "g++ and c++ not found"),
        ({"which": lambda name: None, "env": {"CXX": "clang"}}, "c++", WARN, "clang not found"),
        ({"which": lambda name: None}, "ninja", WARN, "pip install ninja"),
        ({"torch": lambda: GPU, "which": lambda name: None}, "hipcc", WARN, "ROCm module"),
        ({"env": {"OMP_NUM_THREADS": ""}}, "OMP_NUM_THREADS", WARN, "export OMP_NUM_THREADS=1"),
        ({"free": lambda folder: 64 * MB}, "/dev/shm", WARN, "64.00 MB free; "),
        ({"free": lambda folder: 64 * MB}, "/dev/shm", WARN, "--shm-size"),
        ({"root": Path("/no/such/root")}, "/dev/shm", WARN, "is not there"),
    ],
)
def test_what_is_broken_is_found(
    tmp_path: Path, changes: dict[str, Any], subject: str, state: str, words: str
) -> None:
    found = worst(
        finding
        for finding in examine(surroundings(tmp_path, **changes))
        if finding.subject == subject
    )
    assert found.state == state and words in found.line()
    assert "\n" not in found.line()


@pytest.mark.parametrize(
    "cluster", [{"SLURM_CLUSTER_NAME": "frontier"}, {"LMOD_SYSTEM_NAME": "frontier"}]
)
def test_frontiers_variables_are_known(tmp_path: Path, cluster: dict[str, str]) -> None:
    """Recommended values are well, none at all is a warning each, memhooks fails; elsewhere nobody
    cares.
    """
    rules = [rule for rule in load_rules() if not rule.machines or "frontier" in rule.machines]
    good = cluster | {rule.variable: rule.wanted for rule in rules}
    assert worst(variables(surroundings(tmp_path, env=good))).state == OK
    bare = list(variables(surroundings(tmp_path, env=cluster)))
    assert {"NCCL_CROSS_NIC", "FI_CXI_RDZV_PROTO", "MIOPEN_USER_DB_PATH"} <= {
        finding.subject for finding in bare
    }
    assert {finding.state for finding in bare} == {WARN, OK}
    bad = worst(variables(surroundings(tmp_path, env={**good, "FI_MR_CACHE_MONITOR": "memhooks"})))
    assert bad.state == FAIL and "export FI_MR_CACHE_MONITOR=kdreg2 (OLCF" in bad.fix
    elsewhere = surroundings(tmp_path, env={"FI_MR_CACHE_MONITOR": "memhooks"})
    assert worst(variables(elsewhere)).state == OK


def test_the_table_is_sound() -> None:
    """Machines are presets, recommended values are not bad ones, and each row has a reason and a
    source.
    """
    rules = load_rules()
    assert rules
    for rule in rules:
        machines = {*rule.machines, *rule.others}
        assert machines <= set(preset_names()) and rule.reason and rule.source
        for own in (rule, *(rule.on(machine) for machine in machines)):
            assert own is not None and own.source
            assert own.judge({own.variable: own.wanted}).state == OK
        assert rule.unset or rule.bad
    with pytest.raises(ValueError, match='state: "awful" is not one of'):
        read(Rule, "row", {**vars(rules[0]), "state": "awful"})


@pytest.mark.parametrize(("age_s", "state"), [(10, WARN), (3600, FAIL)])
def test_locks_of_dead_compilers_are_found(tmp_path: Path, age_s: int, state: str) -> None:
    seen = surroundings(tmp_path)
    lock = tmp_path / "cache" / "a;touch  PWNED;#" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (seen.now - age_s, seen.now - age_s))
    found = worst(files.locks(seen))
    assert found.state == state and shlex.split(found.line())[-2:] == ["rm", str(lock)]


def test_buffers_of_jobs_are_one_line_to_paste(tmp_path: Path) -> None:
    """A pattern for each job whose ranks left some, and how many bytes they hold; a living run's
    are left alone.
    """
    shm = tmp_path / "dev" / "shm"
    seen = surroundings(tmp_path)
    for job, ranks in (("127.0.0.1_2950", 8), ("127.0.0.1_29501", 4), ("a b_1", 2)):
        for rank in range(ranks):
            (shm / f"deepspeed_allreduce_buffer_0_{job}_{rank}").write_bytes(bytes(500_000))
    used = "deepspeed_allreduce_buffer_0_127.0.0.1_29502_0"
    for name in (used, "deepspeed_allreduce_buffer_0_left;id"):
        (shm / name).touch()
    maps = tmp_path / "proc" / "42" / "maps"
    maps.parent.mkdir(parents=True)
    maps.write_text(f"7f00-7f01 rw-s 00000000 00:19 7 /dev/shm/{used}\n")
    found = worst(files.shared_memory(seen))
    assert (
        found.state == WARN and "15 buffers of ended runs are left there, 7.00 MB" in found.line()
    )
    subprocess.run(["bash", "-c", str(found.fix).replace("/dev/shm/", f"{shm}/")], check=True)
    assert [path.name for path in shm.iterdir()] == [used]


def test_ranks_are_warned_before_they_fill_a_short_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is looked at where there is room; where there is none, a line says so."""
    files.warn_of_shortage()
    assert not capsys.readouterr().err or shutil.disk_usage("/dev/shm").free < files.ENOUGH
    monkeypatch.setattr(files, "ENOUGH", 1 << 60)
    files.warn_of_shortage()
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("zero_topo: /dev/shm: ") and " free; " in line


def test_intel_tiles_need_no_kernels_of_ours_and_xccl(tmp_path: Path) -> None:
    """On Aurora torch has neither NCCL nor a compiler for our kernels, and both are well."""
    tiles = {**GPU, "platform": "xpu", "kernels": {"zt_gpu": "there is no hipcc"}, "triton": None}
    well = list(examine(surroundings(tmp_path, torch=lambda: tiles)))
    assert [finding for finding in well if finding.state != OK] == []
    assert "xccl" in {finding.subject for finding in well}


def test_gpu_checks_are_quiet_without_a_gpu(tmp_path: Path) -> None:
    reported = {**REPORTED, "platform": "cuda"}
    assert worst(software.compilers(surroundings(tmp_path), reported)).state == OK
    assert worst(software.kernels(reported)).state == OK
    assert worst(software.backends(reported)).state == OK


def test_the_command_says_it_in_lines_and_in_json(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit status 1 if something would fail; here a lock of a compiler that died, in this very
    installation.
    """
    for name, value in (("OMP_NUM_THREADS", "1"), ("TORCH_EXTENSIONS_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, 0))
    status, out, _ = run("doctor", "--json")
    reported = json.loads(out)
    failed = [finding for finding in reported["findings"] if finding["state"] == FAIL]
    assert status == reported["failed"] == 1 and str(lock) in failed[0]["subject"]
    lock.unlink()
    status, out, _ = run("doctor")
    assert status == 0 and "ok    python: " in out and "\x1b" not in out and "0 failures" in out
