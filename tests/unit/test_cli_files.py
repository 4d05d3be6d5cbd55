# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A command writes over nothing that it did not write: a name is easily mistyped, a config or a figure easily gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import Run

SMALL = ("simulate", "--gcds", "16", "--schemes", "topo", "--micro-batches", "1", "--model", "gpt2")
MINE = '{"$schema": "../docs/config.schema.json", "zero_topo": {"scheme": "my file"}}'
COMMANDS = {
    "plot": ((*SMALL, "--plot"), "x.png", "x.png"),
    "schema": (("schema", "--output"), "x.json", "x.json"),
}


@pytest.mark.parametrize(("words", "name", "written"), COMMANDS.values(), ids=COMMANDS)
def test_only_new_files_and_own_results_are_written_over(
    words: tuple[str, ...], name: str, written: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody's file stays as it is, and nothing else is written, until --force; the result itself is renewed."""
    monkeypatch.chdir(tmp_path)
    mine = Path(written)
    mine.parent.mkdir(exist_ok=True)
    mine.write_text(MINE)
    status, _, said = run(*words, name)
    assert status == 2 and f"{written} exists and is no result" in said and "--force" in said
    assert mine.read_text() == MINE and [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / mine]
    assert run(*words, name, *(("--force",) if words[0] == "schema" else ("--set", "force=true")))[0] == 0
    first = mine.read_bytes()
    assert b"my file" not in first
    assert run(*words, name)[0] == 0
    mine.unlink()
    assert run(*words, name)[0] == 0 and mine.exists()


def test_results_of_another_kind_and_folders_are_not_written_over(run: Run, tmp_path: Path) -> None:
    """A picture of anything else is no scaling curve; a folder is never a file, forced or not."""
    (tmp_path / "x.png").write_bytes(b"\x89PNG zero_topo memory")
    assert "no result of this kind" in run(*SMALL, "--plot", str(tmp_path / "x.png"))[2]
    assert "which is a file; name a folder" in run("schema", "-o", str(tmp_path / "x.png" / "y"))[2]
    (tmp_path / "folder.png").mkdir()
    for force in ((), ("--set", "force=true")):
        assert run(*SMALL, "--plot", str(tmp_path / "folder.png"), *force)[0] == 2
