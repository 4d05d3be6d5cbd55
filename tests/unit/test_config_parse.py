# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The block's grammar: what is accepted, and that every mistake is one line that names key, reason
and way out.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tests.schema import json_schema
from zero_topo.config import DenseSync, ZeroTopoConfig
from zero_topo.config.modes import SYNC_MODES
from zero_topo.config.parts import QuantizeConfig

MODELS: dict[str, type[BaseModel]] = {
    "": ZeroTopoConfig,
    "quantize": QuantizeConfig,
    "sync": DenseSync,
}


@given(level=st.sampled_from(sorted(MODELS)), data=st.data())
def test_a_misspelt_key_is_answered_with_the_nearest_known_key(
    level: str, data: st.DataObject
) -> None:
    known = list(MODELS[level].model_fields)
    right = data.draw(st.sampled_from([key for key in known if len(key) > 4]))
    at = data.draw(st.integers(0, len(right) - 1))
    wrong = right[:at] + right[at + 1 :]  # one letter is missing
    block: dict[str, Any] = {level: {wrong: None}} if level else {wrong: None}
    with pytest.raises(ValueError) as caught:
        ZeroTopoConfig.parse(block)
    path = ".".join(part for part in ("zero_topo", level, wrong) if part)
    assert str(caught.value).startswith(f"{path}: unknown key; did you mean '{right}'?")


def test_the_block_is_found_in_a_deepspeed_config_and_does_not_change() -> None:
    assert ZeroTopoConfig.from_ds_config({"train_batch_size": 8}) is None
    found = ZeroTopoConfig.from_ds_config({"zero_topo": {"scheme": "hsdp"}})
    assert found is not None and found.scheme == "hsdp"
    with pytest.raises(ValidationError, match="frozen"):
        found.overlap = False  # type: ignore[misc]


def test_each_mode_of_sync_is_selected_by_its_name_and_offered_by_the_schema() -> None:
    choices = [
        choice["$ref"].rsplit("/", 1)[1] for choice in json_schema()["properties"]["sync"]["oneOf"]
    ]
    assert choices == [cls.__name__ for cls in SYNC_MODES]
    for cls in SYNC_MODES:
        assert type(ZeroTopoConfig.parse({"sync": {"mode": cls.MODE}}).sync) is cls
        assert cls.model_fields["mode"].default == cls.MODE


def _objects(schema: Any) -> list[dict[str, Any]]:
    """All object schemas that list properties, at any depth."""
    if isinstance(schema, list):
        return [found for item in schema for found in _objects(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if "properties" in schema else []
    return own + [found for item in schema.values() for found in _objects(item)]


def test_the_schema_describes_every_key_and_closes_every_object() -> None:
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["title"] == "zero_topo"
    for found in _objects(schema):
        assert found["additionalProperties"] is False, found["title"]
        assert [
            key for key, value in found["properties"].items() if not value.get("description")
        ] == []
