# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What proves this repository's claims, run in a checkout as ``python -m benchmarks``; its records
are next to it.
"""
