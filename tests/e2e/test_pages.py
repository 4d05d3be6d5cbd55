# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Pages as a browser shows them: none, of docs or report, is wider than the window of a telephone,
tablet or desktop.

The search box of the docs finds pages, from a folder as from a server, and nothing is fetched from
elsewhere.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import pytest

from tests.documents import PAGES
from tests.launching import ROOT
from tests.unit.test_report import EXACT, RESULT, RUN, folder
from zero_topo.observe.page import HTML
from zero_topo.observe.report import build_report

__all__ = ["folder"]

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WIDTHS = (390, 820, 1400)
WAIT_S = 60
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
    const cut = [];  // numbers that stand on another line than their unit
    for (const cell of inner.querySelectorAll("td, th")) {
      const walk = inner.createTreeWalker(cell, NodeFilter.SHOW_TEXT), range = inner.createRange();
      const unit = /[0-9.]+[ \u00a0](?:[KMGT]?B|ms|us|s)\b/g;
      while (walk.nextNode()) for (const at of walk.currentNode.data.matchAll(unit)) {
        range.setStart(walk.currentNode, at.index);
        range.setEnd(walk.currentNode, at.index + at[0].length);
        if (range.getClientRects().length > 1) cut.push(at[0]);
      }
    }
    found[`${page} at ${width}`] = {
      window: root.clientWidth, wide: root.scrollWidth,
      letters: root.innerText.length, title: inner.title,
      missing: [...inner.images].filter(image => !image.naturalWidth).length,
      images: inner.images.length, cut: cut,
      from_elsewhere: [...inner.querySelectorAll("script[src], link[rel=stylesheet], img")]
        .map(part => part.src || part.href)
        .filter(address => !address.startsWith(location.href.split("probe")[0])),
      colours: [style.color, style.backgroundColor],
      scrolled: [...inner.querySelectorAll(".md-typeset__scrollwrap, pre > code")]
        .filter(part => part.scrollWidth > part.clientWidth)
        .map(part => part.innerText.slice(0, 40)),
      hidden: [...inner.querySelectorAll(".md-typeset__scrollwrap")]
        .filter(part => getComputedStyle(part).overflowX !== "auto"
          || getComputedStyle(part).backgroundImage === "none")
        .length,
    };
    if (--waiting === 0) document.body.textContent = JSON.stringify(found);
  };
  document.body.append(frame);
}
</script></body>
"""
SEARCH = """<script>addEventListener("load", async () => {
  const box = document.querySelector("[data-md-component=search-query]");
  box.focus(); box.value = "ternary";
  box.dispatchEvent(new Event("input", {bubbles: true}));
  box.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true, key: "y"}));
  let found = [];
  for (let tries = 0; tries < 100 && !found.length; tries++) {
    await new Promise(done => setTimeout(done, 200));
    found = [...document.querySelectorAll(".md-search-result__item a")]
      .map(link => link.getAttribute("href"));
  }
  const names = found.map(link => link.split("/").pop().split(/[#?]/)[0]);
  console.log("FOUND " + names.join(" ") + " END");
});</script></body>"""
HOSTILE = (
    "A model <script>document.title = 'taken'</script><img src=x onerror=\"document.title = "
    "'taken'\">"
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium: apt-get install chromium"),
]


BUILT = pytest.mark.skipif(
    not (Path(sys.prefix) / "bin/mkdocs").exists(), reason="mkdocs is not installed: make docs"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of docs, built."""
    folder = tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        str(folder),
    ]
    subprocess.run(build, cwd=ROOT, check=True, timeout=120)
    return folder


@BUILT
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_its_window(site: Path, scheme: str) -> None:
    """On a desktop all tables and code fit. Elsewhere wide ones scroll, and a table's shadow shows
    it.

    All pages in frames of three widths, in one browser, in both themes. No number is cut from its
    unit.
    """
    found = shown(site, [f"{path.stem}.html" for path in PAGES], preference(scheme))
    assert not {page: look for page, look in found.items() if look["letters"] < 200}, (
        "pages that show nothing"
    )
    assert not {
        page: look
        for page, look in found.items()
        if look["wide"] > look["window"] or look["hidden"]
    }
    assert not {page: look["cut"] for page, look in found.items() if look["cut"]}
    assert not {page: look["missing"] for page, look in found.items() if look["missing"]}, (
        "pictures that do not load"
    )
    assert not {
        page: look["from_elsewhere"] for page, look in found.items() if look["from_elsewhere"]
    }
    dark = {
        sum(map(int, re.findall(r"\d+", look["colours"][1])[:3])) < 3 * 128
        for look in found.values()
    }
    assert dark == {scheme == "dark"}
    desktop = {
        page: look["scrolled"] for page, look in found.items() if look["window"] == max(WIDTHS)
    }
    assert not {page: scrolled for page, scrolled in desktop.items() if scrolled}


@BUILT
@pytest.mark.parametrize("place", ["folder", "server"])
def test_the_search_box_finds_pages(site: Path, place: str) -> None:
    """As a reader opens them: without a network, and from a folder without rights that a browser
    does not give.
    """
    page = site / "search-probe.html"
    page.write_text((site / "measured.html").read_text().replace("</body>", SEARCH))
    handler = partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = (
            page.as_uri()
            if place == "folder"
            else f"http://127.0.0.1:{server.server_port}/{page.name}"
        )
        said = console(address, site / f"profile-{place}", "FOUND .* END")
        server.shutdown()
    assert {"sparse.html", "losses.html"} <= set(said.split()), said


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


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, *words: Any) -> None:
        """Log nothing."""


def preference(scheme: str) -> str:
    """The option that makes a browser prefer a theme, by Blink's number of it."""
    return f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}"


def console(address: str, profile: Path, wanted: str) -> str:
    """The first message of a page's console that matches, in a browser with the rights that it has
    by default.
    """
    how = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--enable-logging=stderr",
    ]
    command = [str(BROWSER), *how, address]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as browser:
        assert browser.stderr is not None
        timer = Timer(WAIT_S, browser.kill)
        timer.start()
        try:
            said = (re.search(wanted, line) for line in browser.stderr if "CONSOLE" in line)
            found = next((match[0] for match in said if match), "")
        finally:
            timer.cancel()
            browser.kill()
    return found


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
