# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Compiles a builder's sources once and loads what came of it.

Note [One compile, no hang]
    Where a module lies is named by the hash of its sources, flags, Python and torch, so what is
    there is right, and ranks that find it load it without a lock. Otherwise the first rank of each
    node tries a ``flock``; who gets it compiles, in a directory of its own (some file systems lock
    within a node only), and moves the library into place. All others look whether it is there, now
    and then: each rank the less often the more ranks there are, at random moments, so that a shared
    file system sees about a thousand looks a second from a cluster of any size. The kernel takes
    the lock back when its holder ends; every rank tries it now and then, so another one goes on. A
    compile that fails leaves its reason for those that wait. After `patience_s` a rank goes on
    without the module: other backends give the same bits.

Note [Whose library]
    Loading a library runs it. What is loaded therefore belongs to this user or to root, can be
    written by nobody else, and ends with the SHA-256 of what stands before it: half a library would
    end the process with SIGBUS. It is loaded through the descriptor by which it was checked,
    because others may exchange the folders above it in between. A folder of another user is left
    alone: this user's module then lies next to it, in a folder whose name ends in the user's
    number. No link is followed in place of a module's folder or of a file in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import random
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import IO

logger = logging.getLogger("zero_topo.op_builder")

PATIENCE_S = 900.0
NEWS_S = 30.0
LOOK_S = 0.2
LOOKS_PER_S = 1000.0
LOOKS_PER_TRY = 50  # of the lock
LOCK = "zero_topo.lock"
REASON = "failed.txt"
DIGEST = 32  # bytes of SHA-256
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
WAY_OUT = "set TORCH_EXTENSIONS_DIR to a folder of your own"
_IMPORTING = threading.Lock()
Version = tuple[int, int] | None


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
        """Where the module lies once it is compiled; see Note [Whose library]."""
        shared, own = self.places()
        with suppress(OSError):
            if shared.parent.lstat().st_uid != os.geteuid() and refusal(shared):
                return own
        return shared

    def places(self) -> tuple[Path, Path]:
        """Where the module may lie: by its key alone, and if that folder is another user's."""
        folder = cache_dir() / f"{self.name}_{self.key()}"
        own = folder.with_name(f"{folder.name}-{os.geteuid()}")
        return folder / f"{self.name}.so", own / f"{self.name}.so"


def cache_dir() -> Path:
    """Where modules are kept: below ``TORCH_EXTENSIONS_DIR`` if that is set, else the user's
    cache.
    """
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    # Its specification says to ignore a relative one
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "zero_topo"


def refusal(library: Path) -> str | None:
    """Why a library cannot be loaded, or None if it can; see Note [Whose library]."""
    try:
        os.close(_checked(library))
    except OSError as error:
        return f"{library}: {error.strerror}"
    return None


def load(recipe: Recipe, patience_s: float = PATIENCE_S) -> ModuleType:
    """The module, compiled first if it has to be.

    Raises:
        BuildError: if it does not compile or load, or another process does not finish compiling it
            in time.
    """
    return _imported(recipe.name, built(recipe, patience_s))


def built(recipe: Recipe, patience_s: float = PATIENCE_S) -> Path:
    """The library, compiled first if it has to be; see Note [One compile, no hang].

    Raises:
        BuildError: if it does not compile, or another process does not finish compiling it in time.
    """
    library = recipe.library()
    refused = _version(library)
    if refusal(library) is None:
        return library
    try:
        _make(library.parent)
        with os.fdopen(_opened(library.parent / LOCK, os.O_RDWR | os.O_CREAT), "r+") as lock:
            _compile_or_wait(recipe, library, refused, lock, patience_s)
    except OSError as error:
        raise BuildError(
            f"cannot build in {library.parent}: {error.strerror or error}; {WAY_OUT}"
        ) from error
    return library


def _compile_or_wait(
    recipe: Recipe, library: Path, refused: Version, lock: IO[str], patience_s: float
) -> None:
    """``refused`` is the version of the library that is there and cannot be loaded, or None."""
    reason = library.parent / REASON
    before = _version(reason)
    began = time.monotonic()
    said = 0.0
    for look in _looks():
        if _version(library) not in (None, refused):
            return
        if look % LOOKS_PER_TRY == 0 and _try_lock(lock):
            if _version(library) in (None, refused):
                _compile(recipe, library, lock)
            return
        waited = time.monotonic() - began
        if _version(reason) != before:
            with os.fdopen(_opened(reason), encoding="utf-8") as file:
                raise BuildError(file.read())
        if waited > patience_s:
            raise BuildError(
                f"{_holder(lock)} has been compiling {recipe.name} for over {patience_s:.0f} s"
            )
        if waited - said > NEWS_S:
            said = waited
            _say(
                f"waiting for {_holder(lock)}, which has been compiling {recipe.name} for "
                f"{waited:.0f} s"
            )


def _looks() -> Iterator[int]:
    """Numbers of this process's looks, from 0 on the first rank of a node; sleeps between them."""
    world, rank, local = (
        int(os.environ.get(name) or 0) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    )
    chance = random.Random()
    interval = max(LOOK_S, world / LOOKS_PER_S)
    time.sleep(interval * chance.random() if rank else 0.0)
    for look in count(1 if local else 0):
        yield look
        time.sleep(interval * chance.uniform(0.5, 1.5))


def _compile(recipe: Recipe, library: Path, lock: IO[str]) -> None:
    node = os.uname().nodename
    process = os.getpid()
    lock.truncate(0)
    lock.write(f"process {process} on {node}")
    lock.flush()
    _remove_builds(library.parent, node)
    work = library.parent / f"build-{node}-{process}"
    work.mkdir()
    began = time.monotonic()
    found = [path for path in recipe.places() if os.path.lexists(path)]
    why = "".join(f"; not loaded: {refused}" for refused in map(refusal, found) if refused)
    _say(f"compiling {recipe.name} into {library.parent} (about a minute, once{why})")
    try:
        recipe.compile(work)
    except BuildError as error:
        (work / REASON).write_text(str(error), encoding="utf-8")
        _tighten(work / REASON)
        os.replace(work / REASON, library.parent / REASON)
        raise
    seal(work / library.name)
    os.replace(work / library.name, library)  # whole or not there at all
    shutil.rmtree(work, ignore_errors=True)
    _say(f"compiled {recipe.name} in {time.monotonic() - began:.0f} s")


def _remove_builds(folder: Path, node: str) -> None:
    """Remove what killed compilers left: on this node any, because its lock is taken; of others,
    what is old.
    """
    for left in folder.glob("build-*"):
        with suppress(OSError):
            if (
                left.name.rpartition("-")[0] == f"build-{node}"
                or time.time() - left.stat().st_mtime > PATIENCE_S
            ):
                shutil.rmtree(left)


def seal(library: Path) -> None:
    """End a library with its digest; see Note [Whose library]."""
    digest = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(digest)
    _tighten(library)


# -- whose files -----------------------------------------------------------------------------------


def _make(folder: Path) -> None:
    """Make a module's folder, in which nobody else can write.

    Raises:
        OSError: if it cannot be made, or is another's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder, folder / LOCK):  # what older versions made, too
        with suppress(FileNotFoundError):
            _tighten(path)
    _trust(folder.lstat(), stat.S_ISDIR)


def _tighten(path: Path) -> None:
    """Let nobody else write to what this user has made: the user's mask may allow a group to."""
    found = path.lstat()
    if found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode):
        path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS_WRITE)


def _checked(library: Path) -> int:
    """A descriptor of a library that can be loaded.

    Raises:
        OSError: saying why it cannot.
    """
    file = _opened(library)
    with os.fdopen(os.dup(file), "rb") as copy:
        content = copy.read()
    if hashlib.sha256(content[:-DIGEST]).digest() != content[-DIGEST:]:
        os.close(file)
        raise OSError(0, "is damaged or of an older version")
    return file


def _opened(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file that is this user's or root's, and that nobody else can write to.

    Raises:
        OSError: if it is none.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        _trust(os.fstat(file), stat.S_ISREG)
    except OSError:
        os.close(file)
        raise
    return file


def _trust(found: os.stat_result, kind: Callable[[int], bool]) -> None:
    """Refuse a file or folder of another kind or user, or that others can write to."""
    if not kind(found.st_mode):
        raise OSError(0, "neither a regular file nor a folder of its own")
    if found.st_uid not in (os.geteuid(), 0):
        raise OSError(0, f"belongs to user {found.st_uid}")
    if found.st_mode & OTHERS_WRITE:
        raise OSError(0, "can be written by others")


def _version(path: Path) -> Version:
    """Differs from before if the file has been replaced."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _imported(name: str, library: Path) -> ModuleType:
    with _IMPORTING:  # ranks may be threads
        loaded = sys.modules.get(name)
        if loaded is not None and loaded.__file__ == str(library):
            return loaded
        try:
            # Never closed: for the linker a path is a library
            path = f"/proc/self/fd/{_checked(library)}"
        except OSError as error:
            raise BuildError(f"{library}: {error.strerror}; it is not loaded: {WAY_OUT}") from error
        path = path if os.path.exists(path) else str(library)
        loader = ExtensionFileLoader(name, path)
        try:
            module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=path))
            loader.exec_module(module)
        except ImportError as error:
            raise BuildError(f"{library} does not load: {str(error).splitlines()[0]}") from error
        module.__file__ = str(library)
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
    """Progress is worth a line even where nobody has set up logging: a job that compiles looks like
    one that hangs.
    """
    logger.info(text)
    if not logger.isEnabledFor(logging.INFO):
        print(f"zero_topo: {text}", file=sys.stderr, flush=True)
