# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed config around the block: how it is read, and what of it works; what is refused is
in ``test_mistakes.py``.
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
from tests.data import table
from zero_topo.config import deepspeed_problems, load_deepspeed_config
from zero_topo.config.deepspeed_json import REFUSED_KEYS, with_environment_block
from zero_topo.config.deepspeed_parts import TRUTHS, ZERO, on
from zero_topo.config.stock_keys import KEYS, StockKeys, switched_on, translate
from zero_topo.doctor import refusals
from zero_topo.doctor.refusals import deepspeed_refusals

GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    ZERO: {"stage": 3},
    "zero_topo": {"scheme": "topo"},
}
BAD = GOOD | {"optimizer": {"type": "Adam8bit"}}
"""What DeepSpeed refuses."""


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """GOOD with keys replaced, whose parts are joined by dots."""
    config: dict[str, Any] = json.loads(json.dumps(GOOD))
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        place = config
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return config


TRIED = {"on": True, "set": {}, "above one": 2, "not one": 0.5}
"""Kind of refused values -> one of them; any other kind is a word, which stands for itself."""


@pytest.mark.parametrize("row", REFUSED_KEYS, ids=[row["key"] for row in REFUSED_KEYS])
def test_each_refused_key_is_named_with_its_value(row: dict[str, Any]) -> None:
    kinds = {row["key"]: row["refused"], **row.get("others", {})}
    values = {key: TRIED.get(kind, kind) for key, kind in kinds.items()}
    (line,) = deepspeed_problems(changed(values))
    assert line.startswith(f"{row['key']} = {json.dumps(values[row['key']])}: ")


@pytest.mark.parametrize("name", TRUTHS)
def test_a_text_is_no_switch(name: str) -> None:
    for value in (True, False, "auto", "false"):
        problems = deepspeed_problems(changed({name: value, "optimizer.type": "AdamW"}))
        assert [name in line for line in problems] == [True] * (value == "false")


@pytest.mark.parametrize("config", table("works"))
def test_what_works_is_refused_by_nobody(config: dict[str, Any]) -> None:
    """What Hugging Face fills in counts as absent."""
    assert deepspeed_problems(config) == []
    assert deepspeed_refusals(config, None) == []


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
PARTS = [
    ZERO,
    f"{ZERO}.stage",
    f"{ZERO}.offload_optimizer",
    "optimizer",
    "zero_topo",
    "zero_topo.quantize",
    *TRUTHS,
    *(row["key"] for row in REFUSED_KEYS),
]


@given(
    stock=st.dictionaries(st.sampled_from(KEYS).map(f"{ZERO}.{{}}".format), JSON),
    changes=st.dictionaries(st.sampled_from(PARTS), JSON, max_size=1),
    optimizer=st.booleans(),
)
def test_values_of_any_json_type_are_taken_and_translated_once(
    stock: dict[str, Any], changes: dict[str, Any], optimizer: bool
) -> None:
    """Nothing crashes, and the config that is given stays as it is."""
    config = changed(stock | changes)
    shown = repr(config)
    assert all("\n" not in line for line in deepspeed_problems(config))
    found = translate(config, optimizer=optimizer)
    assert repr(config) == shown
    assert translate(found.config, optimizer=optimizer).lines == ()


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
        assert bool(deepspeed_problems(changed({f"{ZERO}.{key}": value}))) == expected


@pytest.mark.parametrize("device", ["cpu", "CPU"])
def test_parameters_that_train_stay_on_the_device_and_others_may_be_offloaded(device: str) -> None:
    """Whether the config or the caller brings the optimizer."""
    config = changed({f"{ZERO}.offload_param.device": device})
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
    file.write_text(json.dumps(BAD))
    status, out, _ = run("check", str(file), "--ranks", "8", "--machine", "frontier")
    assert status == 0 and "- DeepSpeed is not installed here" in out and out.endswith("ok\n")


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
    assert deepspeed_refusals(BAD, 8) == []


# -- reading ---------------------------------------------------------------------------------------


@given(config=st.dictionaries(st.text(max_size=9), JSON, max_size=5))
def test_a_config_is_read_from_a_dict_a_path_and_base64(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]
) -> None:
    text = json.dumps(config)
    assume("Infinity" not in text)  # which JSON has no number for
    path = tmp_path_factory.getbasetemp() / "ds.json"
    path.write_text(text)
    for source in (config, path, str(path), base64.urlsafe_b64encode(text.encode()).decode()):
        assert load_deepspeed_config(source) == config


def test_comments_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    path = tmp_path / "ds.json"
    path.write_text('{\n  # a comment\n  "zero_topo": {"scheme": "topo",},\n}')
    assert load_deepspeed_config(path) == {"zero_topo": {"scheme": "topo"}}


@pytest.mark.parametrize("kept", ["text", "file"])
def test_the_environments_block_is_that_of_a_stage_3_config(kept: str, tmp_path: Path) -> None:
    """For frameworks that build the config in code; other stages, an empty variable and the block
    that the config has change nothing. A launcher that loses quotation marks passes a path whole.
    """
    text = json.dumps(GOOD["zero_topo"])
    if kept == "file":
        (tmp_path / "block.json").write_text(text)
        text = str(tmp_path / "block.json")
    plain, env = {ZERO: {"stage": 3}}, {"ZERO_TOPO_BLOCK": text}
    assert with_environment_block(plain, env) == plain | {"zero_topo": GOOD["zero_topo"]}
    assert with_environment_block(GOOD, env) == GOOD
    assert with_environment_block(plain, {"ZERO_TOPO_BLOCK": ""}) == plain
    other = {ZERO: {"stage": 2}}
    assert with_environment_block(other, env) == other
