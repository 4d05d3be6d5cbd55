# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The JSON schema of the block, which ``make docs`` writes for editors."""

from __future__ import annotations

import json
import re
from typing import Any

from zero_topo.config import ZeroTopoConfig
from zero_topo.config.parts import ROOT


def json_schema(whole_file: bool = False) -> dict[str, Any]:
    """Return the JSON schema of the block, or of a DeepSpeed config with it (all other keys
    allowed).
    """
    # Editors show a line break of a docstring as one: only those between paragraphs stay.
    text = json.dumps(ZeroTopoConfig.model_json_schema())
    block = {**json.loads(re.sub(r"(?<!\\n)\\n(?!\\n)", " ", text)), "title": ROOT}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    if not whole_file:
        return {**head, **block}
    definitions, title = block.pop("$defs"), "DeepSpeed config with a zero_topo block"
    return {
        **head,
        "title": title,
        "type": "object",
        "properties": {ROOT: block},
        "$defs": definitions,
    }
