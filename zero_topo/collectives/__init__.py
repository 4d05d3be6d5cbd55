# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""All-gather and reduce-scatter of shards, flat or hierarchical, their handles, packing, and the
byte meter.
"""
