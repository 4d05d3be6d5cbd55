# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""NeoX's own preprocessing tool on a text, byte by byte: `neox_data.py CHECKOUT TEXT PREFIX`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.e2e.programs import neox_on_cpu


def main(checkout: str, text: str, prefix: str) -> None:
    """Write `PREFIX_text_document.{bin,idx}`."""
    sys.path.insert(0, checkout)
    os.environ["DS_ACCELERATOR"] = "cpu"
    neox_on_cpu.stand_in(1)
    neox_on_cpu.adapt_neox()
    tool = Path(checkout) / "tools/datasets/preprocess_data.py"
    sys.argv = [
        str(tool),
        "--input",
        text,
        "--tokenizer-type",
        "CharLevelTokenizer",
        "--output-prefix",
        prefix,
    ]
    sys.argv += ["--vocab-file", "none", "--dataset-impl", "mmap", "--append-eod"]
    runpy.run_path(str(tool), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
