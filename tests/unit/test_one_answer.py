# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``plan``, ``simulate``, ``check`` and ``migrate`` give one answer: the same seconds, bytes and
memory for a plan.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import Run
from tests.marks import late
from tests.plans import config_file, printed

NODES = {"frontier": 8, "dgx-h100": 8, "perlmutter": 4}


@pytest.mark.parametrize(
    ("machine", "nodes", "model", "count", "overlap"),
    [
        ("frontier", 2, "gpt2", 1, ("--overlap", "0.5")),
        ("dgx-h100", 4, "llama-2-7b", 1, ("--overlap", "0.5")),
        ("perlmutter", 16, "gpt2", 8, ()),
        late("frontier", 48, "gpt-neox-20b", 4, ()),
        late("dgx-h100", 16, "llama-2-13b", 16, ()),
    ],
)
def test_commands_agree(
    machine: str,
    nodes: int,
    model: str,
    count: int,
    overlap: tuple[str, ...],
    run: Run,
    tmp_path: Path,
) -> None:
    """The commands agree on the recommended plan, which check gets as a block, on a named scheme
    and on a pipeline.
    """
    ranks, of = str(nodes * NODES[machine]), ("--machine", machine, "--model", model, *overlap)
    batches = ("--micro-batches", str(count))
    report = printed(run, "plan", *of, "--nodes", str(nodes), *batches, "--recommend")
    best, activations = report["recommended"], ("--set", f"checkpointing={report['checkpointing']}")
    block = {key: value for key, value in best["block"].items() if key != "topology"}
    stated = config_file(tmp_path, block, gradient_accumulation_steps=count)
    cost = printed(run, "check", stated, *of, "--ranks", ranks, *activations)["cost"]
    assert cost["seconds"] == best["seconds"] and cost["sent_by_domain"] == best["sent_by_domain"]
    assert (cost["stored"], cost["limit"]) == (sum(best["memory"].values()), report["memory_limit"])
    named = config_file(
        tmp_path, {"scheme": "zero3"}, "named.json", gradient_accumulation_steps=count
    )
    cost = printed(run, "check", named, *of, "--ranks", ranks, *activations)["cost"]
    pipeline = report["pipeline"]
    degrees = "/".join(
        "-" if degree is None else str(degree) for degree in best["degrees"].values()
    )
    plan = stated if {"two_hop", "sync"} & set(block) else degrees
    schemes = ("--schemes", f"zero3,{plan},{pipeline['name']}")
    point, chosen, row = printed(
        run, "simulate", *of, "--ranks", ranks, *batches, *schemes, *activations
    )["results"]
    assert cost == {
        "limit": report["memory_limit"],
        **{key: point[key] for key in cost if key != "limit"},
    }
    assert (chosen["seconds"], chosen["stored"]) == (best["seconds"], sum(best["memory"].values()))
    assert (
        row["seconds"] == pipeline["seconds"]
        and row["sent_by_domain"] == pipeline["sent_by_domain"]
    )
    assert row["stored"] == sum(pipeline["memory"].values()) and row["range"] == pipeline["range"]
    (plain,) = printed(
        run, "plan", *of[:4], "--nodes", str(nodes), *batches, "--set", "scheme=zero3"
    )["schemes"]
    assert plain["sent_by_domain"] == cost["sent_by_domain"]
    found = [plan for plan in report["plans"] if plan["name"] == "zero3"]
    assert [(p["seconds"], p["sent_by_domain"], sum(p["memory"].values())) for p in found] in (
        [],
        [(cost["seconds"], cost["sent_by_domain"], cost["stored"])],
    )


def test_a_config_with_numbers_is_checked_where_no_job_runs(run: Run, tmp_path: Path) -> None:
    """On a login node: for the fewest ranks that its degrees divide, which is said; another number
    may be given.
    """
    path = config_file(tmp_path, {"scheme": "zero3", "secondary": 8})
    status, out, err = run("check", path)
    assert (status, err) == (0, "") and "checked for 8 ranks, as this is no job; --ranks N" in out
    assert run("check", path, "--nodes", "3", "--machine", "frontier")[0] == 0
    assert run("check", path, "--ranks", "12")[0] == 2


def test_every_header_says_how_much_is_hidden_and_of_how_many_tokens(
    run: Run, tmp_path: Path
) -> None:
    """In words, with the option that changes it."""
    path = config_file(tmp_path, {"scheme": "zero3"})
    for words in (
        ("simulate", "--gcds", "64", "--micro-batches", "1", "--schemes", "zero3,pipeline"),
        ("plan", "--params", "1B", "--machine", "frontier", "--nodes", "2", "--recommend"),
        ("check", path, "--machine", "frontier", "--world-size", "16", "--params", "1B"),
        ("migrate", path, "--machine", "frontier", "--nodes", "2"),
    ):
        status, out, _ = run(*words)
        assert status == 0 and "1 x 2,048 tokens a micro-batch" in out, words
        assert re.search(r"parameters, as \d+ layers of width \d+; 1 x", out), words
        assert (
            "of the communication that computation may hide, 0% is hidden (--overlap 0, assumed)"
            in out
        )
        changed = run(*words, "--seq", "1024", "--micro-batch", "2", "--overlap", "0.5")[1]
        assert "2 x 1,024 tokens a micro-batch" in changed and "(--overlap 0.5)" in changed, words
        assert run(*words, "--overlap", "1.5")[0] == 2
