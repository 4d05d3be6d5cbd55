# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's keys for ZeRO++, LoCo and MiCS: what they become, and what contradicts them."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import Run
from tests.plans import printed
from zero_topo.config import ZeroTopoConfig, deepspeed_problems
from zero_topo.config.stock_keys import KEYS, ZERO, switched_on, translate

ZEROPP = {
    "zero_quantized_weights": True,
    "zero_hpz_partition_size": 8,
    "zero_quantized_gradients": True,
}
LOCO = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
INT8_COPY = {"weights": "int8", "secondary": "int8"}


def stock(block: Any = None, **zero: Any) -> dict[str, Any]:
    """A config of stage 3 with stock keys, and a block unless that is None."""
    return {ZERO: {"stage": 3, **zero}, **({} if block is None else {"zero_topo": block})}


TRANSLATED = {
    "zero++": (
        ZEROPP,
        {"scheme": "zero++", "secondary": 8, "quantize": {**INT8_COPY, "gradients": "int4"}},
    ),
    "hpz": ({"zero_hpz_partition_size": 8.0}, {"scheme": "zero3", "secondary": 8}),
    "qwz": (
        {"zero_quantized_weights": "true"},
        {"quantize": {"weights": "int8"}},
    ),
    "nothing": (
        {"zero_hpz_partition_size": 1, "zero_quantized_weights": False},
        {},
    ),
    "auto": (dict.fromkeys(ZEROPP, "auto"), {}),
    "loco": (
        {"zero_quantized_gradients": True, **LOCO},
        {
            "weights": "node",
            "gradients": "node",
            "optimizer": "world",
            "sync": {"mode": "quantized"},
        },
    ),
    "mics": ({"mics_shard_size": 4, **ZEROPP}, {"weights": 4, "gradients": 4, "optimizer": 4}),
    "mics in groups": (
        {"mics_shard_size": 4, "mics_hierarchical_params_gather": True},
        {"weights": 4, "gradients": 4, "optimizer": 4},
    ),
}


@pytest.mark.parametrize(("zero", "block"), TRANSLATED.values(), ids=list(TRANSLATED))
def test_check_shows_the_config_of_an_empty_block(
    zero: dict[str, Any], block: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    """No key with an effect is left for DeepSpeed, and none that 0.19.8 refuses; the config that is
    shown is valid on 8 and on 384 ranks.
    """
    path = tmp_path / "ds.json"
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "timers": {"throughput": {"synchronized": False}},
    }
    path.write_text(json.dumps({**settings, **stock({}, **zero)}))
    shown = printed(run, "check", str(path), "--machine", "frontier", "--ranks", "8")["config"]
    assert shown["zero_topo"] == block and switched_on(shown) == {}
    assert not {"mics_shard_size", "zeropp_loco_param"} & set(shown[ZERO])
    path.write_text(json.dumps(shown))
    for ranks in ("8", "384"):
        status, out, err = run("check", str(path), "--machine", "frontier", "--ranks", ranks)
        assert (status, err) == (0, "") and out.endswith("ok\n")


def test_keys_next_to_a_block_are_taken_into_it_where_it_leaves_them_open() -> None:
    """The same config in either form resolves to the same plan; each key is reported in one
    line.
    """
    config = stock({"scheme": "topo", "secondary": 8}, **ZEROPP)
    found = translate(config)
    assert found.config == stock(
        {"scheme": "topo", "secondary": 8, "quantize": {**INT8_COPY, "gradients": "int4"}}
    )
    assert len(found.lines) == 3 and all(line.startswith(f"{ZERO}.zero_") for line in found.lines)
    assert ZeroTopoConfig.from_ds_config(config) == ZeroTopoConfig.from_ds_config(found.config)
    assert deepspeed_problems(config) == []


@pytest.mark.parametrize(
    ("block", "zero", "words"),
    [
        (
            {"secondary": "node"},
            {"zero_hpz_partition_size": 8},
            ["zero_topo.secondary = 8", '"node"'],
        ),
        ({"quantize": {"weights": None}}, ZEROPP, ["zero_quantized_weights = true", "null"]),
        (
            {"quantize": 4},
            {"zero_quantized_weights": True},
            ['zero_topo.quantize = {"weights": "int8"}', "which is 4"],
        ),
        (
            {"sync": {"mode": "dense"}},
            {"zero_quantized_gradients": True, **LOCO},
            ["zeropp_loco_param", '"dense"'],
        ),
    ],
)
def test_keys_that_contradict_the_block_are_refused(
    block: Any, zero: dict[str, Any], words: list[str]
) -> None:
    """In one line that names both, and the key stays where it was."""
    config = stock(block, **zero)
    (problem,) = deepspeed_problems(config)
    assert all(word in problem for word in words) and problem.endswith("remove one of the two")
    (key,) = (key for key in KEYS if key in problem)
    assert key in translate(config).config[ZERO]


JSON: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.builds(list)
    | st.builds(dict)
)


@given(
    zero=st.dictionaries(st.sampled_from(KEYS), JSON),
    block=st.none() | st.dictionaries(st.just("quantize"), JSON),
)
def test_translation_takes_any_json_leaves_its_argument_and_is_done_once(
    zero: Any, block: Any
) -> None:
    config = stock(block, **zero)
    shown = repr(config)
    found = translate(config)
    assert repr(config) == shown
    assert repr(translate(found.config)) == repr(found) or found.lines
    assert translate(found.config).lines == ()


@pytest.mark.parametrize("carried_by", ["config", "config_params", "args"])
def test_deepspeed_gets_the_config_without_the_keys(
    carried_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would act on them or refuse them itself. The caller's dict and arguments are not
    changed.
    """
    from deepspeed.utils import logger

    from zero_topo.hook.initialize import checked_first

    seen: list[Any] = []
    said: list[str] = []

    def initialize(
        args: Any = None, optimizer: Any = None, config: Any = None, config_params: Any = None
    ) -> None:
        seen.append(config or config_params or args.deepspeed_config)

    monkeypatch.setattr(logger, "warning", said.append)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(stock({"scheme": "topo"}, **ZEROPP)))
    given: dict[str, Any] = (
        {"args": Namespace(deepspeed_config=str(path))}
        if carried_by == "args"
        else {carried_by: str(path)}
    )
    checked_first(initialize)(**given)
    assert switched_on(seen[0]) == {} and seen[0]["zero_topo"]["secondary"] == 8
    assert carried_by != "args" or given["args"].deepspeed_config == str(path)
    assert len(said) == 3 and all("is taken as" in line for line in said)
    monkeypatch.setenv("RANK", "1")
    checked_first(initialize)(**given)
    assert len(said) == 3, "another rank says nothing"
