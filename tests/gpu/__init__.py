# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The first hour on a GPU: `make gpu-check`, or one stage of it, `make gpu-check STAGE=3`."""
