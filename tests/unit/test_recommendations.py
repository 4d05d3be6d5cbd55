# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What is recommended for models and machines that people have: it fits, by hand, and loses nothing
for a trifle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Run
from tests.marks import often
from tests.plans import printed
from zero_topo.config import load_deepspeed_config
from zero_topo.cost.model_files import MODELS
from zero_topo.cost.planner import LOSS_MUST_GAIN

FILES = {
    "llama": (
        "llama-3-70b",
        {"max_position_embeddings": 131072, "mlp_bias": False},
        70_553_706_496,
    ),
    "qwen": (
        "qwen-2.5-7b",
        {"max_position_embeddings": 32768, "use_sliding_window": False},
        7_615_616_512,
    ),
    "mistral": (
        "mistral-7b",
        {"max_position_embeddings": 32768, "sliding_window": 4096},
        7_248_023_552,
    ),
}
"""Case -> a known model, what its published file has in addition, and its parameters."""
CASES = {
    "7B on 2 DGX A100": ("--params", "7B", "--machine", "dgx-a100", "--nodes", "2"),
    "13B on 16 nodes of LUMI": ("--params", "13B", "--machine", "lumi-g", "--nodes", "16"),
    "70B on 64 nodes of Frontier": ("--params", "70B", "--machine", "frontier", "--nodes", "64"),
    "405B on 1024 nodes of Frontier": (
        "--params",
        "405B",
        "--machine",
        "frontier",
        "--nodes",
        "1024",
    ),
    "llama": ("--machine", "frontier", "--nodes", "64"),
    "qwen": ("--machine", "frontier", "--nodes", "64"),
    "mistral": ("--machine", "frontier", "--nodes", "64"),
}


def by_hand(report: dict[str, Any], plan: dict[str, Any]) -> float:
    """Bytes of a rank, on the back of an envelope: states by their degrees, DeepSpeed's defaults,
    one layer's activations by the parts of a layer and every layer's input, the loss. A gather's
    message is there, or those of a bucket: what is scattered and comes, and what is synced.
    """
    model, params, stored = report["model"], report["params"], plan["degrees"]
    h, f, s = model["hidden"], model["intermediate"], model["sequence"]
    keys = h * model["kv_heads"] // model["heads"]
    states = (
        2 * params / stored["weights"]
        + 2 * params / stored["gradients"]
        + 12 * params / stored["optimizer"]
    )
    if plan["quantize"]["resident"]:  # a byte and a scale for 256, and the rank's own weights
        states += (1 + 4 / 256 - 2) * params / stored["weights"] + 2 * params / stored["optimizer"]
    copies = (
        params * 1.02 / stored["secondary"]
        if stored["secondary"] and "int8 secondary" in plan["losses"]
        else 0.0
    )
    if stored["secondary"] and not copies and stored["secondary"] < stored["weights"]:
        copies = 2 * params / stored["secondary"]
    layer = params / model["layers"]
    whole = min(params, max(1e9, 2 * layer))
    message = (
        0 if stored["weights"] == 1 else layer * (1.02 if "int8 weights" in plan["losses"] else 2)
    )
    bits = 0.52 if {"int4 gradients", "nf4 gradients"} & set(plan["losses"]) else 2
    largest = max(5e8, h * model["vocab"])  # a gradient that exceeds the bucket is one
    bucket = largest * (4 if stored["gradients"] == 1 else 2 * bits)
    if stored["gradients"] < stored["optimizer"]:
        bucket += 2 * 5e8 * (0.52 if "nf4 sync" in plan["losses"] else 2) / stored["gradients"]
    flight = 2 * whole + 2 * largest + max(message, bucket)
    # of a published shape: three matrices and no biases; of a made-up one two, and two masks of a
    # byte
    kept = 2 * (4 * h + 2 * h + 2 * keys + 4 * f) if model["gated"] else 2 * (8 * h + 2 * f + h)
    logits, ends = 3.52 * 4 * s * model["vocab"], 4 * s * h
    if report["checkpointing"]:
        return states + copies + flight + 2 * s * h * model["layers"] + max(s * kept, logits) + ends
    return states + copies + flight + s * kept * model["layers"] + logits + ends


def model_file(folder: Path, case: str) -> str:
    name, more, _ = FILES[case]
    (folder / "config.json").write_text(json.dumps({**MODELS[name], **more}))
    return str(folder / "config.json")


@pytest.mark.parametrize(
    "case", often({*CASES} - {"70B on 64 nodes of Frontier", "mistral"}, CASES)
)
def test_a_plan_fits_and_loses_nothing_for_less_than_two_percent(
    case: str, run: Run, tmp_path: Path
) -> None:
    """Seven questions as users ask them: memory as by hand to within 5%, a reason for losses, a
    block that loads.
    """
    words = [*CASES[case], "--micro-batches", "4", "--recommend", "--lossy"]
    if case in FILES:
        words += ["--model", model_file(tmp_path, case)]
    report = printed(run, "plan", *words)
    best = report["recommended"]
    stored = sum(best["memory"].values())
    assert stored <= report["memory_limit"] == int(report["topology"]["memory_per_rank"] * 0.9)
    assert stored == pytest.approx(by_hand(report, best), rel=0.05)
    assert best["range"]["low_s"] < best["seconds"] < best["range"]["high_s"]
    exact = [plan["seconds"] for plan in report["plans"] if not plan["losses"]]
    if best["losses"] and exact:
        assert min(exact) > (1 + LOSS_MUST_GAIN) * best["seconds"]
        assert any("which saves" in line for line in report["why"])
    assert load_deepspeed_config({"zero_topo": best["block"]})
    if case in FILES:
        assert report["params"] == FILES[case][2] and report["model"]["sequence"] == 4096
        assert any(
            "sequences of 4,096 tokens are taken" in line and "--seq" in line
            for line in report["why"]
        )


def test_the_papers_largest_models_are_those_of_states_alone(run: Run) -> None:
    """16 GCDs of 64 GiB: 68.7 billion for ZeRO-3 and 55.0 for ZeRO++, as the paper says."""
    words = (
        "plan",
        "--max-params",
        "--set",
        "states-only=true",
        "--machine",
        "frontier",
        "--nodes",
        "2",
    )
    found = printed(run, *words)["schemes"]
    assert found["zero3"]["max_params"] == pytest.approx(68.7e9, rel=1e-3)
    assert found["zero++"]["max_params"] == pytest.approx(55.0e9, rel=1e-3)


def test_attention_and_sequence_decide_what_activations_take(run: Run, tmp_path: Path) -> None:
    """Eager attention at the model's whole length is what once made a plan impossible."""
    machine = ("--machine", "frontier", "--nodes", "1")
    words = (
        "plan",
        "--model",
        model_file(tmp_path, "mistral"),
        *machine,
        "--recommend",
        "--set",
        "fused-loss=true",
    )
    stored = [
        printed(run, *words, *more)["recommended"]["memory"]["activations"]
        for more in (
            ("--set", "checkpointing=true"),
            ("--set", "checkpointing=true", "--seq", "8192"),
            ("--set", "checkpointing=true", "--set", "attention=eager"),
            ("--set", "checkpointing=false"),
        )
    ]
    assert stored[1] == pytest.approx(2 * stored[0], rel=0.01) and stored[2] - stored[
        0
    ] == pytest.approx(5 * 32 * 4096**2, rel=0.01)
    assert stored[3] > 8 * stored[0]
    status, _, error = run(
        *words, "--seq", "32768", "--set", "attention=eager", "--set", "checkpointing=false"
    )
    assert status == 2 and "recompute activations" in error and "use flash attention" in error
    assert run(*words, "--set", "attention=flesh")[2].count("did you mean 'flash'") == 1
