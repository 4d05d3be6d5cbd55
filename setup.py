# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Which directories become which packages, and the native ops if asked for; all else is said in
pyproject.toml.

`op_builder/` and `csrc/` stand at the top of the checkout, where DeepSpeed projects keep them, and
are installed inside the package as `zero_topo.op_builder` and `zero_topo.csrc`, from a wheel and
from an editable install alike: a top-level `op_builder` in site-packages would collide with
DeepSpeed's own build.

`ZT_BUILD_OPS=1 pip install --no-build-isolation .` compiles the ops now instead of at first use:
those that this machine and torch can compile, or the install fails saying which of `ZT_BUILD_CPU=0`
and `ZT_BUILD_GPU=0` leaves it out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup


def native() -> dict[str, Any]:
    """The arguments of `setup` that compile the ops; none unless ZT_BUILD_OPS=1."""
    if os.environ.get("ZT_BUILD_OPS", "0") != "1":
        return {}
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from torch.utils.cpp_extension import BuildExtension

    from op_builder.builder import BUILDERS

    builders = [kind() for kind in BUILDERS if os.environ.get(kind.BUILD_VAR, "1") != "0"]
    chosen = [builder for builder in builders if builder.wanted()]
    for builder in chosen:
        if why := builder.reason():
            sys.exit(
                f"ZT_BUILD_OPS=1 cannot build {builder.name}: {why}; {builder.BUILD_VAR}=0 leaves "
                "it out"
            )
    return {
        "ext_modules": [builder.builder() for builder in chosen],
        "cmdclass": {"build_ext": BuildExtension.with_options(use_ninja=True)},
    }


setup(
    packages=[
        *find_packages(include=["zero_topo", "zero_topo.*"]),
        "zero_topo.op_builder",
        "zero_topo.csrc",
    ],
    package_dir={"zero_topo.op_builder": "op_builder", "zero_topo.csrc": "csrc"},
    package_data={
        "zero_topo": [
            "py.typed",
            "topology/presets/*.json",
            "config/*.json",
            "cost/*.json",
            "doctor/*.json",
            "launch/*.sbatch",
            "launch/job.*",
            "launch/machines/*.json",
            "neox/*.json",
            "observe/*.jinja",
        ],
        "zero_topo.csrc": ["*.h", "*.c", "*.cpp", "*.cu"],
    },
    **native(),
)
