# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo enable`` and ``disable``: where the .pth file goes, and what stays; for what it does see tests/e2e."""

from __future__ import annotations

import site
import sysconfig
from pathlib import Path

import pytest

from zero_topo.cli import enable as enabling
from zero_topo.cli import main


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The interpreter's site-packages, which exists, and the user's, which does not yet."""
    own, user = tmp_path / "own", tmp_path / "user" / "lib" / "site-packages"
    own.mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(own))
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(user))
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    return own, user


def test_enable_and_disable_say_where_and_may_be_repeated(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is a single line that begins with import: ``site`` executes no other."""
    own, user = folders
    for command, words in (("enable", "enabled: wrote"), ("enable", "already enabled by")):
        assert main([command]) == 0
        assert f"{words} {own / 'zero_topo.pth'}" in capsys.readouterr().out
    assert len(list(own.iterdir())) == 1 and not user.exists()
    (line,) = (own / "zero_topo.pth").read_text().splitlines()
    assert line.startswith("import sys; exec(")
    for words in (f"disabled: removed {own / 'zero_topo.pth'}", "not enabled: nothing to remove"):
        assert main(["disable"]) == 0
        assert words in capsys.readouterr().out
    assert not list(own.iterdir())


def test_a_users_folder_is_made_where_the_interpreters_is_not_writable_and_goes_again(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, user = folders
    monkeypatch.setattr(enabling, "_writable", lambda folder: folder == user)
    assert main(["enable"]) == 0
    assert [path.name for path in user.iterdir()] == ["zero_topo.pth"] and not list(own.iterdir())
    assert main(["disable"]) == 0
    assert list(tmp_path.iterdir()) == [own]


def test_nowhere_to_write_is_wrong_input(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(enabling, "_writable", lambda folder: False)
    assert main(["enable"]) == 2
    error = capsys.readouterr().err
    assert all(str(folder) in error for folder in folders) and "virtual environment" in error
