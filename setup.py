# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Which directories become which packages; everything else about the project is said in pyproject.toml.

`op_builder/` and `csrc/` stand at the top of the checkout, where DeepSpeed projects keep them, and are installed inside
the package as `zero_topo.op_builder` and `zero_topo.csrc`, from a wheel and from an editable install alike: a top-level
`op_builder` in site-packages would collide with DeepSpeed's own build.
"""

from __future__ import annotations

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["zero_topo", "zero_topo.*"]), "zero_topo.op_builder", "zero_topo.csrc"],
    package_dir={"zero_topo.op_builder": "op_builder", "zero_topo.csrc": "csrc"},
    package_data={
        "zero_topo": ["py.typed", "topology/presets/*.json"],
        "zero_topo.csrc": ["*.h", "*.c", "*.cpp", "*.cu"],
    },
)
