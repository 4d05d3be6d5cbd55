# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reads the DeepSpeed config around the block, and refuses settings that zero_topo does not
support.

Each refusal is one line: the key and its value, the reason, and what to do instead. Keys are those
of DeepSpeed 0.19.8; ``"auto"`` (Hugging Face) counts as absent, as it does in DeepSpeed.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zero_topo.config.deepspeed_parts import ABSENT, ZERO, lookup, misread, off, on
from zero_topo.config.modes import (
    AGED_REFUSED,
    MUON_REFUSED,
    MUON_WITH_EXPERTS,
    SCAPE_WITH_TENSOR_PARALLEL,
    SPARSE_MODES,
    SYNC_MODES,
)
from zero_topo.config.parts import ROOT
from zero_topo.config.sparse_config import ScapeSync
from zero_topo.config.stock_keys import translate
from zero_topo.config.sync_config import DenseSync
from zero_topo.strict import as_json, cut, packaged, read_text

BLOCK_VARIABLE = "ZERO_TOPO_BLOCK"
"""Environment variable with the block, for frameworks that build the DeepSpeed config in code."""


def load_deepspeed_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Load a DeepSpeed config as a dict from any form that ``deepspeed.initialize(config=...)``
    accepts.

    Args:
        source: a dict, the path of a JSON (or Hjson) file, or URL-safe base64 of its text.

    Raises:
        ValueError: for a missing file, broken JSON, a repeated key, JSON that is not an object,
            Accelerate's own file.
    """
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    # Unlike Path.exists, false for base64 text that is longer than a path may be
    if os.path.exists(path):
        name = f"DeepSpeed config {path}"
        try:
            config = parse_object(read_text(path, name), name)
        except OSError as error:
            raise ValueError(
                f"{name}: cannot be read ({error.strerror}); give the path of a JSON file"
            ) from None
        # A key of every file of Accelerate, whose YAML often passes for Hjson
        if "distributed_type" in config:
            raise ValueError(
                f"{name}: a file of accelerate config, which is no DeepSpeed config; give the JSON "
                "that its deepspeed_config_file names, or write one: only there can the block stand"
            )
        return config
    # base64 may be shortened, a file name not; base64 has no dots or slashes
    shown = cut(f'"{source}"') if set("./") & set(str(source)) else as_json(str(source))
    try:
        text = base64.urlsafe_b64decode(str(source)).decode("utf-8")
    except (binascii.Error, UnicodeError, ValueError):
        raise ValueError(
            f"DeepSpeed config {shown}: no such file, and not base64 of a JSON object either"
        ) from None
    return parse_object(text, f"DeepSpeed config {shown}, decoded from base64")


def with_environment_block(
    ds_config: Mapping[str, Any], env: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the config with the block of ``ZERO_TOPO_BLOCK`` added, if the config is one of stage
    3.

    The variable is a JSON object, or the path of a file with one (ends in ``.json``): the deepspeed
    launcher loses the quotation marks of a value on its way to other nodes.

    Args:
        ds_config: the DeepSpeed config; it is not changed.
        env: the launcher's environment.

    Raises:
        ValueError: if the variable is not a JSON object or no such file, or the config has another
            block.
    """
    text = env.get(BLOCK_VARIABLE, "")
    if not text or _stage(ds_config):
        return dict(ds_config)
    if text.endswith(".json"):
        try:
            content = read_text(Path(text), f"{BLOCK_VARIABLE} = {text}")
        except OSError as error:
            raise ValueError(
                f"{BLOCK_VARIABLE} = {text}: cannot be read ({error.strerror}); give a path that "
                "every node can read"
            ) from None
        block = parse_object(content, f"{BLOCK_VARIABLE} = {text}")
    else:
        block = parse_object(text, BLOCK_VARIABLE)
    if ds_config.get(ROOT, block) != block:
        own = cut(as_json(ds_config[ROOT]))
        raise ValueError(
            f'{BLOCK_VARIABLE} = {cut(text)}: the config has another "{ROOT}" block, {own}; remove '
            "one of the two"
        )
    return {**ds_config, ROOT: block}


def exported(block: str) -> str:
    """Return the line of ``.deepspeed_env`` with which DeepSpeed's launcher sets the block on every
    node.

    The launcher puts double quotes around the value and passes it to a shell.

    Args:
        block: the value of ``ZERO_TOPO_BLOCK``.
    """
    escaped = re.sub(r'([\\"$`])', r"\\\1", block)
    return f"{BLOCK_VARIABLE}={escaped}"


def deepspeed_problems(ds_config: Mapping[str, Any]) -> list[str]:
    """Return one line for each setting that zero_topo does not support; empty without any, or
    without a block.
    """
    found = [*misread(ds_config), _misplaced(ds_config), _misspelt(ds_config)]
    if ROOT in ds_config:
        found += [_stage(ds_config), *(refuse_value(ds_config, **row) for row in REFUSED_KEYS)]
        found.append(_optimizer_of_the_mode(ds_config))
    return [*filter(None, found), *translate(ds_config).problems]


# -- reading ---------------------------------------------------------------------------------------


def parse_object(text: str, name: str) -> dict[str, Any]:
    """Parse a JSON object, or one in Hjson, as DeepSpeed reads it.

    Raises:
        ValueError: in one line that begins with the name, also for a repeated key.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        value = _parse_hjson(text, name, error)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name}: must be a JSON object, got {as_json(value)}")
    return value


def _parse_hjson(text: str, name: str, json_error: json.JSONDecodeError) -> Any:
    """Parse Hjson (comments, trailing commas), as DeepSpeed does, if its Hjson parser is
    installed.
    """
    try:
        hjson = importlib.import_module("hjson")
        value = hjson.loads(text, object_pairs_hook=_without_repeats)
    except (ImportError, ValueError):
        value = None
    if not isinstance(value, dict) or not value:  # Hjson parses an empty text as {}
        raise ValueError(f"{name}: not valid JSON: {json_error}") from None
    return value


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON; write a finite one")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(key for key, _ in pairs)
    repeated = [key for key, times in counts.items() if times > 1]
    if repeated:
        raise ValueError(
            cut(f"repeated key {', '.join(map(repr, sorted(repeated)))}; keep one of each")
        )
    return dict(pairs)


# -- refusing --------------------------------------------------------------------------------------


def refuse_value(
    ds_config: Mapping[str, Any],
    *,
    key: str,
    refused: str,
    why: str,
    instead: str,
    others: Mapping[str, str] = {},
) -> str | None:
    """Refuse values of one key: ``key = value: why; instead``.

    ``refused`` is one of :data:`TESTS`, or a word that refused values contain. ``others`` maps
    other keys to the same kind of test; the value is refused only if all of them hold.
    """
    tests = {key: refused, **others}
    if not all(_holds(test, lookup(ds_config, name)) for name, test in tests.items()):
        return None
    return f"{key} = {as_json(lookup(ds_config, key))}: {why}; {instead}"


def _holds(test: str, value: Any) -> bool:
    check = TESTS.get(test, lambda value: test in str(value).lower())
    return value is not ABSENT and check(value)


TESTS: Mapping[str, Callable[[Any], bool]] = {
    "on": on,
    "off": off,
    "set": lambda value: value not in (None, "none"),
    "not one": lambda value: value != 1,
    "above one": lambda value: isinstance(value, int | float) and value > 1,
}


def tensor_parallel_groups(
    ds_config: Mapping[str, Any], ranks: int | None
) -> tuple[tuple[int, ...], ...]:
    """Return the data-parallel groups of AutoTP, which numbers the ranks that share a layer
    consecutively.

    Args:
        ds_config: the whole config.
        ranks: ranks of the job, if they are known.

    Returns:
        The global ranks of each group; empty without AutoTP, or for an unknown number of ranks.

    Raises:
        ValueError: if the tensor-parallel size does not divide the ranks.
    """
    size = lookup(ds_config, "tensor_parallel.autotp_size")
    if not isinstance(size, int) or size <= 1 or ranks is None:
        return ()
    if ranks % size:
        raise ValueError(
            f"tensor_parallel.autotp_size = {size}: it does not divide {ranks} ranks; choose a "
            "divisor"
        )
    return tuple(tuple(range(first, ranks, size)) for first in range(size))


def deepspeed_hints(ds_config: Mapping[str, Any]) -> list[str]:
    """Return one line for each setting that prevents overlap on a GPU, with the fix; empty without
    a block.
    """
    overlap = refuse_value(ds_config, **NO_OVERLAP)
    hints = [overlap] if overlap else []
    if all(
        lookup(ds_config, f"timers.throughput.{key}") is not False
        for key in ("enabled", "synchronized")
    ):
        hints.append(
            "timers.throughput.synchronized = true, the default: DeepSpeed waits for the device "
            "twice per micro-batch, "
            "so the all-gather of updated weights cannot run under the next forward pass; set "
            '"timers": {"throughput": {"synchronized": false}}'
        )
    return hints if ROOT in ds_config else []


def _misplaced(ds_config: Mapping[str, Any]) -> str | None:
    if lookup(ds_config, f"{ZERO}.{ROOT}") is ABSENT:
        return None
    return (
        f'{ZERO}.{ROOT}: DeepSpeed does not know the block here; move "{ROOT}" to the top level '
        "of the config"
    )


def _misspelt(ds_config: Mapping[str, Any]) -> str | None:
    plain = ROOT.replace("_", "")
    for key in ds_config:
        if key != ROOT and str(key).lower().translate({ord(c): None for c in "-_ +"}) == plain:
            return f'{key}: DeepSpeed would ignore this key and train plain ZeRO; write it "{ROOT}"'
    return None


def _stage(ds_config: Mapping[str, Any]) -> str | None:
    stage = lookup(ds_config, f"{ZERO}.stage")
    if stage == 3:
        return None
    why = "zero_topo places the shards of ZeRO-3"
    if stage is ABSENT:
        return f'{ZERO}.stage is not set: {why}; add "{ZERO}": {{"stage": 3}}'
    return (
        f"{ZERO}.stage = {as_json(stage)}: {why}; set it to 3 (replicated weights are stage 3 "
        'with "weights": 1)'
    )


def _optimizer_of_the_mode(ds_config: Mapping[str, Any]) -> str | None:
    named = lookup(ds_config, f"{ROOT}.sync.mode")
    given = lookup(ds_config, "optimizer.type")
    mode = next((cls for cls in SYNC_MODES if named == cls.MODE), DenseSync)
    sparse = mode in SPARSE_MODES
    optimizer = str(given).lower()
    said = f"optimizer.type = {as_json(given)}"
    if optimizer == "agedadamw" and not (
        sparse and lookup(ds_config, f"{ROOT}.sync.error_feedback") is not False
    ):
        return f"{said}: {AGED_REFUSED}"
    shared = lookup(ds_config, "tensor_parallel.autotp_size")
    if mode is ScapeSync and isinstance(shared, int) and shared > 1:
        return SCAPE_WITH_TENSOR_PARALLEL
    if optimizer == "muon" and sparse:
        return f"{said}: {MUON_REFUSED}"
    if optimizer == "muon" and lookup(ds_config, "expert_parallel.enabled") is True:
        return f"{said}: {MUON_WITH_EXPERTS}"
    if given is ABSENT or optimizer == str(mode.OPTIMIZER or given).lower():
        return None
    return (
        f'{said}: sync.mode = "{mode.MODE}" works with {mode.OPTIMIZER} alone; set it to '
        f'"{mode.OPTIMIZER}"'
    )


NO_OVERLAP, *REFUSED_KEYS = packaged(__package__, "refused.json")
"""The arguments of :func:`refuse_value`: for one warning, then for each refused key."""
