# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Fewer bits: the wire format (torch-free), the operations and their backends."""
