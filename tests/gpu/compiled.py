# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu.compiled`: compile our kernels and the DeepSpeed ops that later stages load,
side by side.
"""

from __future__ import annotations

import subprocess
import sys
import time

LOAD = (
    "from deepspeed.accelerator import get_accelerator as a; "
    "a().create_op_builder('{}').load(verbose=False)"
)
DEEPSPEED_OPS = ("FusedAdamBuilder", "CPUAdamBuilder", "QuantizerBuilder")


def main() -> int:
    """Return 1 if our kernels do not compile; DeepSpeed's failures are printed, and show again
    where they are used.
    """
    began = time.monotonic()
    words = {name: ["-c", LOAD.format(name)] for name in DEEPSPEED_OPS}
    words["zero_topo"] = ["-m", "zero_topo.cli", "build"]
    started = {}
    for name, own in words.items():
        program = [sys.executable, *own]
        started[name] = subprocess.Popen(
            program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    for name, process in started.items():
        output, _ = process.communicate()
        said = "compiled" if process.returncode == 0 else f"FAILED\n{output[-3000:]}"
        print(f"{name}: {said} after {time.monotonic() - began:.0f} s", flush=True)
    return int(started["zero_topo"].returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
