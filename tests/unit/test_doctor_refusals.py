# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed itself would refuse is reported before it starts: the installed DeepSpeed is
asked.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import Run
from tests.launching import ROOT
from tests.unit.test_config_deepspeed import GOOD, changed
from zero_topo.doctor import refusals
from zero_topo.doctor.refusals import BATCHES, deepspeed_refusals, setting_refusals
from zero_topo.versions import SUPPORTED, installed

FILES = ROOT / "tests/data/deepspeed"
BATCH = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3, **params}}}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


REFUSED: list[tuple[dict[str, Any], int | None, str]] = [
    ({"gradient_accumulation_steps": -1}, None, "gradient_accumulation_steps = -1"),
    ({"gradient_accumulation_steps": "4"}, None, 'gradient_accumulation_steps = "4"'),
    ({"gradient_accumulation_steps": 1.5}, None, "gradient_accumulation_steps = 1.5"),
    ({"train_micro_batch_size_per_gpu": {}}, None, "train_micro_batch_size_per_gpu = {}"),
    ({"train_micro_batch_size_per_gpu": None}, None, "train_micro_batch_size_per_gpu is missing"),
    (
        BATCH,
        4,
        "train_batch_size = 64 is no multiple of 32, which is train_micro_batch_size_per_gpu 2 x",
    ),
    ({**BATCH, "train_batch_size": 63}, None, "no multiple of 8"),
    (
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": None},
        8,
        "no multiple of 8, which is 8 ranks",
    ),
    (
        changed(zero_optimization__overlap_com=True),
        None,
        "overlap_com: unknown key; did you mean 'overlap_comm'?",
    ),
    (
        changed(zero_optimization__offload_optimizer={"devise": "cpu"}),
        None,
        "did you mean 'device'?",
    ),
    (changed(zero_optimization__reduce_bucket_size="many"), None, "reduce_bucket_size"),
    (changed(fp16={"enabled": True}), None, "cannot be simultaneously enabled"),
    (changed(fp16={"fp16": True, "enabled": False}), None, "fp16.fp16: unknown key; did you mean"),
    (optimizer("OneBitAdam"), None, 'optimizer.type = "OneBitAdam"'),
    (optimizer("ZeroOneAdam"), None, 'optimizer.type = "ZeroOneAdam"'),
    (optimizer("lr_scheduler"), None, "neither DeepSpeed nor torch.optim has it"),
    (
        optimizer("AdamW", weight_decai=0.1),
        None,
        "AdamW does not take it; did you mean 'weight_decay'?",
    ),
    (optimizer("Adam", max_grad_norm=1.0), None, "gradient_clipping"),
    (scheduler("Warmup"), None, 'scheduler.type = "Warmup"'),
    (
        scheduler("WarmupLR", warmup_steps=10),
        None,
        "scheduler.params.warmup_steps: WarmupLR does not take it",
    ),
    ({"gradient_clipping": "1.0"}, None, 'gradient_clipping = "1.0"'),
    ({"steps_per_print": "often"}, None, 'steps_per_print = "often"'),
    ({"wandb": {"enabled": "si"}}, None, "wandb.enabled"),
    ({"tensorboard": {"job": "x"}}, None, "tensorboard.job: unknown key"),
    ({"csv_monitor": 3}, None, "csv_monitor"),
    ({"checkpoint": {"tag_validation": "Never"}}, None, "checkpoint = "),
    (
        {"zero_allow_untested_optimizer": True, **optimizer("SGD", momentun=0.9)},
        None,
        "did you mean 'momentum'?",
    ),
    # what is known only when the optimizer or the schedule is built
    (
        optimizer("AdamW", lr="1e-3"),
        None,
        'optimizer.params.lr = "1e-3": DeepSpeed computes with it',
    ),
    (
        optimizer("AdamW", lr=-1, torch_adam=True),
        None,
        "optimizer.params.lr = -1: AdamW refuses it: Invalid learning",
    ),
    (
        optimizer("AdamW", eps=-1, torch_adam=True),
        None,
        "optimizer.params.eps = -1: AdamW refuses it",
    ),
    (optimizer("AdamW", betas=0.9), None, "optimizer.params.betas = 0.9: it is a pair"),
    (
        optimizer("AdamW", betas=[0.9, 1.5], torch_adam=True),
        None,
        "params.betas = [0.9, 1.5]: AdamW refuses it",
    ),
    (optimizer("AdamW", amsgrad=True), None, "params.amsgrad = true: AdamW refuses it"),
    (
        optimizer("AdamW", bias_correction="yes"),
        None,
        'bias_correction = "yes": AdamW computes with it; give true',
    ),
    (optimizer("Adagrad", lr=-1), None, "optimizer.params.lr = -1: Adagrad refuses it"),
    (
        optimizer("AgedAdamW", betas=[0.9, 2]),
        None,
        "optimizer.params.betas = [0.9, 2]: AgedAdamW refuses it",
    ),
    (optimizer("AdamS", momentum=0.9), None, "optimizer.params.momentum: AdamS does not take it"),
    (
        optimizer("Muon", ns_method="foo"),
        None,
        'optimizer.params.ns_method = "foo": Muon refuses it',
    ),
    ({"optimizer": {"params": {"lr": 1e-3}}}, None, "optimizer.type is missing"),
    (
        scheduler("WarmupLR", warmup_num_steps="100"),
        None,
        'warmup_num_steps = "100": WarmupLR computes with it',
    ),
    (scheduler("WarmupLR", warmup_num_steps=0), None, "warmup_num_steps = 0: WarmupLR refuses it"),
    (
        scheduler("WarmupLR", warmup_min_lr=[0, 0], warmup_max_lr=[1, 1, 1]),
        None,
        "WarmupLR refuses it: expected",
    ),
    (
        scheduler("WarmupDecayLR", warmup_num_steps=10),
        None,
        "params.total_num_steps is missing: WarmupDecayLR needs it",
    ),
    (
        scheduler("OneCycle", cycle_min_lr="a", cycle_max_lr=1),
        None,
        "OneCycle does not work with it",
    ),
    (
        scheduler("CosineAnnealingLR", T_max=100),
        None,
        "a schedule of torch does not take ZeRO's optimizer",
    ),
    ({"scheduler": {"type": "WarmupLR"}}, None, "scheduler.params is missing"),
    # whose errors spoke of Python
    ({"timers": {"throughput": 3}}, None, 'timers = {"throughput": 3}: DeepSpeed cannot read it'),
    ({"communication_data_type": 3}, None, "communication_data_type = 3: DeepSpeed cannot read it"),
    # warnings that looked at other parts
    ({"bf16": {"enabled": True, "loss_scale": 0}}, None, "bf16.loss_scale: unknown key; remove it"),
    (
        changed(
            zero_optimization__stage3_prefetch_bucket_size=1,
            zero_optimization__prefetch_bucket_size=1,
        ),
        None,
        "it is given by two names; remove one",
    ),
]


@pytest.mark.parametrize(
    ("keys", "ranks", "words"), REFUSED, ids=[words for _, _, words in REFUSED]
)
def test_what_deepspeed_refuses_is_one_line(
    keys: dict[str, Any], ranks: int | None, words: str
) -> None:
    """With the key and its value, whether or not the number of ranks is known."""
    (line,) = deepspeed_refusals({**GOOD, **keys}, ranks)
    assert words in line and "\n" not in line
    assert not re.search(r"NoneType|argument|attribute|has no|<class|Traceback", line)


def test_several_mistakes_are_several_lines() -> None:
    """DeepSpeed names the first alone; a config without the blocks that it refuses is read
    again.
    """
    lines = setting_refusals(
        {**changed(zero_optimization__overlap_com=True), "compile": {"foo": 1}, "csv_monitor": 3}
    )
    assert len(lines) == 3 and all(
        sum(word in line for line in lines) == 1 for word in ("foo", "overlap", "csv")
    )


@pytest.mark.skipif(
    installed("deepspeed") != SUPPORTED["deepspeed"].pinned, reason="0.18 has these keys"
)
@pytest.mark.parametrize(
    "key", ["elasticity", "compression_training", "sparse_gradients", "eigenvalue", "amp"]
)
def test_keys_that_the_installed_release_has_no_more_are_refused(key: str) -> None:
    (line,) = setting_refusals({**GOOD, key: {}})
    assert line.startswith(f"{key} = {{}}: DeepSpeed would refuse it")


@pytest.mark.parametrize(
    ("keys", "ranks"),
    [
        ({}, None),
        (BATCH, None),
        (BATCH, 8),
        ({**dict.fromkeys(BATCHES, "auto"), "fp16": {"enabled": "auto"}}, 8),
        ({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 7}, 8),
        (
            changed(
                zero_optimization__stage3_prefetch_bucket_size="auto",
                zero_optimization__reduce_bucket_size=5e8,
            ),
            8,
        ),
        (changed(zero_optimization__offload_optimizer=None, fp16={"enabled": False}), 8),
        *(
            (optimizer(kind), None)
            for kind in ("Adam", "AdamW", "Adagrad", "Lion", "AdamS", "AgedAdamW")
        ),
        (
            optimizer("AdamW", torch_adam=True, adam_w_mode=True, betas=[0.9, 0.95], fused=True),
            None,
        ),
        ({"zero_allow_untested_optimizer": True, **optimizer("SGD")}, None),
        (scheduler("WarmupDecayLR", warmup_num_steps=10, total_num_steps="auto"), None),
        (
            scheduler(
                "WarmupLR", warmup_max_lr=[1e-2, 2e-3], warmup_num_steps=4, warmup_type="linear"
            ),
            None,
        ),
        (scheduler("OneCycle", cycle_min_lr=0.01, cycle_max_lr=0.1), None),
        (scheduler("WarmupCosineLR", total_num_steps=100, warmup_num_steps=10), None),
        (optimizer("Muon", muon_lr=0.02, adam_lr=3e-4, per_head_muon=True), None),
        (optimizer("Adam", betas="auto", eps="auto", weight_decay="auto"), None),
        (
            changed(zero_optimization__offload_optimizer={"device": "cpu"}, **optimizer("AdamW")),
            None,
        ),
        (
            {
                "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
                "communication_data_type": "bf16",
            },
            None,
        ),
        (
            {
                "data_types": {"grad_accum_dtype": "fp32"},
                "gradient_clipping": 1,
                "steps_per_print": 10,
            },
            None,
        ),
        # The block takes it over
        (changed(zero_topo={}, zero_optimization__mics_shard_size=4), None),
        ({"a_key_of_my_own": 1}, None),
    ],
)
def test_what_deepspeed_takes_is_not_refused(keys: dict[str, Any], ranks: int | None) -> None:
    """What Hugging Face fills in counts as absent."""
    assert deepspeed_refusals({**GOOD, **keys}, ranks) == []


WORDS = {
    "accelerate.yaml": "a file of accelerate config, which is no DeepSpeed config; give",
    "comm_fp8.json": "communication_data_type",
    "comms.json": "comms_logger.prof_ops",
    "compile_foo.json": "compile.foo: unknown key",
    "gdt_bad.json": "data_types.grad_accum_dtype",
    "hpz_empty_block.json": "",
    "hybrid.json": "hybrid_engine.foo",
    "leaf_bad.json": "zero_optimization.leaf_module.classes",
    "nan.json": "NaN is no number of JSON",
    "offload_param_no_optimizer_key.json": 'has no "zero_topo" block',
    "predivide.json": "gradient_predivide_factor = 4.0",
    "removed_key.json": "fp16.opt_level: unknown key",
    "sgd.json": 'optimizer.type = "SGD": DeepSpeed has not tested it with ZeRO; set '
    '"zero_allow_untested_optimizer"',
    "unknownopt.json": 'optimizer.type = "Adam8bit": neither DeepSpeed nor torch.optim has it',
    "zdup.json": "two names",
}


@pytest.mark.parametrize("path", sorted(FILES.iterdir()), ids=lambda path: path.name)
def test_check_judges_files_as_initialize_does(path: Path, run: Run) -> None:
    """Inputs of the shapes that people publish, each with one fault, which ``initialize``
    refuses.
    """
    status, out, err = run("check", str(path), "--world-size", "8", "--machine", "frontier")
    words = WORDS[path.name]
    assert (
        (status, words in err) == (2, True)
        if words
        else (status, err) == (0, "") and out.endswith("ok\n")
    )


def test_without_deepspeed_the_rest_is_checked_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path
) -> None:
    """A login node may have no DeepSpeed; its own refusals are then not known, batch sizes are."""
    monkeypatch.setattr(refusals, "installed", lambda package: None)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**GOOD, **optimizer("Adam8bit")}))
    status, out, _ = run("check", str(file), "--world-size", "8", "--machine", "frontier")
    assert status == 0 and "- DeepSpeed is not installed here" in out and out.endswith("ok\n")
    file.write_text(json.dumps({**GOOD, **BATCH, "train_batch_size": 63}))
    assert run("check", str(file), "--world-size", "8", "--machine", "frontier")[0] == 2
    status, out, _ = run("migrate", str(FILES / "hpz_empty_block.json"))
    assert status == 0 and "DeepSpeed is not installed here" in out


def test_a_deepspeed_that_does_not_start_is_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the last line of its traceback."""
    (tmp_path / "deepspeed.py").write_text("raise ImportError('libcudart.so.99 is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # The one that runs goes on
    monkeypatch.setattr(refusals, "_program", cache(refusals._program.__wrapped__))
    said = refusals.unasked()
    assert said and "libcudart.so.99 is missing" in said and "zero-topo doctor" in said
    assert setting_refusals({**GOOD, **optimizer("Adam8bit")}) == [] and refusals.unasked() == said


COUNTS: st.SearchStrategy[Any] = st.sampled_from(
    [None, None, 0, 1, 2, 3, 8, 16, 48, -1, 2.0, "4", []]
)


@given(
    batch=st.fixed_dictionaries({key: COUNTS for key in BATCHES}), ranks=st.sampled_from([1, 4, 8])
)
def test_deepspeed_agrees_about_batch_sizes(batch: dict[str, Any], ranks: int) -> None:
    """DeepSpeed's own reading of them ends well exactly if nothing is refused here."""
    ds = pytest.importorskip("deepspeed.runtime.config")
    config = {
        "zero_optimization": {"stage": 3},
        **{key: value for key, value in batch.items() if value},
    }
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


def test_an_answer_belongs_to_its_caller() -> None:
    """Two commands of one process get the same answer, whatever the first adds to it."""
    config = {"zero_optimization": {"stage": 3}}
    setting_refusals(config).append("a line of the caller's own")
    assert setting_refusals(config) == []
