# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed config around the block: how it is read, and which mistakes are found in it, by us
or by DeepSpeed.
"""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.commands import Run
from tests.launching import ROOT
from zero_topo.config import (
    deepspeed_problems,
    load_deepspeed_config,
)
from zero_topo.config.deepspeed_json import REFUSED_KEYS, with_environment_block
from zero_topo.config.deepspeed_parts import BATCHES, TRUTHS, on
from zero_topo.config.stock_keys import KEYS, StockKeys, switched_on, translate
from zero_topo.doctor import refusals
from zero_topo.doctor.refusals import deepspeed_refusals

GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "zero_topo": {"scheme": "topo"},
}
ZERO = "zero_optimization"


def changed(**changes: Any) -> dict[str, Any]:
    """GOOD with keys replaced; dots are written as two underscores."""
    config: dict[str, Any] = json.loads(json.dumps(GOOD))
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        place = config
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return config


def dotted(**changes: Any) -> dict[str, Any]:
    """The arguments of :func:`changed` for keys with dots."""
    return changed(**{key.replace(".", "__"): value for key, value in changes.items()})


# -- mistakes --------------------------------------------------------------------------------------

SGD = {"type": "SGD", "params": {"lr": 1e-3}}
BATCH = dict(zip(BATCHES, (64, 2, 4), strict=True))
OURS: list[tuple[dict[str, Any], str, Any]] = [
    (changed(zero_optimization__stage=2), f"{ZERO}.stage", 2),
    (changed(zero_optimization=True), f"{ZERO}.stage", None),
    (changed(zero_optimization__zero_topo={}), f"{ZERO}.zero_topo", None),
    (changed(**{"zero-topo": {}}), "zero-topo", None),
    (changed(optimizer__params={"lr": 0.1}), "optimizer.type", None),
    (changed(gradient_accumulation_steps=1.5), "gradient_accumulation_steps", 1.5),
    (changed(zero_optimization__zero_hpz_partition_size=[]), "zero_hpz_partition_size", []),
    (
        changed(zero_optimization__zero_hpz_partition_size=8, zero_topo__secondary="node"),
        f"{ZERO}.zero_hpz_partition_size",
        8,
    ),
    (changed(optimizer__type="AgedAdamW"), "optimizer.type", "AgedAdamW"),
    (
        changed(optimizer__type="MUON", zero_topo__sync={"mode": "ternary"}),
        "optimizer.type",
        "MUON",
    ),
    (
        changed(optimizer__type="AdamW", zero_topo__sync={"mode": "scape"}),
        "optimizer.type",
        "AdamW",
    ),
    *((dotted(**{name: "false", "optimizer.type": "AdamW"}), name, "false") for name in TRUTHS),
]
"""A config, the key that its line must name, and the value, if it must name one."""
DEEPSPEEDS: list[tuple[dict[str, Any], int | None, str]] = [
    (BATCH, 4, "train_batch_size"),
    ({ZERO: {"stage": 3, "overlap_com": True}}, None, f"{ZERO}.overlap_com"),
    ({"optimizer": {"type": "Adam8bit"}}, None, "Adam8bit"),
    ({"optimizer": SGD}, None, "zero_allow_untested_optimizer"),
    ({"optimizer": {"type": "AdamW", "params": {"weight_decai": 0.1}}}, None, "weight_decai"),
    ({"optimizer": {"type": "AdamS", "params": {"momentum": 0.9}}}, None, "momentum"),
]
"""Changes of GOOD, the ranks, and what DeepSpeed's line must name."""


@pytest.mark.parametrize(("config", "key", "value"), OURS, ids=[key for _, key, _ in OURS])
def test_a_setting_that_would_train_otherwise_than_written_is_named(
    config: dict[str, Any], key: str, value: Any
) -> None:
    (line,) = deepspeed_problems(config)
    assert key in line and "\n" not in line
    assert value is None or json.dumps(value) in line


TRIED = {"on": True, "set": {}, "above one": 2, "not one": 0.5}
"""Kind of refused values -> one of them; any other kind is a word, which stands for itself."""


@pytest.mark.parametrize("row", REFUSED_KEYS, ids=[row["key"] for row in REFUSED_KEYS])
def test_each_refused_key_is_named_with_its_value(row: dict[str, Any]) -> None:
    kinds = {row["key"]: row["refused"], **row.get("others", {})}
    values = {key: TRIED.get(kind, kind) for key, kind in kinds.items()}
    (line,) = deepspeed_problems(dotted(**values))
    assert line.startswith(f"{row['key']} = {json.dumps(values[row['key']])}: ")


@pytest.mark.parametrize(
    ("keys", "ranks", "word"), DEEPSPEEDS, ids=[word for _, _, word in DEEPSPEEDS]
)
def test_what_deepspeed_refuses_is_named_before_it_starts(
    keys: dict[str, Any], ranks: int | None, word: str
) -> None:
    (line,) = deepspeed_refusals({**GOOD, **keys}, ranks)
    assert word in line and "\n" not in line


FILES = {
    "accelerate": "deepspeed_config_file",
    "nan": "NaN",
    "zdup": "max_live_parameters",
}
PUBLISHED = sorted((ROOT / "tests/data/deepspeed").iterdir())


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_check_judges_files_as_initialize_does(path: Path, run: Run) -> None:
    """Each fault of a file is a line that names it, and the file."""
    status, out, err = run("check", str(path), "--ranks", "8", "--machine", "frontier")
    if path.stem == "hpz_empty_block":
        assert (status, err) == (0, "") and out.endswith("ok\n")
        return
    assert (status, out) == (2, "")
    assert all(str(path) in line for line in err.splitlines())
    assert FILES[path.stem] in err


# -- what works ------------------------------------------------------------------------------------

AUTO_ZERO = {
    "stage": 3,
    **dict.fromkeys(["reduce_scatter", "zero_hpz_partition_size", "reduce_bucket_size"], "auto"),
    "offload_optimizer": {"device": "auto", "ratio": "auto"},
}
WORKS: list[dict[str, Any]] = [
    {},
    {ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}},
    {ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}},
    {ZERO: {"stage": 3, "zero_quantized_weights": "false", "zero_hpz_partition_size": 1}},
    {ZERO: AUTO_ZERO, **dict.fromkeys(BATCHES, "auto"), "fp16": {"enabled": "auto"}},
    {"zero_topo": {}, ZERO: {"stage": 3, "mics_shard_size": 4}},
    BATCH,
    {"optimizer": {"type": "AgedAdamW"}, "zero_topo": {"sync": {"mode": "oktopk"}}},
    {"optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-4}}},
    {"optimizer": SGD, "zero_allow_untested_optimizer": True},
    {
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 10, "total_num_steps": "auto"},
        }
    },
]


@pytest.mark.parametrize("keys", WORKS, ids=lambda keys: json.dumps(keys)[:60])
def test_what_works_is_refused_by_nobody(keys: dict[str, Any]) -> None:
    """What Hugging Face fills in counts as absent."""
    config = {**GOOD, **keys}
    assert deepspeed_problems(config) == []
    assert deepspeed_refusals(config, None) == []


@pytest.mark.parametrize("name", TRUTHS)
def test_a_switch_that_is_one_is_not_refused(name: str) -> None:
    for value in (True, False, "auto"):
        assert deepspeed_problems(dotted(**{name: value, "optimizer.type": "AdamW"})) == []


def test_a_config_without_a_block_is_deepspeeds_own() -> None:
    assert deepspeed_problems({ZERO: {"stage": 1, "zero_hpz_partition_size": 8}}) == []


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
    parts = [ZERO, f"{ZERO}.stage", f"{ZERO}.offload_optimizer", "optimizer", "zero_topo"]
    parts += [*TRUTHS, *(f"{ZERO}.{key}" for key in KEYS)]
    config = dotted(**{data.draw(st.sampled_from([*keys, *parts])): data.draw(JSON)})
    assert all("\n" not in line for line in deepspeed_problems(config))
    translate(config, optimizer=True)


# -- what DeepSpeed does ---------------------------------------------------------------------------

SWITCHED: list[Any] = [True, False, 0, 1, 2, 0.5, None, [], {}, "true", "off", "y", "f", "1", "x"]


@pytest.mark.parametrize("key", KEYS)
def test_a_stock_key_is_taken_and_refused_as_deepspeeds_field_does(key: str) -> None:
    """Also those of the releases that no longer have the key, whose fields are of these types."""
    zero = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    for value in [*SWITCHED, 8, 8.0, 8.5, "8"]:
        try:
            stock = getattr(StockKeys.model_validate({key: value}), key)
        except ValueError:
            with pytest.raises(ValueError, match=key):
                switched_on({ZERO: {key: value}})
            stock = ValueError
        if key not in zero.model_fields:
            continue
        try:
            assert getattr(zero(stage=3, **{key: value}), key) == stock
        except ValueError:
            assert stock is ValueError, value


def test_refused_switches_are_on_where_deepspeed_takes_them_as_on() -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    key = "zero_quantized_nontrainable_weights"
    for value in SWITCHED:
        try:
            expected = getattr(zero(stage=3, **{key: value}), key)
        except ValueError:
            expected = False
        assert on(value) == expected
        assert bool(deepspeed_problems(dotted(**{f"{ZERO}.{key}": value}))) == expected


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
    """Whether the config or the caller brings the optimizer."""
    config = changed(zero_optimization__offload_param__device=device)
    assert translate(config).config == config
    for found in (
        translate(config, optimizer=True),
        translate(config | {"optimizer": {"type": "AdamW"}}),
    ):
        assert "offload_param" not in found.config[ZERO]
        assert found.lines[0].startswith(f"{ZERO}.offload_param = ")


def test_without_deepspeed_the_rest_is_checked_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path
) -> None:
    """A login node may have no DeepSpeed; its own refusals are then not known."""
    monkeypatch.setattr(refusals, "installed", lambda package: None)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**GOOD, "optimizer": {"type": "Adam8bit"}}))
    status, out, _ = run("check", str(file), "--ranks", "8", "--machine", "frontier")
    assert status == 0 and "- DeepSpeed is not installed here" in out and out.endswith("ok\n")
    file.write_text(json.dumps(changed(zero_optimization__stage=2)))
    assert run("check", str(file), "--ranks", "8", "--machine", "frontier")[0] == 2


def test_a_deepspeed_that_does_not_start_is_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the last line of its traceback."""
    (tmp_path / "deepspeed.py").write_text("raise ImportError('libcudart.so.99 is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # The one that runs goes on
    monkeypatch.setattr(refusals, "_program", cache(refusals._program.__wrapped__))
    said = refusals.unasked()
    assert said and "libcudart.so.99 is missing" in said
    assert deepspeed_refusals({**GOOD, "optimizer": {"type": "Adam8bit"}}, 8) == []


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
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    assert load_deepspeed_config(encoded) == config


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "JSON"),
        ("", "JSON"),
        ("[1, 2]", "[1, 2]"),
        ('{"a": 1, "a": 2}', "'a'"),
        ('{"zero_topo": {"scheme": "topo", "scheme": "paper"}}', "'scheme'"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.json") as caught:
        load_deepspeed_config(path)
    assert named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["no/such/file.json", "missing", "x" * 5000])
def test_a_missing_file_is_named_shortly(source: str) -> None:
    with pytest.raises(ValueError, match=source[:50]) as caught:
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
    other = with_environment_block(plain | {"zero_optimization": {"stage": 2}}, env)
    assert "zero_topo" not in other
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
    with pytest.raises(ValueError, match=r"block\.json"):
        with_environment_block(plain, env)


@pytest.mark.parametrize("text", ['{"scheme": "zero3"}', "{", '["topo"]'])
def test_an_environments_block_that_cannot_be_is_named(text: str) -> None:
    """Two blocks that differ are a contradiction."""
    with pytest.raises(ValueError, match="ZERO_TOPO_BLOCK") as caught:
        with_environment_block(GOOD, {"ZERO_TOPO_BLOCK": text})
    assert "\n" not in str(caught.value)
