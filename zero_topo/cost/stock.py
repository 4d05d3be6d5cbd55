# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed itself sends and holds with ZeRO-3, ZeRO++, LoCo or MiCS, to set beside a plan of zero_topo.

Note [Stock bytes]
    Gathers go straight, without the node's help; a quantized reduction goes in two hops but is not quantized on one
    node. hpZ keeps its secondary copy in 16 bits whatever it is sent in. LoCo keeps what INT4 took away in INT8: of
    the whole gradient before the hop inside the node, and of the node's share before the hop between nodes. DeepSpeed's
    scales, one for thousands of elements, are counted as ours, one for 256, which is 1.6% too many for INT8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.config.errors import ROOT
from zero_topo.config.stock_keys import LOCO, MICS, MICS_HOPS, QUANTIZED_GRADIENTS, ZERO, translate
from zero_topo.cost.memory import memory_bytes
from zero_topo.cost.volume import Key, Workload, step_bytes
from zero_topo.topology.model import Topology


@dataclass(frozen=True)
class Stock:
    """What DeepSpeed does with the stock keys of a config.

    Attributes:
        config: the plan with the same degrees and formats.
        loco: whether the error of INT4 gradients is fed back.
        straight: whether gathers go past the node.
    """

    config: ResolvedConfig
    loco: bool
    straight: bool

    @classmethod
    def of(cls, active: Mapping[str, object], topology: Topology) -> Stock:
        """Of the keys that are switched on (:func:`~zero_topo.config.stock_keys.switched_on`), on a machine.

        Raises:
            ValueError: if they do not fit the machine.
        """
        loco = LOCO in active and QUANTIZED_GRADIENTS in active and MICS not in active
        zero = {key: value for key, value in active.items() if key != LOCO}
        block = {} if MICS in active else {"scheme": "zero3"}
        translated = translate({ROOT: block, ZERO: zero}).config[ROOT]
        config = resolve_config(ZeroTopoConfig.parse(translated), topology)
        if config.topology.nodes == 1:
            config = replace(config, gradients_spec=None)
        return cls(config, loco, MICS_HOPS not in active)

    def sent(self, work: Workload) -> dict[Key, int]:
        """Bytes of a rank in an optimizer step by phase and domain."""
        routed = step_bytes(self.config, work)
        if not self.straight:
            return routed
        plain = step_bytes(replace(self.config, plan=replace(self.config.plan, inner=None)), work)
        hops = ("scatter",) if self.config.gradients_spec is not None else ()
        return {key: n for key, n in routed.items() if key[0] in hops} | {
            key: n for key, n in plain.items() if key[0] not in hops
        }

    def memory(self, work: Workload, accumulation_itemsize: int) -> dict[str, int]:
        """Bytes of a rank by role; "residual" is LoCo's."""
        held = memory_bytes(replace(self.config, secondary_spec=None), work, accumulation_itemsize)
        if not self.loco or self.config.topology.nodes == 1:
            return held
        whole = sum(work.numels)
        return {**held, "residual": whole + whole // self.config.topology.ranks_per_node}
