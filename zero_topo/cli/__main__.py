# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m zero_topo.cli``, for machines where the ``zero-topo`` script is not on the path."""

from __future__ import annotations

import sys

from zero_topo.cli import main

sys.exit(main())
