# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What nvcc and hipcc make of the GPU kernels: no spills, vector loads, IEEE division, nothing
fused, waves of 64.

No GPU is needed. Where a compiler is missing the tests say so and skip.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.utils.hipify import hipify_python

from op_builder import source_dir
from op_builder.jit import cache_dir
from tests.kernels.gpu_library import LIBRARY, Step, built, kernel_sources
from tests.kernels.instructions import (
    Choice,
    amd_blocks,
    cycle,
    sass_blocks,
    sass_functions,
)
from tests.launching import output

pytestmark = pytest.mark.long
NVIDIA = ("80", "90")
AMD = "gfx90a"
BLOCKS = {
    "zt_quantize_kernel": 9,
    "zt_dequantize_kernel": 2,
    "zt_reduce_kernel": 4,
    "zt_requantize_kernel": 3,
}
"""Block kernels by how many formats, dtypes and numbers of messages they are instantiated for."""
CODES = {"zt_assess_kernel": 5, "zt_emit_kernel": 1, "zt_apply_kernel": 1}
"""Those of codes, by lanes and units."""
CASTS = {"zt_cast_kernel": 3, "zt_cast_sum_kernel": 6, "zt_cast_again_kernel": 6}
"""Those of casts, by dtype and alignment."""
EXPECTED = BLOCKS | CASTS | CODES
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
    template = re.match(r"I(\w+?)E+v\d", rest)
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
    assert {name: names.count(name) for name in EXPECTED} == EXPECTED
    assert set(names) == OTHERS | set(EXPECTED)
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
        kernels, local = amd(), "(scratch|buffer)_(load|store)"
        most = {1: 512, 2: 256, 3: 168, 4: 128, 5: 96}
    else:
        kernels, local = nvidia(target), r"\.local"
        most = {1: 255, 2: 128, 3: 80, 4: 64, 5: 48}
    check_all_there(kernels)
    assert not [k for k in kernels if k.spilled > scalars(k) or k.local_bytes or count(local, k)]
    assert not [k for k in kernels if k.registers > most[residents(k)]]


def scalars(kernel: Kernel) -> int:
    """Scalars that AMD's compiler may keep in lanes of vector registers: of sums of 16-bit floats
    that lie anywhere and become messages again, and of INT8 weights. That takes no memory.
    """
    again = kernel.name == "zt_cast_again_kernel" and kernel.arguments in ("Li1ELb0", "Li2ELb0")
    return 16 if again or kernel.name in ("zt_assess_kernel", "zt_emit_kernel") else 0


def aligned_loads(kernel: Kernel) -> int:
    """Words of 16 bytes that a lane quantizes: of 8 units of 16-bit values, 4 units of FP32 or, in
    NF4's small blocks, 4 units of either.
    """
    return 4 if "nf4" in kernel.arguments and kernel.arguments[-1] != "0" else 8


def residents(kernel: Kernel) -> int:
    """Thread blocks, or waves of a SIMD, that shall fit at once."""
    if kernel.name == "zt_assess_kernel":
        return {"1": 5, "4": 3, "8": 2}[kernel.arguments[-1]]
    if kernel.name in BLOCKS | CASTS:
        few = kernel.name in ("zt_dequantize_kernel", "zt_cast_kernel")
        few |= (
            kernel.name == "zt_quantize_kernel"
            and "nf4" in kernel.arguments
            and kernel.arguments[-1] != "0"
        )
        return 3 if few else 2
    return 4 if kernel.name in CODES else 1


def fuses(kernel: Kernel) -> bool:
    """Whether it may fuse a product and a sum: torch does in lerp and addcmul, and a product of
    NF4 is exact.
    """
    sums = kernel.name in ("zt_reduce_kernel", "zt_requantize_kernel")
    return kernel.name == "zt_aged_adamw_kernel" or (sums and "nf4" in kernel.arguments)


@pytest.mark.parametrize("arch", NVIDIA)
def test_nvidia_arithmetic(arch: str) -> None:
    """Every product, sum and quotient is one correctly rounded instruction; none is approximate or
    flushed, and none fused that has other bits then.
    """
    for kernel in nvidia(arch):
        fused = "" if fuses(kernel) else r"|\bfma\b"
        assert not count(r"\bmad\.\S*f32|\.approx|\.ftz" + fused, kernel), kernel.name
        if kernel.name == "zt_aged_adamw_kernel":
            assert count(r"\bfma\.rn", kernel) == 3 * count(r"\bsqrt\.rn", kernel) == 12
        if kernel.name in ("zt_quantize_kernel", "zt_requantize_kernel"):
            assert count(r"\bdiv\.rn\.f32", kernel) >= 2
        if kernel.name in CODES:  # of 1 by a scale, and of a block's top by 127
            found = count(r"\brcp\.rn\.f32", kernel), count(r"\bdiv\.rn\.f32", kernel)
            assert found == {"zt_assess_kernel": (1, 1), "zt_emit_kernel": (1, 0)}.get(
                kernel.name, (0, 0)
            ), kernel.name
        if kernel.name in ("zt_reduce_kernel", "zt_requantize_kernel"):
            assert count(r"\bmul\.rn\.f32", kernel) >= 16
            assert count(r"\b(add|fma)\.rn\.f32", kernel) >= 16


@pytest.mark.parametrize("arch", NVIDIA)
def test_nvidia_memory(arch: str) -> None:
    """Aligned runs move 16 bytes at a time, through pointers known to be global; arguments are not
    copied. Pieces and casts that lie anywhere are read by words of 16 bytes too, two for a unit of
    16 bits and three for one of FP32; by elements only where they end.
    """
    for kernel in nvidia(arch):
        words, halves = (count(rf"ld\.global\S*\.{size}", kernel) for size in (r"v4\.u32", "u16"))
        assert not count(r"\bld\.(?!global|param|shared)\w|\bst\.(?!global|shared)\w", kernel), (
            kernel.name
        )
        if kernel.name == "zt_quantize_kernel":
            assert words >= aligned_loads(kernel) + 8
        if kernel.name in ("zt_reduce_kernel", "zt_dequantize_kernel"):
            assert count(r"st\.global\S*\.v4\.u32", kernel) >= 8
        if kernel.name in CASTS:
            assert words >= 14 and count(r"st\.global\S*\.v4", kernel) >= 2
        if kernel.name in BLOCKS | CASTS:
            assert halves <= (9 if "sum" in kernel.name or "again" in kernel.name else 1)
        if kernel.name in CODES:
            assert words >= 4
            wide = [many for many in (4, 2) if count(rf"st\.global\S*\.v{many}\.u32", kernel)]
            # Blocks sent whole
            assert wide == {"apply": [4], "emit": [2], "assess": []}[kernel.name[3:-7]]


def test_amd_arithmetic() -> None:
    """Division is IEEE's, nothing but it is fused, denormals are kept."""
    for kernel in amd():
        assert count("amdhsa_float_denorm_mode_32 3", kernel) == 1
        if kernel.name not in BLOCKS | CODES or fuses(kernel):
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
            assert count("global_load_dwordx4", kernel) >= aligned_loads(kernel)
        if kernel.name == "zt_apply_kernel":
            assert count("global_load_dwordx4", kernel) and count("global_store_dwordx4", kernel)


def exactly(number: int, pattern: str) -> Choice:
    """The block that has this number of matching instructions."""
    return lambda block: -abs(block.count(pattern) - number)


def most(pattern: str) -> Choice:
    """The block with most instructions that match."""
    return lambda block: block.count(pattern)


WORD = r"LDG.*\.128"
BF16 = r"F2FP\.BF16"
TURN = most("SHFL")
SPLIT = most(r"STG.*U16.*-0x")
SASS: dict[str, tuple[Any, ...]] = {
    "quantize_kernelI7zt_int8Li2": (64, 6.4, exactly(8, WORD), most("STG")),
    "quantize_kernelI7zt_int4Li2": (64, 6.3, exactly(8, WORD), most("STG")),
    "quantize_kernelI6zt_nf4Li2": (32, 10.0, exactly(4, WORD), most("STG")),
    "quantize_kernelI7zt_int8Li0": (32, 7.8, exactly(8, WORD), most("STG")),
    "quantize_kernelI7zt_int4Li2 odd": (64, 7.2, exactly(8, WORD), exactly(1, WORD), TURN),
    "quantize_kernelI7zt_int8Li2 odd": (64, 8.0, exactly(8, WORD), exactly(1, WORD), TURN),
    "quantize_kernelI6zt_nf4Li2 odd": (32, 11.5, exactly(4, WORD), exactly(1, WORD), TURN),
    "dequantize_kernelI7zt_int8 odd": (64, 7.0, exactly(9, "LDG"), TURN, SPLIT),
    "dequantize_kernelI7zt_int4 odd": (64, 6.3, exactly(9, "LDG"), TURN, SPLIT),
    "dequantize_kernelI7zt_int8": (64, 5.1, exactly(9, "LDG"), most(BF16)),
    "dequantize_kernelI7zt_int4": (64, 5.0, exactly(9, "LDG"), most(BF16)),
    "reduce_kernelI6zt_nf4Li1": (32, 5.9, most("SHFL"), most(BF16)),
    "reduce_kernelI7zt_int8Li4": (128, 5.2, most("LDG"), most(BF16)),
    "reduce_kernelI7zt_int4Li8": (256, 4.8, most("LDG"), most(BF16)),
    "reduce_kernelI6zt_nf4Li8": (256, 3.8, most("LDG"), most(BF16)),
    "assess_kernelILi8ELi4": (32, 14.6, exactly(8, WORD), most("STG")),
    "cast_sum_kernelILi2ELb1": (128, 3.5, most("LDG"), most(BF16)),
    "count_kernelILi2": (32, 4.2, most(WORD), TURN),
    "count_kernelILi0": (32, 5.4, most(WORD), TURN),
    "compact_kernelILi2": (32, 10.0, most(WORD), TURN),
}
"""Elements that a lane's loop takes, instructions of each at most, and basic blocks of it: its
loads, and its stores, or where it adds counts. Of sums of four messages if integers of 8 bits or
floats, else of eight. Of "odd" rows also the blocks in which they are turned.
"""


def tritons_programs() -> str:
    """Where Triton's wheel has NVIDIA's programs."""
    found = importlib.util.find_spec("triton")
    return "" if found is None else str(Path(str(found.origin)).parent / "backends/nvidia/bin")


@pytest.mark.parametrize("kernel", SASS)
def test_nvidia_instructions(kernel: str) -> None:
    """A lane's loop over whole blocks takes few instructions, everything that is not data
    included: the issue of instructions is what bounds these kernels.
    """
    elements, limit, *blocks = SASS[kernel]
    program = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=tritons_programs())
    if program is None:
        pytest.skip("cuobjdump not installed")
    texts = [
        output((program, "-sass", str(path)))
        for path in nvidia_library("90").glob("zt_gpu_*.cubin")
    ]
    functions = sass_functions("".join(texts))
    wanted = kernel.removesuffix(" odd")
    (code,) = (lines for name, lines in functions.items() if wanted in name)
    assert cycle(sass_blocks(code), blocks) <= limit * elements


STORED = most("global_store_dword")
ISA = {
    "quantize_kernelI7zt_int8Li2": (64, 9.8, exactly(8, "global_load_dwordx4"), STORED),
    "quantize_kernelI7zt_int4Li2": (64, 10.2, exactly(8, "global_load_dwordx4"), STORED),
    "quantize_kernelI6zt_nf4Li2": (32, 15.1, exactly(4, "global_load_dwordx4"), STORED),
    "dequantize_kernelI7zt_int8": (64, 4.8, exactly(9, "global_load"), STORED),
    "dequantize_kernelI7zt_int4": (64, 4.8, exactly(9, "global_load"), STORED),
    "reduce_kernelI6zt_nf4Li1": (32, 7.7, most("ds_bpermute"), STORED),
    "reduce_kernelI7zt_int8Li4": (128, 6.0, most("global_load"), STORED),
    "reduce_kernelI7zt_int4Li4": (128, 6.1, most("global_load"), STORED),
    "reduce_kernelI6zt_nf4Li4": (128, 6.2, most("global_load"), STORED),
}
"""As above, of FP32 where values are written: to make BF16 of them takes AMD six instructions."""


@pytest.mark.parametrize("kernel", ISA)
def test_amd_instructions(kernel: str) -> None:
    """A lane's loop over aligned blocks on gfx90a."""
    elements, limit, *blocks = ISA[kernel]
    (found,) = (k for k in amd() if kernel in f"{k.name}I{k.arguments}")
    assert cycle(amd_blocks(found.code), blocks) <= limit * elements


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
