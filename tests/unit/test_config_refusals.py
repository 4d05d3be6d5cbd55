# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed itself would refuse is told before it starts, and is what DeepSpeed refuses."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_config_deepspeed import GOOD, ZERO, changed
from zero_topo.config import deepspeed_refusals
from zero_topo.config.refusals import BATCHES, BLOCKS, REMOVED

BATCH = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
REFUSED: list[tuple[dict[str, Any], int | None, str]] = [
    ({"gradient_accumulation_steps": -1}, None, "gradient_accumulation_steps = -1"),
    ({"gradient_accumulation_steps": "4"}, None, 'gradient_accumulation_steps = "4"'),
    ({"gradient_accumulation_steps": 1.5}, None, "gradient_accumulation_steps = 1.5"),
    ({"train_micro_batch_size_per_gpu": {}}, None, "train_micro_batch_size_per_gpu = {}"),
    ({"train_micro_batch_size_per_gpu": None}, None, "train_micro_batch_size_per_gpu is missing"),
    (BATCH, 4, "train_batch_size = 64 is no multiple of 32, which is train_micro_batch_size_per_gpu 2 x"),
    ({**BATCH, "train_batch_size": 63}, None, "no multiple of 8"),
    ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": None}, 8, "no multiple of 8, which is 8 ranks"),
    (changed(zero_optimization__overlap_com=True), None, "overlap_com: unknown key; did you mean 'overlap_comm'?"),
    (changed(zero_optimization__offload_optimizer={"devise": "cpu"}), None, "did you mean 'device'?"),
    (changed(zero_optimization__reduce_bucket_size="many"), None, "reduce_bucket_size"),
    (changed(fp16={"enabled": True}), None, "fp16.enabled = true and bf16.enabled = true"),
    *(({key: {}}, None, f"{key} = {{}}") for key in REMOVED),
]


@pytest.mark.parametrize(("keys", "ranks", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_deepspeed_refuses_is_one_line(keys: dict[str, Any], ranks: int | None, words: str) -> None:
    """With the key and its value, whether or not the number of ranks is known."""
    (line,) = deepspeed_refusals({**GOOD, **keys}, ranks)
    assert words in line and "\n" not in line


@pytest.mark.parametrize(
    ("keys", "ranks"),
    [
        ({}, None),
        (BATCH, None),
        (BATCH, 8),
        ({**dict.fromkeys(BATCHES, "auto"), "fp16": {"enabled": "auto"}}, 8),
        ({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 7}, 8),
        (changed(zero_optimization__stage3_prefetch_bucket_size="auto", zero_optimization__reduce_bucket_size=5e8), 8),
        (changed(zero_optimization__offload_optimizer=None, fp16={"enabled": False}), 8),
    ],
)
def test_what_deepspeed_takes_is_not_refused(keys: dict[str, Any], ranks: int | None) -> None:
    """What Hugging Face fills in counts as absent."""
    assert deepspeed_refusals({**GOOD, **keys}, ranks) == []


VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [True, False, 0, 1, 8, -1, 2.5, 1e9, "cpu", "none", "1", "many", "auto", None, [], {}]
)
COUNTS: st.SearchStrategy[Any] = st.sampled_from([None, None, 0, 1, 2, 3, 8, 16, 48, -1, 2.0, "4", []])
UNIMPORTANT = ("stage", "zenflow", "leaf_module", "cpu_offload", "compute_grad_norm", "bf16_", "loss_", "min_loss")


def keys_of(name: str) -> list[str]:
    """Of a block, and one that it does not have; without those on which DeepSpeed has more to say than a type."""
    return [*(key for key in BLOCKS[name].model_fields if not key.startswith(UNIMPORTANT)), "no_such_key"]


@given(
    blocks=st.fixed_dictionaries(
        {name: st.dictionaries(st.sampled_from(keys_of(name)), VALUES, max_size=2) for name in BLOCKS}
    ),
    batch=st.fixed_dictionaries({key: COUNTS for key in BATCHES}),
    ranks=st.sampled_from([1, 4, 8]),
)
@settings(max_examples=200)
def test_deepspeed_agrees(blocks: dict[str, dict[str, Any]], batch: dict[str, Any], ranks: int) -> None:
    """DeepSpeed's own reading of any config of these keys ends well exactly if nothing is refused here."""
    ds = pytest.importorskip("deepspeed.runtime.config")
    config = {**blocks, ZERO: {"stage": 3, **blocks[ZERO]}, **{key: value for key, value in batch.items() if value}}
    refused = deepspeed_refusals(config, ranks)
    logging.disable(logging.WARNING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ds.dist, "get_rank", lambda: 0)
        patch.setattr(ds.dist, "get_world_size", lambda: ranks)
        try:
            ds.DeepSpeedConfig(copy.deepcopy(config))
            said = None
        except Exception as error:
            said = error
        finally:
            logging.disable(logging.NOTSET)
    assert bool(refused) == (said is not None), (config, refused, said)
