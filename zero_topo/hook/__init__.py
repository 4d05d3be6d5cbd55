# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The seam to DeepSpeed: all code that imports it or uses its private names. The engine does not
import DeepSpeed.
"""

import deepspeed  # noqa: F401  (it installs the hook and imports this package's modules, so it comes first)
