# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The modes of ``sync``: the reduction of gradient shards across gradient domains, once per optimizer step.

Importing the package registers every mode with :func:`zero_topo.sync.base.build_mode`.
"""

from zero_topo.sync import dense, oktopk, quantized, radius, scape, tagc, topk
from zero_topo.sync.adams import AdamS
from zero_topo.sync.base import Moment, Owed, Parameter, SyncContext, SyncMode, build_mode

__all__ = [
    "AdamS",
    "Moment",
    "Owed",
    "Parameter",
    "SyncContext",
    "SyncMode",
    "build_mode",
    "dense",
    "oktopk",
    "quantized",
    "radius",
    "scape",
    "tagc",
    "topk",
]
