# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reads NeoX's options and YAML files, merges them as NeoX does, and makes their DeepSpeed config;
no torch.

Note [Dropped defaults]
    NeoX hands DeepSpeed only the keys that differ from NeoX's own defaults, then adds
    ``deepspeed_extra_args``, whose values win. NeoX's default for ``gradient_clipping`` is 1.0.
    DeepSpeed's is 1.0 from 0.19.3 on, and 0 before: there a config that asks for 1.0 trains without
    clipping unless the extra arguments repeat it.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zero_topo.strict import cut, packaged, read_text

EXTRA = "deepspeed_extra_args"

DEEPSPEED_DEFAULTS: Mapping[str, Any] = packaged(__package__, "deepspeed_defaults.json")
"""NeoX's keys for DeepSpeed and their defaults (its class NeoXArgsDeepspeedConfig)."""


def load_configs(paths: Iterable[str]) -> dict[str, Any]:
    """Load and merge the YAML files; ``125M`` means ``125M.yml``, and dashes in keys underscores,
    as in NeoX.

    Raises:
        ValueError: for files that cannot be read, and for a key that occurs twice.
    """
    merged: dict[str, Any] = {}
    for path in map(config_path, paths):
        for key, value in _load(path).items():
            plain = str(key).replace("-", "_")
            if plain in merged:
                raise ValueError(f"{path}: {plain} is given by another file too; remove one")
            merged[plain] = value
    return merged


def config_path(name: str) -> Path:
    """Return the path of the file that a name on the command line means."""
    return Path(name if name.endswith((".yml", ".yaml", ".json")) else f"{name}.yml")


def _load(path: Path) -> dict[str, Any]:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ValueError(
            "PyYAML is not installed, which NeoX needs too; pip install pyyaml"
        ) from None
    try:
        value = yaml.load(read_text(path, str(path)), Loader=_strict_loader(yaml))
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); give the path of a NeoX config"
        ) from None
    except (yaml.YAMLError, ValueError, TypeError) as error:  # dates and keys raise the last two
        raise ValueError(f"{path}: not valid YAML: {cut(' '.join(str(error).split()))}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no keys; write a mapping such as num_layers: 12")
    return value


def _strict_loader(yaml: Any) -> Any:
    """Return a loader that refuses a repeated key, of which YAML would silently keep the last."""

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = Counter(str(key.value) for key, _ in node.value)
            repeated = [key for key, times in keys.items() if times > 1]
            if repeated:
                raise yaml.YAMLError(f"repeated key {repeated[0]}; keep one")
            return super().construct_mapping(node, deep)

    return Loader


def deepspeed_config(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed config that NeoX makes of its own config; see Note [Dropped defaults].

    Args:
        merged: of :func:`load_configs`.
    """
    config = {
        key: merged[key]
        for key, default in DEEPSPEED_DEFAULTS.items()
        if key in merged and merged[key] != default
    }
    precision = merged.get("precision")
    if precision == "fp16":
        config.setdefault("fp16", {"enabled": True})
    elif precision == "bfloat16":
        config.setdefault("bf16", {"enabled": True})
    config.setdefault("optimizer", {"type": "Adam"})
    return {**config, **part(merged, EXTRA)}


def part(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a block, or an empty one if it is absent or not an object."""
    found = whole.get(key)
    return found if isinstance(found, Mapping) else {}
