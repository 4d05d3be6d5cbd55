# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``plan``, ``simulate``, ``check`` and ``migrate`` give one answer: the same seconds, bytes and memory for a plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Run

NODES = {"frontier": 8, "dgx-h100": 8, "perlmutter": 4}


def printed(run: Run, *words: str) -> Any:
    status, out, err = run(*words, "--json")
    assert (status, err) == (0, ""), err
    return json.loads(out)


def config(path: Path, count: int, **block: Any) -> str:
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": count,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 3},
                "zero_topo": block,
            }
        )
    )
    return str(path)


@pytest.mark.parametrize("overlap", [(), ("--overlap", "0.5")])
@pytest.mark.parametrize(
    ("machine", "nodes", "model", "count"),
    [("frontier", 48, "gpt-neox-20b", 4), ("dgx-h100", 4, "llama-2-7b", 1), ("perlmutter", 16, "gpt2", 8)],
)
def test_commands_agree(
    machine: str, nodes: int, model: str, count: int, overlap: tuple[str, ...], run: Run, tmp_path: Path
) -> None:
    """The commands agree on the recommended plan, which check gets as a block, and on a named scheme."""
    ranks, of = str(nodes * NODES[machine]), ("--machine", machine, "--model", model, *overlap)
    batches = ("--micro-batches", str(count))
    best = printed(run, "plan", *of, "--nodes", str(nodes), *batches, "--recommend")["recommended"]
    block = {key: value for key, value in best["block"].items() if key != "topology"}
    stated = config(tmp_path / "best.json", count, **block)
    cost = printed(run, "check", stated, *of, "--world-size", ranks)["cost"]
    assert cost["step_s"] == best["seconds"] and cost["sent_by_domain"] == best["sent_by_domain"]
    assert cost["held"] == sum(best["memory"].values())
    named = config(tmp_path / "zero3.json", count, scheme="zero3")
    cost = printed(run, "check", named, *of, "--world-size", ranks)["cost"]
    (point,) = printed(run, "simulate", *of, "--gcds", ranks, *batches, "--schemes", "zero3")["results"]
    assert cost == {key: point[key] for key in cost}
    (plain,) = printed(run, "plan", *of[:4], "--nodes", str(nodes), *batches, "--set", "scheme=zero3")["schemes"]
    assert plain["sent_by_domain"] == cost["sent_by_domain"]
    plans = printed(run, "plan", *of, "--nodes", str(nodes), *batches, "--recommend")["plans"]
    found = [plan for plan in plans if plan["name"] == "zero3"]
    assert [(p["seconds"], p["sent_by_domain"], sum(p["memory"].values())) for p in found] in (
        [],
        [(cost["step_s"], cost["sent_by_domain"], cost["held"])],
    )


def test_every_header_says_how_much_is_hidden_and_of_how_many_tokens(run: Run, tmp_path: Path) -> None:
    """In words, with the option that changes it."""
    path = config(tmp_path / "ds.json", 1, scheme="zero3")
    for words in (
        ("simulate", "--gcds", "64", "--micro-batches", "1"),
        ("plan", "--params", "1B", "--machine", "frontier", "--nodes", "2", "--recommend"),
        ("check", path, "--machine", "frontier", "--world-size", "16", "--params", "1B"),
        ("migrate", path, "--machine", "frontier", "--nodes", "2"),
    ):
        status, out, _ = run(*words)
        assert status == 0 and "1 x 2,048 tokens a micro-batch" in out, words
        assert "of the communication that can overlap with computation 0% does (--overlap 0, assumed)" in out
        assert re.search(r"\(--overlap 0\.5\)", run(*words, "--overlap", "0.5")[1]), words
        assert run(*words, "--overlap", "1.5")[0] == 2
