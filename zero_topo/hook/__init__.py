# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The seam to DeepSpeed: everything that imports it or names its privates. The engine below knows nothing of it."""

import deepspeed  # noqa: F401  (it installs the hook and imports this package's modules, so it comes first)
