# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What waits for an import; that it then installs the hook is shown by
``tests/e2e/test_hook_file.py``.
"""

from __future__ import annotations

import sys

import pytest

from zero_topo import lazy_hook


def test_arming_twice_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """``import zero_topo`` a second time, in a new module object, adds no second finder."""
    monkeypatch.setattr(lazy_hook, "HOOKS", {"zt_awaited": "zt_hook"})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    lazy_hook.arm()
    before = list(sys.meta_path)
    lazy_hook.arm()
    assert sys.meta_path == before
