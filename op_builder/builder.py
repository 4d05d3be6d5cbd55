# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed-style builders of the native kernels: `CPUBuilder`, and `GPUBuilder` for CUDA and ROCm.

They are DeepSpeed's `OpBuilder`s (names start with `zt_`, for DeepSpeed keeps all loaded ops in one
dictionary), so `ds_report`-like tools can ask them `is_compatible`. What differs: sources are ours,
a module built ahead of time is looked for inside `zero_topo`, and compiling at first use follows
Note [One compile, no hang].

Note [Copied sources]
    torch's hipify writes its translations (``zt_gpu_blocks.hip``, ``zt_wire_hip.h``) next to what
    it translates, and translates every header it finds on the include path. So what is compiled is
    a copy of `csrc`: neither a checkout nor a read-only installation is written to, and a module's
    key stays what it was.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension

try:  # inside the installed package
    from zero_topo.op_builder import jit, source_dir
except ImportError:  # at the top of a checkout that is not installed, when setup.py builds the ops
    from op_builder import jit, source_dir

logger = logging.getLogger("zero_topo.op_builder")

BINDING = "zt_binding.cpp"
COMMON = (BINDING, "zt_error.cpp")
SHARED = ("zt_changes.h", "zt_kernels.h", "zt_nf4.h", "zt_wire.h")
# No contraction of a product and a sum into one rounding: every backend gives the same bits.
CXX_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")
# Fixed, not those present: a login node without a GPU then builds what compute nodes look for.
CUDA_ARCHITECTURES = ("8.0", "9.0+PTX")
OLDEST_CUDA = 8.0
"""Compute capability below which the kernels do not compile (zt_gpu_portable.h)."""
# Torch takes names for numbers, also "Kepler+Tesla"
BEFORE_AMPERE = (
    "Kepler",
    "Maxwell",
    "Pascal",
    "Volta",
    "Turing",
)
ROCM_ARCHITECTURES = ("gfx90a", "gfx942")


class TopoBuilder(OpBuilder):
    """What both builders share; a subclass says its sources and flags."""

    NAME = ""
    BUILD_VAR = ""

    def __init__(self) -> None:
        super().__init__(name=self.NAME)

    def absolute_name(self) -> str:
        """Where a module built ahead of time lies."""
        return f"zero_topo.{self.name}"

    def kernel_sources(self) -> list[str]:
        """File names of the kernels, in csrc."""
        raise NotImplementedError

    def sources(self) -> list[str]:
        """Every file to compile, absolute."""
        return [str(source_dir() / name) for name in (*COMMON, *self.kernel_sources())]

    def files(self) -> list[Path]:
        """Every file to compile, and the headers they include."""
        headers = [
            path
            for path in originals("*.h")
            if path.name in SHARED or path.name.startswith(self.name)
        ]
        return [*map(Path, self.sources()), *headers]

    def copied(self, directory: Path) -> list[str]:
        """Copies of the files in a directory; those of them to compile. See Note [Copied
        sources].
        """
        directory.mkdir(parents=True, exist_ok=True)
        for path in self.files():
            shutil.copy(path, directory)
        return [str(directory / Path(source).name) for source in self.sources()]

    def deepspeed_src_path(self, code_path: str) -> str:
        """Paths are absolute; DeepSpeed would look for them inside itself."""
        return code_path

    def cxx_args(self) -> list[str]:
        """Flags of the C++ compiler."""
        return [*CXX_FLAGS, "-fopenmp"]

    def nvcc_args(self) -> list[str]:
        """Flags of nvcc or hipcc."""
        return []

    def reason(self) -> str | None:
        """Why this machine cannot compile the op, or None if it can."""
        if shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None:
            return "there is no C++ compiler (install g++)"
        return None if shutil.which("ninja") else "there is no ninja (pip install ninja)"

    def wanted(self) -> bool:
        """Whether building ops ahead of time includes this one."""
        return True

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op can be compiled here."""
        why = self.reason()
        if why and verbose:
            self.warning(f"{self.name}: {why}")
        return why is None

    def load(self, verbose: bool = False) -> ModuleType:
        """The module: built ahead of time if that fits this torch, else compiled at first use.

        Raises:
            BuildError: one line saying why there is none.
        """
        return self._prebuilt() or self.jit_load(verbose)

    def _prebuilt(self) -> ModuleType | None:
        try:
            module = importlib.import_module(self.absolute_name())
        except ModuleNotFoundError:
            return None
        except ImportError as error:
            logger.info(
                "%s built ahead of time does not load: %s", self.name, str(error).splitlines()[0]
            )
            return None
        built = module.torch_version
        if built == torch.__version__.partition("+")[0]:
            return module
        logger.info("%s was built for torch %s, this is %s", self.name, built, torch.__version__)
        return None

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Compile if need be, and load; see Note [One compile, no hang].

        Raises:
            BuildError: one line saying why there is none.
        """
        return jit.load(self._possible(self.chosen(verbose)))

    def build(self, verbose: bool = False) -> Path:
        """The library, compiled if need be but not loaded.

        Raises:
            BuildError: one line saying why there is none.
        """
        return jit.built(self._possible(self.recipe(verbose)))

    def chosen(self, verbose: bool = False) -> jit.Recipe:
        """What to compile and load here."""
        return self.recipe(verbose)

    def _possible(self, recipe: jit.Recipe) -> jit.Recipe:
        why = self.reason() if jit.refusal(recipe.library()) else None
        if why is not None:
            raise jit.BuildError(why)
        return recipe

    def recipe(self, verbose: bool = False) -> jit.Recipe:
        """What to compile, and how."""
        flags = (
            *self.cxx_args(),
            *self.nvcc_args(),
            torch.__version__,
            str(torch.compiled_with_cxx11_abi()),
        )
        flags += (str(sys.implementation.cache_tag), platform.machine())
        return jit.Recipe(
            self.name,
            tuple(self.files()),
            flags,
            lambda directory: self._compile(directory, verbose),
        )

    def _compile(self, directory: Path, verbose: bool) -> None:
        try:
            cpp_extension.load(
                name=self.name,
                sources=self.copied(directory / "csrc"),
                extra_include_paths=[str(directory / "csrc")],
                extra_cflags=self.cxx_args(),
                extra_cuda_cflags=self.nvcc_args(),
                extra_ldflags=self.extra_ldflags(),
                build_directory=str(directory),
                with_cuda=self.with_cuda(),
                is_python_module=False,
                is_standalone=False,
                verbose=verbose,
            )
        except Exception as error:  # whatever torch's builder runs into, there are other backends
            facts = str(error).splitlines() or [repr(error)]
            lines = [line for line in facts if "error: " in line or "cannot find" in line] or facts
            raise jit.BuildError(
                f"{self.name} does not compile: {lines[0]}; its build is in {directory}"
            ) from error

    def with_cuda(self) -> bool:
        """Whether the sources hold kernels for a GPU."""
        return False

    def builder(self) -> Any:
        """The setuptools extension that builds the op ahead of time."""
        kind = cpp_extension.CUDAExtension if self.with_cuda() else cpp_extension.CppExtension
        directory = Path("build", "csrc", self.name)
        arguments = {
            "cxx": self.cxx_args(),
            **({"nvcc": self.nvcc_args()} if self.with_cuda() else {}),
        }
        return kind(
            name=self.absolute_name(),
            sources=self.copied(directory),
            include_dirs=[str(directory.absolute())],
            extra_compile_args=arguments,
            extra_link_args=self.extra_ldflags(),
        )

    def extra_ldflags(self) -> list[str]:
        """Flags of the linker."""
        return ["-fopenmp"]


class CPUBuilder(TopoBuilder):
    """The kernels for processors; which instructions to use is decided when they run."""

    NAME = "zt_cpu"
    BUILD_VAR = "ZT_BUILD_CPU"

    def kernel_sources(self) -> list[str]:
        """Every zt_cpu file."""
        return [path.name for path in originals("zt_cpu*.cpp")]


class GPUBuilder(TopoBuilder):
    """The kernels for GPUs, by nvcc or hipcc according to what torch was built for."""

    NAME = "zt_gpu"
    BUILD_VAR = "ZT_BUILD_GPU"

    def __init__(self, architectures: Sequence[str] = ()) -> None:
        super().__init__()
        self._only = tuple(architectures)

    def kernel_sources(self) -> list[str]:
        """Every zt_gpu file."""
        return [path.name for path in originals("zt_gpu*.cu")]

    def cxx_args(self) -> list[str]:
        """The binding only learns that it launches on streams."""
        return [*super().cxx_args(), "-DZT_FOR_GPU"]

    def nvcc_args(self) -> list[str]:
        """IEEE arithmetic, nothing contracted, nothing flushed; torch adds the architectures."""
        if self.is_rocm_pytorch():
            return ["-O3", "-ffp-contract=off", "-fhip-fp32-correctly-rounded-divide-sqrt"]
        return ["-O3", "-fmad=false", "-ftz=false", "-prec-div=true"]

    def architectures(self) -> tuple[str, ...]:
        """Those given or in torch's variable, else the usual ones, else that of a GPU which those
        leave out.
        """
        asked = re.split("[; ]", os.environ.get(self._variable(), ""))
        chosen = self._only or tuple(arch for arch in asked if arch and not self._too_old(arch))
        own = None if chosen else self._own_architecture()
        if self.is_rocm_pytorch():
            return chosen or (
                (own,) if own and own not in ROCM_ARCHITECTURES else ROCM_ARCHITECTURES
            )
        return chosen or ((own,) if own and self._too_old(own) else CUDA_ARCHITECTURES)

    def _too_old(self, arch: str) -> bool:
        """Whether the kernels cannot be compiled for it: NVIDIA's containers list 7.5 in torch's
        variable.
        """
        if self.is_rocm_pytorch():
            return False
        number = re.match(r"\d+\.\d+", arch)
        return arch.startswith(BEFORE_AMPERE) if number is None else float(number[0]) < OLDEST_CUDA

    def chosen(self, verbose: bool = False) -> jit.Recipe:
        """What was built ahead of time; else what compiles soonest while other ranks wait: for this
        GPU alone.

        A list of architectures in torch's variable is a container's, not the user's, so it does not
        count here.
        """
        usual = super().chosen(verbose)
        own = None if self._only else self._own_architecture()
        if own is None or jit.refusal(usual.library()) is None:
            return usual
        return GPUBuilder((own,)).recipe(verbose)

    def recipe(self, verbose: bool = False) -> jit.Recipe:
        """As of any op; the architectures count."""
        usual = super().recipe(verbose)
        return replace(usual, flags=(*usual.flags, *self.architectures()))

    def builder(self) -> Any:
        """As of any op; torch reads the architectures when it compiles."""
        os.environ[self._variable()] = ";".join(self.architectures())
        return super().builder()

    def _compile(self, directory: Path, verbose: bool) -> None:
        before = os.environ.get(self._variable())
        # Without, torch 2.6 needs a GPU to look at
        os.environ[self._variable()] = ";".join(self.architectures())
        try:
            super()._compile(directory, verbose)
        finally:
            del os.environ[self._variable()]
            os.environ.update({} if before is None else {self._variable(): before})

    def _variable(self) -> str:
        return "PYTORCH_ROCM_ARCH" if self.is_rocm_pytorch() else "TORCH_CUDA_ARCH_LIST"

    def _own_architecture(self) -> str | None:
        if not torch.cuda.is_available():
            return None
        if self.is_rocm_pytorch():
            return str(torch.cuda.get_device_properties().gcnArchName).partition(":")[0]
        return ".".join(map(str, torch.cuda.get_device_capability()))

    def with_cuda(self) -> bool:
        """These are kernels for a GPU."""
        return True

    def wanted(self) -> bool:
        """If torch is for GPUs."""
        return torch.version.cuda is not None or torch.version.hip is not None

    def reason(self) -> str | None:
        """As for the CPU, and torch and a toolkit must be for GPUs."""
        if torch.version.cuda is None and torch.version.hip is None:
            return "this torch is built for CPUs"
        compiler = "hipcc" if self.is_rocm_pytorch() else "nvcc"
        home = cpp_extension.ROCM_HOME if self.is_rocm_pytorch() else cpp_extension.CUDA_HOME
        if home is None and shutil.which(compiler) is None:
            return f"there is no {compiler}"
        return super().reason()


def originals(pattern: str) -> list[Path]:
    """Files of csrc, sorted, without translations that an earlier build for ROCm left there."""
    return sorted(path for path in source_dir().glob(pattern) if not path.stem.endswith("_hip"))


BUILDERS: tuple[type[TopoBuilder], ...] = (CPUBuilder, GPUBuilder)
