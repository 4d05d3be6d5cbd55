# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Programs to copy from. `train_gpt.py` is the one the README's `make demo` runs."""
