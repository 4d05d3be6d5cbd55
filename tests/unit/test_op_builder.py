# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Compiling at first use: once per machine, never a hang, and a sentence when it cannot be."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zero_topo.op_builder import jit, source_dir
from zero_topo.op_builder.builder import BUILDERS, SHARED, CPUBuilder, GPUBuilder

SOURCE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "zt_toy", 0, -1, 0};
PyMODINIT_FUNC PyInit_zt_toy(void) {
    PyObject *m = PyModule_Create(&module);
    PyModule_AddIntConstant(m, "answer", 42);
    return m;
}
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of a small extension, and an empty cache; nothing of it stays imported."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "zt_toy", raising=False)
    source = tmp_path / "toy.c"
    source.write_text(SOURCE)
    return source


def recipe(source: Path, compiles: list[Path], flags: tuple[str, ...] = ()) -> jit.Recipe:
    """Compiles the toy, noting each time it does."""

    def build(directory: Path) -> None:
        compiles.append(directory)
        include = sysconfig.get_path("include")
        command = ["gcc", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(directory / "zt_toy.so")]
        subprocess.run(command, check=True)
        time.sleep(0.3)

    return jit.Recipe("zt_toy", (source,), flags, build)


def test_many_compile_once(toy: Path) -> None:
    """Ranks that come while one compiles wait for it and load what it made; later ones do not even look at a lock."""
    compiles: list[Path] = []
    with ThreadPoolExecutor(5) as ranks:
        loads = [ranks.submit(jit.load, recipe(toy, compiles)) for _ in range(5)]
    assert [load.result().answer for load in loads] == [42] * 5 and len(compiles) == 1
    assert jit.load(recipe(toy, compiles)).answer == 42 and len(compiles) == 1


def test_another_source_or_flag_is_another_module(toy: Path) -> None:
    """What is found in the cache was made from exactly this."""
    keys = {recipe(toy, []).key(), recipe(toy, [], ("-DX",)).key()}
    toy.write_text(SOURCE.replace("42", "43"))
    assert len(keys | {recipe(toy, []).key()}) == 3


def test_what_a_dead_process_left_does_not_stop_the_next(toy: Path) -> None:
    """A process killed while compiling leaves a lock file and torch's own: both are nobody's."""
    wanted = recipe(toy, [])
    directory = jit.cache_dir() / f"zt_toy_{wanted.key()}"
    (directory / "build").mkdir(parents=True)
    (directory / "build" / "lock").touch()
    (directory / "zero_topo.lock").write_text("process 1 on a machine that was switched off")
    assert jit.load(wanted, patience_s=1.0).answer == 42
    assert not (directory / "build" / "lock").exists()


def test_a_holder_that_does_not_finish_is_named(toy: Path) -> None:
    """After its patience a rank goes on without the module and says who was compiling, instead of waiting for ever."""
    wanted = recipe(toy, [])
    directory = jit.cache_dir() / f"zt_toy_{wanted.key()}"
    directory.mkdir(parents=True)
    with (directory / "zero_topo.lock").open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        holder.write("process 7 on node001")
        holder.flush()
        with pytest.raises(jit.BuildError, match="process 7 on node001 has been compiling zt_toy"):
            jit.load(wanted, patience_s=0.5)


def test_a_failed_compile_leaves_no_module(toy: Path) -> None:
    """A module is there whole or not at all: the next try compiles again."""

    def fail(directory: Path) -> None:
        (directory / "zt_toy.so").write_text("half")
        raise jit.BuildError("zt_toy does not compile: no such luck")

    compiles: list[Path] = []
    with pytest.raises(jit.BuildError, match="no such luck"):
        jit.load(jit.Recipe("zt_toy", (toy,), (), fail))
    assert jit.load(recipe(toy, compiles)).answer == 42 and len(compiles) == 1


def test_a_cache_that_cannot_be_written_is_a_sentence(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only home or a file in the way is reported, not raised as something else."""
    blocked = toy.parent / "file"
    blocked.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(blocked))
    with pytest.raises(jit.BuildError, match="cannot build in"):
        jit.load(recipe(toy, []))


def test_builders_hash_exactly_what_they_compile() -> None:
    """Their sources are the kernel files that there are, and each header is of one builder or of all."""
    builders = [kind() for kind in BUILDERS]
    named = {Path(source).name for builder in builders for source in builder.sources()}
    assert named == {path.name for path in source_dir().iterdir() if path.suffix in (".cpp", ".cu")}
    for header in source_dir().glob("*.h"):
        owners = [builder.name for builder in builders if header in builder.recipe().sources]
        assert owners == ([b.name for b in builders] if header.name in SHARED else [header.name[:6]]), header.name


def test_deepspeed_does_not_take_our_builders_for_its_own() -> None:
    """DeepSpeed keeps loaded ops by name and imports a top-level op_builder that calls itself its own."""
    import op_builder

    assert not hasattr(op_builder, "__deepspeed__")
    assert all(kind().name.startswith("zt_") for kind in BUILDERS)


def test_builders_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, no ninja, a torch for CPUs: one line each, and `is_compatible` is False."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert CPUBuilder().reason() == "there is no C++ compiler (install g++)"
    assert not CPUBuilder().is_compatible()
    with pytest.raises(jit.BuildError, match="no C\\+\\+ compiler"):
        CPUBuilder().jit_load()
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    assert GPUBuilder().reason() == "this torch is built for CPUs" and not GPUBuilder().wanted()


def test_gpu_flags_keep_ieee_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fast math, no contraction, no flushing, whatever the vendor."""
    monkeypatch.setattr(GPUBuilder, "is_rocm_pytorch", staticmethod(lambda: False))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    cuda = GPUBuilder().nvcc_args()
    assert {"-fmad=false", "-ftz=false", "-prec-div=true", "-gencode=arch=compute_90,code=sm_90"} <= set(cuda)
    monkeypatch.setattr(GPUBuilder, "is_rocm_pytorch", staticmethod(lambda: True))
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx90a")
    rocm = GPUBuilder().nvcc_args()
    assert {"-ffp-contract=off", "--offload-arch=gfx90a"} <= set(rocm)
    assert not [flag for flag in (*cuda, *rocm, *CPUBuilder().cxx_args()) if "fast" in flag]


def test_the_environment_chooses_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_EXTENSIONS_DIR, as for torch and DeepSpeed; else the user's cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    assert jit.cache_dir() == Path("/somewhere")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert jit.cache_dir() == Path("/cache/zero_topo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert jit.cache_dir() == Path(os.path.expanduser("~/.cache/zero_topo"))
