# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo enable`` and ``disable``: where the .pth file goes, and what stays; for what it does
see tests/e2e.
"""

from __future__ import annotations

import site
import sysconfig
from pathlib import Path

import pytest

from tests.commands import Run


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
    folders: tuple[Path, Path], run: Run
) -> None:
    """The file is a single line that begins with import: ``site`` executes no other."""
    own, user = folders
    for words in ("enabled: wrote", "already enabled by"):
        status, out, _ = run("enable")
        assert status == 0 and f"{words} {own / 'zero_topo.pth'}" in out
    assert len(list(own.iterdir())) == 1 and not user.exists()
    (line,) = (own / "zero_topo.pth").read_text().splitlines()
    assert line.startswith("import sys; exec(")
    for words in (f"disabled: removed {own / 'zero_topo.pth'}", "not enabled: nothing to remove"):
        status, out, _ = run("disable")
        assert status == 0 and words in out
    assert not list(own.iterdir())


def test_a_users_folder_is_made_where_the_interpreters_is_not_writable_and_goes_again(
    folders: tuple[Path, Path], run: Run, tmp_path: Path
) -> None:
    """Nobody, root neither, writes below a file."""
    own, user = folders
    own.rmdir()
    own.touch()
    assert run("enable")[0] == 0
    assert [path.name for path in user.iterdir()] == ["zero_topo.pth"]
    assert run("disable")[0] == 0
    assert list(tmp_path.iterdir()) == [own]


def test_nowhere_to_write_is_wrong_input(
    folders: tuple[Path, Path], run: Run, tmp_path: Path
) -> None:
    folders[0].rmdir()
    folders[0].touch()
    (tmp_path / "user").touch()
    status, _, error = run("enable")
    assert (
        status == 2
        and all(str(folder) in error for folder in folders)
        and "virtual environment" in error
    )
