# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Finds settings of YAML files with which NeoX would train otherwise than written, without NeoX.

The DeepSpeed config that NeoX makes of them is judged by ``zero-topo check``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zero_topo.cli import main
from zero_topo.config.parts import ROOT
from zero_topo.neox.config import EXTRA, config_path, deepspeed_config, load_configs, part
from zero_topo.strict import as_json

ADAMS_OF_NEOX = ("cpu_adam", "cpu_torch_adam")


def check(configs: Sequence[str], words: Sequence[str]) -> int:
    """Run ``zero-topo check`` on the DeepSpeed config of some YAML files, and return its status.

    Args:
        configs: the YAML files.
        words: options of ``zero-topo check``.

    Raises:
        ValueError: as :func:`require`.
    """
    config = deepspeed_config(require(configs))
    optimizer = part(config, "optimizer")
    if optimizer.get("type") in ADAMS_OF_NEOX:  # NeoX builds it, as DeepSpeed builds its own
        config["optimizer"] = {**optimizer, "type": "Adam"}
    with TemporaryDirectory() as folder:
        file = Path(folder, config_path(configs[0]).with_suffix(".json").name)
        file.write_text(json.dumps(config), encoding="utf-8")
        return main(["check", str(file), *words])


def require(configs: Sequence[str]) -> dict[str, Any]:
    """Return the merged configs.

    Raises:
        ValueError: one line per problem.
    """
    merged = load_configs(configs)
    found = list(problems(merged))
    if found:
        raise ValueError("\n".join(f"{', '.join(configs)}: {line}" for line in found))
    return merged


def problems(merged: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that NeoX does not pass to DeepSpeed as it is written, and for
    parallelism that its ZeRO-3 does not have.

    Args:
        merged: the result of :func:`load_configs`.
    """
    extra = merged.get(EXTRA, {})
    if not isinstance(extra, Mapping) or ROOT not in extra:
        yield (
            f"{EXTRA}.{ROOT} is missing, so this would be plain ZeRO; add "
            f'"{EXTRA}": {{"{ROOT}": {{}}}}'
        )
    for key, value in part(merged, EXTRA).items():
        if key != ROOT and key in merged and merged[key] != value:
            yield (
                f"{key} = {as_json(merged[key])}, but {EXTRA}.{key} = {as_json(value)}: DeepSpeed "
                "gets the latter and NeoX the former; make them equal"
            )
    for key, least in (
        ("pipe_parallel_size", 0),
        ("model_parallel_size", 1),
        ("moe_num_experts", 1),
    ):
        value = merged.get(key, least)
        if not isinstance(value, int) or value > least:
            yield f"{key} = {as_json(value)}: NeoX has no ZeRO-3 with it; set it to {least}"
    optimizer = part(merged, "optimizer")
    offload = part(part(merged, "zero_optimization"), "offload_optimizer")
    if str(optimizer.get("type")).lower() == "adam" and offload.get("device") == "cpu":
        yield (
            f"optimizer.type = {as_json(optimizer['type'])} with offload_optimizer: NeoX would "
            'step on the GPU; set it to "cpu_adam"'
        )
