# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The engine without DeepSpeed, a model or other ranks: its optimizer step phase by phase, in a
world of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero_topo.config import ResolvedConfig
from zero_topo.engine.stage3 import Stage3
from zero_topo.plan import Phase, packed_runs
from zero_topo.sync import Moment, Parameter


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Makes this process one rank of a world of any size; collectives return at once and bring what
    was sent.

    Where messages may differ in length, they bring zeros.

    Args:
        world_size: number of ranks pretended, for example 75264.
        rank: which of them this process is.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    even = dist.all_to_all_single

    def all_to_all(received: Tensor, sent: Tensor, *splits: Any, **kwargs: Any) -> Any:
        if not splits:
            return even(received, sent, **kwargs)
        received.zero_()
        return SimpleNamespace(wait=lambda: None)

    def listed(received: Sequence[Tensor], *_: Any, **__: Any) -> Any:
        for part in received:
            part.zero_()
        return SimpleNamespace(wait=lambda: None)

    try:
        with patch.multiple(dist, all_to_all_single=all_to_all, all_to_all=listed):
            yield
    finally:
        dist.destroy_process_group()


def matrices(numels: Sequence[int]) -> list[Parameter]:
    """Parameters of these sizes, vectors if they have one element, in the order in which a model
    needs them.
    """
    return [
        Parameter(f"p{place}", n, 1 if n == 1 else 2, place=place) for place, n in enumerate(numels)
    ]


def bare_engine(
    config: ResolvedConfig,
    parameters: Sequence[Parameter],
    dtype: torch.dtype = torch.float32,
    bucket_numel: int = 1 << 40,
    loss_scale: Callable[[], float] = lambda: 1.0,
    moments: Callable[[], Sequence[Moment]] = tuple,
    frozen: Sequence[Parameter] = (),
    device: torch.device | str = "cpu",
) -> Stage3:
    """The engine as DeepSpeed would make it.

    Args:
        config: the plan and the formats.
        parameters: those that are trained.
        dtype: of weights and gradients, sent and kept.
        bucket_numel: elements that sync and publish carry in one collective.
        loss_scale: the present one.
        moments: what the optimizer remembers.
        frozen: parameters that are not trained.
        device: where they are.
    """
    like = torch.empty(0, dtype=dtype, device=device)
    return Stage3(config, parameters, frozen, like, dtype, dtype, bucket_numel, loss_scale, moments)


class BareStep:
    """An engine and the phases of its step, on the same gradient for all parameters.

    Args:
        config: the engine's; nothing of it should overlap, or a phase ends in another.
        numels: elements of each parameter.
        together: parameters that are scattered, synced and published in one collective; None is
            all.

    Attributes:
        engine: made for it.
    """

    def __init__(
        self, config: ResolvedConfig, numels: Sequence[int], together: int | None = None
    ) -> None:
        padded = max(config.plan.world_size * config.plan.shard_numel(n) for n in numels)
        self._moments: list[Moment] = []
        bucket = padded * (together or len(numels))
        self.engine = bare_engine(
            config, matrices(numels), torch.bfloat16, bucket, moments=lambda: self._moments
        )
        self.engine.weights.publish_world()
        self._masters = torch.zeros(self.engine.gradients.optimizer_rows().shape)
        self._moments.append(Moment(0, torch.zeros_like(self._masters), 0.9))
        self._buckets = packed_runs([1] * len(numels), together)
        largest = torch.randn(max(numels), generator=torch.Generator().manual_seed(1)).bfloat16()
        self._grads = [largest[:n] for n in numels]

    def phases(self) -> Mapping[str, Callable[[], None]]:
        """What a step does, in order, by name; of the optimizer's update that part which is the
        engine's.
        """
        return {
            "gather_forward": lambda: self._gather("gather_forward"),
            "gather_backward": lambda: self._gather("gather_backward"),
            "scatter": self._scatter,
            "sync": self.engine.gradients.sync,
            "update": self._update,
            "publish": self._publish,
            "commit": lambda: self.engine.end_step(skipped=False),
        }

    def _gather(self, phase: Phase) -> None:
        for param_index in range(len(self._grads)):
            self.engine.weights.gather([param_index], phase).wait()

    def _scatter(self) -> None:
        for bucket in self._buckets:
            self.engine.gradients.scatter(
                bucket, self._grads[bucket.start : bucket.stop], bucket is self._buckets[-1]
            )

    def _update(self) -> None:
        with self.engine.watched(self._masters.view(-1), 0, rate=0.1):
            pass

    def _publish(self) -> None:
        weights = self.engine.weights
        weights.update(self._masters)
        weights.wait_for_publish()
