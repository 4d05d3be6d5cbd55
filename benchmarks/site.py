# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs for the pages of docs: the first one is the README, units stay with their
numbers, and nothing is fetched from elsewhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme would fetch so that the search works from a folder."""
OURS = "assets/folder-search.js"
CELL = re.compile(r"<t[dh][^>]*>.*?</t[dh]>", re.DOTALL)
UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]?B(?:/s)?|[KMG]bit/s|TFLOP/s|s|ms|us|min|h)\b)")
README = Path(__file__).parents[1] / "README.md"
LINK = re.compile(r"(!?)\[([^]]+)\]\(([^)]+)\)")
HARD_SPACE = "\N{NO-BREAK SPACE}"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the README in the place of the first page."""
    if page.file.src_uri != "index.md":
        return markdown
    return LINK.sub(_from_docs, README.read_text(encoding="utf-8"))


def _from_docs(link: re.Match[str]) -> str:
    """A link of the README as one of a page; what is no page is named without a link."""
    image, words, target = link.groups()
    page = target.removeprefix("docs/")
    return words if page == target else f"{image}[{words}]({page})"


def on_page_content(html: str, **_: Any) -> str:
    """Keep a number and its unit on one line, in cells of tables."""
    return CELL.sub(lambda cell: UNIT.sub(HARD_SPACE, cell[0]), html)


def on_post_page(output: str, **_: Any) -> str:
    """Take the script for the search from this site."""
    return output.replace(SHIM, OURS)
