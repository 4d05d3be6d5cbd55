# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A real Slurm on this machine: munged, slurmctld and a slurmd per emulated node, all state in one
folder.

Each node is a set of namespaces of its own: a host name, an /etc/hosts, and process numbers, so
that whatever a job leaves behind ends with the node. Nodes claim whatever cores and GPUs they are
asked to (`config_overrides`).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from tests.launching import ROOT, ended, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare", "setpriv")
BINARIES = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}

CONF = """\
ClusterName={cluster}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
GresTypes=gpu
ReturnToService=2
MinJobAge=3600
KillWait=2
SchedulerParameters=sched_interval=1
{nodes}
PartitionName=batch Nodes={names} Default=YES MaxTime=INFINITE State=UP
PartitionName=standard-g Nodes={names} MaxTime=INFINITE State=UP
PartitionName=booster Nodes={names} MaxTime=INFINITE State=UP
PartitionName=gh Nodes={names} MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """What this machine lacks for a Slurm of its own, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm of one's own needs root on Linux"
    absent = [program for program in PROGRAMS if find(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    done = ended(["unshare", "--uts", "--mount", "--pid", "--fork", "true"])
    return "namespaces are not allowed here" if done.returncode else None


def find(program: str) -> str | None:
    """Path of a program, also where only root looks."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), *BINARIES]))


@dataclass
class Cluster:
    """A Slurm cluster; up inside a `with`.

    Attributes:
        folder: for all its state; its path must be short, for a socket lies in it.
        nodes: how many.
        cpus: cores that each claims.
        gpus: GPUs that each claims.
        name: the cluster's.
        stack: what to undo at the end.
    """

    folder: Path
    nodes: int = 2
    cpus: int = 64
    gpus: int = 8
    name: str = "frontier"
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def hosts(self) -> list[str]:
        """Names of the nodes."""
        return [f"zt{node}" for node in range(self.nodes)]

    @property
    def env(self) -> dict[str, str]:
        """Environment for sbatch and the like; sbatch passes it on to the job."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH"))
        }
        path = os.pathsep.join(
            [str(self.folder / "bin"), str(Path(sys.executable).parent), kept["PATH"], *BINARIES]
        )
        kept |= {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "USER": "root",
        }
        return kept | {
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONFAULTHANDLER": "1",
        }

    def __enter__(self) -> Cluster:
        """Start everything and wait until the nodes are idle; on failure nothing is left."""
        try:
            self._write()
            self._start()
            self._wait_for_nodes()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End all jobs and daemons."""
        self.stack.close()

    def run(self, *words: str) -> str:
        """Output of one of Slurm's commands."""
        done = ended(words, env=self.env, cwd=self.folder, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stderr}{self.logs()}"
        return done.stdout

    def wait(self, job: str, timeout_s: float) -> str:
        """The final state of a job, which is cancelled if it takes too long."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            words = dict(
                word.partition("=")[::2]
                for word in self.run("scontrol", "show", "job", job, "-o").split()
            )
            if words["JobState"] in ENDED:
                return words["JobState"]
            time.sleep(0.3)
        self.run("scancel", job)
        return f"still running after {timeout_s} s"

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "".join(
            f"\n--- {path.name}\n{path.read_text()[-1500:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def _write(self) -> None:
        for name in ("state", "bin", *(f"spool-{host}" for host in self.hosts)):
            (self.folder / name).mkdir()
        gpus = [self.folder / f"gpu{number}" for number in range(self.gpus)]
        for gpu in gpus:
            # gres.conf wants devices; this is /dev/null's
            os.mknod(gpu, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        gres = f" Gres=gpu:{self.gpus}" if gpus else ""
        nodes = [
            f"NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} "
            f"CPUs={self.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={self.cpus} "
            f"ThreadsPerCore=1 RealMemory=1000 Features=gpu,nvme{gres}"
            for host in self.hosts
        ]
        host = os.uname().nodename.partition(".")[0]
        values = {"cluster": self.name, "host": host, "port": free_port(), "folder": self.folder}
        text = CONF.format(**values, nodes="\n".join(nodes), names=",".join(self.hosts))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={gpu}\n" for gpu in gpus))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(self.hosts)}\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        # What `module load` is on a real machine; here it only keeps a list.
        module = self.folder / "bin" / "module"
        module.write_text(f'#!/bin/sh\necho "$*" >> {self.folder}/modules\n')
        module.chmod(0o755)

    def _start(self) -> None:
        at = str(self.folder)
        munged = [
            "munged",
            "--foreground",
            "--force",
            f"--socket={at}/munge.socket",
            f"--key-file={at}/munge.key",
        ]
        munged += [
            f"--pid-file={at}/munged.pid",
            f"--log-file={at}/munged.log",
            f"--seed-file={at}/munge.seed",
        ]
        self._daemon([*munged, "--num-threads=2"])
        deadline = time.monotonic() + 20
        while not (self.folder / "munge.socket").exists():
            assert time.monotonic() < deadline, f"munged does not start{self.logs()}"
            time.sleep(0.05)
        self._daemon(["slurmctld", "-D", "-c", "-f", f"{at}/slurm.conf"])
        for host in self.hosts:
            # The shell stays as the first process: slurmd would not bury orphans, and a job ends
            # with its last process.
            inside = (
                f"mount --bind {at}/hosts /etc/hosts && hostname {host} && {find('slurmd')} "
                f"-D -N {host}"
            )
            own = ["--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
            self._daemon(["unshare", *own, "sh", "-c", f"{inside} -f {at}/slurm.conf; exit"])

    def _daemon(self, words: Sequence[str]) -> None:
        """Start a daemon that ends with this cluster, or with this process."""
        log = self.stack.enter_context(open(self.folder / "daemons.log", "ab"))  # noqa: SIM115 (the stack closes it)
        command = ["setpriv", "--pdeathsig", "KILL", find(words[0]) or words[0], *words[1:]]
        process = subprocess.Popen(
            command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            reported = ended(["sinfo", "-h", "-o", "%T %D"], env=self.env).stdout.split()
            if reported == ["idle", str(self.nodes)]:
                return
            assert time.monotonic() < deadline, f"nodes are {reported}{self.logs()}"
            time.sleep(0.2)


def distributed(order: str, folder: Path) -> list[str]:
    """Options for Frontier with its ranks dealt to the nodes in another order: a machine's file
    with that setting.
    """
    machine = json.loads((ROOT / "zero_topo/launch/machines/frontier.json").read_text())
    machine["step"].append(
        {"use": f"--distribution={order}", "reason": "the order to test", "source": "this test"}
    )
    (folder / f"{order}.json").write_text(json.dumps(machine))
    return ["--machine", str(folder / f"{order}.json")]


def submitted(
    cluster: Cluster, words: Sequence[str], log: Path, env: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The job's number, after `zero-topo launch slurm ... | sbatch` with more words.

    Args:
        cluster: where to.
        words: of the first command.
        log: of the job.
        env: variables of the submission.
    """
    here: dict[str, Any] = {
        "env": {**cluster.env, "MASTER_PORT": str(free_port()), **env},
        "cwd": cluster.folder,
        "timeout": 60,
    }
    launch = [
        sys.executable,
        "-m",
        "zero_topo.cli",
        "launch",
        "slurm",
        "--account",
        "a",
        "--time",
        "1:00:00",
        *words,
    ]
    written = ended(launch, **here)
    submit = ["sbatch", "--parsable", f"--output={log}"]
    done = ended(submit, input=written.stdout, **here)
    assert written.returncode == done.returncode == 0, written.stderr + done.stderr + cluster.logs()
    return done.stdout.strip()
