# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The sharded engine. It imports nothing of DeepSpeed; ``hook`` connects the two."""
