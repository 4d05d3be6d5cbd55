# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A command writes over nothing that it did not write: a name is easily mistyped, a config or a
figure easily gone.
"""

from __future__ import annotations

from pathlib import Path

from tests.commands import Run

PLOT = ("plan", "--params", "1B", "--machine", "frontier", "--nodes", "1", "--plot")
MINE = '{"$schema": "../docs/config.schema.json", "zero_topo": {"scheme": "my file"}}'


def test_only_new_files_and_own_results_are_written_over(run: Run, tmp_path: Path) -> None:
    """Somebody's file stays as it is, and nothing else is written; the result itself is renewed."""
    mine = tmp_path / "x.png"
    mine.write_text(MINE)
    status, _, said = run(*PLOT, str(mine))
    assert status == 2 and f"{mine} exists and is no result" in said and "--force" not in said
    assert mine.read_text() == MINE and [*tmp_path.iterdir()] == [mine]
    mine.unlink()
    for _ in range(2):
        assert run(*PLOT, str(mine))[0] == 0 and mine.read_bytes().startswith(b"\x89PNG")


def test_results_of_another_kind_and_folders_are_not_written_over(run: Run, tmp_path: Path) -> None:
    """A picture of anything else is none of plans; a folder is never a file."""
    (tmp_path / "x.png").write_bytes(b"\x89PNG zero_topo memory")
    assert "no result of this kind" in run(*PLOT, str(tmp_path / "x.png"))[2]
    assert "which is a file; name a folder" in run(*PLOT, str(tmp_path / "x.png" / "y.png"))[2]
    (tmp_path / "folder.png").mkdir()
    assert run(*PLOT, str(tmp_path / "folder.png"))[0] == 2
