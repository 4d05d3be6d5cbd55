# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Compiles a builder's sources once and loads what came of it.

Note [One compile, no hang]
    Where a module lies is named by the hash of its sources, flags, Python and torch, so what is there is right, and
    ranks that find it load it without a lock. Otherwise the first rank of each node tries a ``flock``; who gets it
    compiles, in a directory of its own (some file systems lock within a node only), and moves the library into place.
    All others look whether it is there, now and then: each rank the less often the more ranks there are, at random
    moments, so that a shared file system sees about a thousand looks a second from a cluster of any size. The kernel
    takes the lock back when its holder dies; every rank tries it now and then, so another one goes on. A compile that
    fails leaves its reason for those that wait. After `patience_s` a rank goes on without the module: other backends
    give the same bits.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import IO

logger = logging.getLogger("zero_topo.op_builder")

PATIENCE_S = 900.0
NEWS_S = 30.0
LOOK_S, LOOKS_PER_S = 0.2, 1000.0
LOOKS_PER_TRY = 50  # of the lock
LOCK, REASON = "zero_topo.lock", "failed.txt"
_IMPORTING = threading.Lock()


class BuildError(Exception):
    """A native module cannot be built or loaded here; the message is one line that says why."""


@dataclass(frozen=True)
class Recipe:
    """What a module is compiled from.

    Attributes:
        name: of the module.
        sources: files to compile, and the headers they include.
        flags: of the compilers, and whatever else should lead to another build.
        compile: called as ``compile(directory)``; leaves ``name.so`` there.
    """

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    compile: Callable[[Path], None] = field(compare=False)

    def key(self) -> str:
        """Hash of everything the module depends on."""
        digest = hashlib.sha256("\0".join(self.flags).encode())
        for path in sorted(self.sources):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]

    def library(self) -> Path:
        """Where the module lies once it is compiled."""
        return cache_dir() / f"{self.name}_{self.key()}" / f"{self.name}.so"


def cache_dir() -> Path:
    """Where modules are kept: below ``TORCH_EXTENSIONS_DIR`` if that is set, else the user's cache."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero_topo"


def load(recipe: Recipe, patience_s: float = PATIENCE_S) -> ModuleType:
    """The module, compiled first if it has to be.

    Raises:
        BuildError: if it does not compile or load, or another process does not finish compiling it in time.
    """
    return _imported(recipe.name, built(recipe, patience_s))


def built(recipe: Recipe, patience_s: float = PATIENCE_S) -> Path:
    """The library, compiled first if it has to be; see Note [One compile, no hang].

    Raises:
        BuildError: if it does not compile, or another process does not finish compiling it in time.
    """
    library = recipe.library()
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with (library.parent / LOCK).open("a+") as lock:
            _compile_or_wait(recipe, lock, patience_s)
    except OSError as error:
        raise BuildError(f"cannot build in {library.parent}: {error}") from error
    return library


def _compile_or_wait(recipe: Recipe, lock: IO[str], patience_s: float) -> None:
    library, reason = recipe.library(), recipe.library().parent / REASON
    before, began, said = _version(reason), time.monotonic(), 0.0
    for look in _looks():
        if library.exists():
            return
        if look % LOOKS_PER_TRY == 0 and _try_lock(lock):
            if not library.exists():
                _compile(recipe, lock)
            return
        waited = time.monotonic() - began
        if _version(reason) != before:
            raise BuildError(reason.read_text(encoding="utf-8"))
        if waited > patience_s:
            raise BuildError(f"{_holder(lock)} has been compiling {recipe.name} for over {patience_s:.0f} s")
        if waited - said > NEWS_S:
            said = waited
            _say(f"waiting for {_holder(lock)}, which has been compiling {recipe.name} for {waited:.0f} s")


def _looks() -> Iterator[int]:
    """Numbers of this process's looks, from 0 on the first rank of a node; sleeps between them."""
    world, rank, local = (int(os.environ.get(name) or 0) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    chance, interval = random.Random(), max(LOOK_S, world / LOOKS_PER_S)
    time.sleep(interval * chance.random() if rank else 0.0)
    for look in count(1 if local else 0):
        yield look
        time.sleep(interval * chance.uniform(0.5, 1.5))


def _compile(recipe: Recipe, lock: IO[str]) -> None:
    library, node, process = recipe.library(), os.uname().nodename, os.getpid()
    lock.truncate(0)
    lock.write(f"process {process} on {node}")
    lock.flush()
    work = library.parent / f"build-{node}-{process}"
    shutil.rmtree(work, ignore_errors=True)  # of a dead process with this number
    work.mkdir()
    began = time.monotonic()
    _say(f"compiling {recipe.name} into {library.parent} (about a minute, once)")
    try:
        recipe.compile(work)
    except BuildError as error:
        (work / REASON).write_text(str(error), encoding="utf-8")
        os.replace(work / REASON, library.parent / REASON)
        raise
    os.replace(work / library.name, library)  # whole or not there at all
    shutil.rmtree(work, ignore_errors=True)
    _say(f"compiled {recipe.name} in {time.monotonic() - began:.0f} s")


def _version(path: Path) -> tuple[int, int] | None:
    """Differs from before if the file has been replaced."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _imported(name: str, library: Path) -> ModuleType:
    with _IMPORTING:  # ranks may be threads
        loaded = sys.modules.get(name)
        if loaded is not None and loaded.__file__ == str(library):
            return loaded
        spec = importlib.util.spec_from_file_location(name, library)
        assert spec is not None and spec.loader is not None
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            raise BuildError(f"{library} does not load: {str(error).splitlines()[0]}") from error
        sys.modules[name] = module
        return module


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read() or "another process"


def _say(text: str) -> None:
    """Progress is worth a line even where nobody has set up logging: a job that compiles looks like one that hangs."""
    logger.info(text)
    if not logger.isEnabledFor(logging.INFO):
        print(f"zero_topo: {text}", file=sys.stderr, flush=True)
