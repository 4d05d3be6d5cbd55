# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What nvcc and hipcc make of the GPU kernels: no spills, vector loads, IEEE division, nothing
fused, waves of 64.

No GPU is needed. Where a compiler is missing the tests say so and skip.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.utils.hipify import hipify_python

from op_builder import source_dir
from op_builder.builder import SHARED
from op_builder.jit import cache_dir
from tests.kernels.gpu_library import LIBRARY, Step, built, kernel_sources
from tests.launching import output

pytestmark = pytest.mark.long
NVIDIA = ("80", "90")
AMD = "gfx90a"
EXPECTED = {"zt_quantize_kernel": 3, "zt_requantize_kernel": 5, "zt_reduce_kernel": 3}
"""Block kernels by how many units and formats they are instantiated for."""
CODES = {"zt_assess_kernel": 4, "zt_emit_kernel": 1, "zt_apply_kernel": 1}
"""Those of codes, by units."""
CASTS = {"zt_cast_kernel": 3, "zt_cast_sum_kernel": 3, "zt_cast_again_kernel": 3}
"""Those of casts, by dtype."""
OTHERS = {"zt_mask_pack_kernel", "zt_mask_unpack_kernel", "zt_count_kernel", "zt_compact_kernel"}
OTHERS |= {
    "zt_aged_adamw_kernel",
    "zt_sketch_insert_kernel",
    "zt_peel_begin_kernel",
    "zt_peel_kernel",
}


@dataclass(frozen=True)
class Kernel:
    """One kernel as a compiler made it.

    Attributes:
        name: without its template arguments.
        arguments: the template arguments, mangled.
        registers: vector registers of a thread.
        local_bytes: memory of a thread for what registers do not hold.
        spilled: registers that were spilled.
        code: PTX or assembly.
    """

    name: str
    arguments: str
    registers: int
    local_bytes: int
    spilled: int
    code: str


def needs(*programs: str) -> None:
    """Skip, saying why, unless the programs are there."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed")


def split_name(mangled: str) -> tuple[str, str]:
    """The name of a kernel and its template arguments, out of a mangled name."""
    found = re.match(r"_ZL?(\d+)(\w+)", mangled)
    assert found, mangled
    size = int(found[1])
    name, rest = found[2][:size], found[2][size:]
    template = re.match(r"I(\w+?)EEv", rest)
    return name, template[1] if template else ""


def nvidia_library(arch: str) -> Path:
    """The directory of a library for one NVIDIA architecture, with what nvcc kept and said on the
    way.
    """
    needs("nvcc", "ptxas")
    flags = [
        "-std=c++17",
        "-O3",
        "-fmad=false",
        "-ftz=false",
        "-prec-div=true",
        "-Xcompiler",
        "-fPIC",
    ]
    flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xptxas", "-v", "--keep"]
    sources = kernel_sources(source_dir())
    steps = [
        Step(("nvcc", *flags, "-c", str(path), "-o", f"{path.stem}.o"), f"{path.stem}.usage")
        for path in sources
    ]
    link = Step(
        ("nvcc", "-shared", *(f"{path.stem}.o" for path in sources), "-o", LIBRARY), "link.log"
    )
    return built(f"zt_test_sm{arch}", [steps, [link]], source_dir(), cache_dir())


def nvidia(arch: str) -> list[Kernel]:
    """The kernels for one NVIDIA architecture."""
    directory = nvidia_library(arch)
    return [kernel for path in directory.glob("*.ptx") for kernel in nvidia_kernels(path)]


def nvidia_kernels(ptx: Path) -> list[Kernel]:
    """The kernels of one PTX file and of what ptxas said about it."""
    usage = re.compile(
        r"entry function '(\w+)' for.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) "
        r"bytes spill loads"
        r".*?Used (\d+) registers",
        re.DOTALL,
    )
    bodies = dict(
        re.findall(r"\.entry (\w+)\(.*?^\{(.*?)^\}", ptx.read_text(), re.DOTALL | re.MULTILINE)
    )
    found = usage.findall(ptx.with_suffix(".usage").read_text())
    return [
        Kernel(
            *split_name(name), int(registers), int(stack), int(stores) + int(loads), bodies[name]
        )
        for name, stack, stores, loads, registers in found
    ]


def amd_library() -> Path:
    """The directory of a library for AMD's gfx90a, with what hipcc kept on the way."""
    needs("hipcc")
    flags = [
        "-O3",
        "-std=c++17",
        "-ffp-contract=off",
        "-fhip-fp32-correctly-rounded-divide-sqrt",
        "-fPIC",
    ]
    flags += [
        "-Wall",
        "-Werror",
        "-Wno-unused-command-line-argument",
        f"--offload-arch={AMD}",
        "--save-temps",
    ]
    hipcc, sources = ("env", "HIP_PLATFORM=amd", "hipcc"), kernel_sources(source_dir())
    steps = [
        (*hipcc, *flags, "-x", "hip", "-c", str(path), "-o", f"{path.stem}.o") for path in sources
    ]
    link = (*hipcc, "-shared", *(f"{path.stem}.o" for path in sources), "-o", LIBRARY)
    stages = [[Step(words, f"{words[-1]}.log") for words in stage] for stage in (steps, [link])]
    return built(f"zt_test_{AMD}", stages, source_dir(), cache_dir())


def amd() -> list[Kernel]:
    """The kernels for gfx90a."""
    return [
        found for path in amd_library().glob(f"*{AMD}.s") for found in amd_kernels(path.read_text())
    ]


def amd_kernels(assembly: str) -> list[Kernel]:
    """The kernels of one assembly file and of its metadata."""
    bodies = dict(re.findall(r"^(_Z\w+):(.*?)^\.Lfunc_end", assembly, re.DOTALL | re.MULTILINE))
    made = []
    for entry in re.split(r"\n  - (?=\.)", assembly.partition("amdhsa.kernels:")[2])[1:]:
        fields = dict(re.findall(r"^ *\.(\w+): +(\S+)$", entry, re.MULTILINE))
        assert fields["wavefront_size"] == "64", "the builder asks for no other"
        spilled = int(fields["vgpr_spill_count"]) + int(fields["sgpr_spill_count"])
        local = int(fields["private_segment_fixed_size"])
        name = fields["symbol"].removesuffix(".kd")
        made.append(
            Kernel(*split_name(name), int(fields["vgpr_count"]), local, spilled, bodies[name])
        )
    return made


def check_all_there(kernels: list[Kernel]) -> None:
    """Every kernel was found in what the compiler said: the checks below are about something."""
    names = [kernel.name for kernel in kernels]
    assert {
        name: names.count(name) for name in EXPECTED | CASTS | CODES
    } == EXPECTED | CASTS | CODES
    assert set(names) == OTHERS | set(EXPECTED | CASTS | CODES)
    assert all(kernel.code.strip() for kernel in kernels)


def count(pattern: str, kernel: Kernel) -> int:
    """Matches of a pattern in a kernel's code."""
    return len(re.findall(pattern, kernel.code))


@pytest.mark.parametrize("target", [*NVIDIA, AMD])
def test_registers(target: str) -> None:
    """Nothing spills or lies in local memory; as many thread blocks, or waves of 64, fit as the
    kernels ask for.
    """
    if target == AMD:
        kernels, local, most = (
            amd(),
            "(scratch|buffer)_(load|store)",
            {"": 128, "1": 96, "2": 128, "4": 128, "8": 256},
        )
    else:
        kernels, local, most = (
            nvidia(target),
            r"\.local",
            {"": 64, "1": 48, "2": 64, "4": 80, "8": 128},
        )
    three = 168 if target == AMD else 80  # of three thread blocks
    check_all_there(kernels)
    assert not [k for k in kernels if k.spilled or k.local_bytes or count(local, k)]
    assert not [k for k in kernels if k.name in EXPECTED and k.registers > most[k.arguments[2]]]
    assert not [
        k
        for k in kernels
        if k.name in CODES and k.registers > (most | {"4": three})[k.arguments[2:3]]
    ]
    assert not [k for k in kernels if k.name in CASTS and k.registers > three]


@pytest.mark.parametrize("arch", NVIDIA)
def test_nvidia_arithmetic(arch: str) -> None:
    """Every product, sum and quotient is one correctly rounded instruction; none is fused,
    approximate or flushed.
    """
    kernels = nvidia(arch)
    for kernel in kernels:
        # Torch fuses product and sum of lerp and addcmul
        aged = kernel.name == "zt_aged_adamw_kernel"
        assert not count(r"\bmad\.\S*f32|\.approx|\.ftz" + ("" if aged else r"|\bfma\b"), kernel), (
            kernel.name
        )
        assert not aged or count(r"\bfma\.rn", kernel) == 3 * count(r"\bsqrt\.rn", kernel) == 12
        if kernel.name in ("zt_quantize_kernel", "zt_requantize_kernel"):
            assert count(r"\bdiv\.rn\.f32", kernel) >= 2
        if kernel.name in CODES:  # of 1 by a scale, and of a block's top by 127
            found = count(r"\brcp\.rn\.f32", kernel), count(r"\bdiv\.rn\.f32", kernel)
            assert found == {"zt_assess_kernel": (1, 1), "zt_emit_kernel": (1, 0)}.get(
                kernel.name, (0, 0)
            ), kernel.name
        if kernel.name in ("zt_reduce_kernel", "zt_requantize_kernel"):
            assert count(r"\bmul\.rn\.f32", kernel) >= 16 and count(r"\badd\.rn\.f32", kernel) >= 16


@pytest.mark.parametrize("arch", NVIDIA)
def test_nvidia_memory(arch: str) -> None:
    """Aligned runs move 16 bytes at a time, through pointers known to be global; arguments are not
    copied.
    """
    for kernel in nvidia(arch):
        assert not count(r"\bld\.(?!global|param|shared)\w|\bst\.(?!global|shared)\w", kernel), (
            kernel.name
        )
        if kernel.name == "zt_quantize_kernel":
            units = int(kernel.arguments[2])
            # FP32 has two for each unit
            assert count(r"ld\.global\S*\.v4\.u32", kernel) >= 4 * units
        if kernel.name == "zt_reduce_kernel":
            assert count(r"st\.global\S*\.v4\.u32", kernel) >= 8
        if kernel.name in CODES:
            assert count(r"ld\.global\S*\.v4\.u32", kernel) >= 4
            wide = [many for many in (4, 2) if count(rf"st\.global\S*\.v{many}\.u32", kernel)]
            # Blocks sent whole
            assert wide == {"apply": [4], "emit": [2], "assess": []}[kernel.name[3:-7]]


VECTORS = {
    "zt_quantize_kernel": 14 + 7,
    "zt_reduce_kernel": 7,
    "zt_cast_kernel": 8 + 14 + 7,
    "zt_cast_sum_kernel": 7,
}
"""Words of 16 bytes read where a run is not aligned: by units that are one run each, and by those
of a whole run. A unit of FP32 is in three, one of 16 bits in two.
"""


@pytest.mark.parametrize("arch", NVIDIA)
def test_nvidia_memory_that_is_not_aligned(arch: str) -> None:
    """Pieces and casts that lie anywhere are read by words of 16 bytes too; by elements only where
    they end.
    """
    for kernel in nvidia(arch):
        if kernel.name not in VECTORS and kernel.name not in CASTS:
            continue
        words, halves = (count(rf"ld\.global\.cs\.{size}", kernel) for size in (r"v4\.u32", "u16"))
        own = 4 * int(kernel.arguments[2]) if kernel.name == "zt_quantize_kernel" else 0
        assert words >= own + VECTORS.get(kernel.name, 14), kernel
        assert halves <= (1 if "sum" not in kernel.name and "again" not in kernel.name else 9), (
            kernel
        )
        if kernel.name in CASTS:  # of a message's units, all but those at its ends
            assert count(r"st\.global\S*\.v4", kernel) >= 2


def test_amd_arithmetic() -> None:
    """Division is IEEE's, nothing but it is fused, denormals are kept."""
    for kernel in amd():
        assert count("amdhsa_float_denorm_mode_32 3", kernel) == 1
        if kernel.name not in EXPECTED | CODES:
            continue
        divisions = count("v_div_fixup_f32", kernel)
        # Fused are only the five steps of a division, and those of integer divisions, where 2^32 or
        # its negative is in.
        assert count(r"v_(pk_)?(fma|fmac|fmaak|fmamk)_f32", kernel) == 5 * divisions
        assert not count(r"v_(mac|mad|madak|madmk)_f32(?!.*0x[4c]f800000)", kernel)
        if kernel.name in ("zt_quantize_kernel", "zt_requantize_kernel", "zt_assess_kernel"):
            assert divisions >= 2
        if kernel.name == "zt_reduce_kernel":
            assert divisions == 0 and count(r"v_(pk_)?mul_f32", kernel) >= 8


def test_amd_memory() -> None:
    """Aligned runs move 16 bytes at a time, through pointers known to be global."""
    for kernel in amd():
        assert not count("flat_(load|store)", kernel), kernel.name
        if kernel.name == "zt_quantize_kernel":
            assert count("global_load_dwordx4", kernel) >= 4 * int(kernel.arguments[2])
        if kernel.name == "zt_apply_kernel":
            assert count("global_load_dwordx4", kernel) and count("global_store_dwordx4", kernel)


FUNCTIONS = (
    "quantize dequantize_reduce requantize mask_pack mask_unpack count_above compact_above "
    "sketch_insert"
)
FUNCTIONS += " sketch_peel aged_adamw codes_assess codes_emit codes_apply"
LIBRARIES = {"nvcc": lambda: nvidia_library(NVIDIA[-1]), "hipcc": amd_library}
DEVICES = ("/dev/nvidiactl", "/dev/kfd")


@pytest.mark.parametrize("compiler", LIBRARIES)
def test_the_library_loads(compiler: str) -> None:
    """All functions are there and check their arguments; without a GPU a launch fails and gives the
    runtime's words.
    """
    library = ctypes.CDLL(str(LIBRARIES[compiler]() / LIBRARY))
    partial = (ctypes.c_int64 * 1)()
    numbers = (ctypes.c_float * 100)()

    function = library.zt_gpu_count_above
    places = ctypes.c_void_p
    function.argtypes = [places, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, places, places]

    def count(dtype: int) -> int:
        addresses = ctypes.addressof(numbers), ctypes.addressof(partial)
        return int(function(addresses[0], dtype, 100, 1.0, addresses[1], None))

    assert all(hasattr(library, f"zt_gpu_{name}") for name in FUNCTIONS.split())
    assert count(7) == 2
    if not any(Path(device).exists() for device in DEVICES):
        status = count(0)
        library.zt_gpu_runtime_text.restype = ctypes.c_char_p
        assert status & 255 == 8 and status >> 8 and library.zt_gpu_runtime_text(status)


def test_the_sources_survive_hipify(tmp_path: Path) -> None:
    """torch's translation of CUDA sources, which its ROCm builds apply to extensions, leaves
    kernels that compile.
    """
    needs("hipcc")
    for path in source_dir().glob("zt_*"):
        (tmp_path / path.name).write_text(path.read_text())
    files = [str(path) for path in kernel_sources(tmp_path)]
    with contextlib.redirect_stdout(io.StringIO()):
        hipify_python.hipify(
            project_directory=str(tmp_path),
            output_directory=str(tmp_path),
            includes=[f"{tmp_path}/*"],
            extra_files=files,
            is_pytorch_extension=True,
            hipify_extra_files_only=True,
        )
    translated = sorted(tmp_path.glob("zt_gpu*.hip"))
    assert len(translated) == len(files)
    for path in translated:
        words = (
            "hipcc",
            "-x",
            "hip",
            "-std=c++17",
            f"--offload-arch={AMD}",
            "-fsyntax-only",
            str(path),
        )
        output(words, env={**os.environ, "HIP_PLATFORM": "amd"})


def test_no_source_includes_torch() -> None:
    """The kernels compile without torch, and for HIP without CUDA's headers."""
    for path in [*source_dir().glob("zt_gpu*"), *(source_dir() / name for name in SHARED)]:
        included = [line for line in path.read_text().splitlines() if line.startswith("#include")]
        assert not [
            line
            for line in included
            if any(word in line for word in ("torch", "ATen", "c10", "pybind"))
        ]
