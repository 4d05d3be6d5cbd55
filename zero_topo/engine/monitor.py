# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What zero_topo does, in DeepSpeed's own channels: monitors, the log with ``wall_clock_breakdown``, the comms logger.

Events go to whatever monitors the DeepSpeed config turns on (TensorBoard, W&B, Comet, CSV), after every optimizer step
and at the same count of samples as DeepSpeed's own, from rank 0, which tells what it did itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from zero_topo.engine.comms_log import CommsLog
from zero_topo.engine.log import LOGGER
from zero_topo.engine.stage3 import Stage3
from zero_topo.plan import PHASES

Event = tuple[str, float, int]


def step_events(
    sent: Mapping[tuple[str, str], int], seconds: Mapping[str, float], report: Mapping[str, float], samples: int
) -> list[Event]:
    """The monitor's events of one optimizer step.

    Args:
        sent: (phase, domain) -> bytes.
        seconds: phase -> seconds of the host.
        report: what the mode of sync says: densities, norms, counts.
        samples: where the step stands on the monitor's axis.

    Returns:
        ``zero_topo/bytes_<domain>``, ``zero_topo/ms_<phase>`` and ``zero_topo/sync_<name>``.
    """
    domains: dict[str, int] = {}
    for (_, domain), nbytes in sent.items():
        domains[domain] = domains.get(domain, 0) + nbytes
    values = {f"bytes_{domain}": float(nbytes) for domain, nbytes in domains.items()}
    values |= {f"ms_{phase}": 1e3 * value for phase, value in seconds.items()}
    values |= {f"sync_{name}": value for name, value in report.items()}
    return [(f"zero_topo/{name}", value, samples) for name, value in sorted(values.items())]


def breakdown(seconds: Mapping[str, float]) -> str:
    """One line: the host's time in each phase of a step, in a step's order."""
    parts = (f"{phase} {1e3 * seconds[phase]:.2f} ms" for phase in PHASES if phase in seconds)
    return f"zero_topo: {', '.join(parts) or 'nothing metered'}"


def report(engine: Any, topo: Stage3, log: Callable[..., None], comms_logger: Any) -> None:
    """Tell DeepSpeed's comms logger of each exchange, and its monitors and the log of each step if the config asks so.

    Args:
        engine: DeepSpeed's.
        topo: what works for it.
        log: DeepSpeed's, of a line and the ranks that write it, for the comms logger's lines.
        comms_logger: DeepSpeed's; it decides by its own switches what it wants.
    """
    topo.meter.listener = CommsLog(comms_logger, log)
    if not (engine.monitor.enabled or engine.wall_clock_breakdown()):
        return
    step = engine.step

    @wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps > before and engine.global_rank == 0:
            _report_step(engine, engine.optimizer.topo)
        return result

    engine.step = wrapper


def _report_step(engine: Any, topo: Stage3) -> None:
    seconds = topo.meter.last_seconds()
    if engine.monitor.enabled:
        of_mode = topo.gradients.mode.report()
        engine.monitor.write_events(step_events(topo.meter.last_step(), seconds, of_mode, engine.global_samples))
    every = engine.steps_per_print()
    if engine.wall_clock_breakdown() and every and engine.global_steps % every == 0:
        LOGGER.info(breakdown(seconds))
