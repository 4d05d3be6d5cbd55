# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Marks that tests share."""

from __future__ import annotations

from functools import partial

import pytest

late = partial(pytest.param, marks=pytest.mark.long)
"""Parameters with which only ``make test-long`` runs a test."""
