# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A small machine on one host that behaves like a hierarchical one: network namespaces joined by
rate-limited links.
"""
