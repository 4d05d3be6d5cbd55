# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Each check of the doctor in front of something broken: it says what and how to mend it, and
leaves the rest alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.commands import Run
from tests.data import table
from zero_topo import doctor
from zero_topo.doctor import FAIL, OK, WARN, Finding, examine, files, software
from zero_topo.doctor.refusals import torch_state
from zero_topo.doctor.variables import Rule, known_machine, load_rules, variables
from zero_topo.strict import read
from zero_topo.topology import preset_names
from zero_topo.units import GB, MB
from zero_topo.versions import SUPPORTED

REPORTED: Mapping[str, Any] = {
    "platform": "cpu",
    "devices": 0,
    "seam": None,
    "kernels": {"zt_cpu": "built", "zt_gpu": "there is no GPU compiler"},
}
GPU = {**REPORTED, "platform": "rocm", "devices": 8}


@pytest.fixture(autouse=True)
def well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which all is well."""
    monkeypatch.setattr(doctor, "torch_state", lambda: REPORTED)
    monkeypatch.setattr(software, "installed", lambda name: SUPPORTED[name].pinned)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=8 * GB))
    for rule in load_rules():
        monkeypatch.delenv(rule.variable, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))


def worst(findings: Iterable[Finding]) -> Finding:
    """The finding that matters most; its fix is there exactly if it is a problem."""
    ranked = sorted(findings, key=lambda finding: (OK, WARN, FAIL).index(finding.state))
    assert bool(ranked[-1].fix) == (ranked[-1].state != OK)
    return ranked[-1]


def test_all_is_well_on_a_good_machine() -> None:
    findings = list(examine(None))
    assert [finding for finding in findings if finding.state != OK] == []
    assert len({finding.subject for finding in findings}) == len(findings)


TABLE = table("doctor")
"""What torch reports that is not well, or releases; the subject, its state, words."""


@pytest.mark.parametrize(("facts", "releases", "subject", "state", "words"), TABLE)
def test_what_is_not_well_is_found(
    facts: dict[str, Any],
    releases: dict[str, str] | None,
    subject: str,
    state: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worst finding about a subject, in a line."""
    monkeypatch.setattr(doctor, "torch_state", lambda: {**REPORTED, **facts})
    if releases is not None:
        monkeypatch.setattr(software, "installed", releases.get)
    found = worst(finding for finding in examine(None) if finding.subject == subject)
    assert found.state == state and words in found.line() and "\n" not in found.line()


def test_a_short_shared_memory_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * MB))
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    found = worst(files.shared_memory(tmp_path))
    assert found.state == WARN and "64.00 MB" in found.line()
    assert worst(files.shared_memory(tmp_path / "none")).state == WARN


@pytest.mark.parametrize(
    "cluster", [{"SLURM_CLUSTER_NAME": "frontier"}, {"LMOD_SYSTEM_NAME": "frontier"}]
)
def test_frontiers_variables_are_known(
    monkeypatch: pytest.MonkeyPatch, cluster: dict[str, str]
) -> None:
    """Recommended values are well, none at all is a warning each, memhooks fails; elsewhere nobody
    cares.
    """
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    machine = known_machine()
    assert machine == "frontier"
    bare = list(variables(machine))
    assert {"NCCL_CROSS_NIC", "FI_CXI_RDZV_PROTO", "MIOPEN_USER_DB_PATH"} <= {
        finding.subject for finding in bare
    }
    assert {finding.state for finding in bare} == {WARN, OK}
    for rule in load_rules():
        if not rule.machines or "frontier" in rule.machines:
            monkeypatch.setenv(rule.variable, rule.wanted)
    assert worst(variables(machine)).state == OK
    monkeypatch.setenv("FI_MR_CACHE_MONITOR", "memhooks")
    bad = worst(variables(machine))
    assert bad.state == FAIL and "export FI_MR_CACHE_MONITOR=kdreg2 (OLCF" in bad.fix
    assert worst(variables(None)).state == OK


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


def test_gpu_kernels_are_not_missed_without_a_gpu_of_theirs() -> None:
    """Nor on Intel's, which torch's operations serve."""
    for facts in ({**REPORTED, "platform": "cuda"}, {**GPU, "platform": "xpu"}):
        assert worst(software.kernels(facts)).state == OK


def test_the_command_says_it_in_lines_and_in_json(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 1 if something would fail; here a variable."""
    monkeypatch.setattr(doctor, "torch_state", torch_state)
    monkeypatch.setenv("FI_MR_CACHE_MONITOR", "memhooks")
    status, out, _ = run("doctor", "--machine", "frontier", "--json")
    reported = json.loads(out)
    failed = [finding for finding in reported["findings"] if finding["state"] == FAIL]
    assert status == reported["failed"] == 1
    assert failed[0]["subject"] == "FI_MR_CACHE_MONITOR=memhooks"
    monkeypatch.delenv("FI_MR_CACHE_MONITOR")
    status, out, _ = run("doctor")
    assert status == 0 and "ok    torch: " in out and "\x1b" not in out and "0 failures" in out
