# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed without its all-reduce in shared memory, which serves inference alone: on CPUs it would
take two cores for a minute to compile, and 66 MB of memory a rank.
"""

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
