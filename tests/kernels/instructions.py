# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How many instructions a loop of a kernel takes, in NVIDIA's SASS or AMD's assembly.

A loop is the shortest cycle through basic blocks that a test names by what they contain. So
branches that the fast path does not take cost their test alone.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Block:
    """A basic block.

    Attributes:
        code: its instructions.
        after: numbers of the blocks that may follow.
    """

    code: list[str]
    after: list[int] = field(default_factory=list)

    def count(self, pattern: str) -> int:
        """Instructions that match a pattern."""
        return sum(bool(re.search(pattern, line)) for line in self.code)


Choice = Callable[[Block], int]
"""A number for a basic block; of all blocks the first one with the largest is meant."""


def sass_functions(text: str) -> dict[str, list[tuple[str, str]]]:
    """The functions in what cuobjdump prints: addresses and instructions, by mangled name."""
    functions: dict[str, list[tuple[str, str]]] = {}
    for part in text.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        lines = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(.*?) *;", body, re.MULTILINE)
        functions[name.strip()] = [(f"0x{int(at, 16):x}", line) for at, line in lines]
    return functions


def sass_blocks(lines: Sequence[tuple[str, str]]) -> list[Block]:
    """The basic blocks of a function; an indirect branch may lead to any that no other leads to."""
    jump = re.compile(r"\b(?:BRA|BSSY|CALL)\b.* (0x[0-9a-f]+)$")
    targets = {found[1] for _, line in lines if (found := jump.search(line))}
    lines = [line for line in lines if line[1] != "NOP"]
    blocks, at = _cut(lines, targets, r"\b(BRA|EXIT|BRX|RET)\b")
    for number, block in enumerate(blocks):
        last = block.code[-1]
        found = jump.search(last)
        if found and "BRA" in last:
            block.after.append(at[found[1]])
        if not re.match(r"(BRA|EXIT|BRX|RET)\b", last) or re.search(r"BRA\S* !?U?P\d", last):
            block.after.append(number + 1)
    known = {number for block in blocks for number in block.after}
    others = [number for number in range(1, len(blocks)) if number not in known]
    for number, block in enumerate(blocks):
        if "BRX" in block.code[-1]:
            block.after += [other for other in others if other > number]
    return blocks


def amd_blocks(assembly: str) -> list[Block]:
    """The basic blocks of a kernel in LLVM's assembly."""
    lines: list[tuple[str, str]] = []
    labels: list[str] = []
    place: dict[str, str] = {}
    for line in assembly.splitlines():
        text = line.split(";")[0].strip()
        if text.startswith(".LBB"):
            labels.append(text.rstrip(":"))
        elif text and text[0] not in ".#" and not text.startswith(("s_nop", "s_waitcnt")):
            for label in labels:
                place[label] = labels[0]
            lines.append((labels[0] if labels else "", text))
            labels = []
    blocks, at = _cut(lines, set(place.values()), r"^(s_cbranch\w*|s_branch|s_endpgm)")
    for number, block in enumerate(blocks):
        words = block.code[-1].split()
        if "branch" in words[0]:
            block.after.append(at[place[words[1]]])
        if words[0] not in ("s_branch", "s_endpgm"):
            block.after.append(number + 1)
    return blocks


def _cut(
    lines: Sequence[tuple[str, str]], targets: set[str], ends: str
) -> tuple[list[Block], dict[str, int]]:
    """Basic blocks without successors, and the number of each that begins at a target."""
    blocks, at = [Block([])], {}
    for place, line in lines:
        if place in targets:
            if blocks[-1].code:
                blocks.append(Block([]))
            at[place] = len(blocks) - 1
        blocks[-1].code.append(line)
        if re.search(ends, line):
            blocks.append(Block([]))
    return [block for block in blocks if block.code], at


def cycle(blocks: Sequence[Block], choices: Sequence[Choice]) -> int:
    """Instructions of the shortest cycle through the chosen blocks, in this order."""
    chosen = []
    for choice in choices:
        numbers = [choice(block) for block in blocks]
        chosen.append(numbers.index(max(numbers)))
    ways = zip(chosen, [*chosen[1:], chosen[0]], strict=True)
    return sum(_way(blocks, begin, end) for begin, end in ways)


def _way(blocks: Sequence[Block], begin: int, end: int) -> int:
    """Instructions of the shortest way from the end of a block to that of another."""
    done: set[int] = set()
    heap = [(len(blocks[number].code), number) for number in blocks[begin].after]
    heapq.heapify(heap)
    while heap:
        length, number = heapq.heappop(heap)
        if number == end:
            return length
        if number not in done:
            done.add(number)
            for after in blocks[number].after:
                heapq.heappush(heap, (length + len(blocks[after].code), after))
    raise AssertionError(f"no way from block {begin} to block {end}")
