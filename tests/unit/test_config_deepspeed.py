# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed config around the block: how it is read, and what is refused next to zero_topo."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zero_topo.config import deepspeed_problems, load_deepspeed_config
from zero_topo.config.deepspeed_json import REFUSED_KEYS, with_environment_block
from zero_topo.config.stock_keys import translate

GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "zero_topo": {"scheme": "topo"},
}


def changed(**changes: Any) -> dict[str, Any]:
    """GOOD with keys replaced, or removed where the value is None; dots are written as two
    underscores.
    """
    config: dict[str, Any] = json.loads(json.dumps(GOOD))
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        place = config
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return config


ZERO = "zero_optimization"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (changed(zero_optimization__stage=2), f"{ZERO}.stage = 2", "set it to 3"),
    (changed(zero_optimization__stage="auto"), f"{ZERO}.stage is not set", '{"stage": 3}'),
    (changed(zero_optimization=True), f"{ZERO} = true", '{"stage": 3}'),
    (
        {key: value for key, value in GOOD.items() if key != ZERO},
        f"{ZERO}.stage is not set",
        '{"stage": 3}',
    ),
    (
        changed(optimizer__type="MUON", zero_topo__sync={"mode": "ternary"}),
        'type = "MUON": every',
        '"quantized"',
    ),
    (changed(optimizer__type="AgedAdamW"), 'optimizer.type = "AgedAdamW": it divides', '"AdamW"'),
    (
        changed(optimizer__type="agedadamw", zero_topo__sync={"mode": "quantized"}),
        "nothing waits",
        "sparse",
    ),
    (
        changed(
            optimizer__type="AgedAdamW", zero_topo__sync={"mode": "topk_a", "error_feedback": False}
        ),
        "nothing waits",
        "error_feedback",
    ),
    ({ZERO: {"stage": 3, "zero_topo": {}}}, f"{ZERO}.zero_topo", "top level"),
    (
        {ZERO: {"stage": 3}, "zero-topo": {}},
        "zero-topo: DeepSpeed would ignore",
        'write it "zero_topo"',
    ),
    (
        {ZERO: {"stage": 3}, "ZeroTopo": {}},
        "ZeroTopo: DeepSpeed would ignore",
        'write it "zero_topo"',
    ),
]


TRIED = {"on": True, "set": {}, "above one": 2, "not one": 0.5}
"""Kind of refused values -> one of them; any other kind is a word, which stands for itself."""


@pytest.mark.parametrize("row", REFUSED_KEYS, ids=[row["key"] for row in REFUSED_KEYS])
def test_each_refused_key_is_one_line_with_its_value_reason_and_way_out(
    row: dict[str, Any],
) -> None:
    kinds = {row["key"]: row["refused"], **row.get("others", {})}
    values = {key: TRIED.get(kind, kind) for key, kind in kinds.items()}
    (line,) = deepspeed_problems(
        changed(**{key.replace(".", "__"): value for key, value in values.items()})
    )
    assert (
        line == f"{row['key']} = {json.dumps(values[row['key']])}: {row['why']}; {row['instead']}"
    )


@pytest.mark.parametrize(
    ("config", "what", "instead"), REFUSED, ids=[what for _, what, _ in REFUSED]
)
def test_a_setting_zero_topo_cannot_work_next_to_is_refused_in_one_line(
    config: dict[str, Any], what: str, instead: str
) -> None:
    (line,) = deepspeed_problems(config)
    assert what in line and instead in line and "\n" not in line


@pytest.mark.parametrize(
    "config",
    [
        GOOD,
        changed(
            zero_optimization__offload_optimizer={
                "device": "cpu",
                "ratio": 1.0,
                "super_offload": False,
            }
        ),
        changed(zero_optimization__offload_optimizer={"device": "none", "ratio": 0.5}),
        changed(zero_optimization__offload_param={"device": "none"}),
        changed(zero_optimization__offload_param=None),
        changed(zero_optimization__zenflow=None),
        changed(zero_optimization__zero_hpz_partition_size=1),
        changed(
            zero_optimization={
                "stage": 3,
                "reduce_scatter": False,
                "stage3_use_all_reduce_for_fetch_params": True,
            }
        ),
        changed(optimizer__type="AgedAdamW", zero_topo__sync={"mode": "oktopk"}),
        changed(zero_optimization__offload_param__device="cpu"),
        changed(zero_optimization__zero_quantized_weights="false", compile__deepcompile=False),
        changed(
            train_batch_size="auto",
            optimizer={"type": "auto"},
            zero_optimization={
                "stage": 3,
                **dict.fromkeys(
                    ["reduce_scatter", "zero_hpz_partition_size", "zero_quantized_weights"], "auto"
                ),
                "offload_param": {"device": "auto"},
                "offload_optimizer": {"device": "auto", "ratio": "auto"},
            },
            tensor_parallel={"autotp_size": "auto"},
            sequence_parallel_size="auto",
        ),
        changed(
            tensor_parallel__autotp_size=0,
            expert_parallel={"enabled": False},
            sequence_parallel_size=2,
        ),
        changed(
            pipeline__stages="auto", torch_autocast={"enabled": False}, optimizer={"type": "AdamW"}
        ),
        # Without the block none of our business
        {"zero_optimization": {"stage": 1, "zero_hpz_partition_size": 8}},
    ],
)
def test_what_works_is_not_refused(config: dict[str, Any]) -> None:
    assert not deepspeed_problems(config)


def test_what_asks_for_less_than_is_done_is_taken_out_of_the_config() -> None:
    """DeepSpeed would all-reduce past our scatter; what leaves things as they are, and what is no
    switch, stays.
    """
    less = {"reduce_scatter": False, "stage3_use_all_reduce_for_fetch_params": True}
    stays = {"stage": 3, "use_all_reduce_for_fetch_params": False}
    found = translate(changed(zero_optimization={**stays, **less}))
    assert found.config[ZERO] == stays and len(found.lines) == 2 and not found.problems
    others: list[Any] = [True, "auto", None, []]
    for scattered in others:
        config = changed(zero_optimization={**stays, "reduce_scatter": scattered})
        assert translate(config).config == config


@pytest.mark.parametrize("device", ["cpu", "CPU"])
def test_parameters_that_train_stay_on_the_device_and_others_may_be_offloaded(device: str) -> None:
    """Whether the config or the caller brings the optimizer: the key is left out with a line that
    says why.
    """
    config = changed(zero_optimization__offload_param__device=device)
    assert translate(config).config == config
    for found in (
        translate(config, optimizer=True),
        translate(config | {"optimizer": {"type": "AdamW"}}),
    ):
        assert "offload_param" not in found.config[ZERO]
        assert (
            found.lines[0].startswith(f"{ZERO}.offload_param = ")
            and "on the device" in found.lines[0]
        )


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=5,
)


@given(data=st.data())
def test_no_value_of_any_json_type_makes_a_check_crash(data: st.DataObject) -> None:
    keys = [row["key"] for row in REFUSED_KEYS]
    key = data.draw(
        st.sampled_from([*keys, ZERO, f"{ZERO}.stage", f"{ZERO}.offload_optimizer", "optimizer"])
    )
    config = changed(**{key.replace(".", "__"): data.draw(JSON)})
    assert all("\n" not in line for line in deepspeed_problems(config))


def test_every_refused_key_exists_in_the_installed_deepspeed() -> None:
    found = importlib.util.find_spec("deepspeed")
    if found is None or not found.submodule_search_locations:
        pytest.skip("deepspeed is not installed")
    root = Path(found.submodule_search_locations[0])
    sources = [
        root / "runtime",
        root / "compile" / "config.py",
        root / "module_inject" / "auto_ep_config.py",
    ]
    files = [
        file
        for source in sources
        for file in ([source] if source.is_file() else source.rglob("*.py"))
    ]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    keys = {part for row in REFUSED_KEYS for part in row["key"].split(".")}
    assert sorted(key for key in keys if key not in text) == []


# -- reading ---------------------------------------------------------------------------------------


def test_a_config_is_read_from_a_dict_a_path_and_base64(tmp_path: Path) -> None:
    text = json.dumps(GOOD)
    (tmp_path / "ds.json").write_text(text)
    assert load_deepspeed_config(GOOD) == GOOD
    assert load_deepspeed_config(tmp_path / "ds.json") == GOOD
    assert load_deepspeed_config(str(tmp_path / "ds.json")) == GOOD
    assert load_deepspeed_config(base64.urlsafe_b64encode(text.encode()).decode()) == GOOD


@given(config=st.dictionaries(st.text(max_size=9), JSON, max_size=5))
def test_base64_of_any_json_object_is_read_back(config: dict[str, Any]) -> None:
    assume("Infinity" not in json.dumps(config))  # which JSON has no number for
    assert (
        load_deepspeed_config(base64.urlsafe_b64encode(json.dumps(config).encode()).decode())
        == config
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1, 2]", r"must be a JSON object, got \[1, 2\]"),
        ('{"a": 1, "a": 2}', "repeated key 'a'"),
        ('{"zero_topo": {"scheme": "topo", "scheme": "paper"}}', "repeated key 'scheme'"),
    ],
)
def test_a_broken_file_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_deepspeed_config(path)
    assert "broken.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["no/such/file.json", "missing", "x" * 5000])
def test_a_missing_file_is_said_to_be_missing(source: str) -> None:
    with pytest.raises(ValueError, match=r"no such file|not valid JSON") as caught:
        load_deepspeed_config(source)
    assert len(str(caught.value)) < 300


def test_comments_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    path = tmp_path / "ds.json"
    path.write_text('{\n  # a comment\n  "zero_topo": {"scheme": "topo",},\n}')
    assert load_deepspeed_config(path) == {"zero_topo": {"scheme": "topo"}}


# -- the block of the environment ------------------------------------------------------------------


def test_the_environments_block_is_that_of_a_stage_3_config() -> None:
    """For frameworks that build the config in code; other stages, and an empty variable, change
    nothing.
    """
    plain, env = changed(), {"ZERO_TOPO_BLOCK": '{"scheme": "zero3"}'}
    del plain["zero_topo"]
    assert with_environment_block(plain, env) == plain | {"zero_topo": {"scheme": "zero3"}}
    assert with_environment_block(plain, {"ZERO_TOPO_BLOCK": ""}) == plain
    assert (
        with_environment_block(plain | {"zero_optimization": {"stage": 2}}, env).get("zero_topo")
        is None
    )
    assert with_environment_block(GOOD, {"ZERO_TOPO_BLOCK": '{"scheme": "topo"}'}) == GOOD


def test_the_environments_block_may_be_in_a_file(tmp_path: Path) -> None:
    """A launcher that loses quotation marks passes a path whole."""
    plain = changed()
    del plain["zero_topo"]
    file = tmp_path / "block.json"
    file.write_text('{"scheme": "zero3"}')
    env = {"ZERO_TOPO_BLOCK": str(file)}
    assert with_environment_block(plain, env) == plain | {"zero_topo": {"scheme": "zero3"}}
    file.unlink()
    with pytest.raises(
        ValueError, match=r"ZERO_TOPO_BLOCK = .*block.json: cannot be read .*every node can read"
    ):
        with_environment_block(plain, env)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"scheme": "zero3"}',
            r'the config has another "zero_topo" block, .*; remove one of the two',
        ),
        ("{", "ZERO_TOPO_BLOCK: not valid JSON"),
        ('["topo"]', "ZERO_TOPO_BLOCK: must be a JSON object"),
    ],
)
def test_an_environments_block_that_cannot_be_is_refused(text: str, message: str) -> None:
    """In one line; two blocks that differ are a contradiction."""
    with pytest.raises(ValueError, match=message) as caught:
        with_environment_block(GOOD, {"ZERO_TOPO_BLOCK": text})
    assert "\n" not in str(caught.value)
