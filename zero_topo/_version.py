# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The version of zero_topo: read by `zero_topo.__version__` and, without importing anything, by the build."""

from __future__ import annotations

__version__ = "0.1.0"
