# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the command line said."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The options of all three commands; those that a command does not have keep their defaults.

    Attributes:
        command: "check", "launch" or "train".
        configs: YAML files, merged as NeoX merges them.
        neox_path: NeoX's checkout, or None for an importable ``megatron``.
        ranks: of all nodes, or None to ask the launcher.
        cpu: train on CPUs.
        dry_run: print the command that ``launch`` would run.
        plain: leave the ``zero_topo`` block out, for stock ZeRO-3 with all else the same.
        srun: options for ``srun``, or None for DeepSpeed's launcher.
        megatron_config: NeoX's arguments as URL-safe base64 of JSON.
        deepspeed_config: likewise of DeepSpeed's; only NeoX's autotuning reads it.
    """

    command: str
    configs: list[str]
    neox_path: str | None = None
    ranks: int | None = None
    cpu: bool = False
    dry_run: bool = False
    plain: bool = False
    srun: str | None = None
    megatron_config: str | None = None
    deepspeed_config: str | None = None
