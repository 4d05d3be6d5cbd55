# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Collective checks: all ranks have one plan, replicas are bit-identical; and the placement of each
rank, from which all build one tree.

Each check gathers its evidence on every rank and evaluates it there, so all ranks raise the same
error and none hangs.

Digests first
    A plan with the order of 75,264 ranks is a megabyte; an all-gather of it would move 56 PB. Ranks
    therefore gather digests of 32 bytes each. Only if these differ, one rank of each kind
    broadcasts its text.

Note [A rank without the block]
    A rank without a ``zero_topo`` block continues with stock DeepSpeed. It must not wait for the
    others, nor they for it: its script may have imported zero_topo only for a plan, on one rank.
    Every rank therefore registers in the store of torch's rendezvous, and only ranks with the block
    wait until all have registered.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from struct import Struct
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.config import ResolvedConfig
from zero_topo.config.deepspeed_json import BLOCK_VARIABLE, exported
from zero_topo.plan import Plan
from zero_topo.quant.operands import counted
from zero_topo.topology.devices import devices_of_package, nvlink_domain, package_of, same_model
from zero_topo.topology.placements import Placement

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ROW = Struct("64s 16s 16s 16s B")
"""A placement as ranks gather it: host, machine, package, NVLink domain, devices of a package."""

MOST_NAMED = 4
"""At most so many kinds of ranks are named in an error, and so many differences of each."""
SAME_START = "give every rank the same JSON, model, optimizer, software and launcher environment"


def check_blocks(
    store: dist.Store,
    rank: int,
    world_size: int,
    has_block: bool,
    of_environment: str | None = None,
) -> None:
    """Wait until every rank has begun this engine, and check that all configs have a ``zero_topo``
    block.

    A rank without a block does not wait (Note [A rank without the block]).

    Args:
        store: the store of torch's rendezvous.
        rank: this rank.
        world_size: number of ranks that build this engine.
        has_block: whether this rank's config has the block.
        of_environment: the value of ``ZERO_TOPO_BLOCK``, from which this rank's block comes; None
            if its JSON has it.

    Raises:
        ValueError: on every rank with a block, naming ranks without one.
        TimeoutError: after the store's timeout, naming ranks that have not begun the engine.
    """
    turn = store.add(_engines_of(rank), 1)
    # Engines are counted, so that keys of one engine are never read for the next.
    here = dist.PrefixStore(f"zero_topo/engine {turn}", store)
    if not has_block:
        here.set(f"without {here.add('without', 1)}", f"rank {rank} of host {socket.gethostname()}")
    # The last rank lets the others go: one key to wait for, however many ranks there are.
    if here.add("here", 1) == world_size:
        here.set("all here", "yes")
    if not has_block:
        return
    try:
        here.wait(["all here"])
    except RuntimeError as error:
        raise TimeoutError(
            f"ranks {_missing(store, here, turn, world_size)} did not begin the engine that the "
            "others have begun: "
            "import zero_topo and call deepspeed.initialize on every rank, or look in their logs"
        ) from error
    without = here.add("without", 0)
    if without:
        count = min(without, MOST_NAMED)
        named = [here.get(f"without {i}").decode() for i in range(1, count + 1)]
        if of_environment is not None:
            raise ValueError(
                f"{BLOCK_VARIABLE} is not set on {without} of {world_size} ranks, such as "
                f"{', '.join(named)}: launchers pass few variables on to other nodes; DeepSpeed's "
                f"reads ~/.deepspeed_env, so add this line there: {exported(of_environment)}"
            )
        raise ValueError(
            f'{without} of {world_size} ranks have no "zero_topo" block in their DeepSpeed config, '
            "such as "
            f"{', '.join(named)}; give every rank the same JSON"
        )


def _engines_of(rank: int) -> str:
    return f"zero_topo/engines of rank {rank}"


def _missing(store: dist.Store, here: dist.Store, turn: int, world_size: int) -> str:
    """Return the ranks that have not begun their engine number ``turn``; one rank queries the store
    for all.
    """
    if here.add("asking", 1) == 1:
        missing = [rank for rank in range(world_size) if store.add(_engines_of(rank), 0) < turn]
        here.set("missing", str(missing[:8]))
    return here.get("missing").decode()


def check_agreement(
    config: ResolvedConfig,
    device: torch.device,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Check that all ranks resolved one plan for one machine. Collective.

    Args:
        config: this rank's config.
        device: the accelerator this rank uses.
        more: further values that must be equal on all ranks, in JSON types.

    Raises:
        ValueError: on every rank, naming two ranks and their values.
    """
    topology = config.machine.to_json()
    agree({"zero_topo": config.to_json(), "topology": topology, **more}, device)


def agree(
    facts: Mapping[str, Any],
    device: torch.device,
    way_out: str = SAME_START,
    groups: Sequence[Sequence[int]] = (),
) -> None:
    """Check that all ranks report equal values. Collective.

    Args:
        facts: reported values by key; ``{"refused": sentence}`` from a rank that cannot continue.
        device: the device of the world group's tensors.
        way_out: what the user can do if ranks differ.
        groups: groups of ranks inside which values are compared; by default all ranks are.

    Raises:
        ValueError: on every rank, if reported values differ.
    """
    text = json.dumps(facts, sort_keys=True, default=_plain)
    rows = _gathered(sha256(text.encode()).digest(), device)
    # Only where digests differ are the values themselves sent.
    for members in groups or [range(len(rows))]:
        kinds: dict[bytes, list[int]] = {}
        for rank in members:
            kinds.setdefault(rows[rank], []).append(rank)
        if len(kinds) == 1:
            continue
        ranks = sorted(kinds.values(), key=lambda members: (-len(members), members))[:MOST_NAMED]
        texts = [_text_of(members[0], text) for members in ranks]
        raise ValueError(f"{_disagreement(ranks, texts)}; {way_out}")


def _gathered(row: bytes, device: torch.device) -> list[bytes]:
    """Return the row of each rank; all have one length. Collective."""
    own = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    table = own.new_empty(dist.get_world_size() * len(row))
    dist.all_gather_into_tensor(table, own)
    return [found.tobytes() for found in table.view(-1, len(row)).cpu().numpy()]


def all_can(
    problem: str | None,
    facts: Mapping[str, Any],
    device: torch.device,
    way_out: str,
    groups: Sequence[Sequence[int]] = (),
) -> str | None:
    """Return why ranks cannot all continue, None if they can and report equal values. Collective.

    Args:
        problem: why this rank cannot continue; None if it can.
        facts: the values it reports if it can.
        device: the device of the world group's tensors.
        way_out: what the user can do if some rank cannot continue.
        groups: groups of ranks inside which values are compared; by default all ranks are.

    Returns:
        The same message on every rank, naming a rank that cannot continue or reports other values.
    """
    try:
        # Of all ranks: those of one group may refuse with equal words, which the others must learn.
        agree({"refused": problem} if problem else {}, device, way_out)
        if problem is None:
            agree(facts, device, way_out, groups)
    except ValueError as error:
        return str(error)
    return problem and f"{problem}; {way_out}"  # all ranks report this problem


def _plain(value: Any) -> Any:
    """Convert a value that has no JSON type: a tensor to its values, another object to text without
    its address.
    """
    if isinstance(value, Tensor):
        return value.tolist()
    return re.sub(r" at 0x\w+", "", str(value))


def _text_of(leader: int, text: str) -> tuple[dict[str, Any], str]:
    """Broadcast the values that rank ``leader`` reports, and its host. Collective."""
    box = [text, socket.gethostname()]
    dist.broadcast_object_list(box, src=leader)
    return json.loads(box[0]), box[1]


def _disagreement(
    kinds: Sequence[Sequence[int]],
    texts: Sequence[tuple[Mapping[str, Any], str]],
) -> str:
    """Describe in one line how ranks differ from the largest kind, which comes first in
    ``kinds``.
    """
    named = [
        f"rank {ranks[0]} of host {host}" for ranks, (_, host) in zip(kinds, texts, strict=True)
    ]
    for name, (facts, _) in zip(named, texts, strict=True):
        if "refused" in facts:
            return f"{name} refuses: {facts['refused']}"
    # The first kind is the largest: what most ranks have counts as right.
    usual, *others = (dict(_leaves(facts)) for facts, _ in texts)
    odd = []
    for ranks, name, facts in zip(kinds[1:], named[1:], others, strict=True):
        every = sorted({*usual, *facts})
        keys = [key for key in every if usual.get(key) != facts.get(key)]
        values = [
            f"{key} {facts.get(key, 'absent')} in place of {usual.get(key, 'absent')}"
            for key in keys
        ]
        more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        odd.append(f"{name}{more} has {', '.join(values[:MOST_NAMED])}")
    return f"ranks do not agree with {named[0]} and {len(kinds[0]) - 1} more: {'; '.join(odd)}"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield ``key.key`` and the JSON value of each leaf of nested dicts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, json.dumps(value)


def gather_placements(device: torch.device) -> list[Placement]:
    """Return the placement of each rank, in rank order. Collective.

    Args:
        device: the accelerator this rank uses.
    """
    own = own_placement(device)
    # A row of fixed length for each rank: one all-gather.
    texts = (own.host.encode(), own.machine.encode(), own.package.encode(), own.domain.encode())
    rows = _gathered(ROW.pack(*texts, own.size), device)
    placements = []
    for row in rows:
        *padded, size = ROW.unpack(row)
        host, machine, package, domain = (text.rstrip(b"\0").decode() for text in padded)
        placements.append(Placement(host, machine, package, size, domain))
    return placements


def own_placement(device: torch.device) -> Placement:
    """Return where this rank runs; on a CPU only its host is known."""
    host = socket.gethostname()
    boot_id = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    # A host is what NCCL takes for one.
    machine = _digest(os.environ.get("NCCL_HOSTID") or f"{host} {boot_id}")
    if device.type == "cpu":
        return Placement(host, machine)
    backend = torch.get_device_module(device)
    found = backend.get_device_properties(device)
    size = devices_of_package(found.name, os.environ)
    if not hasattr(found, "pci_bus_id"):  # Intel's: torch has no address
        return Placement(host, machine, size=size)
    address = _address(found)
    others: list[str] = []
    if size > 1:
        visible = map(backend.get_device_properties, range(backend.device_count()))
        others = same_model(address) or [_address(other) for other in visible]
    domain = nvlink_domain(address) if torch.version.cuda else ""
    return Placement(
        host, machine, package_of(address, size, others), size, domain and _digest(domain)
    )


def _address(properties: Any) -> str:
    """Return the PCI domain, bus and device of a device from its properties in torch."""
    domain, bus = properties.pci_domain_id, properties.pci_bus_id
    return f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def check_replicas(plans: Mapping[tuple[int, ...], Plan], copies: Sequence[Tensor]) -> None:
    """Compare checksums of shards over the ranks that should store the same bits. Collective.

    Args:
        plans: the plan of each group of global ranks: ``copies[0]`` is replicated on ranks of one
            weights position, ``copies[1]`` on those of one secondary position.
        copies: this rank's shards.

    Raises:
        RuntimeError: on every rank, naming two ranks that differ.
    """
    sums = torch.stack([checksum(copy) for copy in copies])
    table = sums.new_empty(dist.get_world_size(), len(copies))
    dist.all_gather_into_tensor(table.view(-1), sums)
    for ranks, plan in plans.items():
        # Replicas of a shard are every degree-th rank in tree order.
        in_tree_order = [ranks[rank] for rank in plan.rank_at]
        degrees = {"weight": plan.weights, "secondary": plan.secondary}
        for column, (name, degree) in zip(range(len(copies)), degrees.items(), strict=False):
            assert degree is not None
            # One column per replicated position
            stored = table[in_tree_order, column].view(-1, degree)
            differ = (stored != stored[0]).nonzero()
            if len(differ):
                row, position = differ[0].tolist()
                raise RuntimeError(
                    f"ranks {in_tree_order[position]} and {in_tree_order[row * degree + position]} "
                    f"share a {name} shard but hold different bits after publish: the run is no "
                    "longer valid; restart from the last checkpoint and report this with your "
                    "configuration"
                )


def checksum(tensor: Tensor) -> Tensor:
    """Return an order-sensitive 64-bit checksum of a tensor's bytes (scalar int64 on its
    device).
    """
    data = tensor.contiguous().view(-1).view(torch.uint8)
    padding = -data.numel() % 8
    padded = torch.cat([data, data.new_zeros(padding)])
    words = padded.view(torch.int64)
    # Odd factors: a change of one word always changes the sum, modulo 2**64.
    places = 2 * counted(len(words), words) + 1
    return (words * places * 0x9E3779B1).sum()
