# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Compiles a builder's sources once per machine and loads what came of it.

Note [One compile, no hang]
    Where a module lies is named by the hash of its sources, flags, compiler and torch, so what is there is right, and
    ranks that find it load it without a lock. Otherwise one process compiles while the others wait for its ``flock``,
    which the kernel takes back when the holder dies: it cannot go stale, as the files that torch locks with do. Those
    are deleted by the holder: whoever left them is dead. On a file system without locks (or after `patience_s`) a rank
    goes on without the module: other backends give the same bits.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO

logger = logging.getLogger("zero_topo.op_builder")

PATIENCE_S = 900.0
NEWS_S = 30.0
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
    directory = cache_dir() / f"{recipe.name}_{recipe.key()}"
    library = directory / f"{recipe.name}.so"
    if not library.exists():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(directory / "zero_topo.lock", recipe.name, patience_s):
                if not library.exists():
                    _compile(recipe, directory)
        except OSError as error:
            raise BuildError(f"cannot build in {directory}: {error}") from error
    return _imported(recipe.name, library)


def _compile(recipe: Recipe, directory: Path) -> None:
    for stale in directory.glob("**/lock"):
        stale.unlink()
    work = directory / "build"
    work.mkdir(exist_ok=True)
    began = time.monotonic()
    _say(f"compiling {recipe.name} into {directory} (about a minute, once)")
    recipe.compile(work)
    os.replace(work / f"{recipe.name}.so", directory / f"{recipe.name}.so")  # whole or not there at all
    _say(f"compiled {recipe.name} in {time.monotonic() - began:.0f} s")


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


@contextmanager
def _locked(path: Path, name: str, patience_s: float) -> Iterator[None]:
    began = said = time.monotonic()
    with path.open("a+") as file:
        while not _try_lock(file):
            now = time.monotonic()
            if now - began > patience_s:
                raise BuildError(f"{_holder(file)} has been compiling {name} for over {patience_s:.0f} s")
            if now - said > NEWS_S:
                said = now
                _say(f"waiting for {_holder(file)}, which has been compiling {name} for {now - began:.0f} s")
            time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


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
