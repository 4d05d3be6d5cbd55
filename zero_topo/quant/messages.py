# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Messages of one size in a table, as backends read and write them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Messages:
    """What several sources say to several members.

    Attributes:
        table: uint8 ``[sources, outer, inner, bytes]``, the bytes of each message adjacent, the rest of any strides.
            Member ``m`` is ``(m // inner, m % inner)``.
        without_source: a source whose messages are not summed, None for none.
        without_member: a member whose message is neither written nor read, None for none.
    """

    table: Tensor
    without_source: int | None = None
    without_member: int | None = None

    @property
    def members(self) -> int:
        """How many members there are."""
        return self.table.shape[1] * self.table.shape[2]

    def kept(self) -> list[int]:
        """The members but the one left out."""
        return [m for m in range(self.members) if m != self.without_member]

    def of(self, member: int) -> list[Tensor]:
        """Messages to a member of each source but the one left out."""
        outer, inner = divmod(member, self.table.shape[2])
        return [t[outer, inner] for s, t in enumerate(self.table) if s != self.without_source]


def to_members(messages: Tensor, without: int | None = None) -> Messages:
    """One message for each member: ``[bytes]``, ``[members, bytes]`` or ``[outer, inner, bytes]``."""
    assert messages.dim() <= 3
    return Messages(messages[(None,) * (4 - messages.dim())], without_member=without)


def from_sources(messages: Tensor, without: int | None = None) -> Messages:
    """Messages to be summed: ``[sources, bytes]``, or ``[sources, members, bytes]`` for several members."""
    assert messages.dim() in (2, 3)
    return Messages(messages[:, None, None] if messages.dim() == 2 else messages[:, None], without_source=without)
