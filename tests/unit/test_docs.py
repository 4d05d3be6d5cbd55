# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Documents tell the truth about files, commands and configs: what they name exists."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.documents import PAGES
from tests.hazards import listed, pattern
from tests.launching import ROOT
from zero_topo import __version__
from zero_topo.config import ZeroTopoConfig, deepspeed_problems
from zero_topo.cost.rule import before_a_model
from zero_topo.topology.presets import load_preset

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
IMAGE = re.compile(r'(?:src|srcset)="([^"]+)"')
PATH = re.compile(
    r"(?<![\w/.-])((?:zero_topo|tests|configs|neox_configs|csrc|op_builder|benchmarks|docs)/[\w./-]*\w)"
)
MAKE = re.compile(r"\bmake ([a-z][a-z-]+)")


@pytest.fixture(params=[*sorted(ROOT.glob("*.md")), *PAGES], ids=lambda path: path.name)
def document(request: pytest.FixtureRequest) -> Path:
    """Each of the checkout's, and each page of its docs."""
    return Path(request.param)


def commands(text: str) -> str:
    """The parts of a document that are code: fenced blocks and inline spans."""
    blocks = [body for _, body in FENCE.findall(text)]
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", FENCE.sub("", text))])


def test_links_lead_somewhere(document: Path) -> None:
    """Every relative link and picture is a file of the checkout."""
    text = document.read_text()
    targets = {target.split("#")[0] for target in [*LINK.findall(text), *IMAGE.findall(text)]}
    relative = {
        target
        for target in targets
        if target and "://" not in target and not target.startswith("mailto:")
    }
    assert not [target for target in sorted(relative) if not (document.parent / target).exists()]


def test_blocks_are_of_a_language_that_is_tested(document: Path) -> None:
    """`bash` or `console` would be past the test that runs every line of `sh`; what cannot run here
    is `text`.
    """
    assert {language for language, _ in FENCE.findall(document.read_text())} <= {
        "",
        "sh",
        "json",
        "python",
        "text",
    }


def test_make_targets_exist(document: Path) -> None:
    """Every `make something` in code is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z][a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(MAKE.findall(commands(document.read_text()))) <= targets


def test_named_paths_exist(document: Path) -> None:
    """Every path below one of our directories that is named in code exists."""
    found = set(PATH.findall(document.read_text()))
    assert not [path for path in sorted(found) if not (ROOT / path).exists()]


def test_json_blocks_are_valid_configs(document: Path) -> None:
    """Every JSON block is a DeepSpeed config, or a fragment of one, that starts on 16 and on 384
    GCDs of Frontier.
    """
    for language, body in FENCE.findall(document.read_text()):
        if language != "json":
            continue
        text = body.strip().rstrip(",")
        config = json.loads(text if text.startswith("{") else f"{{{text}}}")
        assert isinstance(config, dict)
        assert not deepspeed_problems({"zero_optimization": {"stage": 3}, **config})
        block = ZeroTopoConfig.from_ds_config(config)
        for ranks in (16, 384):
            assert block is None or before_a_model(block, load_preset("frontier", ranks))


def test_ci_runs_the_readmes_command() -> None:
    """CI runs what the README tells a stranger to run, the docs and the check of what is
    released.
    """
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert {"make test", "make --jobs 2 --output-sync=target docs release-check"} <= {
        *script.read_text().splitlines()
    }
    assert "make test" in commands((ROOT / "README.md").read_text())


def test_hazards_can_be_put_back() -> None:
    """Each text of `tests/hazards.md` stands once in the package, and its test is there: else it
    proves nothing.
    """
    sources = (*(ROOT / "zero_topo").rglob("*.py"), *(ROOT / "csrc").glob("zt_gpu_*"))
    package = "\n".join(path.read_text() for path in sources)
    launcher = "\n".join(path.read_text() for path in (ROOT / "tests/launcher").glob("*.py"))
    for hazard in listed():
        assert len(pattern(hazard.text).findall(package)) == 1, hazard.what
        file, _, name = hazard.test.partition("::")
        tests = (ROOT / file).read_text() if name else launcher
        function = name.partition("[")[0]
        assert (function or file.removeprefix("launcher: ").split()[0]) in tests, hazard.what


def test_changelog_knows_this_version() -> None:
    """The version of the package has its section in the changelog."""
    assert re.search(
        rf"^## \[{re.escape(__version__)}\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
