# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The modes of ``sync``: the reduction of gradient shards across gradient domains, once per
optimizer step.

Importing the package registers every mode with :func:`zero_topo.sync.base.build_mode`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from zero_topo.sync import dense, oktopk, quantized, radius, scape, tagc, ternary  # noqa: F401  (they register)
from zero_topo.sync.base import Moment, Parameter, ResidualOwners, SyncContext, SyncMode, build_mode
from zero_topo.sync.optimizers import AdamLike, AdamS, AgedAdamW

OPTIMIZERS: Mapping[str, type[AdamLike]] = MappingProxyType(
    {kind.__name__.lower(): kind for kind in (AdamS, AgedAdamW)}
)
"""The package's own optimizers by ``optimizer.type``, in lower case."""

__all__ = [
    "OPTIMIZERS",
    "AdamS",
    "AgedAdamW",
    "Moment",
    "Parameter",
    "ResidualOwners",
    "SyncContext",
    "SyncMode",
    "build_mode",
]
