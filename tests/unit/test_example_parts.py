# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The parts of the example: its data, its model, its command line, its length."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import run_threads
from zero_topo.examples import train_gpt
from zero_topo.examples.data import EVAL_EVERY, Corpus, batch
from zero_topo.examples.gpt import GPT


def test_data_takes_a_file_or_a_folder(tmp_path: Path) -> None:
    """One piece in twenty is kept for evaluation, and together the parts are the whole text."""
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)) * 20)
    corpus = Corpus.load(path, 8)
    assert len(corpus.evaluation) == 4000 // EVAL_EVERY
    assert sorted(torch.cat([corpus.train, corpus.evaluation]).tolist()) == sorted(
        path.read_bytes()
    )
    (tmp_path / "folder").mkdir()
    for i in range(20):
        (tmp_path / "folder" / f"{i}.txt").write_text("word " * 10)
    assert len(Corpus.load(tmp_path / "folder", 8).evaluation) == 50


def test_data_that_cannot_serve_is_refused_by_name(tmp_path: Path) -> None:
    """A missing path and a text shorter than a sample give the path, the reason and the way out."""
    with pytest.raises(ValueError, match="nowhere does not exist: give a text file or a folder"):
        Corpus.load(tmp_path / "nowhere", 8)
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(ValueError, match="one sample needs 9: give --data more text"):
        Corpus.load(tmp_path / "short", 8)


@given(
    seed=st.integers(0, 1000),
    step=st.integers(0, 1000),
    rank=st.integers(0, 64),
    context=st.integers(1, 30),
)
def test_batches_depend_on_seed_step_and_rank_only(
    seed: int, step: int, rank: int, context: int
) -> None:
    """A resumed run sees the batches it would have seen; targets are the tokens one byte later,
    inside the text.
    """
    text = torch.arange(31, dtype=torch.uint8)
    tokens, targets = batch(text, (3, context), seed, step, rank)
    again, _ = batch(text, (3, context), seed, step, rank)
    assert torch.equal(tokens, again)
    assert tokens.shape == targets.shape == (3, context)
    assert torch.equal(targets, tokens + 1)


def test_the_model_does_not_see_the_future() -> None:
    """What comes after a byte must not change the prediction made at it."""
    torch.manual_seed(0)
    model = GPT(layers=1, width=16, heads=2, context=8)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5:], after[:, 5:])


@given(warmup=st.integers(2, 20), share=st.floats(0, 1), steps=st.integers(1, 100))
def test_the_warm_up_does_not_depend_on_the_number_of_steps(
    warmup: int, share: float, steps: int
) -> None:
    """A run of --seconds, whose end is open until then, equals a run of as many --steps."""
    step = round(share * warmup)
    known = train_gpt.warm_up_and_cosine(warmup + steps, warmup, step)
    assert known == train_gpt.warm_up_and_cosine(math.inf, warmup, step)


def test_ranks_of_different_speed_agree_on_the_number_of_steps() -> None:
    """Rank 0's clock decides, and a run that is too slow for its time takes one step more."""

    def rank_main(rank: int) -> list[int]:
        slow = 1 + rank
        cpu = torch.device("cpu")
        # The first step of three takes 5 s, each other one a second
        times_s = [100.0, 105.0, 105.0 + slow, 105.0 + 2 * slow]
        return [train_gpt.steps_that_fit(times_s, seconds, cpu) for seconds in (60.0, 6.0)]

    assert run_threads(2, rank_main) == [[56, 4], [56, 4]]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--deepspeed_config", "a.json", "--seconds", "60", "--resume", "saved"],
        ["--deepspeed_config", "a.json", "--seconds", "60", "--warmup", "1"],
        ["--deepspeed_config", "a.json", "--seconds", "60", "--steps", "9"],
    ],
)
def test_arguments_that_cannot_work_end_before_anything_starts(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a config, or with a time that no warm-up measures, the usage is printed; status 2."""
    with pytest.raises(SystemExit) as stopped:
        train_gpt.parse_arguments(words)
    assert stopped.value.code == 2
    assert "--deepspeed_config" in capsys.readouterr().err
