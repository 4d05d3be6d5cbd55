# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Compiling at first use: once per machine, never a hang, and a sentence when it cannot be."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from torch.utils import cpp_extension

from tests.commands import Run
from zero_topo.op_builder import jit, source_dir
from zero_topo.op_builder.builder import BUILDERS, SHARED, CPUBuilder, GPUBuilder, TopoBuilder

SOURCE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "zt_toy", 0, -1, 0};
PyMODINIT_FUNC PyInit_zt_toy(void) {
    PyObject *m = PyModule_Create(&module);
    PyModule_AddIntConstant(m, "answer", 42);
    return m;
}
"""


class Toy:
    """A small extension.

    Attributes:
        recipe: how it is compiled.
        compiles: how often it was.
        seconds: that a compile takes at least.
    """

    def __init__(self, source: Path) -> None:
        source.write_text(SOURCE)
        self.recipe = jit.Recipe("zt_toy", (source,), (), self._compile)
        self.compiles = 0
        self.seconds = 0.0

    def _compile(self, directory: Path) -> None:
        self.compiles += 1
        flags = ("-shared", "-fPIC", f"-I{sysconfig.get_path('include')}")
        files = (*self.recipe.sources, "-o", directory / "zt_toy.so")
        subprocess.run(("gcc", *flags, *files), check=True)
        time.sleep(self.seconds)

    def lock(self) -> Path:
        """Where the lock lies, in the library's folder, which is made."""
        folder = self.recipe.library().parent
        folder.mkdir(parents=True)
        return folder / jit.LOCK


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """One in an empty cache; nothing of it stays imported."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "zt_toy", raising=False)
    return Toy(tmp_path / "toy.c")


def torch_for_amd(monkeypatch: pytest.MonkeyPatch, rocm: bool) -> None:
    """Torch is built for GPUs of AMD, or not."""
    monkeypatch.setattr(GPUBuilder, "is_rocm_pytorch", staticmethod(lambda: rocm))


def leave(library: Path) -> None:
    """A library of nothing, as a build leaves it."""
    library.parent.mkdir(parents=True)
    library.touch()
    jit.seal(library)


def test_many_compile_once(toy: Toy) -> None:
    """Ranks that come while one compiles wait for it and load what it made."""
    toy.seconds = 0.3
    with ThreadPoolExecutor(5) as ranks:
        loads = [ranks.submit(jit.load, toy.recipe) for _ in range(5)]
    assert [load.result().answer for load in loads] == [42] * 5
    assert jit.load(toy.recipe).answer == 42 and toy.compiles == 1


def test_what_a_dead_process_left_does_not_stop_the_next(toy: Toy) -> None:
    """A process killed while compiling leaves a lock file and torch's own: both are nobody's."""
    library = toy.recipe.library()
    directory = library.parent
    node, other = os.uname().nodename, directory / "build-elsewhere-1"
    for number in (os.getpid(), 1):  # ours is that of a process before a reboot
        (directory / f"build-{node}-{number}").mkdir(parents=True)
        (directory / f"build-{node}-{number}" / "lock").touch()
    other.mkdir()
    for age in (0.0, 2 * jit.PATIENCE_S):  # may still compile there; is dead
        (directory / jit.LOCK).write_text("process 1 on a machine that was switched off")
        os.utime(other, (time.time() - age, time.time() - age))
        library.unlink(missing_ok=True)
        assert jit.load(toy.recipe, patience_s=1.0).answer == 42
        assert names(directory) == {jit.LOCK, "zt_toy.so", *([] if age else [other.name])}


def test_when_the_builder_dies_another_rank_goes_on(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits tries the lock now and then, which the kernel takes from the dead."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(jit, "LOOKS_PER_TRY", 3)
    # As the kernel closes the files of the dead
    with toy.lock().open("w") as builder, ThreadPoolExecutor(1) as rank:
        fcntl.flock(builder, fcntl.LOCK_EX)
        waiting = rank.submit(jit.load, toy.recipe, 30.0)
        time.sleep(0.7)
        assert not waiting.done()
        builder.close()
        assert waiting.result().answer == 42 and toy.compiles == 1


def test_ranks_that_wait_hear_why_a_compile_failed(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on with another backend at once, and do not compile it once more, each in turn."""
    compiling = threading.Event()

    def fail(directory: Path) -> None:
        compiling.set()
        time.sleep(0.3)
        raise jit.BuildError("zt_toy does not compile: no such luck")

    wanted = replace(toy.recipe, compile=fail)
    with ThreadPoolExecutor(2) as ranks:
        first = ranks.submit(jit.load, wanted)
        assert compiling.wait(10)
        monkeypatch.setenv("LOCAL_RANK", "1")
        began = time.monotonic()
        second = ranks.submit(jit.load, toy.recipe, 60.0)
        for rank in (first, second):
            with pytest.raises(jit.BuildError, match="no such luck"):
                rank.result()
    assert time.monotonic() - began < 10


def test_a_holder_that_does_not_finish_is_named(toy: Toy) -> None:
    """After its patience a rank goes on without the module."""
    with toy.lock().open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        holder.write("process 7 on node001")
        holder.flush()
        with pytest.raises(jit.BuildError, match="process 7 on node001"):
            jit.load(toy.recipe, patience_s=0.5)


def test_a_cache_that_cannot_be_written_is_a_sentence(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only home or a file in the way is reported, not raised as something else."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(toy.recipe.sources[0]))
    with pytest.raises(jit.BuildError, match="cannot build in"):
        jit.load(toy.recipe)


def half(library: Path) -> None:
    os.truncate(library, library.stat().st_size // 2)


def linked(library: Path) -> None:
    library.rename(library.with_name("elsewhere"))
    library.symlink_to("elsewhere")


NOBODY = 65534
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "half": (half, "is damaged"),
    "another's": (lambda library: os.chown(library, NOBODY, NOBODY), f"belongs to user {NOBODY}"),
    "written by all": (lambda library: library.chmod(0o777), "can be written by others"),
    "a link": (linked, "Too many levels of symbolic links"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_library_that_is_not_to_be_trusted_is_compiled_anew(
    damage: Callable[[Path], object], words: str, toy: Toy, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half a library is SIGBUS when it is loaded, and another user's may do anything: one line says
    why not.
    """
    library = jit.built(toy.recipe)
    if damage is DAMAGES["another's"][0] and os.geteuid():
        pytest.skip("only root can give files away")
    damage(library)
    capfd.readouterr()
    assert jit.load(toy.recipe).answer == 42 and toy.compiles == 2
    assert f"once; not loaded: {library}: {words}" in capfd.readouterr().err
    sys.modules.pop("zt_toy")
    assert jit.load(toy.recipe).answer == 42 and toy.compiles == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_folder_of_another_user_is_left_alone(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even its lock is opened: a module of this user's own lies next to it. What root has built
    serves all.
    """
    shared = jit.built(toy.recipe)
    theirs = shared.with_name(jit.LOCK)
    for path in (shared, theirs, shared.parent):
        os.chown(path, NOBODY, NOBODY)
    theirs.write_text("theirs")
    for _ in range(2):
        own = jit.built(toy.recipe)
        assert toy.compiles == 2 and own.parent.name == f"{shared.parent.name}-{os.geteuid()}"
    assert theirs.read_text() == "theirs" and names(shared.parent) == {jit.LOCK, shared.name}
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert jit.built(toy.recipe) == shared  # the other user
    os.chown(shared, 0, 0)
    os.chown(shared.parent, 0, 0)
    assert jit.built(toy.recipe) == shared and toy.compiles == 2


def test_a_link_in_place_of_the_lock_is_not_followed(toy: Toy) -> None:
    """Whoever compiles writes its name into the lock: that would empty the file the link
    leads to.
    """
    (mine,) = toy.recipe.sources
    toy.lock().symlink_to(mine)
    with pytest.raises(jit.BuildError, match="set TORCH_EXTENSIONS_DIR to a folder of your own"):
        jit.load(toy.recipe)
    assert mine.read_text() == SOURCE


def test_a_users_mask_lets_nobody_else_write(toy: Toy) -> None:
    """With the mask 002, usual where groups share folders, members of the group could exchange what
    is compiled.
    """
    old = os.umask(0)
    try:
        lock = toy.lock()
        lock.touch()
        assert jit.load(toy.recipe).answer == 42
    finally:
        os.umask(old)
    folder = lock.parent
    assert not [path for path in (folder, *folder.iterdir()) if path.stat().st_mode & 0o022]


def test_builders_hash_exactly_what_they_compile() -> None:
    """Their sources are the kernel files that there are, and each header is of one builder or of
    all.
    """
    builders = [kind() for kind in BUILDERS]
    named = {Path(source).name for builder in builders for source in builder.sources()}
    assert named == {path.name for path in source_dir().iterdir() if path.suffix in (".cpp", ".cu")}
    for header in source_dir().glob("*.h"):
        owners = [builder.name for builder in builders if header in builder.recipe().sources]
        assert owners == (
            [b.name for b in builders] if header.name in SHARED else [header.name[:6]]
        ), header.name


def test_deepspeed_does_not_take_our_builders_for_its_own() -> None:
    """DeepSpeed keeps loaded ops by name and imports a top-level op_builder that calls itself its
    own.
    """
    import op_builder

    assert not hasattr(op_builder, "__deepspeed__")
    assert all(kind().name.startswith("zt_") for kind in BUILDERS)


def test_builders_say_what_is_missing(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, no ninja, a torch for CPUs: one line each, and `is_compatible` is False."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert not CPUBuilder().is_compatible()
    with pytest.raises(jit.BuildError, match="no C\\+\\+ compiler"):
        CPUBuilder().jit_load()
    leave(CPUBuilder().recipe().library())
    # What others have built needs no compiler
    with pytest.raises(jit.BuildError, match="does not load"):
        CPUBuilder().jit_load()
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    assert "CPU" in GPUBuilder().reason() and not GPUBuilder().wanted()


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, which builders take for the real ones; torch is for AMD GPUs and
    compiles nothing.
    """
    copy = shutil.copytree(source_dir(), tmp_path / "csrc")
    monkeypatch.setattr("zero_topo.op_builder.builder.source_dir", lambda: copy)
    monkeypatch.setattr(cpp_extension, "IS_HIP_EXTENSION", True)
    monkeypatch.setattr(cpp_extension, "ROCM_HOME", "/opt/rocm")
    torch_for_amd(monkeypatch, True)
    monkeypatch.setattr(cpp_extension, "_write_ninja_file_and_build_library", lambda **given: None)
    monkeypatch.setattr(cpp_extension, "_import_module_from_library", lambda *given: None)
    monkeypatch.setattr(cpp_extension, "library_paths", lambda **given: [])
    monkeypatch.chdir(tmp_path)
    return copy


def keys() -> list[str]:
    """Of every builder's module."""
    return [kind().recipe().key() for kind in BUILDERS]


def names(directory: Path) -> set[str]:
    """Of the files in a directory."""
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("way", ["at first use", "ahead of time"])
def test_hipify_translates_a_copy(csrc: Path, tmp_path: Path, way: str) -> None:
    """torch's own hipify leaves the sources and the keys as they were, and translates every
    kernel.
    """
    before, there = keys(), names(csrc)
    if way == "at first use":
        made = tmp_path / "work" / "csrc"
        GPUBuilder().recipe().compile(made.parent)
    else:
        made = tmp_path / "build" / "csrc" / "zt_gpu"
        assert {
            path.endswith((".hip", "_hip.cpp")) for path in map(str, GPUBuilder().builder().sources)
        } == {True}
    assert {f"{path.stem}.hip" for path in source_dir().glob("zt_gpu*.cu")} <= names(made)
    assert names(csrc) == there and keys() == before


def seeing(monkeypatch: pytest.MonkeyPatch, arch: str | None) -> None:
    """This process sees a GPU of an architecture, or none."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: arch is not None)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda: SimpleNamespace(gcnArchName=f"{arch}:sramecc+")
    )
    monkeypatch.setattr(
        "torch.cuda.get_device_capability", lambda: tuple(map(int, str(arch).split(".")))
    )


AMD, NVIDIA = ("gfx90a", "gfx942"), ("8.0", "9.0+PTX")
LEFT_OUT = ("gfx908", "7.0")
OF_CONTAINER = "8.0 8.6 9.0 10.0 12.0+PTX"
OF_ROCM = "gfx900 gfx906 gfx908 gfx90a gfx942 gfx1030 gfx1100"
ARCHITECTURES = [
    ("", AMD, "gfx90a gfx942 gfx908"),
    ("", NVIDIA, "8.0 8.6 9.0 10.0 7.0"),
    (f"7.5 {OF_CONTAINER}", tuple(OF_CONTAINER.split()), "9.0"),
    ("6.0;Kepler+Tesla;Volta;7.5+PTX", NVIDIA, "9.0"),
    (OF_ROCM, tuple(OF_ROCM.split()), "gfx90a"),
]
"""Torch's variable, the architectures that are compiled where no GPU is seen, GPUs."""


@pytest.mark.parametrize(("listed", "general", "gpus"), ARCHITECTURES)
def test_a_gpu_compiles_for_itself_unless_a_module_for_it_was_built(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, listed: str, general: tuple[str, ...], gpus: str
) -> None:
    """Ranks load what a login node without a GPU built; else each compiles for its own GPU, which
    is soonest, whatever a container lists. What is too old for the kernels is left out.
    """
    rocm = gpus.startswith("gfx")
    torch_for_amd(monkeypatch, rocm)
    monkeypatch.setenv("PYTORCH_ROCM_ARCH" if rocm else "TORCH_CUDA_ARCH_LIST", listed)
    seeing(monkeypatch, None)
    login = GPUBuilder().recipe()
    assert GPUBuilder().architectures() == general
    for built in (False, True):
        for arch in gpus.split():
            seeing(monkeypatch, arch)
            own = arch in LEFT_OUT or not built
            wanted = GPUBuilder([arch]).recipe() if own else login
            assert GPUBuilder().chosen().key() == wanted.key()
            assert own == (wanted.key() != login.key())
        if not built:
            leave(login.library())


def test_architectures_reach_torch_and_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What torch's variable asks for is compiled, else the usual ones; another list is another
    module.

    Torch gets them in its variable, for without it torch 2.6 fails where there is no GPU to look
    at.
    """
    torch_for_amd(monkeypatch, False)
    seen, found = [], set()
    monkeypatch.setattr(
        cpp_extension, "load", lambda **given: seen.append(os.environ["TORCH_CUDA_ARCH_LIST"])
    )
    for wanted in ("8.0", "9.0a Hopper", None):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted or "")
        recipe = GPUBuilder().recipe()
        recipe.compile(tmp_path)
        found.add(recipe.key())
        assert os.environ["TORCH_CUDA_ARCH_LIST"] == (wanted or "")
    assert seen == ["8.0", "9.0a;Hopper", "8.0;9.0+PTX"] and len(found) == 3


@pytest.mark.parametrize("error", [IndexError("x"), RuntimeError("FAILED\n/ld: cannot find -lx")])
def test_what_stops_torchs_builder_is_a_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also what it does not expect itself: a rank goes on with another backend."""
    monkeypatch.setattr(cpp_extension, "load", mock.Mock(side_effect=error))
    with pytest.raises(jit.BuildError, match="x"):
        CPUBuilder().recipe().compile(tmp_path)


def test_build_compiles_for_those_that_come(
    toy: Toy, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`zero-topo build` leaves every library where ranks look; status 1 where what is asked for
    cannot be built.
    """
    monkeypatch.setattr(
        TopoBuilder, "_compile", lambda self, into, verbose: (into / f"{self.name}.so").touch()
    )
    assert run("build")[0] == 0 and CPUBuilder().recipe().library().exists()
    for name in ("cuda", "hip"):
        monkeypatch.setattr(f"torch.version.{name}", None)
    status, out, _ = run("build", "--arch", "sm_90")
    assert (status, out.splitlines()[1]) == (1, "zt_gpu: not here: this torch is built for CPUs")
    monkeypatch.setattr("torch.version.cuda", "12.4")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "/usr/local/cuda")
    status, out, _ = run("build", "--arch", "sm_90,sm_100")
    assert status == 0 and out.count("zt_gpu: ") == 2
    assert all(GPUBuilder([arch]).recipe().library().exists() for arch in ("9.0", "10.0"))
    status, _, err = run("build", "--arch", "gfx90a")
    assert status == 2 and "--arch gfx90a: this torch compiles for NVIDIA GPUs" in err


def test_gpu_flags_keep_ieee_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fast math, no contraction, no flushing, whatever the vendor."""
    torch_for_amd(monkeypatch, False)
    assert {"-fmad=false", "-ftz=false", "-prec-div=true"} <= set(GPUBuilder().nvcc_args())
    torch_for_amd(monkeypatch, True)
    assert "-ffp-contract=off" in GPUBuilder().nvcc_args()


def test_the_environment_chooses_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_EXTENSIONS_DIR, as for torch and DeepSpeed; else the user's cache, never one below the
    current folder.
    """
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    assert jit.cache_dir() == Path("/somewhere")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert jit.cache_dir() == Path("/cache/zero_topo")
    for unusable in (None, "cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable or "")
        assert jit.cache_dir() == Path(os.path.expanduser("~/.cache/zero_topo"))
