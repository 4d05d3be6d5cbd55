# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""FSDP2 as a host: the same training as plain FSDP2, the bytes of the formulas, states over the
job, checkpoints.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zero_topo.fsdp as topo
from tests.harness import run_threads
from tests.launching import ROOT
from tests.marks import late, often
from tests.ranks.worlds import SPARSE
from zero_topo import AdamS
from zero_topo.fsdp.block import resolve
from zero_topo.fsdp.optimizer import ShardedOptimizer
from zero_topo.fsdp.parts import Part

WIDTH = 16
VOCABULARY = 32
MACHINES = {
    4: {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 2},
    8: {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 2},
}
EXACT: dict[str, Any] = {"scheme": "paper", "quantize": {"weights": None, "gradients": None}}
BETWEEN = {"weights": "gpu", "gradients": "gpu", "optimizer": "node"}
Q4: dict[str, Any] = {
    "scheme": "paper",
    "sync": {"mode": "quantized"},
    "quantize": {"publish": "int4"},
}
PUBLISHED: dict[str, Any] = {**EXACT, "quantize": {**EXACT["quantize"], "publish": "int4"}}
DIRECT: dict[str, Any] = {**EXACT, "sync": {"reduce": "reduce_scatter"}}
FEEDBACK: dict[str, Any] = {**EXACT, "sync": {"mode": "quantized"}}


class Block(nn.Module):
    """A normalized two-layer perceptron; rows that four ranks divide evenly, unless ``odd``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A small language model."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class LlamaLoss(nn.Module):
    """Hugging Face's Llama, four layers of width 32, behind the same call."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, max_position_embeddings=16, **sizes
        )
        self.llama = transformers.LlamaForCausalLM(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.llama(tokens, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def small() -> nn.Module:
    """Even shapes."""
    return Net(WIDTH, VOCABULARY)


def odd() -> nn.Module:
    """Shapes that no number of ranks divides."""
    return Net(10, 13)


@dataclass(frozen=True)
class Job:
    """A training: the model, and what a step does.

    Attributes:
        build: makes the model; weights are drawn afterwards.
        micro_batches: of a step.
        flags: the call by which FSDP2 learns which backward pass is the last; empty for none.
        clip: the norm to which gradients are clipped, or None.
        ours: clip by the optimizer's method instead of torch's function.
        frozen: names of parameters that contain this word are frozen.
        scheduled: whether the learning rate changes.
        dtype: of the weights.
        compiled: whether blocks are compiled.
        vocabulary: tokens.
        steps: of the training.
    """

    build: Callable[[], nn.Module] = small
    micro_batches: int = 1
    flags: str = ""
    clip: float | None = None
    ours: bool = False
    frozen: str = ""
    scheduled: bool = False
    dtype: torch.dtype = torch.float32
    compiled: bool = False
    vocabulary: int = VOCABULARY
    steps: int = 5

    def model(self) -> nn.Module:
        """The model, with the same weights on every rank."""
        model = self.build()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(0.3 * torch.randn(param.shape, generator=generator))
                if self.frozen and self.frozen in name:
                    param.requires_grad_(False)
        return model.to(self.dtype)

    def batch(self, rank: int, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, different on every rank."""
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
        tokens = torch.randint(0, self.vocabulary, (2, 7), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


EVERYTHING = Job(
    micro_batches=2, flags="set_is_last_backward", clip=0.5, frozen="blocks.0.up", scheduled=True
)


@dataclass
class Trained:
    """What a rank has after a training: mean losses, norms, whole weights, and the optimizer."""

    losses: list[float]
    norms: list[float]
    weights: list[Tensor]
    optimizer: torch.optim.Optimizer


def sharded(job: Job, block: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """The model and the optimizer of a rank: plain FSDP2 over all ranks without a block."""
    model: Any = job.model()
    for name, module in model.named_children():
        if job.compiled and name == "blocks":
            for inner in module:
                inner.compile(backend="aot_eager")
    settings: dict[str, Any] = {"lr": 1e-2}
    if block is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                for inner in module:
                    fully_shard(inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
        trained = [param for param in model.parameters() if param.requires_grad]
        return model, torch.optim.AdamW(trained, **settings)
    topo.fully_shard(model, on_machine(block))
    kind = AdamS if block.get("sync", {}).get("mode") == "scape" else torch.optim.AdamW
    return model, topo.shard_optimizer(kind, model, **settings)


def on_machine(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block on the emulated machine of this world."""
    machine = MACHINES.get(
        dist.get_world_size(), {"nodes": 1, "gpus_per_node": 1, "gcds_per_gpu": 2}
    )
    return {"topology": {"emulated": machine}, **block}


def steps_of(job: Job, model: Any, optimizer: Any, rank: int, steps: range) -> Trained:
    """Train some steps."""
    schedule = (
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if job.scheduled
        else None
    )
    losses, norms = [], []
    for step in steps:
        total = torch.zeros(())
        for micro_batch in range(job.micro_batches):
            if job.flags:
                getattr(model, job.flags)(micro_batch == job.micro_batches - 1)
            loss = model(*job.batch(rank, step, micro_batch)) / job.micro_batches
            loss.backward()
            total += loss.detach().float()
        if job.clip is not None:
            if job.ours and isinstance(optimizer, ShardedOptimizer):
                norm = optimizer.clip_grad_norm_(job.clip)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    weights = [param.detach().full_tensor().clone() for param in model.parameters()]
    return Trained(losses, norms, weights, optimizer)


def train(rank: int, job: Job, block: Mapping[str, Any] | None) -> Trained:
    """A rank's training from its beginning."""
    return steps_of(job, *sharded(job, block), rank, range(job.steps))


def assert_equal(found: Trained, expected: Trained, tolerance: float = 1e-6) -> None:
    """Losses, norms and weights of two trainings are equal."""
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=tolerance)
    torch.testing.assert_close(found.norms, expected.norms, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(found.weights, expected.weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


PLANS = {
    "paper": EXACT,
    "hsdp": {"scheme": "hsdp"},
    "zero3": {"scheme": "zero3"},
    "between": BETWEEN,
    "one rank": {"weights": "rank", "gradients": "rank", "optimizer": "world"},
}


@pytest.mark.parametrize(
    ("ranks", "names"),
    [(4, ("paper", "between")), late(4, ("hsdp", "zero3", "one rank")), late(8, tuple(PLANS))],
)
def test_a_training_equals_plain_fsdp2(ranks: int, names: tuple[str, ...]) -> None:
    """Every plan, unquantized: losses, norms and weights as of FSDP2 over all ranks.

    With accumulation, clipping by torch's own function, a schedule and frozen parameters.
    """
    expected = run_threads(ranks, train, EVERYTHING, None)[0]
    assert expected.losses[0] > expected.losses[-1] and max(expected.norms) > 0.5
    for name in names:
        assert_equal(run_threads(ranks, train, EVERYTHING, PLANS[name])[0], expected)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            replace(EVERYTHING, build=odd, vocabulary=13, ours=True, steps=3), id="odd shapes"
        ),
        pytest.param(replace(EVERYTHING, flags="", frozen="", clip=None, steps=3), id="no flags"),
        pytest.param(replace(EVERYTHING, build=LlamaLoss, frozen="mlp.up_proj"), id="llama"),
        late(Job(compiled=True, steps=2), id="compiled"),
        late(replace(EVERYTHING, flags="set_requires_gradient_sync"), id="no reduction between"),
    ],
)
def test_other_trainings_equal_plain_fsdp2(job: Job) -> None:
    """Uneven rows, the optimizer's own clipping, backward passes that all count as the last, Llama,
    compiled blocks.
    """
    expected = run_threads(4, train, job, None)[0]
    assert_equal(run_threads(4, train, job, EXACT)[0], expected)


@pytest.mark.long
@pytest.mark.parametrize("name", PLANS)
def test_odd_shapes_under_every_plan(name: str) -> None:
    """Rows that neither the ranks nor the parts of a shard divide evenly, eight ranks."""
    job = Job(build=odd, vocabulary=13, steps=3)
    expected = run_threads(8, train, job, None)[0]
    assert_equal(run_threads(8, train, job, PLANS[name])[0], expected)


MODES = {
    "paper": {"scheme": "paper"},
    "q4": Q4,
    "nf4": {
        "scheme": "paper",
        "quantize": {"gradients": "nf4"},
        "sync": {"mode": "quantized"},
    },
    "zero++": {"scheme": "zero++"},
    "scape": {**EXACT, "optimizer": "node", "sync": {"mode": "scape", "density": 0.5, "warmup": 0}},
    **{name: {**EXACT, "sync": sync} for name, sync in SPARSE.items()},
}


@cache
def exact(job: Job) -> Trained:
    """The training of four ranks with nothing quantized."""
    return run_threads(4, train, job, EXACT)[0]


@pytest.mark.parametrize("name", often(("paper", "q4", "ternary", "oktopk"), MODES))
def test_every_format_and_mode_trains(name: str) -> None:
    """Quantized and sparse trainings stay near the exact one, all ranks store the same weights,
    checked after steps.
    """
    job = Job(steps=4)
    found = run_threads(4, train, job, {"debug_checks": True, **MODES[name]})
    assert found[0].losses[-1] < exact(job).losses[0] - 0.05
    assert found[0].losses[1:] != exact(job).losses[1:]
    for rank in found[1:]:
        assert all(map(torch.equal, rank.weights, found[0].weights))


def parts_of(trained: Trained) -> list[Part]:
    """What the rank's optimizer updates."""
    assert isinstance(trained.optimizer, ShardedOptimizer)
    return list(trained.optimizer.parts.values())


def test_int4_differences_keep_the_masters() -> None:
    """Of a quantized post-step all-gather only the stored weights are rounded: masters follow the
    exact training.
    """
    job = Job(steps=1)
    found = run_threads(4, train, job, PUBLISHED)[0]
    for ours, theirs in zip(parts_of(found), parts_of(exact(job)), strict=True):
        torch.testing.assert_close(ours.master, theirs.master, rtol=0, atol=1e-7)
        rounded = (ours.weights() - ours.master[: ours.numel]).abs().max()
        assert 0 < rounded < 1e-2 / 7


def test_bf16_weights_have_fp32_masters() -> None:
    """A model of BF16 trains as closely to the FP32 one as its rounding allows, by masters that
    keep small updates.
    """
    job = Job(dtype=torch.bfloat16, steps=4)
    found = run_threads(4, train, job, {**EXACT, "accumulation_dtype": "fp32"})[0]
    assert abs(found.losses[-1] - exact(Job(steps=4)).losses[-1]) < 0.02
    part = parts_of(found)[0]
    assert part.master.dtype == torch.float32 and not torch.equal(
        part.master, part.master.bfloat16().float()
    )


def numbers(rank: int, job: Job, block: Mapping[str, Any]) -> tuple[Any, Any, int]:
    """Statistics of a training, what the formula says, and the elements of the optimizer's
    momentum.
    """
    optimizer: Any = train(rank, job, block).optimizer
    found = topo.stats(optimizer)
    momentum = sum(state["exp_avg"].numel() for state in optimizer.inner.state.values())
    assert found.memory["optimizer"] == 12 * momentum
    return found.step_bytes, found.formula, momentum


@pytest.mark.parametrize("name", often(("q4",), ["paper", "q4", "zero++", "hsdp", "between"]))
def test_bytes_are_those_of_the_formulas(name: str) -> None:
    """Of every phase and domain, on every rank, with two micro-batches of which one syncs."""
    block = {**MODES, **PLANS}[name]
    for sent, formula, _ in run_threads(
        8, numbers, Job(micro_batches=2, flags="set_is_last_backward", steps=2), block
    ):
        assert sent == formula


def test_bytes_across_nodes_by_hand() -> None:
    """Two nodes, exact: half of the shard's gradients go out for sync, once for two micro-batches,
    half come back.
    """
    numel = sum(param.numel() for param in small().parameters())
    for sent, _, momentum in run_threads(
        4, numbers, Job(micro_batches=2, flags="set_is_last_backward", steps=2), DIRECT
    ):
        across = Counter(
            {phase: nbytes for (phase, domain), nbytes in sent.items() if domain == "world"}
        )
        assert across == {"sync": 4 * numel // 4, "publish": 4 * numel // 4}
        assert momentum == numel // 4


def test_no_flags_sync_in_every_pass() -> None:
    """A loop that names no last pass sends every micro-batch's gradients across nodes; one that
    does, the last.
    """
    sent = []
    for flags in ("", "set_requires_all_reduce"):
        found = run_threads(4, numbers, Job(micro_batches=3, flags=flags, steps=1), EXACT)[0]
        sent.append(found[0]["sync", "world"])
    assert sent[0] == 3 * sent[1]


def states_of(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """The states of both, as users of FSDP2 get them."""
    return get_state_dict(model, optimizer)


def saved(rank: int, job: Job, block: Mapping[str, Any], folder: Path) -> tuple[Trained, float]:
    """A checkpoint after three steps, and the training that goes on; the sum of all residuals of a
    parameter.
    """
    model, optimizer = sharded(job, block)
    steps_of(job, model, optimizer, rank, range(3))
    weights, states = states_of(model, optimizer)
    residual = states["state"]["head.weight"].get("zero_topo_residual", torch.zeros(()))
    total = residual.full_tensor().abs().sum() if isinstance(residual, DTensor) else residual
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return steps_of(job, model, optimizer, rank, range(3, 5)), float(total)


def loaded(
    rank: int, job: Job, block: Mapping[str, Any] | None, folder: Path
) -> tuple[list[Tensor], Any]:
    """A new model and optimizer with the checkpoint's states, whole."""
    model, optimizer = sharded(job, block)
    weights, states = states_of(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    whole = [entry["exp_avg"].full_tensor().clone() for entry in states["state"].values()]
    return whole, (model, optimizer)


def resumed(rank: int, job: Job, block: Mapping[str, Any], folder: Path) -> Trained:
    """The training that goes on from the checkpoint."""
    _, (model, optimizer) = loaded(rank, job, block, folder)
    return steps_of(job, model, optimizer, rank, range(3, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, late(torch.float32)])
def test_a_resumed_training_goes_on(dtype: torch.dtype, tmp_path: Path) -> None:
    """On as many ranks, bit for bit: weights, states, learning rates; BF16 masters too."""
    job = Job(dtype=dtype)
    expected, _ = run_threads(4, saved, job, EXACT, tmp_path)[0]
    found = run_threads(4, resumed, job, EXACT, tmp_path)[0]
    assert found.losses == expected.losses
    assert all(map(torch.equal, found.weights, expected.weights))


def delivered(rank: int, job: Job, block: Mapping[str, Any], folder: Path) -> float:
    """The residual of a parameter that a loaded run has put into its own rows, summed over all
    ranks.
    """
    _, (_, optimizer) = loaded(rank, job, block, folder)
    part = next(part for part in optimizer.parts.values() if part.name == "head.weight")
    own = (
        optimizer.gradients.layout.parameter(optimizer.gradients.own_row[None], part.param_index)
        .abs()
        .sum()
    )
    dist.all_reduce(own)
    return float(own)


def test_checkpoints_load_on_half_the_ranks(tmp_path: Path) -> None:
    """States, and residuals of sync as a gradient of the first step; plain FSDP2 reads the same
    checkpoint.
    """
    _, residual = run_threads(4, saved, Job(), FEEDBACK, tmp_path)[0]
    assert residual > 0
    whole = run_threads(4, loaded, Job(), FEEDBACK, tmp_path)[0][0]
    for ranks, block in ((2, FEEDBACK), (4, None)):
        found = run_threads(ranks, loaded, Job(), block, tmp_path)[0][0]
        assert all(map(torch.equal, found, whole))
    sums = run_threads(2, delivered, Job(), FEEDBACK, tmp_path)
    assert sums[0] == pytest.approx(residual, rel=1e-5)


def edited(rank: int) -> tuple[Tensor, Tensor]:
    """Weights that the user sets between two steps, and the same after a step without a learning
    rate.
    """
    job = Job()
    model, optimizer = sharded(job, PUBLISHED)
    steps_of(job, model, optimizer, rank, range(1))
    with torch.no_grad():
        model.head.weight.fill_(0.125)
    optimizer.param_groups[0]["lr"] = 0.0
    steps_of(job, model, optimizer, rank, range(1, 2))
    return model.head.weight.detach().full_tensor(), model.head.bias.detach().full_tensor()


def test_edits_of_weights_reach_the_masters() -> None:
    """Weights that were loaded or set after the optimizer was built are not overwritten by old
    masters.
    """
    weight, bias = run_threads(4, edited)[0]
    assert torch.equal(weight, torch.full_like(weight, 0.125)) and bias.abs().sum() > 0


def reported(rank: int, folder: Path) -> None:
    topo.report(train(rank, Job(steps=2), Q4).optimizer, folder, title="FSDP2")  # type: ignore[arg-type]


def test_the_report_of_a_run(tmp_path: Path) -> None:
    """The folder has a report with all ranks' bytes next to the formula."""
    run_threads(4, reported, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    rows = report["zero_topo"]["sent"]
    assert report["title"] == "FSDP2" and report["zero_topo"]["ranks"] == 4
    measured = [row for row in rows if row["max"]]
    assert {row["phase"] for row in measured} >= {
        "gather_forward",
        "gather_backward",
        "scatter",
        "sync",
        "publish",
    }
    assert all(row["min"] == row["max"] == row["formula"] for row in measured)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {"scheme": "paper", "weights": "rank", "gradients": "node"},
            "FSDP2 has one degree for both",
        ),
        ({"scheme": "paper", "secondary": "node"}, "reshard_after_forward=2"),
        ({"scheme": "topo", "quantize": {"resident": "int8"}}, "resident"),
        ({"scheme": "paper", "seed": 1}, "call torch.manual_seed"),
        ({"scheme": "paper", "report": "runs/a"}, "call zero_topo.fsdp.report"),
        ({"scheme": "auto"}, "no plan is chosen for a model under FSDP2"),
        ({"scheme": "papers"}, "paper"),
    ],
)
def test_what_fsdp2_cannot_have_is_refused_in_a_line(block: dict[str, Any], words: str) -> None:
    """Degrees apart, a secondary copy, INT8 alone, DeepSpeed's keys: one line with the value and
    the way out.
    """
    with pytest.raises(ValueError, match=words) as error:
        resolve({"topology": {"emulated": MACHINES[4]}, **block}, 4)
    assert "\n" not in str(error.value)


def test_schemes_are_what_fsdp2_has_of_them() -> None:
    """Their own choices are replaced, not refused: one degree, no secondary, no INT8 storage."""
    for scheme, degree in {
        "paper": 2,
        "topo": 2,
        "topo-zero2": 2,
        "hsdp": 2,
        "zero3": 4,
        "zero++": 4,
    }.items():
        config = resolve({"topology": {"emulated": MACHINES[4]}, "scheme": scheme}, 4)
        plan = config.plan
        assert (plan.weights, plan.gradients, plan.secondary, config.resident_spec) == (
            degree,
            degree,
            None,
            None,
        )


def refused(rank: int, which: str) -> str:
    """What a rank reads."""
    block = on_machine(EXACT)
    model: Any = small()
    with pytest.raises((ValueError, RuntimeError)) as error:
        if which == "not sharded":
            topo.attach(model, block)
        elif which == "wrong mesh":
            fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
            topo.attach(model, block)
        elif which == "replicas":
            fully_shard(
                model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            )
            topo.attach(model, block)
        elif which == "mesh":
            topo.fully_shard(model, block, mesh=init_device_mesh("cpu", (4,)))
        elif which == "not attached":
            topo.shard_optimizer(torch.optim.AdamW, model)
        elif which == "no optimizer":
            topo.fully_shard(model, block)
            model(*Job().batch(rank, 0, 0)).backward()
        elif which == "meta":
            with torch.device("meta"):
                model = small()
            topo.shard_optimizer(torch.optim.AdamW, topo.fully_shard(model, block))
        elif which == "foreign":
            topo.fully_shard(model, block)
            topo.shard_optimizer(torch.optim.AdamW, model, small().parameters())
        elif which == "muon":
            model.requires_grad_(False)
            model.head.weight.requires_grad_(True)
            topo.fully_shard(model, block)
            topo.shard_optimizer(torch.optim.Muon, model, [model.head.weight])
        elif which == "a part":
            topo.fully_shard(model, block)
            topo.shard_optimizer(torch.optim.AdamW, model, [model.head.weight])
        elif which == "twice":
            topo.attach(topo.fully_shard(model, block), block)
    return str(error.value)


@pytest.mark.parametrize(
    ("which", "words"),
    {
        "not sharded": "Net is not sharded: call torch's fully_shard",
        "wrong mesh": "share weights; shard over shard_mesh",
        "replicas": "without replicas",
        "mesh": "leave it out",
        "not attached": "is not attached",
        "no optimizer": "build the optimizer by shard_optimizer first",
        "meta": "call model.to_empty",
        "foreign": "are not the model's",
        "muon": "2D",
        "a part": "freeze it by requires_grad_(False)",
        "twice": "attach a model once",
    }.items(),
)
def test_mistakes_are_refused_in_a_line(which: str, words: str) -> None:
    """On every rank, with what to do."""
    for line in run_threads(4, refused, which):
        assert words in line and "\n" not in line


WITHOUT = """
import sys
from importlib.util import find_spec

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "deepspeed":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import zero_topo.fsdp
assert callable(zero_topo.fsdp.fully_shard) and "deepspeed" not in sys.modules
"""


def test_it_is_imported_where_deepspeed_is_missing() -> None:
    """No module on the way to ``zero_topo.fsdp`` looks for DeepSpeed."""
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=120, cwd=ROOT)
