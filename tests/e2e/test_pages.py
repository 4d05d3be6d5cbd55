# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A report as a browser shows it: it fits the window of a telephone, tablet or desktop."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_report import EXACT, RESULT, RUN, folder
from zero_topo.observe.page import HTML
from zero_topo.observe.report import build_report

__all__ = ["folder"]

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WIDTHS = (390, 820, 1400)
PROBE = """<body><script>
const found = {};
let waiting = PAGES.length * WIDTHS.length;
for (const page of PAGES) for (const width of WIDTHS) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 900; frame.style.border = 0; frame.src = page;
  frame.onload = () => {
    const inner = frame.contentDocument, root = inner.documentElement;
    const style = getComputedStyle(inner.body);
    for (const part of inner.querySelectorAll("details")) part.open = true;
    found[`${page} at ${width}`] = {
      window: root.clientWidth, wide: root.scrollWidth,
      letters: root.innerText.length, title: inner.title,
      missing: [...inner.images].filter(image => !image.naturalWidth).length,
      images: inner.images.length,
      colours: [style.color, style.backgroundColor],
    };
    if (--waiting === 0) document.body.textContent = JSON.stringify(found);
  };
  document.body.append(frame);
}
</script></body>
"""
HOSTILE = (
    "A model <script>document.title = 'taken'</script><img src=x onerror=\"document.title = "
    "'taken'\">"
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium: apt-get install chromium"),
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_fits_shows_its_pictures_and_obeys_nothing(folder: Path, scheme: str) -> None:
    """At both widths, light and dark, all parts open; a title full of tags and a long word change
    nothing.
    """
    result = RESULT | {
        "title": f"{HOSTILE} {'x' * 300}",
        "settings": {"data": HOSTILE, "long": "y" * 500},
    }
    build_report(folder, RUN, [EXACT] * 8, **result)
    found = shown(folder, [HTML], preference(scheme))
    for look in found.values():
        assert look["wide"] <= look["window"] and look["letters"] > 2000, look
        assert (look["images"], look["missing"]) == (3, 0) and look["title"] == result["title"], (
            look
        )
        black, white = "rgb(0, 0, 0)", "rgb(255, 255, 255)"
        assert (look["colours"] == [black, white]) == (scheme == "light"), look
        assert (look["colours"][0] == white) == (scheme == "dark"), look


def preference(scheme: str) -> str:
    """The option that makes a browser prefer a theme, by Blink's number of it."""
    return f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}"


def shown(site: Path, names: list[str], *options: str) -> dict[str, dict[str, Any]]:
    """Page and width -> what a browser makes of a folder's page in a frame of that width."""
    probe = site / "probe.html"
    probe.write_text(
        PROBE.replace("PAGES", json.dumps(names)).replace("WIDTHS", json.dumps(WIDTHS))
    )
    usual = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
    ]
    # It keeps a theme
    profile = site / "-".join(["profile", *(re.sub(r"\W", "", option) for option in options)])
    how = [f"--user-data-dir={profile}", "--virtual-time-budget=20000", "--dump-dom"]
    command = [str(BROWSER), *usual, *options, *how, probe.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    body = re.search(r"<body>(\{.*\})</body>", done.stdout, re.DOTALL)
    assert body is not None, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(html.unescape(body[1]))
    assert {look["window"] for look in found.values()} == set(WIDTHS) and len(found) == len(
        names
    ) * len(WIDTHS)
    return found
