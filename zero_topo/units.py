# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Bytes, rates and seconds: the constants, and how they are written for people.

Networks and published memory sizes are decimal (1 GB = 10^9 bytes), so decimal is the default; the
binary units are there for what is counted in powers of two. No other file spells out ``1e9``.
"""

from __future__ import annotations

KB = 1000
MB = 1000 * KB
GB = 1000 * MB
TB = 1000 * GB
PB = 1000 * TB

KIB = 1024

_DECIMAL = (("KB", KB), ("MB", MB), ("GB", GB), ("TB", TB), ("PB", PB))


def format_bytes(n: float) -> str:
    """Write a number of bytes in the largest decimal unit that keeps it at one or more.

    Args:
        n: bytes, not negative; may be fractional (a mean).

    Returns:
        For example ``"512 B"``, ``"1.50 GB"``.
    """
    if round(n) < KB:
        digits = f"{n:.0f}" if float(n).is_integer() else f"{n:.2f}".rstrip("0").rstrip(".")
        return f"{digits} B"
    for name, unit in _DECIMAL:
        # Compare the rounded value, or 999,999 bytes would be written "1000.00 KB".
        if round(n / unit, 2) < 1000 or name == _DECIMAL[-1][0]:
            return f"{n / unit:.2f} {name}"
    raise AssertionError("the last unit takes any size")


def format_count(n: int) -> str:
    """Write a number of parameters as people say it, to three digits: ``"350M"``, ``"20.0B"``,
    ``"1.50T"``.
    """
    for name, unit in (("", 1), ("K", KB), ("M", MB), ("B", GB), ("T", TB)):
        if float(f"{n / unit:.3g}") < 1000:
            return str(n) if n < KB else f"{n / unit:#.3g}".rstrip(".") + name
    return f"{n / TB:,.0f}T"


def format_seconds(s: float) -> str:
    """Write a duration, for example ``"3.2 us"``, ``"12.0 ms"``, ``"1.50 s"``, ``"2 min 05 s"``,
    ``"1 h 02 min"``.

    Args:
        s: seconds, not negative.
    """
    if s == 0:
        return "0 s"
    for name, unit in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        if round(s / unit, 1) < 1000:
            return f"{s / unit:.1f} {name}"
    if round(s, 2) < 60:
        return f"{s:.2f} s"
    minutes, seconds = divmod(round(s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(round(s / 60), 60)
    return f"{hours} h {minutes:02d} min"
