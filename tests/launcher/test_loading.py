# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A checkpoint that one rank cannot load is loaded by none: one line on every rank, and nothing has
changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.launcher import checkpoints
from tests.launcher.checkpoints import (
    SAVED_AT,
    TAG,
    Saved,
    assert_same_bits,
    common_directory,
    job,
    loaded,
    save,
)
from tests.launcher.test_checkpoint import RESUMED
from tests.launcher.training import Job, Net, advance, block, close, start, weights
from tests.marks import core, cores

DAMAGED = 1  # the rank
UNIVERSAL = "universal"
Harm = Callable[[Path], object]


def unequal(model: nn.Module) -> list[dict[str, Any]]:
    """Three parameter groups, of other learning rates and decays."""
    params = list(model.parameters())
    settings = enumerate(((1e-2, 0.1), (3e-2, 0.0), (5e-3, 0.3)))
    return [
        {"params": params[index::3], "lr": rate, "weight_decay": decay}
        for index, (rate, decay) in settings
    ]


RUNS: dict[str, Job] = {
    "q4": RESUMED["quantized"],
    "replicated": job(block("topo", optimizer="node"), "bf16"),
    UNIVERSAL: replace(job(block("topo")), model=partial(Net, depth=2), groups=unequal),
}
del RUNS[UNIVERSAL].ds["scheduler"]  # groups keep their own rates
RUNS[UNIVERSAL].ds["checkpoint"] = {"load_universal": True}


Trained = tuple[Saved, Any]
"""A run that was saved, and an engine that has come as far as the save."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Trained]]:
    """One of the runs, made when first asked for."""
    made: dict[str, Trained] = {}

    def get(name: str) -> Trained:
        if name not in made:
            saved = save(RUNS[name], common_directory(tmp_path_factory.mktemp(name)))
            if name == UNIVERSAL:
                converted(saved.path)
            engine = start(saved.job)
            advance(saved.job, engine, 0, SAVED_AT)
            made[name] = saved, engine
        return made[name]

    yield get
    for _, engine in made.values():
        close(engine)


def converted(path: Path) -> None:
    """Make a universal checkpoint of the one that was saved. Collective."""
    if dist.get_rank() == 0:
        checkpoints.to_universal(path / TAG, path / UNIVERSAL)
        (path / "latest_universal").write_text(UNIVERSAL)
        torch.save({"residuals": {}, "ages": {}}, path / RESIDUALS)
    dist.barrier()


def cut(path: Path) -> None:
    """Leave the first half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def changed(change: Callable[[Any], object], path: Path) -> None:
    """Save what the file holds, changed."""
    found = torch.load(path, weights_only=False)
    new = change(found)
    torch.save(found if new is None else new, path)


def put(value: Any, *place: Any) -> Harm:
    """Put a value, or what a function makes of the old one, in its place; None removes it."""

    def change(found: Any) -> None:
        for key in place[:-1]:
            found = found[key]
        if value is None:
            del found[place[-1]]
        else:
            found[place[-1]] = value(found[place[-1]]) if callable(value) else value

    return partial(changed, change)


MODEL = f"{TAG}/zero_pp_rank_{DAMAGED}_mp_rank_00_model_states.pt"
OPTIM = f"{TAG}/bf16_zero_pp_rank_{DAMAGED}_mp_rank_00_optim_states.pt"
PARAMETER = f"{UNIVERSAL}/zero/inp.weight/fp32.pt"
RESIDUALS = f"{UNIVERSAL}/zero_topo_residuals.pt"
INNER = "optimizer_state_dict"
READ, ODD = "refuses: .* cannot be read", "has .*"
SHORT_MASTERS = put(lambda flat: flat[:-1], INNER, "fp32_flat_groups", 0)
SHORT_MOMENT = put(torch.zeros(1), INNER, INNER, "state", 0, "exp_avg")
RESIDUAL = put(torch.zeros(2, 3), INNER, "zero_topo", "sync", "residual")
OF_THREE = partial(changed, lambda _: torch.zeros(3))
KINDS: dict[str, tuple[str, Harm, str]] = {
    "model cut": (MODEL, cut, READ),
    "optimizer missing": (OPTIM, Path.unlink, f"{READ}.*FileNotFoundError"),
    "no module": (MODEL, put(None, "module"), "refuses: .*KeyError"),
    "no frozen parameter": (
        MODEL,
        put({}, "frozen_param_fragments"),
        f"{ODD}frozen.inp.bias absent",
    ),
    "another step": (
        MODEL,
        put(7, "global_steps"),
        f"{ODD}global_steps 7 in place of 2",
    ),
    "short masters": (OPTIM, SHORT_MASTERS, r"masters in sub-groups of \["),
    "short moment": (OPTIM, SHORT_MOMENT, rf"{ODD}exp_avg .torch.float32 \[1\]"),
    "nothing of ours": (OPTIM, put(None, INNER, "zero_topo"), f"{ODD}zero_topo"),
    "another residual": (OPTIM, RESIDUAL, f"{ODD}residual"),
    "universal cut": (PARAMETER, cut, READ),
    "universal short": (
        PARAMETER,
        OF_THREE,
        "inp.weight/fp32.pt holds 3 elements, but inp.weight has 407",
    ),
    "universal residuals empty": (
        RESIDUALS,
        lambda path: path.write_bytes(b""),
        f"refuses: .*{RESIDUALS}",
    ),
}


def damaged(saved: Saved, tmp_path: Path, file: str, harm: Harm) -> Path:
    """The folder to load from, which on one rank is a damaged copy."""
    if dist.get_rank() != DAMAGED:
        return saved.path
    own = Path(shutil.copytree(saved.path, tmp_path / "own"))
    harm(own / file)
    return own


@pytest.mark.parametrize("kind", cores(("another step", "another residual"), KINDS))
def test_a_damaged_file_of_one_rank_is_refused_by_all(
    kind: str, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    """With the rank, the file or what differs in it, and a way out; the engine is as it was."""
    file, harm, words = KINDS[kind]
    saved, engine = trained("q4" if file.startswith(TAG) else UNIVERSAL)
    folder = damaged(saved, tmp_path, file, harm)
    with pytest.raises(
        ValueError, match=rf"the checkpoint is not loaded: .*rank {DAMAGED} of host .*{words}"
    ) as caught:
        engine.load_checkpoint(str(folder))
    assert str(caught.value).endswith("copy that rank's files anew, or name another tag")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert engine.global_steps == SAVED_AT
    assert_same_bits(weights(engine), saved.weights)


@pytest.mark.parametrize(("name", "harm"), [core("q4", cut), ("replicated", SHORT_MASTERS)])
def test_training_goes_on_after_a_load_that_failed(
    name: str, harm: Harm, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    """Bit for bit as if it had not been tried; masters of several rows are laid out for the load
    and back.
    """
    saved, engine = trained(name)
    stock = engine.checkpoint_engine
    with pytest.raises(ValueError, match="not loaded"):
        engine.load_checkpoint(str(damaged(saved, tmp_path, OPTIM, harm)))
    assert engine.checkpoint_engine is stock
    assert advance(saved.job, engine, SAVED_AT, saved.job.steps) == saved.losses


def test_a_folder_without_a_checkpoint_is_none_on_all_ranks(rank: int, tmp_path: Path) -> None:
    """As in stock: a script's first start. Where one rank alone has one, all say so."""
    engine = start(RUNS["q4"])
    assert engine.load_checkpoint(str(tmp_path)) == (None, None)
    if rank == DAMAGED:
        (tmp_path / "latest").write_text("x")
    with pytest.raises(
        ValueError, match=r"not loaded: .*rank 1 of host .* refuses: .*x/zero_pp_rank_1"
    ):
        engine.load_checkpoint(str(tmp_path))
    close(engine)


def test_parameter_groups_keep_their_settings_over_a_universal_checkpoint(
    trained: Callable[[str], Trained],
) -> None:
    """DeepSpeed's loader gives all of them the first one's rate and decay; then losses would be
    1e-3 off.
    """
    saved, _ = trained(UNIVERSAL)
    with loaded(saved.job, saved.path) as engine:
        rates = [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]
        assert rates == [(1e-2, 0.1), (3e-2, 0.0), (5e-3, 0.3)]
        assert advance(saved.job, engine, SAVED_AT, saved.job.steps) == pytest.approx(
            saved.losses, abs=1e-5
        )
