# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What nvcc and hipcc make of the GPU kernels: no spills, vector loads, IEEE division, nothing fused, waves of 64.

No GPU is needed. Where a compiler is missing the tests say so and skip.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from op_builder import source_dir
from op_builder.jit import cache_dir
from tests.kernels.gpu_library import Step, built, kernel_sources

NVIDIA = ("80", "90")
AMD = "gfx90a"
EXPECTED = {"zt_quantize_kernel": 6, "zt_requantize_kernel": 12, "zt_reduce_kernel": 8}
"""Block kernels by how many units, bits and symmetries they are instantiated for."""
OTHERS = {"zt_mask_pack_kernel", "zt_mask_unpack_kernel", "zt_count_kernel", "zt_compact_kernel"}
OTHERS |= {"zt_sketch_insert_kernel", "zt_peel_begin_kernel", "zt_peel_kernel"}


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


def nvidia_flags(arch: str) -> tuple[str, ...]:
    """What the builder gives nvcc, for one architecture."""
    return ("-std=c++17", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", f"-arch=compute_{arch}")


def nvidia(arch: str) -> list[Kernel]:
    """The kernels for one NVIDIA architecture."""
    needs("nvcc", "ptxas")
    to_ptx, to_code = [], []
    for path in kernel_sources(source_dir()):
        ptx = f"{path.stem}.{arch}.ptx"
        to_ptx.append(Step(("nvcc", *nvidia_flags(arch), "-ptx", str(path), "-o", ptx), f"{ptx}.log"))
        to_code.append(Step(("ptxas", "-v", "-O3", f"-arch=sm_{arch}", ptx, "-o", f"{ptx}.cubin"), f"{ptx}.usage"))
    directory = built(f"zt_test_sm{arch}", [to_ptx, to_code], source_dir(), cache_dir())
    return [kernel for step in to_code for kernel in nvidia_kernels(directory / step.words[-3])]


def nvidia_kernels(ptx: Path) -> list[Kernel]:
    """The kernels of one PTX file and of what ptxas said about it."""
    usage = re.compile(
        r"entry function '(\w+)' for.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        re.DOTALL,
    )
    bodies = dict(re.findall(r"\.entry (\w+)\(.*?^\{(.*?)^\}", ptx.read_text(), re.DOTALL | re.MULTILINE))
    found = usage.findall(Path(f"{ptx}.usage").read_text())
    return [
        Kernel(*split_name(name), int(registers), int(stack), int(stores) + int(loads), bodies[name])
        for name, stack, stores, loads, registers in found
    ]


def amd() -> list[Kernel]:
    """The kernels for AMD's gfx90a."""
    needs("hipcc")
    steps = []
    for path in kernel_sources(source_dir()):
        flags = (
            "-O3",
            "-std=c++17",
            "-ffp-contract=off",
            "-fhip-fp32-correctly-rounded-divide-sqrt",
            "-Wall",
            "-Werror",
        )
        quiet = ("-Wno-unused-command-line-argument", f"--offload-arch={AMD}", "--cuda-device-only", "-S")
        words = ("env", "HIP_PLATFORM=amd", "hipcc", *flags, *quiet, "-x", "hip", str(path), "-o", f"{path.stem}.s")
        steps.append(Step(words, f"{path.stem}.log"))
    directory = built(f"zt_test_{AMD}", [steps], source_dir(), cache_dir())
    return [kernel for step in steps for kernel in amd_kernels((directory / step.words[-1]).read_text())]


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
        made.append(Kernel(*split_name(name), int(fields["vgpr_count"]), local, spilled, bodies[name]))
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


@pytest.mark.parametrize("arch", NVIDIA)
def test_nvidia_registers(arch: str) -> None:
    """Nothing spills, nothing lies in local memory, and as many thread blocks fit as the kernels ask for."""
    kernels = nvidia(arch)
    check_all_there(kernels)
    assert not [k for k in kernels if k.spilled or k.local_bytes or ".local" in k.code]
    most = {"2": 64, "4": 80, "8": 128}
    assert not [k for k in kernels if k.name in EXPECTED and k.registers > most[k.arguments[2]]]


@pytest.mark.parametrize("arch", NVIDIA)
def test_nvidia_arithmetic(arch: str) -> None:
    """Every product, sum and quotient is one correctly rounded instruction; none is fused, approximate or flushed."""
    kernels = nvidia(arch)
    for kernel in kernels:
        assert not count(r"\bfma\b|\bmad\.\S*f32|\.approx|\.ftz", kernel), kernel.name
        if kernel.name in ("zt_quantize_kernel", "zt_requantize_kernel"):
            assert count(r"\bdiv\.rn\.f32", kernel) >= 2
        if kernel.name in ("zt_reduce_kernel", "zt_requantize_kernel"):
            assert count(r"\bmul\.rn\.f32", kernel) >= 16 and count(r"\badd\.rn\.f32", kernel) >= 16


@pytest.mark.parametrize("arch", NVIDIA)
def test_nvidia_memory(arch: str) -> None:
    """Aligned runs move 16 bytes at a time, through pointers known to be global; arguments are not copied."""
    for kernel in nvidia(arch):
        assert not count(r"\bld\.(?!global|param|shared)\w|\bst\.(?!global|shared)\w", kernel), kernel.name
        if kernel.name == "zt_quantize_kernel":
            units = int(kernel.arguments[2])
            assert count(r"ld\.global\S*\.v4\.u32", kernel) >= 4 * units  # FP32 has two for each unit
        if kernel.name == "zt_reduce_kernel":
            assert count(r"st\.global\S*\.v4\.u32", kernel) >= 8


def test_amd_registers() -> None:
    """Waves of 64 lanes, no spills, no scratch, registers for as many waves as the kernels ask for."""
    kernels = amd()
    check_all_there(kernels)
    assert not [k for k in kernels if k.spilled or k.local_bytes or count("(scratch|buffer)_(load|store)", k)]
    most = {"2": 128, "4": 168, "8": 256}
    assert not [k for k in kernels if k.name in EXPECTED and k.registers > most[k.arguments[4]]]


def test_amd_arithmetic() -> None:
    """Division is IEEE's, nothing but it is fused, denormals are kept."""
    for kernel in amd():
        assert count("amdhsa_float_denorm_mode_32 3", kernel) == 1
        if kernel.name not in EXPECTED:
            continue
        divisions = count("v_div_fixup_f32", kernel)
        # Fused are only the five steps of a division, and those of integer divisions, which have powers of 2^32 in them.
        assert count(r"v_(pk_)?(fma|fmac|fmaak|fmamk)_f32", kernel) == 5 * divisions
        assert not count(r"v_(mac|mad|madak|madmk)_f32(?!.*0x[4c]f800000)", kernel)
        if kernel.name in ("zt_quantize_kernel", "zt_requantize_kernel"):
            assert divisions >= 2
        if kernel.name == "zt_reduce_kernel":
            assert divisions == 0 and count(r"v_(pk_)?mul_f32", kernel) >= 8


def test_amd_memory() -> None:
    """Aligned runs move 16 bytes at a time, through pointers known to be global."""
    for kernel in amd():
        assert not count("flat_(load|store)", kernel), kernel.name
        if kernel.name == "zt_quantize_kernel":
            assert count("global_load_dwordx4", kernel) >= 4 * int(kernel.arguments[2])
