# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tables of tests as JSON: what is given, and what must come of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def table(name: str) -> Any:
    """What the file of this name holds."""
    return json.loads((Path(__file__).parent / f"{name}.json").read_text())
