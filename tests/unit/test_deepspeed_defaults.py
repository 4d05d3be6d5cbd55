# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the package and its pages say of DeepSpeed's defaults is what the installed DeepSpeed
has.
"""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Run
from tests.launching import ROOT
from tests.unit.test_config_deepspeed import changed
from tests.unit.test_neox import GOOD
from zero_topo.config.deepspeed_json import muon_clipping
from zero_topo.cost.job import COUNTS, Job
from zero_topo.neox import check
from zero_topo.neox.__main__ import main as neox
from zero_topo.versions import CLIPPING_SINCE, default_clipping, installed

CLIP_1 = ROOT / "tests/data/neox/clip_1.yml"
MUON: dict[str, Any] = {"optimizer": {"type": "Muon", "params": {"muon_lr": 0.02}}}
DROPPED: dict[str, Any] = {"deepspeed_extra_args": {"zero_topo": {}}}


def default_of(module: str, kind: str, field: str) -> Any:
    """The default of a field of a config of DeepSpeed's."""
    return getattr(pytest.importorskip(f"deepspeed.{module}"), kind).model_fields[field].default


def test_clipping_by_default() -> None:
    """1.0 since 0.19.3; before, nothing was clipped."""
    constants = pytest.importorskip("deepspeed.runtime.constants")
    version = installed("deepspeed")
    assert version is not None and default_clipping(version) == constants.GRADIENT_CLIPPING_DEFAULT
    assert [
        default_clipping(release) for release in ("0.18.0", "0.19.2", CLIPPING_SINCE, "0.19.8")
    ] == [0, 0, 1, 1]
    for page in ("optimizers.md", "neox.md"):
        assert CLIPPING_SINCE in (ROOT / "docs" / page).read_text()
    assert f"from {CLIPPING_SINCE} on" in str(import_module("zero_topo.neox.config").__doc__)


def test_sizes_that_predictions_assume() -> None:
    """Where a config names none."""
    zero = ("runtime.zero.config", "DeepSpeedZeroConfig")
    for name, keys in COUNTS.items():
        assert inspect.signature(Job).parameters[name].default == default_of(
            *zero, keys[-1].removeprefix("stage3_")
        )
    memory = " ".join(str(import_module("zero_topo.cost.memory").__doc__).split())
    assert "10^9 elements by default" in memory and "5 * 10^8 by default" in memory


# -- clipping where it matters ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "refused"), [("0.18.0", True), ("0.19.2", True), ("0.19.3", False), (None, False)]
)
def test_neox_check_asks_for_clipping_twice_only_where_deepspeed_would_not_clip(
    version: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the installed release; without one the rank that has it decides."""
    monkeypatch.setattr(check, "installed", lambda package: version)
    lines = list(check.problems(GOOD | DROPPED))
    assert [line for line in lines if line.startswith("gradient_clipping")] == lines and bool(
        lines
    ) == refused
    assert all(f"DeepSpeed {version} would not clip" in line for line in lines)


@pytest.mark.skipif(
    default_clipping(installed("deepspeed") or "0.19.8") == 0, reason="this release does not clip"
)
def test_a_neox_config_that_clips_to_1_is_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """NeoX drops the key, and DeepSpeed clips to 1.0 without it."""
    pytest.importorskip("yaml")
    assert neox(["check", str(CLIP_1)]) == 0, capsys.readouterr().err


def test_clipping_of_muons_updates_is_reported(run: Run, tmp_path: Path) -> None:
    """Whether the config or DeepSpeed's default asks for it; not with 0, nor for another
    optimizer.
    """
    (line,) = muon_clipping(changed(**MUON), 1.0)
    assert (
        line.startswith("gradient_clipping = 1.0, DeepSpeed's default: ")
        and '"gradient_clipping": 0' in line
    )
    assert muon_clipping(changed(gradient_clipping=0.5, **MUON), 0.0)[0].startswith(
        "gradient_clipping = 0.5: "
    )
    assert (
        muon_clipping(changed(**MUON), 0.0)
        == muon_clipping(changed(gradient_clipping=0, **MUON), 1.0)
        == []
    )
    assert muon_clipping(changed(optimizer={"type": "AdamW"}), 1.0) == []
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(changed(gradient_clipping=1.0, **MUON)))
    status, out, _ = run("check", str(path), "--machine", "frontier", "--ranks", "16")
    assert status == 0 and "clips the norm of Muon's updates" in " ".join(out.split())
