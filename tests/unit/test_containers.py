# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/containers copy all that the package is built of, and shells and linters read
them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching import ROOT, ended

FOLDER = ROOT / "docs" / "containers"
DOCKERFILE, FRONTIER = FOLDER / "Dockerfile", FOLDER / "frontier.def"
NEEDED = {
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "zero_topo",
    "op_builder",
    "csrc",
    "configs",
}


def copied() -> dict[Path, set[str]]:
    """What each recipe takes out of the checkout."""
    docker = re.findall(r"^COPY (.*) /opt/zero_topo\S*$", DOCKERFILE.read_text(), re.MULTILINE)
    files = FRONTIER.read_text().partition("%files\n")[2].partition("\n\n")[0]
    return {
        DOCKERFILE: {word for line in docker for word in line.split()},
        FRONTIER: {line.split()[0] for line in files.splitlines()},
    }


@pytest.mark.parametrize("recipe", [DOCKERFILE, FRONTIER], ids=lambda path: path.name)
def test_a_recipe_copies_what_the_package_is_built_of(recipe: Path) -> None:
    assert copied()[recipe] == NEEDED and all((ROOT / name).exists() for name in NEEDED)


def test_the_recipes_scripts_are_shell() -> None:
    """`sh -n` reads every section of the definition."""
    for section in ("post", "environment", "test", "runscript"):
        body = re.search(rf"^%{section}\n((?:.*\n)*?)(?=^%|\Z)", FRONTIER.read_text(), re.MULTILINE)
        assert body is not None and body[1].strip(), section
        done = ended(["sh", "-n"], input=body[1])
        assert (done.returncode, done.stderr) == (0, "")
