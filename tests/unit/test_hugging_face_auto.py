# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Hugging Face's "auto": absent to our checks of the DeepSpeed config, and a value of our own
inside the block.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

import zero_topo  # noqa: F401  (arms the hook that the plugin needs)
from zero_topo.config import ZeroTopoConfig, deepspeed_problems
from zero_topo.hook.initialize import resolve_block

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

FILLED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "bf16.enabled": False,
    "fp16.enabled": False,
}
BLOCK = {"topology": "auto", "scheme": "auto"}


def config(block: dict[str, Any] = BLOCK) -> dict[str, Any]:
    """As Hugging Face's users write it."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "offload_optimizer": {"device": "auto"},
        },
        "zero_topo": dict(block),
    }


def test_auto_passes_our_checks_before_anyone_has_filled_it() -> None:
    """``zero.Init`` sees the config this early, as long as transformers builds the model."""
    assert not deepspeed_problems(config())
    resolved = resolve_block(config({"topology": "auto"}), 1)
    assert resolved.plan.world_size == 1


def test_accelerate_fills_what_it_knows_and_leaves_the_block_alone() -> None:
    """Without our hook it refuses ``zero_topo.scheme`` as an "auto" that it does not know."""
    given = config()
    given["zero_optimization"] |= {
        "reduce_bucket_size": 1000,
        "offload_optimizer": {"device": "none"},
    }
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=given)
    plugin.deepspeed_config_process(must_match=False, **FILLED)
    assert plugin.deepspeed_config["train_batch_size"] == 32
    assert plugin.deepspeed_config["zero_topo"] == BLOCK
    block = ZeroTopoConfig.from_ds_config(plugin.deepspeed_config)
    assert block is not None and (block.topology, block.scheme) == ("auto", "auto")


def test_the_trainers_config_leaves_the_block_alone() -> None:
    """It fills keys by name from its arguments; "auto" in the block survives."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    whole = {"fp16": False, "fp16_full_eval": False, "bf16": True, "bf16_full_eval": False}
    arguments = Mock(
        world_size=8, per_device_train_batch_size=4, gradient_accumulation_steps=1, **whole
    )
    stored = HfTrainerDeepSpeedConfig(config())
    stored.trainer_config_process(arguments)
    assert stored.config["train_batch_size"] == 32 and stored.config["bf16"]["enabled"] is True
    assert stored.config["zero_topo"] == BLOCK
