# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reports zero_topo's traffic and times through DeepSpeed: its monitors, ``wall_clock_breakdown``.

After every optimizer step rank 0 writes events about its own work to the monitors that the
DeepSpeed config enables (TensorBoard, W&B, Comet, CSV), at the sample count that DeepSpeed's own
events have.
"""

from __future__ import annotations

from collections.abc import Mapping

from zero_topo.plan import PHASES

Event = tuple[str, float, int]


def step_events(
    sent: Mapping[tuple[str, str], int],
    seconds: Mapping[str, float],
    report: Mapping[str, float],
    peak_bytes: int,
    samples: int,
) -> list[Event]:
    """Return the monitor's events of one optimizer step.

    Args:
        sent: (phase, domain) -> bytes.
        seconds: phase -> seconds of the host.
        report: the report of the mode of sync: densities, norms, counts.
        peak_bytes: the peak of this rank's memory.
        samples: the step's position on the monitor's axis.

    Returns:
        ``zero_topo/bytes_<domain>``, ``zero_topo/ms_<phase>``, ``zero_topo/sync_<name>`` and
        ``zero_topo/peak_bytes``.
    """
    domains: dict[str, int] = {}
    for (_, domain), nbytes in sent.items():
        domains[domain] = domains.get(domain, 0) + nbytes
    values = {f"bytes_{domain}": float(nbytes) for domain, nbytes in domains.items()}
    values |= {f"ms_{phase}": 1e3 * value for phase, value in seconds.items()}
    values |= {f"sync_{name}": value for name, value in report.items()}
    values["peak_bytes"] = float(peak_bytes)
    return [(f"zero_topo/{name}", value, samples) for name, value in sorted(values.items())]


def breakdown(seconds: Mapping[str, float]) -> str:
    """Return one line with the host's time in each phase, in the order of a step."""
    parts = (f"{phase} {1e3 * seconds[phase]:.2f} ms" for phase in PHASES if phase in seconds)
    return f"zero_topo: {', '.join(parts) or 'nothing metered'}"
