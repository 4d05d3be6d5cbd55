# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Hugging Face's "auto" in the DeepSpeed config, next to our own inside the block."""

from __future__ import annotations

from typing import Any

import pytest

import zero_topo  # noqa: F401  (arms the hook that the plugin needs)

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

FILLED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "bf16.enabled": False,
    "fp16.enabled": False,
}
BLOCK = {"topology": "auto", "scheme": "auto"}


CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 1000,
        "offload_optimizer": {"device": "none"},
    },
    "zero_topo": dict(BLOCK),
}
"""As Hugging Face's users write it."""


def test_accelerate_fills_what_it_knows_and_leaves_the_block_alone() -> None:
    """Without our hook it refuses ``zero_topo.scheme`` as an "auto" that it does not know."""
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=CONFIG)
    plugin.deepspeed_config_process(must_match=False, **FILLED)
    assert plugin.deepspeed_config["train_batch_size"] == 32
    assert plugin.deepspeed_config["zero_topo"] == BLOCK
