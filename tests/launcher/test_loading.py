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
from typing import Any, NamedTuple

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
    parts: list[list[nn.Parameter]] = [[], [], []]
    for index, param in enumerate(p for p in model.parameters() if p.requires_grad):
        parts[index % 3].append(param)
    settings = zip(parts, (1e-2, 3e-2, 5e-3), (0.1, 0.0, 0.3), strict=True)
    return [
        {"params": params, "lr": rate, "weight_decay": decay} for params, rate, decay in settings
    ]


def unscheduled(run: Job, **ds: Any) -> Job:
    """A run whose groups keep their own rates, perhaps from a universal checkpoint."""
    return replace(
        run, groups=unequal, ds={**{k: v for k, v in run.ds.items() if k != "scheduler"}, **ds}
    )


RUNS: dict[str, Job] = {
    "q4": RESUMED["quantized"],
    "codes": RESUMED["codes"],
    "replicated": job(block("topo", optimizer="node"), "bf16"),
    UNIVERSAL: replace(
        unscheduled(job(block("topo")), checkpoint={"load_universal": True}),
        model=partial(Net, depth=2),
    ),
}


class Trained(NamedTuple):
    """A run that was saved, and an engine that has come as far as the save."""

    saved: Saved
    engine: Any


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Trained]]:
    """One of the runs, made when first asked for."""
    made: dict[str, Trained] = {}

    def get(name: str) -> Trained:
        if name not in made:
            saved = save(RUNS[name], common_directory(tmp_path_factory.mktemp(name)))
            if name == UNIVERSAL:
                converted(saved.path)
            made[name] = Trained(saved, start(saved.job))
            advance(saved.job, made[name].engine, 0, SAVED_AT)
        return made[name]

    yield get
    for one in made.values():
        close(one.engine)


def converted(path: Path) -> None:
    """Make a universal checkpoint of the one that was saved. Collective."""
    if dist.get_rank() == 0:
        checkpoints.to_universal(path / TAG, path / UNIVERSAL)
        (path / "latest_universal").write_text(UNIVERSAL)
        torch.save({"residuals": {}, "ages": {}}, path / UNIVERSAL / "zero_topo_residuals.pt")
    dist.barrier()


def cut(path: Path) -> None:
    """Leave the first half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    """Leave nothing in the file."""
    path.write_bytes(b"")


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


MODEL, OPTIM = (
    f"zero_pp_rank_{DAMAGED}_mp_rank_00_model_states.pt",
    f"bf16_zero_pp_rank_{DAMAGED}_mp_rank_00_optim_states.pt",
)
INNER = "optimizer_state_dict"
FIRST = (INNER, INNER, "state", 0)
READ, ODD = "refuses: .* cannot be read", "has .*"


def ours(value: Any, *place: Any) -> Harm:
    """Change what the engine keeps in DeepSpeed's file of an optimizer."""
    return put(value, INNER, "zero_topo", *place)


ANY_FILE: dict[str, tuple[Harm, str]] = {
    "cut": (cut, READ),
    "missing": (Path.unlink, f"{READ}.*FileNotFoundError"),
}
OF_THE_MODEL: dict[str, tuple[Harm, str]] = {
    "no module": (put(None, "module"), "refuses: .*KeyError"),
    "a frozen parameter missing": (
        put({}, "frozen_param_fragments"),
        f"{ODD}frozen.inp.bias absent",
    ),
    "another step": (put(7, "global_steps"), f"{ODD}global_steps 7 in place of 2"),
}
SHORT_MASTERS = put(lambda flat: flat[:-1], INNER, "fp32_flat_groups", 0)
OF_THE_OPTIMIZER: dict[str, tuple[Harm, str]] = {
    "masters of another size": (SHORT_MASTERS, r"masters in sub-groups of \["),
    "no masters": (put(None, INNER, "fp32_flat_groups"), "refuses: .*KeyError"),
    "a moment of one element": (
        put(torch.zeros(1), *FIRST, "exp_avg"),
        rf"{ODD}exp_avg .torch.float32 \[1\]",
    ),
    "our entry missing": (ours(None), f"{ODD}zero_topo"),
    "no owners": (ours(None, "residual_owners", "owners"), f"{ODD}residual_owners.owners absent"),
    "weights of one element": (
        ours(torch.zeros(1), "stored"),
        rf"{ODD}stored .torch.float32 \[1\]",
    ),
    "a residual of another size": (ours(torch.zeros(2, 3), "sync", "residual"), f"{ODD}residual"),
}
OF_THREE, WRONG_SIZE = (
    partial(changed, lambda _: torch.zeros(3)),
    "inp.weight/fp32.pt holds 3 elements, but inp.weight has 407",
)
PARAMETER = "zero/inp.weight/fp32.pt"
KINDS: dict[str, tuple[str, str, Harm, str]] = {
    **{
        f"{file} {kind}": ("q4", file, *case)
        for kind, case in ANY_FILE.items()
        for file in (MODEL, OPTIM)
    },
    **{kind: ("q4", MODEL, *case) for kind, case in OF_THE_MODEL.items()},
    **{kind: ("q4", OPTIM, *case) for kind, case in OF_THE_OPTIMIZER.items()},
    "scales resized": ("codes", OPTIM, ours(lambda row: row[:-1], "scales"), f"{ODD}scales"),
    "a universal parameter cut": (UNIVERSAL, PARAMETER, cut, READ),
    "a universal parameter of another size": (UNIVERSAL, PARAMETER, OF_THREE, WRONG_SIZE),
    "no universal state": (UNIVERSAL, "zero/optimizer_state.pt", Path.unlink, READ),
    "what is carried emptied": (
        UNIVERSAL,
        "zero_topo_residuals.pt",
        emptied,
        "refuses: .*zero_topo_residuals.pt",
    ),
}


CORE = (f"{MODEL} cut", "another step", "a residual of another size")


def damaged(saved: Saved, tmp_path: Path, file: str, harm: Harm) -> Path:
    """The folder to load from, which on one rank is a damaged copy."""
    if dist.get_rank() != DAMAGED:
        return saved.path
    own = Path(shutil.copytree(saved.path, tmp_path / "own"))
    harm(own / (UNIVERSAL if saved.job is RUNS[UNIVERSAL] else TAG) / file)
    return own


@pytest.mark.parametrize("kind", cores(CORE, KINDS), ids=[kind.replace(" ", "-") for kind in KINDS])
def test_a_damaged_file_of_one_rank_is_refused_by_all(
    kind: str, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    """With the rank, the file or what differs in it, and a way out; the engine is as it was."""
    name, file, harm, words = KINDS[kind]
    saved, engine = trained(name)
    folder = damaged(saved, tmp_path, file, harm)
    with pytest.raises(
        ValueError, match=rf"the checkpoint is not loaded: .*rank {DAMAGED} of host .*{words}"
    ) as caught:
        engine.load_checkpoint(str(folder))
    assert str(caught.value).endswith("copy that rank's files anew, or name another tag")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert engine.global_steps == SAVED_AT
    assert_same_bits(weights(engine), saved.weights)


@pytest.mark.parametrize(
    ("name", "harm"), [core("q4", cut), ("codes", cut), ("replicated", SHORT_MASTERS)]
)
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
