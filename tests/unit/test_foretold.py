# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`check` says of every block that ships, that a page shows or that was migrated what will happen
on 8 to 384 ranks.

They are GCDs of Frontier, whose GPUs have two, or GPUs of DGX nodes, each of which is one rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Run
from tests.documents import blocks
from tests.launching import ROOT
from tests.marks import late
from zero_topo.cli.migrate import migrated
from zero_topo.config import load_deepspeed_config

PLAIN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "timers": {"throughput": {"synchronized": False}},
}
ZEROPP = {
    "zero_quantized_weights": True,
    "zero_hpz_partition_size": 8,
    "zero_quantized_gradients": True,
}
STOCK = {
    "zero++": ZEROPP,
    "hpz": {"zero_hpz_partition_size": 8},
    "mics": {"mics_shard_size": 8},
    "zero3": {},
}
SHOWN = {
    name: {**PLAIN, "bf16": {"enabled": "fp16" not in shown}, **shown}
    for name, shown in blocks().items()
}
SHIPPED = {
    path.name: load_deepspeed_config(path) for path in sorted((ROOT / "configs").glob("*.json"))
}
MIGRATED = {
    f"migrated {name}": migrated({**PLAIN, "zero_optimization": {"stage": 3, **keys}}).config
    for name, keys in STOCK.items()
}
CONFIGS = {**SHIPPED, **SHOWN, **MIGRATED}
CANNOT = {
    "has 2 nodes x 2 GPUs x 2 ranks = 8 ranks but the job has 384": lambda block, ranks: (
        isinstance(block.get("topology"), dict) and ranks == 384
    ),
    "16": lambda block, ranks: block.get("optimizer") == 16 and ranks == 8,
}
"""What ``check`` says of what cannot run, and of which block on how many ranks."""


@pytest.mark.parametrize(
    ("machine", "ranks"),
    [
        ("frontier", 8),
        ("dgx-h100", 64),
        late("frontier", 384),
        late("dgx-h100", 8),
        late("dgx-h100", 384),
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_check_says_what_will_happen(
    name: str, ranks: int, machine: str, run: Run, tmp_path: Path
) -> None:
    """The plan, or what is chosen for models of three sizes, and how large a model fits; or the
    reason why not.
    """
    config = CONFIGS[name]
    block = config["zero_topo"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    finds_out = block.get("topology", "auto") == "auto"
    if not finds_out and machine == "dgx-h100":
        pytest.skip("the block says itself where it runs")
    where = ["--machine", machine] if finds_out else []
    status, out, err = run("check", str(path), "--world-size", str(ranks), *where)
    cannot = [words for words, wrong in CANNOT.items() if wrong(block, ranks)]
    if cannot:
        assert (
            status == 2
            and out == ""
            and len(err.splitlines()) == 1
            and all(words in err for words in cannot)
        )
        return
    assert (status, err) == (0, "") and out.endswith("ok\n")
    here = machine if finds_out else block["topology"]
    chosen = here == "dgx-h100" and not {"scheme", "weights"} & set(block)
    assert ("Chosen for models of these sizes" in out and "70.0B" in out) == chosen
    assert ("Shards: domain" in out) != chosen
    known = finds_out or isinstance(block["topology"], str)
    assert ("trains models of up to" in out) == (known and not chosen)
    if here == "dgx-h100" and block.get("scheme") == "topo" and "weights" not in block:
        assert "every rank stores all weights" in out
