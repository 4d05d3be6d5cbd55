# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Resharding: converts a checkpoint of other ranks, sub-groups or parameter orders to the files of
this rank.

Note [Recut]
    DeepSpeed cuts a parameter of ``m`` elements into ``N`` shards of ``ceil(m / N)``, one per rank.
    A rank's flat tensors store its shards of a sub-group's parameters one after the other;
    ``param_shapes`` lists these parameters. A shard for another ``N`` is read from the few old
    shards that it overlaps. Files are memory-mapped: a rank reads only what it copies, and never
    stores a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_topo.engine.residual_transfer import STATE_KEY, first_line

FRAGMENTS = "frozen_param_fragments"
GROUPS = (
    "give the optimizer the parameter groups of the run that saved it, or load a universal "
    "checkpoint of it"
)


def file_name(rank: int, kind: str, tensor_rank: int = 0) -> str:
    """Return DeepSpeed's name of a rank's file of "model" or "optim" states, without the prefix of
    BF16.

    Args:
        rank: its number in the data-parallel group.
        kind: "model" or "optim".
        tensor_rank: its number in the tensor-parallel group.
    """
    return f"zero_pp_rank_{rank}_mp_rank_{tensor_rank:02d}_{kind}_states.pt"


def mapped(path: Path) -> Any:
    """Load a file of ``torch.save``; tensors are memory-mapped."""
    with named(path):
        # As DeepSpeed reads it
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Convert any error inside the context to a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({first_line(error)})") from None


class Saved:
    """The files of one tag, each opened once, on first use.

    Args:
        folder: the tag's folder.
        prefix: prefix of the optimizer files' names.
        rank: this rank's number in the data-parallel group.
        ranks: number of ranks of the data-parallel group.
        tensor_rank: this rank's number in the tensor-parallel group.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str,
        rank: int,
        ranks: int,
        tensor_rank: int = 0,
    ) -> None:
        self._folder = folder
        self._prefix = prefix
        self._rank = rank
        self._ranks = ranks
        self._tensor_rank = tensor_rank
        # Memory-mapped: what is not read costs nothing.
        self._open = cache(lambda name: mapped(folder / name))
        self._saved_ranks = int(self._model(0)["dp_world_size"])

    def _model(self, rank: int) -> Any:
        return self._open(file_name(rank, "model", self._tensor_rank))

    def _optimizer(self, rank: int) -> Any:
        return self._open(f"{self._prefix}{file_name(rank, 'optim', self._tensor_rank)}")[
            "optimizer_state_dict"
        ]

    @cached_property
    def _places(self) -> dict[str, tuple[int, int, int]]:
        """Return by trained parameter: its sub-group, the offset in the sub-group's flat tensors,
        its elements.
        """
        found = {}
        for sub_group, shapes in enumerate(self._model(0)["param_shapes"]):
            first = 0
            for name, shape in shapes.items():
                found[name] = sub_group, first, shape.numel()
                # DeepSpeed pads each parameter to a multiple of the ranks that saved it.
                first += -(-shape.numel() // self._saved_ranks)
        return found

    def _shard(self, numel: int, of: Callable[[int], Tensor]) -> Tensor:
        """Return this rank's shard of a parameter, padded with zeros; ``of(rank)`` returns a saved
        rank's shard.
        """
        width, old = (-(-numel // ranks) for ranks in (self._ranks, self._saved_ranks))
        begin = self._rank * width
        end = min(numel, (self._rank + 1) * width)
        parts = [of(0)[:0]]
        # The saved ranks whose shards overlap this rank's.
        for owner in range(begin // old, -(-end // old)) if begin < end else ():
            first = max(begin - owner * old, 0)
            past = min(end - owner * old, old)
            parts.append(of(owner)[first:past])
            if len(parts[-1]) != past - first:
                raise ValueError(
                    f"{self._folder}: a shard of rank {owner} is too short; copy its files anew"
                )
        found = torch.cat(parts)
        return torch.nn.functional.pad(found, (0, width - len(found)))

    def _flat(self, names: Sequence[str], of: Callable[[int, int], Tensor]) -> Tensor:
        """Return this rank's shards of some parameters; ``of(rank, sub_group)`` returns a saved
        flat tensor.
        """
        return torch.cat(
            [self._shard(self._places[name][2], partial(self._columns, name, of)) for name in names]
        )

    def _columns(self, name: str, of: Callable[[int, int], Tensor], owner: int) -> Tensor:
        sub_group, first, numel = self._places[name]
        return of(owner, sub_group).detach().view(-1)[first:][: -(-numel // self._saved_ranks)]

    def model(
        self,
        found: Mapping[str, Any],
        shapes: Sequence[Mapping[str, torch.Size]],
    ) -> dict[str, Any]:
        """Return this rank's file of model states.

        Args:
            found: a saved file of model states.
            shapes: the shapes of this run's parameters, by sub-group and name.

        Raises:
            ValueError: for a parameter that was not saved, or was saved with another size.
        """
        for name, shape in (item for of in shapes for item in of.items()):
            saved = self._places[name][2] if name in self._places else "no"
            if saved != shape.numel():
                raise ValueError(
                    f"{self._folder} has {saved} elements of {name}, which has {shape.numel()} here"
                )
        # Frozen parameters are saved by each rank, not in the partitioned groups.
        fragments = found.get(FRAGMENTS)
        if fragments is not None:
            fragments = {
                name: self._shard(shape.numel(), partial(self._fragment, name))
                for name, shape in found["frozen_param_shapes"].items()
            }
        return {
            **found,
            "dp_world_size": self._ranks,
            "param_shapes": [*shapes],
            FRAGMENTS: fragments,
        }

    def _fragment(self, name: str, owner: int) -> Tensor:
        fragment: Tensor = self._model(owner)[FRAGMENTS][name].view(-1)
        return fragment

    def optimizer(
        self,
        shapes: Sequence[Mapping[str, torch.Size]],
        groups: Sequence[int],
    ) -> dict[str, Any]:
        """Return this rank's file of optimizer states.

        Args:
            shapes: the shapes of this run's parameters, by sub-group and name.
            groups: the parameter group of each sub-group.

        Raises:
            ValueError: if a parameter was saved in another parameter group.
        """
        whole = self._optimizer(0)
        inner = whole["optimizer_state_dict"]
        states = inner["state"]
        settings = inner["param_groups"]
        was = {sub_group: group for group, of in enumerate(settings) for sub_group in of["params"]}
        for name, group in (
            (name, group) for of, group in zip(shapes, groups, strict=True) for name in of
        ):
            if was[self._places[name][0]] != group:
                raise ValueError(
                    f"{name} was saved in another parameter group than {group}, where it is here: "
                    f"{GROUPS}"
                )
        masters = [
            self._flat([*of], lambda owner, of: self._optimizer(owner)["fp32_flat_groups"][of])
            for of in shapes
        ]
        state = {sub_group: self._state([*of], states) for sub_group, of in enumerate(shapes)}
        owned: list[dict[str, Any]] = []
        for index, of in enumerate(settings):
            # Sub-groups are counted anew: this run may cut parameters otherwise.
            own = [s for s, group in enumerate(groups) if group == index]
            owned.append({**of, "params": own})
        settings = owned
        inner = {**inner, "state": state, "param_groups": settings}
        found = {
            **whole,
            "partition_count": self._ranks,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": masters,
        }
        del whole
        # State of sync fits only the ranks and columns that saved it.
        found.pop(STATE_KEY, None)
        if self.same_columns(shapes) and STATE_KEY in self._optimizer(self._rank):
            found[STATE_KEY] = self._optimizer(self._rank)[STATE_KEY]
        return {"optimizer_state_dict": found}

    def _state(
        self,
        names: Sequence[str],
        states: Mapping[int, Mapping[str, Any]],
    ) -> dict[str, Any]:
        sub_group = self._places[names[0]][0]
        columns = self._optimizer(0)["fp32_flat_groups"][sub_group].numel()

        def value(key: str, first: Any) -> Any:
            if not (isinstance(first, Tensor) and first.dim() and first.numel() == columns):
                return first.clone() if isinstance(first, Tensor) else first
            return self._flat(
                names,
                lambda owner, of: self._optimizer(owner)["optimizer_state_dict"]["state"][of][key],
            )

        return {key: value(key, first) for key, first in states[sub_group].items()}

    def same_columns(self, shapes: Sequence[Mapping[str, torch.Size]]) -> bool:
        """Return whether a rank's columns equal the saved ones, so that sync's saved state fits."""
        return self._saved_ranks == self._ranks and [*self._places] == [
            name for of in shapes for name in of
        ]

    def drops_residual(self, shapes: Sequence[Mapping[str, torch.Size]]) -> bool:
        """Return whether rank 0 saved a residual of sync that does not fit this run."""
        residual = self._optimizer(0).get(STATE_KEY, {}).get("sync", {}).get("residual")
        return not self.same_columns(shapes) and residual is not None and residual.numel() > 0
