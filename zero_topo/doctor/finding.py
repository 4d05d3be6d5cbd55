# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines a finding of the doctor: the state of one subject, and the fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OK: Literal["ok"] = "ok"
WARN: Literal["warn"] = "warn"
FAIL: Literal["fail"] = "fail"


@dataclass(frozen=True)
class Finding:
    """Holds the result of one check.

    Attributes:
        state: "ok"; "warn" if runs work but slowly or not everywhere; "fail" if they will not work.
        subject: what was checked.
        text: what was found.
        fix: what to do about it; empty if all is well.
    """

    state: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.fix or self.state == OK, f"{self.subject}: a problem needs a fix"

    def line(self) -> str:
        """Return the finding in one line, without the state."""
        text = " ".join(self.text.split())
        return f"{text}; {self.fix}" if self.fix else text
