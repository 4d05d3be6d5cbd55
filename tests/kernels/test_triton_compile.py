# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compile for every GPU that they are meant for, to code that computes and moves
what it should.

No GPU is needed: another process (this file, run as a module) calls the backend on CPU tensors with
a driver that compiles, as any launch does, and then launches nothing. So what is looked at is what
a launch would run, with its options and its specialisation on aligned pointers.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.operators import Operators
from tests.launching import ROOT, output
from zero_topo.quant.operands import (
    View,
    from_sources,
    to_members,
)
from zero_topo.quant.spec import NF4, BlockSpec, Cast, Format

pytest.importorskip("triton")
pytestmark = pytest.mark.long

NVIDIA = {"sm80": ("cuda", 80, 32), "sm90": ("cuda", 90, 32)}
AMD = {"gfx90a": ("hip", "gfx90a", 64), "gfx942": ("hip", "gfx942", 64)}
TARGETS = NVIDIA | AMD

# An odd number: the last tile does not decide how the others move.
NUMEL = 70_001
# What calls of the two kinds begin with.
ENCODES = ("quantize", "requantize")
DECODES = ("dequantize", "reduce")
CASTS = ("cast", "sum")


def kernels() -> Operators:
    """The backend; imported late, where a driver is set."""
    from zero_topo.quant import triton

    return Operators(triton)


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """A call for each kernel and for what decides its code most, with a name."""
    triton = kernels()
    int8, int4, other, large = (
        BlockSpec("int8"),
        BlockSpec("int4", 64),
        BlockSpec("int8", 64),
        BlockSpec("int4", 2048),
    )
    fp32, fp16, bf16 = (whole(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    rows = View(bf16.flat, 16, 1024, 4096, 4, 1024, present=1000)
    reduce, cast = triton.dequantize_reduce, Cast("bf16")
    many = [(chunks(int8)[:count], hole) for count in (2, 3, 8) for hole in (-1, 0, 1)]
    yield "quantize", lambda: triton.quantize([bf16], int8, to_members(chunks(int8)[0]))
    yield (
        "quantize strided",
        lambda: triton.quantize([rows], int4, to_members(chunks(int4, rows.numel)[:4])),
    )
    yield "quantize large", lambda: triton.quantize([fp32], large, to_members(chunks(large)[0]))
    yield "quantize nf4", lambda: triton.quantize([bf16], NF4, to_members(chunks(NF4)[0]))
    yield "reduce nf4", lambda: reduce(from_sources(chunks(NF4)), NF4, [bf16], 0.1)
    yield "dequantize", lambda: reduce(to_members(chunks(int8)[0]), int8, [fp32])
    yield (
        "reduce int8 bf16",
        lambda: [reduce(from_sources(some, hole), int8, [bf16], 0.1) for some, hole in many],
    )
    yield (
        "reduce int4 fp32",
        lambda: reduce(from_sources(chunks(int4)), int4, [fp32], 0.1, accumulate=True),
    )
    yield "reduce large fp16", lambda: reduce(from_sources(chunks(large)), large, [fp16])
    yield "requantize", lambda: again(int4, other)
    odd = View(bf16.flat, 16, 1024, 4099, 4, 1001, present=1000)
    yield "odd rows", lambda: reduce(to_members(chunks(int8, odd.numel)[:4]), int8, [odd])
    yield "cast", lambda: triton.quantize([fp32], cast, to_members(chunks(cast)[0]))
    yield (
        "cast strided",
        lambda: triton.quantize([rows], cast, to_members(chunks(cast, rows.numel)[:4])),
    )
    yield "sum casts", lambda: reduce(from_sources(chunks(cast), 3), cast, [fp32], 0.1)
    yield "sum casts again", lambda: again(cast, cast)


def again(source: Format, spec: Format) -> None:
    """Messages -> message."""
    triton = kernels()
    out = to_members(chunks(spec)[0])
    triton.requantize(from_sources(chunks(source)), source, spec, out, NUMEL, 0.1)


def whole(dtype: torch.dtype) -> View:
    """A contiguous piece."""
    return View(torch.zeros(NUMEL, dtype=dtype), 1, NUMEL, NUMEL)


def chunks(spec: Format, numel: int = NUMEL) -> torch.Tensor:
    """Messages in one receive buffer, each at a multiple of 16 bytes."""
    size = spec.nbytes(numel)
    return torch.zeros(8, -(-size // 16) * 16, dtype=torch.uint8)[:, :size]


class Compiler:
    """What Triton asks of a driver, for GPUs that are not there: it compiles for them, and launches
    nothing.
    """

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.targets = [GPUTarget(*target) for target in TARGETS.values()]
        self.device = 0
        self.utils = self

    def get_current_device(self) -> int:
        """Index of a target."""
        return self.device

    def get_current_target(self) -> Any:
        """What to compile for."""
        return self.targets[self.device]

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        """The least that any of the targets has."""
        return {"max_shared_mem": 64 << 10}

    def load_binary(self, *binary: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, threads."""
        return 0, 0, 0, 0, 1024

    def launcher_cls(self, *kernel: Any) -> Callable[..., None]:
        """A launch: programs of any number are on the grid's first axis, as the others end at
        65,535.
        """

        def launch(x: int, y: int, z: int, *arguments: Any) -> None:
            assert y == z == 1

        return launch


def main(directory: Path, target: str) -> None:
    """Compile for a target into `<directory>/<call>.<kernel>.<assembly, binary or other stage>`."""
    import triton

    driver = Compiler()
    triton.runtime.driver.set_active(driver)
    place = directory

    def keep(metadata_group: dict[str, str], **compilation: Any) -> None:
        for name, path in metadata_group.items():
            assert not Path(f"{place}.{name}").exists(), (
                f"{place.name}: another kernel for other numbers"
            )
            shutil.copy(path, f"{place}.{name}")
            if name.endswith(".cubin"):
                usage = subprocess.check_output(
                    [triton.knobs.nvidia.cuobjdump.path, "-res-usage", path], text=True
                )
                Path(f"{place}.{name.removesuffix('cubin')}usage").write_text(usage)

    triton.knobs.compilation.listener = keep
    driver.device = list(TARGETS).index(target)
    for call, run in calls():
        place = directory / call
        run()


Code = dict[str, str]
KERNELS = 15


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Code]:
    """Asks for the text of a target's stage (`ptx`, `amdgcn`): {"<call>.<kernel>": text}.

    What one worker has compiled, half a minute for a target, the others read.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def ask(target: str, stage: str) -> Code:
        directory = shared / f"triton-{target}"
        with Path(f"{directory}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.exists():
                compile_for(target, directory)
        found = {path.stem: path.read_text() for path in directory.glob(f"*.{stage}")}
        assert len(found) == KERNELS
        return found

    return ask


def compile_for(target: str, directory: Path) -> None:
    """In a process of its own; nothing is left of one that fails."""
    env = {**os.environ, "TRITON_CACHE_DIR": f"{directory}.cache"}
    env.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory(dir=directory.parent) as made:
        command = [sys.executable, "-m", "tests.kernels.test_triton_compile", made, target]
        output(command, env=env, cwd=ROOT)
        shutil.copytree(made, directory)


@pytest.mark.parametrize("target", NVIDIA)
def test_ptx_rounds_as_the_contract_says(compiled: Callable[[str, str], Code], target: str) -> None:
    """Division is correctly rounded; nothing is approximate, flushed or contracted; BF16 is rounded
    to nearest even.
    """
    code = compiled(target, "ptx")
    for name, text in code.items():
        assert not re.findall(
            r"\bmad\.\S*f32|\S+\.approx\S*|\S+\.ftz\S*|div\.full\S*|\bfma\.\S*", text
        ), name
        assert bool(re.search(r"(div|rcp)\.rn\.f32", text)) == name.startswith(ENCODES), name
    assert "cvt.rn.bf16x2.f32" in code["reduce int8 bf16.reduce_tile"]


# Stage, load and store.
WIDE = dict.fromkeys(NVIDIA, ("ptx", r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32"))
WIDE |= dict.fromkeys(AMD, ("amdgcn", "load_dwordx[24]", "store_dwordx[24]"))


@pytest.mark.parametrize("target", TARGETS)
def test_code_moves_16_bytes_at_once(compiled: Callable[[str, str], Code], target: str) -> None:
    """Values and messages are read and written 128 bits a thread, strided rows too."""
    stage, load, store = WIDE[target]
    for name, text in compiled(target, stage).items():
        if name.startswith((*ENCODES, *DECODES, *CASTS)):
            assert re.search(load, text) and re.search(store, text), name


@pytest.mark.parametrize("target", NVIDIA)
def test_nvidia_registers_suffice(compiled: Callable[[str, str], Code], target: str) -> None:
    """Nothing is kept on the stack."""
    for name, text in compiled(target, "usage").items():
        assert re.search(r"STACK:0 .*LOCAL:0 ", text), f"{name}: {text}"


@pytest.mark.parametrize("target", AMD)
def test_amd_code_is_for_waves_of_64_and_does_not_spill(
    compiled: Callable[[str, str], Code], target: str
) -> None:
    """What the metadata of the binaries says; they are linked too."""
    for name, text in compiled(target, "amdgcn").items():
        said = dict(re.findall(r"^ *(?:- )?\.(\w+): +(\d+)$", text, re.MULTILINE))
        assert said["wavefront_size"] == "64", name
        for what in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
            assert said[what] == "0", f"{name}: {what} {said[what]}"


@pytest.mark.parametrize("target", AMD)
def test_amd_code_rounds_as_the_contract_says(
    compiled: Callable[[str, str], Code], target: str
) -> None:
    """Divisions end in the fix-up of IEEE; sums are not contracted; denormals stay; BF16 is rounded
    half to even.
    """
    code = compiled(target, "amdgcn")
    for name, text in code.items():
        assert ("v_div_fixup_f32" in text) == name.startswith(ENCODES), name
        assert ".amdhsa_float_denorm_mode_32 3" in text, name
        if name.startswith((*DECODES, "sum")):
            assert not re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mac|mad)\w*f32\w*", text), name
    rounds = code["reduce int8 bf16.reduce_tile"]
    assert "v_add3_u32" in rounds and "0x7fff" in rounds, (
        "half an ulp, less one, plus the last bit kept"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
