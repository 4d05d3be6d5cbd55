# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What can be wrong with an installation, a machine and its environment before a run, each found with its fix."""

from zero_topo.doctor.examine import examine
from zero_topo.doctor.finding import FAIL, OK, WARN, Finding
from zero_topo.doctor.surroundings import Surroundings

__all__ = ["FAIL", "OK", "WARN", "Finding", "Surroundings", "examine"]
