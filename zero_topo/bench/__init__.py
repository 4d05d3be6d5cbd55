# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Benchmarks behind ``zero-topo bench``: each prints a table and can leave a record that says how it was measured."""
