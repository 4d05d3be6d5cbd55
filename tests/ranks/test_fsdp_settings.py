# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Every public method of FSDP2's modules, and every parameter of ``fully_shard``: as under FSDP2,
or refused in a line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

import zero_topo.fsdp as topo
from tests.harness import run_threads
from tests.marks import late, often
from tests.ranks.fsdp_scripts import (
    EXACT,
    Block,
    both,
    loss_of,
    machine,
    make,
    net,
    shard_plainly,
    train,
)
from zero_topo.fsdp.block import resolve
from zero_topo.fsdp.settings import REFUSED


def everywhere(name: str, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
    """A call on each sharded module."""

    def call(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                getattr(module, name)(*args, **kwargs)

    return call


def divided(name: str) -> Callable[[Any], None]:
    """A factor that is not the number of ranks, and another for one block."""

    def call(model: Any) -> None:
        everywhere(name, 1.5)(model)
        model.blocks[0].set_gradient_divide_factor(factor=7.0)
        everywhere("set_force_sum_reduction_for_comms", True)(model)

    return call


def gather_by_hand(model: Any) -> None:
    """Gather some modules before their turn."""
    model.unshard()
    model.blocks[0].unshard(async_op=True).wait()
    model.reshard()


METHODS: dict[str, Callable[[Any], None]] = {
    "reshard": lambda model: model.reshard(),
    "unshard": gather_by_hand,
    "reset_iter_state": lambda model: model.reset_iter_state(),
    "set_is_last_backward": lambda model: model.set_is_last_backward(is_last_backward=False),
    "set_requires_gradient_sync": lambda model: model.set_requires_gradient_sync(True),
    "set_requires_all_reduce": lambda model: model.set_requires_all_reduce(
        requires_all_reduce=False, recurse=True
    ),
    "set_reshard_after_forward": everywhere("set_reshard_after_forward", True),
    "set_reshard_after_backward": everywhere("set_reshard_after_backward", False),
    "set_modules_to_forward_prefetch": lambda model: model.set_modules_to_forward_prefetch(
        list(model.blocks)
    ),
    "set_modules_to_backward_prefetch": lambda model: model.set_modules_to_backward_prefetch(
        list(model.blocks)
    ),
    "set_post_optim_event": lambda model: model.set_post_optim_event(torch.Event("cpu")),
    "set_reduce_scatter_divide_factor": divided("set_reduce_scatter_divide_factor"),
    "set_gradient_divide_factor": divided("set_gradient_divide_factor"),
    "set_force_sum_reduction_for_comms": everywhere(
        "set_force_sum_reduction_for_comms", enable=False
    ),
    "set_reduce_scatter_unused_params": everywhere("set_reduce_scatter_unused_params", True),
    "set_reduce_scatter_max_input_buffers": everywhere("set_reduce_scatter_max_input_buffers", 2),
    "set_unshard_in_backward": everywhere("set_unshard_in_backward", True),
}
"""Methods that are honoured, each with a call that changes what FSDP2 does."""

REFUSED_CALLS: dict[str, tuple[Any, ...]] = {
    "set_all_reduce_hook": (print,),
    "set_custom_all_gather": (None,),
    "set_custom_reduce_scatter": (None,),
    "set_separate_reduce_scatter_group": (),
    "set_allocate_memory_from_process_group_for_comm": (True,),
    "set_symm_mem_for_comm": (),
}


def test_every_method_is_honoured_or_refused() -> None:
    """A method that a new torch adds is in neither table, and fails here."""
    public = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert public == {*METHODS, *REFUSED}
    assert REFUSED_CALLS.keys() == REFUSED.keys()


def with_settings(
    block: Mapping[str, Any] | None, names: tuple[str, ...], options: dict[str, Any]
) -> list[float]:
    """Losses of a model that was sharded with options, after calls of some methods."""
    model, optimizer = make(block, torch.optim.SGD, options=options)
    losses = train(model, optimizer, range(1))
    for name in names:
        METHODS[name](model)
    return [*losses, *train(model, optimizer, range(1, 4))]


DIVISION = ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor")
TOGETHER = tuple(name for name in METHODS if name not in DIVISION)


@pytest.mark.parametrize(
    "names",
    [TOGETHER, DIVISION[:1], *(late((name,)) for name in METHODS if name != DIVISION[0])],
    ids=lambda names: "-".join(names) if len(names) < 3 else "together",
)
def test_settings_are_those_of_fsdp2(names: tuple[str, ...]) -> None:
    """Losses with the settings equal those of plain FSDP2."""
    found, expected = both(with_settings, names, {})
    assert found == pytest.approx(expected, abs=1e-6)


def divided_before(block: Mapping[str, Any] | None, divisor: float | None) -> list[float]:
    """Losses of a trainer that sets the division before ``attach``."""
    model = net()
    if block is None:
        shard_plainly(model)
        everywhere("set_gradient_divide_factor", 1.5 if divisor is None else divisor)(model)
        everywhere("set_force_sum_reduction_for_comms", True)(model)
        return train(model, torch.optim.SGD(model.parameters(), lr=1e-2), range(3))
    mesh = topo.shard_mesh(machine(block))
    for inner in model.blocks:
        fully_shard(inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    everywhere("set_gradient_divide_factor", 1.5)(model)
    topo.attach(model, machine(block), divisor=divisor)
    return train(model, topo.shard_optimizer(torch.optim.SGD, model, lr=1e-2), range(3))


@pytest.mark.parametrize("divisor", [None, late(3.0)])
@pytest.mark.parametrize("weights", ["node", late("rank")])
def test_a_division_before_attach_is_kept(divisor: float | None, weights: str) -> None:
    """Unless ``attach`` is given another one."""
    block = {**EXACT, "weights": weights, "gradients": weights}
    found = run_threads(4, lambda rank: divided_before(block, divisor))[0]
    expected = run_threads(4, lambda rank: divided_before(None, divisor))[0]
    assert found == pytest.approx(expected, abs=1e-6)


# -- parameters of fully_shard ---------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "reshard_after_forward": False,
    "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    "offload_policy": OffloadPolicy(),
    "ignored_params": set(),
    "shard_placement_fn": lambda param: None,
}
REFUSED_OPTIONS = {"mesh", "dp_mesh_dims", "module"}
"""Parameters of which no value is taken, or not each."""


def test_every_parameter_is_honoured_or_refused() -> None:
    """A parameter that a new torch adds is in neither table, and fails here."""
    assert set(inspect.signature(fully_shard).parameters) == {*OPTIONS, *REFUSED_OPTIONS}
    assert MISTAKES.keys() > REFUSED_OPTIONS


@pytest.mark.parametrize("name", often(("reshard_after_forward",), OPTIONS))
def test_options_are_those_of_fsdp2(name: str) -> None:
    """Losses with the option equal those of plain FSDP2."""
    found, expected = both(with_settings, (), {name: OPTIONS[name]})
    assert found == pytest.approx(expected, abs=1e-6)


# -- mistakes --------------------------------------------------------------------------------------

SHARD: Any = topo.fully_shard
ADAMW = torch.optim.AdamW


def with_replicas(model: Any, block: Any) -> None:
    """A mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    topo.attach(fully_shard(model, mesh=mesh), block)


def by_muon(model: Any, block: Any) -> None:
    """An optimizer of matrices."""
    model.requires_grad_(False)
    model.out.weight.requires_grad_(True)
    topo.shard_optimizer(torch.optim.Muon, SHARD(model, block), [model.out.weight])


def with_a_hook(model: Any, block: Any) -> None:
    """A hook that would see sums of one node."""
    fully_shard(model, mesh=topo.shard_mesh(block))
    model.set_all_reduce_hook(print)
    topo.attach(model, block)


def in_columns(param: Any) -> Shard:
    """Not by rows."""
    return Shard(param.dim() - 1)


def ignoring(model: Any, block: Any) -> None:
    """A parameter that is not sharded, and trained."""
    SHARD(model, block, ignored_params={model.inp.weight})
    topo.shard_optimizer(ADAMW, model)


def optimized_by(kind: Any) -> Callable[[Any, Any], Any]:
    """An optimizer that is not known to update each element by itself."""
    return lambda model, block: topo.shard_optimizer(kind, SHARD(model, block), lr=1e-3)


class Unknown(torch.optim.SGD):
    """A user's own."""


def after_a_pass(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A call with a parameter that has a gradient, and the optimizer; the weight stays as it is."""

    def mistake(model: Any, block: Any) -> None:
        optimizer = topo.shard_optimizer(ADAMW, SHARD(model, block), lr=0.0)
        loss_of(model, 0).backward()
        param = model.inp.weight
        before = param.to_local().clone()
        try:
            with torch.no_grad():
                call(param, optimizer)
        finally:
            assert torch.equal(before, param.to_local())

    return mistake


def read_in_a_hook(model: Any, block: Any) -> None:
    """A gradient that is not reduced between nodes yet."""
    topo.shard_optimizer(ADAMW, SHARD(model, block))
    model.inp.weight.register_post_accumulate_grad_hook(lambda param: param.grad.norm())
    loss_of(model, 0).backward()


def read_after_the_step(param: Any, optimizer: Any) -> None:
    """A gradient that is gone; a copy stays."""
    grad = param.grad
    copied = grad.clone()
    optimizer.step()
    assert copied.norm() > 0
    grad.norm()


MISTAKES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "not sharded": (topo.attach, "Net is not sharded: call torch's fully_shard"),
    "wrong mesh": (
        lambda model, block: topo.attach(shard_plainly(model), block),
        "share weights; shard over shard_mesh",
    ),
    "replicas": (with_replicas, "without replicas"),
    "twice": (lambda model, block: topo.attach(SHARD(model, block), block), "attach a model once"),
    "sharded": (
        lambda model, block: SHARD(fully_shard(model, mesh=topo.shard_mesh(block)), block),
        "is sharded already; call attach",
    ),
    "a hook before": (with_a_hook, "set_all_reduce_hook: "),
    "mesh": (lambda model, block: SHARD(model, block, mesh=None), "leave it out"),
    "dp_mesh_dims": (lambda model, block: SHARD(model, block, dp_mesh_dims=None), "leave it out"),
    "offload": (
        lambda model, block: SHARD(model, block, offload_policy=CPUOffloadPolicy()),
        "offload_policy: ",
    ),
    "columns": (
        lambda model, block: SHARD(model, block, shard_placement_fn=in_columns),
        "need Shard(0)",
    ),
    "module": (lambda model, block: SHARD([*model.blocks], block), "pass modules=[[norm"),
    "a container": (lambda model, block: SHARD(model.blocks, block), "ModuleList has no forward"),
    "a foreign module": (
        lambda model, block: SHARD(model, block, modules=[Block()]),
        "modules: Block is not in the model",
    ),
    "not attached": (lambda model, block: topo.shard_optimizer(ADAMW, model), "is not attached"),
    "no optimizer": (
        lambda model, block: loss_of(SHARD(model, block), 0).backward(),
        "build the optimizer by shard_optimizer first",
    ),
    "meta": (
        lambda model, block: topo.shard_optimizer(ADAMW, SHARD(model.to("meta"), block)),
        "call model.to_empty",
    ),
    "foreign parameters": (
        lambda model, block: topo.shard_optimizer(ADAMW, SHARD(model, block), net().parameters()),
        "are not the model's",
    ),
    "a part": (
        lambda model, block: topo.shard_optimizer(ADAMW, SHARD(model, block), [model.out.weight]),
        "freeze it by requires_grad_(False)",
    ),
    "ignored": (ignoring, "give it an optimizer of its own"),
    "muon": (by_muon, "2D"),
    "a weight added to": (
        after_a_pass(lambda param, _: param.add_(param.grad, alpha=-0.1)),
        "let the optimizer of shard_optimizer update it",
    ),
    "several weights added to": (
        after_a_pass(lambda param, _: torch._foreach_add_([param], [param.grad], alpha=-0.1)),
        "let the optimizer of shard_optimizer update it",
    ),
    "a gradient read in a hook": (read_in_a_hook, "read param.grad after the pass"),
    "a gradient read after the step": (
        after_a_pass(read_after_the_step),
        "copy it by param.grad.clone()",
    ),
    "an unknown optimizer": (optimized_by(Unknown), "pass elementwise=True"),
    "norms of rows": (optimized_by(torch.optim.Adafactor), "pass elementwise=True"),
}
"""Calls with a model and a block, and what every rank reads."""


def calling(name: str, args: tuple[Any, ...], model: Any, block: Any) -> None:
    """Call a method that is refused."""
    getattr(SHARD(model, block).blocks[0], name)(*args)


for method, arguments in REFUSED_CALLS.items():
    MISTAKES[method] = partial(calling, method, arguments), f"{method}: {REFUSED[method]}"


def refused(rank: int, name: str) -> str:
    """What a rank reads."""
    with pytest.raises((ValueError, RuntimeError)) as error:
        MISTAKES[name][0](net(), machine())
    return str(error.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_in_a_line(name: str) -> None:
    """On every rank, with what to do."""
    for line in run_threads(4, refused, name):
        assert MISTAKES[name][1] in line and "\n" not in line


def test_the_earlier_name_of_int4_publish_means_the_same() -> None:
    """Scripts that name it so still run; other formats of ``publish`` are gone."""
    own: dict[str, Any] = {
        "topology": {"emulated": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 2}}
    }
    own["scheme"] = "paper"
    anew = resolve({**own, "quantize": {"publish": "int4"}}, 4)
    assert anew.publish_spec is not None
    assert resolve({**own, "publish": {"delta": "int4"}}, 4) == anew
    with pytest.raises(ValueError, match="publish was removed"):
        resolve({**own, "publish": {"delta": "int8"}}, 4)
