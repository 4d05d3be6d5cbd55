# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Moving shards: the two hop collectives, their handles, packing, and the byte meter."""
