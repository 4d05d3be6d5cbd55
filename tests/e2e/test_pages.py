# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The docs as a browser shows them: no page is wider than a telephone's or a desktop's window."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import PAGES
from tests.launching import ROOT

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (390, 1280)
PROBE = """<body><script>
const found = {};
let waiting = PAGES.length * WIDTHS.length;
for (const page of PAGES) for (const width of WIDTHS) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 900; frame.style.border = 0; frame.src = page;
  frame.onload = () => {
    const root = frame.contentDocument.documentElement;
    found[`${page} at ${width}`] = [root.clientWidth, root.scrollWidth, root.innerText.length];
    if (--waiting === 0) document.body.textContent = JSON.stringify(found);
  };
  document.body.append(frame);
}
</script></body>
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium: apt-get install chromium"),
    pytest.mark.skipif(not (Path(sys.prefix) / "bin/mkdocs").exists(), reason="mkdocs is not installed: make docs"),
]


def test_no_page_is_wider_than_its_window(tmp_path: Path) -> None:
    """Wide tables and lines of code scroll by themselves. All pages in frames of both widths, in one browser."""
    site = tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=120)
    names = [f"{path.stem}.html" for path in PAGES]
    probe = site / "probe.html"
    probe.write_text(PROBE.replace("PAGES", json.dumps(names)).replace("WIDTHS", json.dumps(WIDTHS)))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"]
    command = [
        str(BROWSER),
        *options,
        f"--user-data-dir={tmp_path}/profile",
        "--virtual-time-budget=20000",
        "--dump-dom",
    ]
    done = subprocess.run([*command, probe.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    body = re.search(r"<body>(\{.*\})</body>", done.stdout, re.DOTALL)
    assert body is not None, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(html.unescape(body[1]))
    assert {window for window, _, _ in found.values()} == set(WIDTHS) and len(found) == len(names) * len(WIDTHS)
    assert not {page: sizes for page, sizes in found.items() if sizes[2] < 200}, "pages that show nothing"
    assert not {page: sizes for page, sizes in found.items() if sizes[1] > sizes[0]}
