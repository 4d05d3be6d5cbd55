# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tests that need real ranks: `make test-launcher K=<part of a name>` runs them, 8 processes in one launch."""

from __future__ import annotations

from tests.rank_plugin import *  # noqa: F403 (the plugin's hooks and fixtures)
