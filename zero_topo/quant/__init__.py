# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Implements block quantization: the wire format (torch-free), the operations and their
backends.
"""
