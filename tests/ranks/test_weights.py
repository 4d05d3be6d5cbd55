# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Weight shards: the errors that keep stale weights from being read, what debug checks
find. What gathers, publishes, edits and restarts bring is tested in ``test_phases.py``, bytes in
``test_step_bytes.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.bare import bare_engine, matrices
from tests.plans import BLOCK
from tests.ranks.worlds import PARAM_INDICES, PLAIN, loaded, world
from zero_topo.engine.buffer import Form
from zero_topo.engine.weights import Weights
from zero_topo.hook.parameters import ParameterGathers
from zero_topo.plan import Phase

TRAINED = (64, 7)
FROZEN = (8 * BLOCK, 8 * 2 * BLOCK, 8 * 3 * BLOCK - 7)


def test_what_never_changes_is_quantized_once() -> None:
    """The copy that a forward gather fills for backward ones is not filled again while the weights
    are the same.
    """
    w = world({"scheme": "zero++", "quantize": {"secondary": "int8"}}, numels=TRAINED)

    def rank_main(rank: int) -> None:
        frozen = matrices(FROZEN)
        engine = bare_engine(w.config, matrices(TRAINED), torch.bfloat16, frozen=frozen)
        engine.restart_frozen()
        for _ in range(3):
            engine.sets[1].gather(range(len(frozen)), "gather_forward").wait()

    with patch.object(Form, "store", autospec=True, side_effect=Form.store) as store:
        w.on_ranks(rank_main)
    assert store.call_count == w.size * len(FROZEN)


def test_fp32_weights_are_their_own_masters() -> None:
    """DeepSpeed keeps no others then; the optimizer's groups are updated one after the other."""
    w = world({"scheme": "zero3"}, numels=TRAINED)

    def rank_main(rank: int) -> None:
        engine = loaded(w)
        weights = engine.weights
        for index in range(len(TRAINED)):
            masters = weights.layout.parameter(weights.own_row[None], index)[0]
            masters.fill_(index + 1)
            weights.update(masters[None], range(index, index + 1))
        engine.end_step(skipped=False)
        for index, whole in enumerate(weights.gather(range(len(TRAINED)), "gather_forward").wait()):
            assert torch.equal(whole, torch.full_like(whole, index + 1))

    w.on_ranks(rank_main)


# -- errors and debug checks -----------------------------------------------------------------------


def unrefreshed(weights: Weights) -> None:
    assert weights.secondary is not None
    weights.secondary._views.clear()
    weights.update(weights.own)


def unfinished(weights: Weights) -> None:
    weights.update(weights.own)
    weights.start_publish()
    weights._pending.clear()


@pytest.mark.parametrize(
    ("forget", "phase", "said"),
    [
        (unrefreshed, "gather_backward", "was not refreshed"),
        (unfinished, "gather_forward", "before publish updated them"),
    ],
)
def test_weights_of_another_version_are_an_error_not_a_stale_read(
    forget: Callable[[Weights], None], phase: Phase, said: str
) -> None:
    """If the engine forgot to refresh a secondary or to finish a publish before a gather, the
    version stamp says so.
    """
    w = world({"scheme": "topo", "secondary": "node"})

    def rank_main(rank: int) -> str:
        engine = loaded(w)
        forget(engine.weights)
        with pytest.raises(RuntimeError, match=said) as caught:
            engine.weights.gather(PARAM_INDICES, phase).wait()
        return str(caught.value)

    assert len(set(w.on_ranks(rank_main))) == 1


@pytest.mark.parametrize("quantize", [PLAIN, {"resident": "int8"}], ids=["plain", "codes"])
def test_debug_checks_name_the_ranks_whose_replicas_differ(quantize: dict[str, Any]) -> None:
    """By one bit of one copy, of weights as they are and of INT8 weights."""
    w = world({"scheme": "topo", "quantize": quantize, "debug_checks": True})

    def rank_main(rank: int) -> str:
        engine = loaded(w)
        for _ in range(2):
            engine.end_step(skipped=False)
            engine.weights.update(engine.weights.own.float())
            engine.weights.wait_for_publish()
        if rank == 5:
            int8 = engine.weights.int8
            copy = engine.weights.primary if int8 is None else int8.codes.stored
            copy.view(-1).view(torch.uint8)[3] ^= 1
        with pytest.raises(RuntimeError, match="ranks 1 and 5 share a weight shard") as caught:
            engine.end_step(skipped=False)
        return str(caught.value)

    assert len(set(w.on_ranks(rank_main))) == 1


def test_debug_checks_pass_if_all_frozen_parameters_are_int8() -> None:
    """No frozen parameter then has a column in the model's own type, and the check compares empty
    tensors.
    """
    w = world({"scheme": "topo", "debug_checks": True}, numels=TRAINED)

    def rank_main(rank: int) -> None:
        frozen = matrices([8 * BLOCK])
        engine = bare_engine(w.config, matrices(TRAINED), torch.bfloat16, frozen=frozen)
        assert not engine.sets[1].primary.numel()
        engine.end_step(skipped=True)

    w.on_ranks(rank_main)


def test_what_cannot_follow_the_plan_stays_with_deepspeed() -> None:
    """Those of another type or served by another engine of ours, and a line says so; empty ones do
    not count.
    """

    def parameter(ds_id: int, numel: int, dtype: torch.dtype, partition: Any = print) -> Any:
        found = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
        stored = torch.zeros(numel, dtype=dtype)
        vars(found).update(ds_id=ds_id, ds_numel=numel, ds_shape=(numel,), ds_tensor=stored)
        vars(found).update(ds_persist=False, partition=partition)
        return found

    def gathers(*params: Any) -> ParameterGathers:
        module = torch.nn.ParameterList([*params, trained])
        return ParameterGathers(module, [trained], {}, half, [*module.parameters()])

    half, single = torch.bfloat16, torch.float32
    plain, empty, trained = parameter(3, 8, half), parameter(4, 0, half), parameter(5, 8, half)
    found = gathers(parameter(1, 8, single), parameter(2, 8, half, partial(print)), plain, empty)
    assert [param.ds_id for param in found.frozen] == [3] and found.param_indices == {5: 0, 3: 0}
    assert (found.note() or "").startswith(
        "2 frozen parameters are not torch.bfloat16, or another engine"
    )
    assert gathers(plain, empty).note() is None
