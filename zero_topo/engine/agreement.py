# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks that need every rank: the same plan everywhere, the machine as declared, replicas bit-identical.

Each check gathers the evidence on every rank and judges it there, so all ranks raise the same error and none hangs.

Note [Digests first]
    A plan with the order of 75,264 ranks is a megabyte, and gathering it from each to each would be 56 PB. So ranks
    gather digests, 48 bytes each, and only where these differ, one rank for each difference tells all others its text.

Note [A rank without the block]
    It goes on to stock DeepSpeed, and neither may it wait there nor others for it: its script may have imported
    zero_topo for a plan, on one rank alone. So every rank leaves word in the store in which torch's ranks met, and
    only those with the block wait until all have.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.config import ResolvedConfig
from zero_topo.plan import Plan
from zero_topo.topology.captures import ask_tools
from zero_topo.topology.model import Topology
from zero_topo.topology.seats import Seat, check_seats, take_seat

DIGEST = 32
MOST_TOLD = 4
"""Of kinds of ranks that differ; and of differences between two."""
SAME_START = "give every rank the same JSON, model, optimizer, software and launcher environment"


def check_blocks(store: dist.Store, rank: int, world_size: int, has_block: bool) -> None:
    """Wait until every rank came this far with this engine, and see whether all have a ``zero_topo`` block.

    A rank without one does not wait (Note [A rank without the block]).

    Args:
        store: in which the ranks met.
        rank: this one.
        world_size: ranks that build this engine.
        has_block: whether this rank's config has the block.

    Raises:
        ValueError: on every rank with a block, naming those without.
        TimeoutError: after the store's timeout, naming ranks that did not come.
    """
    turn = store.add(_engines_of(rank), 1)
    here = dist.PrefixStore(f"zero_topo/engine {turn}", store)
    if not has_block:
        here.set(f"without {here.add('without', 1)}", f"rank {rank} of host {socket.gethostname()}")
    if here.add("here", 1) == world_size:
        here.set("all here", "yes")
    if not has_block:
        return
    try:
        here.wait(["all here"])
    except RuntimeError as error:
        raise TimeoutError(
            f"ranks {_missing(store, here, turn, world_size)} did not begin the engine that the others have begun: "
            "import zero_topo and call deepspeed.initialize on every rank, or look in their logs"
        ) from error
    without = here.add("without", 0)
    if without:
        named = [here.get(f"without {i}").decode() for i in range(1, min(without, MOST_TOLD) + 1)]
        raise ValueError(
            f'{without} of {world_size} ranks have no "zero_topo" block in their DeepSpeed config, such as '
            f"{', '.join(named)}; give every rank the same JSON"
        )


def _engines_of(rank: int) -> str:
    return f"zero_topo/engines of rank {rank}"


def _missing(store: dist.Store, here: dist.Store, turn: int, world_size: int) -> str:
    """Ranks that have not begun their engine number ``turn``; one rank asks for all others."""
    if here.add("asking", 1) == 1:
        missing = [rank for rank in range(world_size) if store.add(_engines_of(rank), 0) < turn]
        here.set("missing", str(missing[:8]))
    return here.get("missing").decode()


def check_agreement(
    config: ResolvedConfig, device: torch.device, more: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """All ranks resolved the same plan, and ranks that the topology puts on one node or GPU are there.

    Args:
        config: this rank's.
        device: the accelerator it uses.
        more: what else must be the same, in JSON types.

    Raises:
        ValueError: on every rank, naming two ranks and what they have, or the odd host.
    """
    topology = config.topology.to_json()
    topology.pop("sources", None)  # a tool that was too slow on one node leaves a note there
    seat = own_seat(config.topology, device)
    places = agree({"zero_topo": config.to_json(), "topology": topology, **more}, seat, device)
    with suppress(ValueError):
        check_seats(config.topology, places)
        return
    seats = [seat] * len(places)
    dist.all_gather_object(seats, seat)
    check_seats(config.topology, seats)  # the same, with the names of the hosts


def agree(told: Mapping[str, Any], seat: Seat, device: torch.device, way_out: str = SAME_START) -> list[Seat]:
    """Gather a digest of what this rank says, and where it sits. Collective.

    Args:
        told: values by key; ``{"refused": sentence}`` of a rank that cannot go on.
        seat: where this rank runs.
        device: where the world's collectives take tensors.
        way_out: what to do where ranks differ.

    Returns:
        A seat for each rank, whose host is a digest of its own.

    Raises:
        ValueError: on every rank, if not all say the same.
    """
    text = json.dumps(told, sort_keys=True, default=_plain)
    place = sha256(f"{seat.host} {seat.machine}".encode()).digest()[:8]
    package = (0 if seat.package is None else 1 + seat.package).to_bytes(8, "little")
    row = sha256(text.encode()).digest() + place + package
    own = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    table = own.new_empty(dist.get_world_size() * own.numel())
    dist.all_gather_into_tensor(table, own)
    data = table.cpu().numpy().tobytes()
    rows = [data[begin : begin + len(row)] for begin in range(0, len(data), len(row))]
    kinds: dict[bytes, list[int]] = {}
    for rank, found in enumerate(rows):
        kinds.setdefault(found[:DIGEST], []).append(rank)
    if len(kinds) > 1:
        ranks = sorted(kinds.values(), key=lambda members: (-len(members), members))[:MOST_TOLD]
        texts = [_text_of(members[0], text, seat.host) for members in ranks]
        raise ValueError(f"{_disagreement(ranks, texts)}; {way_out}")
    return [_place(found[DIGEST:]) for found in rows]


def all_can(problem: str | None, told: Mapping[str, Any], device: torch.device, way_out: str) -> None:
    """Go on only if every rank can, and all say the same. Collective.

    Args:
        problem: why this rank cannot; None if it can.
        told: what it says if it can.
        device: where the world's collectives take tensors.
        way_out: what to do where not all can.

    Raises:
        ValueError: on every rank, naming one that cannot or differs.
    """
    agree(told if problem is None else {"refused": problem}, Seat(socket.gethostname()), device, way_out)
    if problem is not None:  # all say the same
        raise ValueError(f"{problem}; {way_out}")


def _plain(value: Any) -> Any:
    """In JSON types what JSON does not know: a rate in a tensor by its value, an object without its address."""
    return value.tolist() if isinstance(value, Tensor) else re.sub(r" at 0x\w+", "", str(value))


def _place(data: bytes) -> Seat:
    """What :func:`agree` gathers of a seat: a digest of the host, and the package's number plus one or zero."""
    package = int.from_bytes(data[8:], "little")
    return Seat(data[:8].hex(), package=package - 1 if package else None)


def _text_of(leader: int, text: str, host: str) -> tuple[dict[str, Any], str]:
    """What a rank said, and its host. Collective."""
    box = [text, host]
    dist.broadcast_object_list(box, src=leader)
    return json.loads(box[0]), box[1]


def _disagreement(kinds: Sequence[Sequence[int]], texts: Sequence[tuple[Mapping[str, Any], str]]) -> str:
    """One line about ranks that say different things: the kind of most ranks first."""
    named = [f"rank {ranks[0]} of host {host}" for ranks, (_, host) in zip(kinds, texts, strict=True)]
    for name, (told, _) in zip(named, texts, strict=True):
        if "refused" in told:
            return f"{name} refuses: {told['refused']}"
    usual, *others = (dict(_leaves(told)) for told, _ in texts)
    odd = []
    for ranks, name, told in zip(kinds[1:], named[1:], others, strict=True):
        keys = [key for key in sorted({*usual, *told}) if usual.get(key) != told.get(key)]
        values = [f"{key} {told.get(key, 'absent')} in place of {usual.get(key, 'absent')}" for key in keys]
        more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        odd.append(f"{name}{more} has {', '.join(values[:MOST_TOLD])}")
    return f"ranks do not agree with {named[0]} and {len(kinds[0]) - 1} more: {'; '.join(odd)}"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """``key.key`` and value of each leaf of nested dicts; a long value is cut."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, json.dumps(value)


def own_seat(topology: Topology, device: torch.device) -> Seat:
    """Where this rank runs; tools are asked for GPU packages only where the topology says that ranks share one."""
    if device.type != "cuda" or topology.emulated:
        return take_seat(socket.gethostname(), None, None)
    found: Any = torch.cuda.get_device_properties(device)  # torch does not declare the PCI address
    bus_id = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    tree = ask_tools().tree if topology.ranks_per_gpu > 1 else None
    return take_seat(socket.gethostname(), bus_id, tree)


def check_replicas(plan: Plan, copies: Sequence[Tensor]) -> None:
    """Compare checksums of shards over the ranks that should hold the same bits.

    Args:
        plan: says who shares: ``copies[0]`` is shared within a weights position, ``copies[1]`` within a secondary one.
        copies: this rank's shards.

    Raises:
        RuntimeError: on every rank, naming two ranks that differ.
    """
    sums = torch.stack([checksum(copy) for copy in copies])
    table = sums.new_empty(plan.world_size, len(copies))
    dist.all_gather_into_tensor(table.view(-1), sums)
    rank_at = torch.tensor(plan.rank_at, device=table.device)
    degrees = {"weight": plan.weights, "secondary": plan.secondary}
    for column, (name, degree) in zip(range(len(copies)), degrees.items(), strict=False):
        assert degree is not None
        held = table[rank_at, column].view(-1, degree)  # a column for each position that is shared
        differ = (held != held[0]).nonzero()
        if len(differ):
            row, position = differ[0].tolist()
            raise RuntimeError(
                f"ranks {plan.rank_at[position]} and {plan.rank_at[row * degree + position]} share a {name} shard but "
                "hold different bits after publish: the run is no longer valid; restart from the last checkpoint and "
                "report this with your configuration"
            )


def checksum(tensor: Tensor) -> Tensor:
    """Order-sensitive 64-bit checksum of a tensor's bytes (scalar int64 on its device)."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    padding = -data.numel() % 8
    words = torch.cat([data, data.new_zeros(padding)]).view(torch.int64)
    places = torch.arange(1, 2 * words.numel(), 2, device=words.device, dtype=torch.int64)
    return (words * places * 0x9E3779B1).sum()
