# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""FSDP2 as a host: formats and modes, the bytes of the formulas, states over the job, plans that it
cannot have. That sequences of calls train as plain FSDP2 is tested in ``test_fsdp_search.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_topo.fsdp as topo
from tests.harness import run_threads
from tests.launching import ROOT
from tests.marks import often
from tests.ranks.fsdp_scripts import (
    EXACT,
    INT4,
    Net,
    make,
    train,
    weights_of,
)
from tests.ranks.worlds import SPARSE
from zero_topo import AdamS
from zero_topo.fsdp.block import resolve

Q4: dict[str, Any] = {
    "scheme": "paper",
    "sync": {"mode": "quantized"},
    "quantize": {"publish": "int4"},
}
DIRECT: dict[str, Any] = {**EXACT, "sync": {"reduce": "reduce_scatter"}}
STEPS = 4


# -- formats and modes -----------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "paper": {"scheme": "paper"},
    "q4": Q4,
    "nf4": {
        "scheme": "paper",
        "quantize": {"gradients": "nf4"},
        "sync": {"mode": "quantized"},
    },
    "zero++": {"scheme": "zero++"},
    "hsdp": {"scheme": "hsdp"},
    "between": {"weights": "gpu", "gradients": "gpu", "optimizer": "node"},
    "scape": {**EXACT, "optimizer": "node", "sync": {"mode": "scape", "density": 0.5, "warmup": 0}},
    **{name: {**EXACT, "sync": sync} for name, sync in SPARSE.items()},
}


class Trained:
    """What a rank has after a training: losses, whole weights, the optimizer."""

    def __init__(
        self, block: dict[str, Any], steps: int = STEPS, dtype: torch.dtype = torch.float32
    ) -> None:
        kind = AdamS if block.get("sync", {}).get("mode") == "scape" else torch.optim.AdamW
        model, self.optimizer = make(block, kind, dtype=dtype)
        self.losses = train(model, self.optimizer, range(steps))
        self.weights = weights_of(model)
        self.parts = list(self.optimizer.parts.values())


@cache
def exact(steps: int = STEPS) -> Trained:
    """The training of rank 0 of four with nothing quantized."""
    return run_threads(4, lambda rank: Trained(EXACT, steps))[0]


@pytest.mark.parametrize(
    "name", often(("paper", "q4", "ternary", "oktopk"), sorted(MODES.keys() - {"hsdp", "between"}))
)
def test_every_format_and_mode_trains(name: str) -> None:
    """Losses of quantized and sparse trainings fall; all ranks store the same weights, checked
    after steps.
    """
    found = run_threads(4, lambda rank: Trained({"debug_checks": True, **MODES[name]}))
    assert found[0].losses[-1] < 0.7 * exact().losses[0]
    assert found[0].losses[1:] != exact().losses[1:]
    for rank in found[1:]:
        assert all(map(torch.equal, rank.weights, found[0].weights))


def test_int4_differences_keep_the_masters() -> None:
    """Of a quantized post-step all-gather only the stored weights are rounded: masters follow the
    exact training.
    """
    found = run_threads(4, lambda rank: Trained(INT4, 1))[0]
    for ours, theirs in zip(found.parts, exact(1).parts, strict=True):
        torch.testing.assert_close(ours.master, theirs.master, rtol=0, atol=1e-7)
        rounded = (ours.weights() - ours.master[: ours.numel]).abs().max()
        assert 0 < rounded < 1e-2 / 7


def test_bf16_weights_have_fp32_masters() -> None:
    """A model of BF16 trains as closely to the FP32 one as its rounding allows, by masters that
    keep small updates.
    """
    block = {**EXACT, "accumulation_dtype": "fp32"}
    found = run_threads(4, lambda rank: Trained(block, dtype=torch.bfloat16))[0]
    assert found.losses[-1] == pytest.approx(exact().losses[-1], abs=0.03)
    master = found.parts[0].master
    assert master.dtype == torch.float32 and not torch.equal(master, master.bfloat16().float())


# -- bytes -----------------------------------------------------------------------------------------


def numbers(
    rank: int, block: dict[str, Any], micro_batches: int = 2, flag: str = "set_is_last_backward"
) -> tuple[Any, Any, int]:
    """Statistics of a training, what the formula says, and the elements of the optimizer's
    momentum.
    """
    model, optimizer = make(block)
    train(model, optimizer, range(2), micro_batches, flag)
    found = topo.stats(optimizer)
    momentum = sum(state["exp_avg"].numel() for state in optimizer.inner.state.values())
    assert found.memory["optimizer"] == 12 * momentum
    return found.step_bytes, found.formula, momentum


@pytest.mark.parametrize("name", often(("q4",), ("paper", "q4", "zero++", "hsdp", "between")))
def test_bytes_are_those_of_the_formulas(name: str) -> None:
    """Of every phase and domain, on every rank, with two micro-batches of which one syncs."""
    for sent, formula, _ in run_threads(8, numbers, MODES[name]):
        assert sent == formula


def test_bytes_across_nodes_by_hand() -> None:
    """Two nodes, exact: half of the shard's gradients go out for sync, once for two micro-batches,
    half come back.
    """
    numel = sum(param.numel() for param in Net().parameters())
    for sent, _, momentum in run_threads(4, numbers, DIRECT):
        across = Counter(
            {phase: nbytes for (phase, domain), nbytes in sent.items() if domain == "world"}
        )
        assert across == {"sync": 4 * numel // 4, "publish": 4 * numel // 4}
        assert momentum == numel // 4


def test_no_flags_sync_in_every_pass() -> None:
    """A loop that names no last pass sends every micro-batch's gradients across nodes; one that
    does, the last.
    """
    sent = []
    for flag in ("", "set_requires_all_reduce"):
        found = run_threads(4, numbers, EXACT, 3, flag)[0]
        sent.append(found[0]["sync", "world"])
    assert sent[0] == 3 * sent[1]


def test_the_report_of_a_run(tmp_path: Path) -> None:
    """The folder has a report with all ranks' bytes next to the formula."""
    run_threads(4, lambda rank: topo.report(Trained(Q4, 1).optimizer, tmp_path, title="FSDP2"))
    report = json.loads((tmp_path / "report.json").read_text())
    rows = report["zero_topo"]["sent"]
    assert report["title"] == "FSDP2" and report["zero_topo"]["ranks"] == 4
    measured = [row for row in rows if row["max"]]
    assert {row["phase"] for row in measured} >= {
        "gather_forward",
        "gather_backward",
        "scatter",
        "sync",
        "publish",
    }
    assert all(row["min"] == row["max"] == row["formula"] for row in measured)


# -- errors ---------------------------------------------------------------------------------------


MACHINE = {"topology": {"emulated": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 2}}}


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {"scheme": "paper", "weights": "rank", "gradients": "node"},
            "FSDP2 has one degree for both",
        ),
        ({"scheme": "paper", "secondary": "node"}, "reshard_after_forward=2"),
        ({"scheme": "topo", "quantize": {"resident": "int8"}}, "resident"),
        ({"scheme": "paper", "seed": 1}, "call torch.manual_seed"),
        ({"scheme": "paper", "report": "runs/a"}, "call zero_topo.fsdp.report"),
        ({"scheme": "auto"}, "no plan is chosen for a model under FSDP2"),
        ({"scheme": "papers"}, "paper"),
    ],
)
def test_what_fsdp2_cannot_have_is_refused_in_a_line(block: dict[str, Any], words: str) -> None:
    """Degrees apart, a secondary copy, INT8 alone, DeepSpeed's keys: one line with the value and
    the way out.
    """
    with pytest.raises(ValueError, match=words) as error:
        resolve({**MACHINE, **block}, 4)
    assert "\n" not in str(error.value)


WITHOUT = """
import sys
from importlib.util import find_spec

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "deepspeed":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import zero_topo.fsdp
assert callable(zero_topo.fsdp.fully_shard) and "deepspeed" not in sys.modules
"""


def test_it_is_imported_where_deepspeed_is_missing() -> None:
    """No module on the way to ``zero_topo.fsdp`` looks for DeepSpeed."""
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=120, cwd=ROOT)
