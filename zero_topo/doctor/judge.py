# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m zero_topo.doctor.judge``: reads configs, a line of JSON each, and prints what
DeepSpeed refuses.

For ``null`` in place of a config and its ranks it prints the state of torch and DeepSpeed, see
``probe.py``.
"""

from __future__ import annotations

import json
import logging
import os
import sys

from zero_topo.doctor.probe import state


def main() -> None:
    """Answer a line for each line until standard input ends."""
    logging.disable(logging.WARNING)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed prints
    import deepspeed  # noqa: F401  (with it comes the hook, whose optimizers DeepSpeed then knows)

    from zero_topo.doctor.judgement import refusals

    print("[]", file=answers, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answer = state() if request is None else refusals(*request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
