# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The hook is installed when its module is imported, whoever asked before whether there is such a module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from zero_topo import lazy_hook


@pytest.fixture
def awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is waited for, and one that installs its hook."""
    (tmp_path / "zt_awaited.py").write_text("hooked = False\n")
    (tmp_path / "zt_hook.py").write_text("import zt_awaited\nzt_awaited.hooked = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(lazy_hook, "HOOKS", {"zt_awaited": "zt_hook"})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("zt_awaited", "zt_hook"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    lazy_hook.arm()


@pytest.mark.usefixtures("awaited")
@pytest.mark.parametrize("asked", [0, 1, 2])
def test_asking_whether_the_module_exists_does_not_lose_the_hook(asked: int) -> None:
    """transformers and accelerate ask for DeepSpeed so, long before they import it: it would train without a word."""
    for _ in range(asked):
        assert importlib.util.find_spec("zt_awaited") is not None
    assert importlib.import_module("zt_awaited").hooked


@pytest.mark.usefixtures("awaited")
def test_arming_twice_waits_once() -> None:
    """``import zero_topo`` after ``zero-topo enable`` adds no second finder."""
    before = list(sys.meta_path)
    lazy_hook.arm()
    assert sys.meta_path == before
