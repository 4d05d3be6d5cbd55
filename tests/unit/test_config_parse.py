# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The block's grammar: what is accepted, and that every mistake is one line that names key, reason
and way out.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.schema import json_schema
from zero_topo.config import ZeroTopoConfig
from zero_topo.config.modes import SYNC_MODES


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
