# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks the launcher's variables, those that it passes on, and the network interfaces that the
backends use.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from zero_topo.doctor.finding import FAIL, OK, WARN, Finding
from zero_topo.doctor.surroundings import Surroundings
from zero_topo.strict import words_of
from zero_topo.topology.launchers import launcher_view
from zero_topo.topology.probes import slurm

LOOPBACK = "lo"
PREFIX = "ZERO_TOPO_"


def launcher(seen: Surroundings) -> Iterator[Finding]:
    """Check that the launchers' variables are consistent."""
    try:
        view = launcher_view(seen.env)
    except ValueError as error:
        yield Finding(
            FAIL,
            "launcher",
            str(error),
            "see what is set: env | grep -E 'RANK|WORLD|SLURM|FLUX|OMPI'",
        )
        return
    if view is None:
        yield Finding(OK, "launcher", "not in a job")
    else:
        yield Finding(
            OK,
            "launcher",
            f"{view.source}: {view.world_size} ranks on {view.nodes or 'unknown'} nodes",
        )


def interfaces(seen: Surroundings) -> Iterator[Finding]:
    """Check that the interfaces named for gloo and NCCL (RCCL reads the same variable) exist and
    are up.
    """
    there = seen.interfaces()
    several = False
    with suppress(ValueError):  # reported by launcher()
        view = launcher_view(seen.env)
        several = view is not None and (view.nodes or 1) > 1
    for variable, matches in (("GLOO_SOCKET_IFNAME", _exact), ("NCCL_SOCKET_IFNAME", _nccl)):
        value = seen.env.get(variable, "").strip()
        if value:
            yield _judged(f"{variable}={value}", matches(value, there), there, several)
        else:
            up = [name for name, is_up in there.items() if is_up]
            yield Finding(OK, variable, f"not set, the backend chooses; up are {', '.join(up)}")


def forgotten(seen: Surroundings) -> Iterator[Finding]:
    """Check that DeepSpeed's launcher passes zero_topo's variables to other nodes.

    It passes a list of its own, and the lines of ``.deepspeed_env``; under the hook
    (``zero-topo enable``) ours too.
    """
    ours = sorted(name for name in seen.env if name.startswith(PREFIX))
    if not ours:
        return
    by_scheduler = slurm.in_step(seen.env) or "FLUX_TASK_RANK" in seen.env
    file = seen.env.get("DS_ENV_FILE", ".deepspeed_env")
    paths = (Path(seen.env.get("HOME", "~")).expanduser() / file, Path(file))
    texts = [path.read_text(errors="replace") for path in paths if path.is_file()]
    listed = {line.partition("=")[0] for text in texts for line in text.splitlines()}
    missing = [name for name in ours if name not in listed]
    if by_scheduler or seen.enabled() or not missing:
        yield Finding(OK, PREFIX, f"{', '.join(ours)} set, on every node")
        return
    text = f"{', '.join(missing)} set, which the deepspeed launcher does not pass to other nodes"
    quoted = [name for name in missing if '"' in seen.env[name]]
    if quoted:
        text += f", nor the quotation marks of {', '.join(quoted)}"
    values = {
        name: f"/path/of/{name.lower()}.json" if name in quoted else seen.env[name]
        for name in missing
    }
    lines = " ".join(shlex.quote(f"{name}={value}") for name, value in values.items())
    yield Finding(
        WARN, PREFIX, text, f"printf '%s\\n' {lines} >> ~/.deepspeed_env, or zero-topo enable"
    )


def _judged(
    subject: str, named: Mapping[str, list[str]], there: Mapping[str, bool], several: bool
) -> Finding:
    """Return the finding for a variable with its value; ``named``: each word of that -> the
    interfaces it selects.
    """
    variable = subject.partition("=")[0]
    best = next((name for name, is_up in there.items() if is_up and name != LOOPBACK), LOOPBACK)
    absent = [word for word, names in named.items() if not names]
    chosen = [name for names in named.values() for name in names]
    down = [name for name in chosen if not there[name]]
    if several and set(chosen) == {LOOPBACK}:
        text = "ranks are on several nodes, and the loopback interface reaches none but its own"
        return Finding(
            FAIL, subject, text, "unset it" if best == LOOPBACK else f"export {variable}={best}"
        )
    if absent:
        text = f"there is no interface {', '.join(absent)}, there are {', '.join(there)}"
        return Finding(FAIL, subject, text, f"export {variable}={best}")
    if down and len(down) == len(chosen):
        return Finding(
            FAIL, subject, f"{', '.join(down)} is down", f"export {variable}={best}, or bring it up"
        )
    if down:
        return Finding(
            WARN,
            subject,
            f"{', '.join(down)} is down",
            f"leave it out of {variable}, or bring it up",
        )
    return Finding(OK, subject, "up")


def _exact(value: str, there: Mapping[str, bool]) -> dict[str, list[str]]:
    """Parse gloo's value: full names, separated by commas."""
    return {word: [word] if word in there else [] for word in words_of(value)}


def _nccl(value: str, there: Mapping[str, bool]) -> dict[str, list[str]]:
    """Parse NCCL's value: prefixes of names; a leading ``=`` means full names, ``^`` all interfaces
    except these.
    """
    exact = "=" in value[:2]
    others = value.startswith("^")
    words = words_of(value.lstrip("^="))
    meant = {
        word: [name for name in there if name == word or (not exact and name.startswith(word))]
        for word in words
    }
    if not others:
        return meant
    excluded = {name for names in meant.values() for name in names}
    return {value: [name for name in there if name not in excluded]}
