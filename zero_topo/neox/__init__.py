# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX, unmodified: ``python -m zero_topo.neox {check,launch,train} CONFIG.yml ...``.

``check`` reads the YAML files without NeoX or torch; ``launch`` starts a run by NeoX's own
launcher; ``train`` is what each rank executes. NeoX is the checkout that ``--neox-path`` or the
variable NEOX_PATH names, or an importable ``megatron``.
"""
