# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Prose uses the field's terms: words that only this project gave a meaning stay out of pages, docstrings and messages.

Checked are README, docs, and of the package and the benchmarks every docstring, comment and text with a space in it:
messages, help, descriptions of keys. Names in code font, names of parameters and fenced code are not prose.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.documents import DOCUMENTS
from tests.house import sources
from tests.launching import ROOT


class Word(NamedTuple):
    """A word to avoid: its pattern, what to write instead, jargon that matches, ordinary English that does not."""

    pattern: str
    instead: str
    jargon: str
    ordinary: str = ""


WORDS = {
    "hop": Word(r"\bhops?\b", "process group", "the inner hop", "`hop` is a name; people hope"),
    "route": Word(r"\broutes?\b", "hierarchical collective", "along the route", "a routed packet"),
    "slot": Word(r"(?<!-by )\bslots?\b", "parameter index", "the slot of a weight", "mpirun --rank-by slot"),
    "span": Word(
        r"\b(a|the|its|each|of) spans?\b|\bspans (of|that)\b", "shard range", "its span", "it spans two nodes"
    ),
    "piece": Word(
        r"\bpieces? of (a )?(gradient|weight|shard)s?\b", "view", "own a piece of gradients", "pieces of text"
    ),
    "lane": Word(r"\blanes?\b", "queue", "the lane of publish", "a planet"),
    "codes": Word(
        r"\b(as|resident|held) codes\b|\bcodes alone\b|\bcodes' ", "INT8 weights", "held as codes", "in code"
    ),
    "escaped": Word(
        r"(?<!as )\bescape[sd]?\b(?! (every|character|sequence))", "sent whole", "a block escapes", "shown as escapes"
    ),
    "owed": Word(r"\b(owe[ds]?|owing|debts?)\b", "residual", "what a rank owes", "powed"),
    "carry": Word(
        r"(?<!topo )\bcarr(y|ies|ied)\b.{0,20}\bresidual", "store", "it carries residuals", "a node's uplink carries it"
    ),
    "told": Word(r"\btold\b", "reported; flag", "ranks are told", "untold"),
    "look": Word(
        r"\b(an?|one|each|no|per|of|the) looks?\b|\blooks at\b", "synchronization", "a look per step", "look for"
    ),
    "pick": Word(r"\bpick(s|ed|ing)?\b", "selected element", "picks of a rank", "a pickle"),
    "held": Word(
        r"\bheld\b|\b(ranks?|[GC]PUs?|plans?|modes?|memory|machine|who|what (it|each)) (alone )?holds?\b",
        "stored",
        "bytes held",
        "Holds the settings; Held and Karp",
    ),
    "beside": Word(r"\bbeside\b", "in addition to; next to", "the bytes beside them", "besides"),
    "seat": Word(r"\bseats?\b", "placement", "the seat of a rank", "where a rank sits"),
    "doubt": Word(r"\b(doubts?|hints?)\b", "warning", "doubts worth showing", "undoubtedly"),
    "in full": Word(r"\bin full\b", "uncompressed", "all is sent in full", "a full node"),
    "fewer bits": Word(r"\bfewer bits\b", "quantized", "what travels in fewer bits", "fewer bytes"),
    "dies": Word(
        r"(?<!rank )(?<!rank \d )(?<!store )\bdies\b|\b(a|the|per|each) die\b",
        "GCDs",
        "dies of a GPU",
        "if rank 0 dies",
    ),
    "kept whole": Word(r"\bkept whole\b", "persistent", "weights kept whole", "sent whole"),
    "hangs on": Word(r"\bhangs? on\b", "depends on", "the step hangs on it", "a run that hangs"),
    "travel": Word(r"\btravel(s|led)?\b", "is sent", "nothing travels", "unravel"),
}
"""The vocabulary of the project's style, as patterns of the sense that is meant."""

FIELDS_OWN = {
    "lane": ("quant/reference.py", "quant/triton_sparse.py", "config/tagc_config.py", "docs/kernels.md"),
}
"""Files in which a word is the field's own: lanes of a GPU's warp, and of TAGC's sketch."""

NAMES = (r"``?[^`]+``?", r"\{\w+\}", r"^[^\n]*\bTensor(\(\w!\))? \w+,[^\n]*", r"^ +\w+(, \w+)*: ")
"""Names in a text of Python: code font, fields of a format, an operator's schema, the parameter of an Args line."""


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield ``(line number, text)`` of what people read in a page or a Python file, without names in code font."""
    text = path.read_text()
    if path.suffix == ".md":
        for code in (r"^```.*?^```", r"<!--.*?-->", r"`[^`]*`", r"(?<=\])\([^)]*\)"):
            text = re.sub(code, lambda match: "`" + "\n" * match[0].count("\n"), text, flags=re.M | re.S)
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], without_names(token.string)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            lines = without_names(node.value).splitlines()
            yield from ((node.lineno + number, line) for number, line in enumerate(lines))


def without_names(text: str) -> str:
    """Leave out names, which other tests keep; lines stay where they are."""
    for name in NAMES:
        text = re.sub(name, lambda match: "`" + "\n" * match[0].count("\n"), text, flags=re.M)
    return text


def test_words_of_ours_are_gone() -> None:
    """On failure, write the field's term that stands first in the line."""
    found = [
        f"{word.instead}: {path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*DOCUMENTS, *(source.path for source in sources("zero_topo", "benchmarks")))
        for number, line in prose(path)
        for name, word in WORDS.items()
        if re.search(word.pattern, line) and not path.as_posix().endswith(FIELDS_OWN.get(name, ("-",)))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("word", WORDS)
def test_a_planted_word_is_found(word: str, tmp_path: Path) -> None:
    """In a page, a docstring, a comment and a message; ordinary English that looks alike is not."""
    pattern, _, jargon, ordinary = WORDS[word]
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    for text, count in ((jargon, 1), (ordinary, 0)):
        page.write_text(f"# Title\n\n{text}\n")
        assert sum(bool(re.search(pattern, line)) for _, line in prose(page)) == count
        module.write_text(f'"""Say {text}."""\n# say {text}\nraise ValueError("say {text}")\n')
        assert sum(bool(re.search(pattern, line)) for _, line in prose(module)) == 3 * count
