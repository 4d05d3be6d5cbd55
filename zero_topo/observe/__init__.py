# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Records a run: its log, its report, its plots. Torch-free; only programs import it, never the
algorithms.
"""
