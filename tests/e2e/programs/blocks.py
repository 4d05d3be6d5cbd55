# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Blocks of ``test_clients.py``, by name: stock ZeRO-3, unquantized, the defaults."""

STEPS = 6
TREE = {"topology": {"emulated": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 2}}, "scheme": "topo"}
FULL = {"weights": None, "secondary": None, "gradients": None}
BLOCKS = {"plain": None, "topo": {**TREE, "quantize": FULL}, "default": TREE}
