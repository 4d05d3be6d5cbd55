# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Prose and identifiers use the field's terms, not words that only this project gave a meaning.

Checked are README, docs, and of the package, the builder, the benchmarks and the tests every
docstring, comment and text with a space in it: messages, help, descriptions of keys. Names in code
font, names of parameters and fenced code are not prose; identifiers are checked on their own.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tests.documents import DOCUMENTS
from tests.house import Source, sources
from tests.launching import ROOT

WORDS = {
    "hop": (r"\bhops?\b", "process group"),
    "route": (r"\broutes?\b", "hierarchical collective"),
    "slot": (r"(?<!-by )\bslots?\b", "parameter index"),
    "span": (r"\b(a|the|its|each|of) spans?\b|\bspans (of|that)\b", "shard range"),
    "piece": (r"\bpieces? of (a )?(gradient|weight|shard)s?\b", "view"),
    "lane": (r"\blanes?\b", "queue"),
    "codes": (r"\b(as|resident|held) codes\b|\bcodes alone\b|\bcodes' ", "INT8 weights"),
    "escaped": (r"(?<!as )\bescape[sd]?\b(?! (every|character|sequence))", "sent whole"),
    "owed": (r"\b(owe[ds]?|owing|debts?)\b", "residual"),
    "carry": (r"(?<!topo )\bcarr(y|ies|ied)\b.{0,20}\bresidual", "store"),
    "told": (r"\btold\b", "reported; flag"),
    "look": (r"\b(an?|one|each|no|per|of|the) looks?\b(?!-)|\blooks at\b", "synchronization"),
    "pick": (r"\bpick(s|ed|ing)?\b", "selected element"),
    "held": (
        r"\bheld\b|\b(ranks?|[GC]PUs?|plans?|modes?|memory|machine|who|what (it|each)) (alone "
        r")?holds?\b",
        "stored",
    ),
    "beside": (r"\bbeside\b", "in addition to; next to"),
    "seat": (r"\bseats?\b", "placement"),
    "doubt": (r"\b(doubts?|hints?)\b", "warning"),
    "in full": (r"\bin full\b", "uncompressed"),
    "fewer bits": (r"\bfewer bits\b", "quantized"),
    "dies": (r"(?<!rank )(?<!rank \d )(?<!store )\bdies\b|\b(a|the|per|each) die\b", "GCDs"),
    "kept whole": (r"\bkept whole\b", "persistent"),
    "hangs on": (r"\bhangs? on\b", "depends on"),
    "travel": (r"\btravel(s|led)?\b", "is sent"),
}
"""Words to avoid: a pattern of the sense that is meant, and what to write instead."""

FIELDS_OWN = {
    "lane": (
        "quant/reference_sparse.py",
        "quant/triton_sparse.py",
        "config/tagc_config.py",
        "docs/kernels.md",
    ),
    "slot": ("e2e/test_enable.py",),
    "hop": ("topology/captures.py",),
    "held": ("topology/ring.py",),
    "escaped": (
        "programs/refused.py",
        "unit/test_page.py",
        "test_topology_devices.py",
        "test_topology_nvidia_smi.py",
    ),
}
"""Files in which a word is the field's own or a name: lanes of a GPU's warp and of TAGC's sketch,
slots of a hostfile, hops of amd-smi, Held and Karp, escapes of a terminal.
"""

IDENTIFIERS = (
    r"hops?|routes?",  # process group, stages of a hierarchical collective
    r"slots?|spans?|lanes?",  # parameter index, shard range, queue
    r"seats?|told|beside",  # placement, reported, next to
    r"picks?|picked|held|owed",  # selected, stored, residual
)
"""Words that no identifier has as a part."""

ROOMS = ("zero_topo", "op_builder", "benchmarks", "tests")

NAMES = (r"``?[^`]+``?", r"\{\w+\}", r"^[^\n]*\bTensor(\(\w!\))? \w+,[^\n]*", r"^ +\w+(, \w+)*: ")
"""Names in a text of Python: code font, fields of a format, an operator's schema, the parameter of
an Args line.
"""


Line = tuple[Path, int, str]


def prose_of_page(path: Path) -> Iterator[Line]:
    """Yield ``(file, line number, text)`` of what people read in a page, without names in code
    font.
    """
    text = path.read_text()
    for code in (r"^```.*?^```", r"<!--.*?-->", r"`[^`]*`", r"(?<=\])\([^)]*\)"):
        text = re.sub(
            code, lambda match: "`" + "\n" * match[0].count("\n"), text, flags=re.M | re.S
        )
    yield from ((path, number, line) for number, line in enumerate(text.splitlines(), 1))


def prose_of_source(source: Source) -> Iterator[Line]:
    """Yield the same of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield source.path, token.start[0], without_names(token.string)
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            lines = without_names(node.value).splitlines()
            yield from (
                (source.path, node.lineno + number, line) for number, line in enumerate(lines)
            )


def without_names(text: str) -> str:
    """Leave out names, which other tests keep; lines stay where they are."""
    for name in NAMES:
        text = re.sub(name, lambda match: "`" + "\n" * match[0].count("\n"), text, flags=re.M)
    return text


def test_words_of_ours_are_gone() -> None:
    """On failure, write the field's term that stands first in the line."""
    any_word = re.compile("|".join(pattern for pattern, _ in WORDS.values()), re.IGNORECASE)
    found = [
        f"{instead}: {path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, number, line in chain(
            *map(prose_of_page, DOCUMENTS),
            *(
                prose_of_source(source)
                for source in sources(*ROOMS)
                if any_word.search(source.text)
            ),
        )
        if any_word.search(line) and path != Path(__file__)
        for name, (pattern, instead) in WORDS.items()
        if re.search(pattern, line, re.IGNORECASE)
        and not path.as_posix().endswith(FIELDS_OWN.get(name, ("-",)))
    ]
    assert not found, "\n".join(found)


def test_identifiers_are_the_fields_too() -> None:
    """A name with such a word in it, in any case; `two_hop` is a key of the block."""
    words = re.compile(rf"(^|_)({'|'.join(IDENTIFIERS)})(_|$)", re.IGNORECASE)
    anywhere = re.compile(rf"(\b|_)({'|'.join(IDENTIFIERS)})(\b|_)", re.IGNORECASE)
    found = []
    for source in sources(*ROOMS):
        if not anywhere.search(source.text.replace("two_hop", "")):
            continue
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.NAME and words.search(token.string.replace("two_hop", "")):
                found.append(f"{source.path.relative_to(ROOT)}:{token.start[0]}: {token.string}")
    assert not found, "\n".join(found)
