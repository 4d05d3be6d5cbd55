# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo enable`` and ``zero-topo disable``: the hook in every process of this Python, without
an import.

The .pth file
    Python runs the line of a .pth file in site-packages at every start. Ours puts one small object
    in front of the import system and imports nothing. When something imports DeepSpeed (or
    Accelerate, which reads DeepSpeed's configs) the object goes away, and zero_topo is imported
    first; if it is not installed any more, the file goes away too. Pip knows nothing of the file,
    so that an upgrade leaves the hook where it is.
"""

from __future__ import annotations

import site
import sysconfig
from pathlib import Path

HOOK_FILE = "zero_topo.pth"
MADE = "# made "  # begins the lines that name the folders that enabling made, innermost first
_FINDER = """
class ZeroTopoFinder:
    def find_spec(self, name, path=None, target=None):
        if name not in ("deepspeed", "accelerate"):
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec
        if find_spec("zero_topo"):
            import zero_topo
        else:
            import os
            try:
                os.remove(file)
            except OSError:
                pass
        return find_spec(name)

sys.meta_path.insert(0, ZeroTopoFinder())
"""


def hook_files() -> list[Path]:
    """Return folders for the file: the interpreter's site-packages, then the user's, if Python
    reads them.
    """
    folders = [sysconfig.get_path("purelib")]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [Path(folder) / HOOK_FILE for folder in folders]


def enable() -> None:
    """Install the hook for every program of this Python. They need no `import zero_topo` then."""
    present = [path for path in hook_files() if path.is_file()]
    if present:
        print(f"already enabled by {present[0]}")
        return
    for path in hook_files():
        line = f"import sys; exec({_FINDER!r}, {{'sys': sys, 'file': {str(path)!r}}})"
        try:
            made = [f"{MADE}{folder}" for folder in path.parents if not folder.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join([*made, line, ""]), encoding="utf-8")
        except OSError:
            continue
        print(
            f'enabled: wrote {path}; a DeepSpeed config with a "zero_topo" block is all that a '
            "program needs now"
        )
        return
    folders = " and ".join(str(path.parent) for path in hook_files())
    raise ValueError(
        f"cannot write to {folders}: enable in a virtual environment, or import zero_topo in the "
        "script"
    )


def disable() -> None:
    """Undo `enable`."""
    present = [path for path in hook_files() if path.is_file()]
    for path in present:
        lines = path.read_text(encoding="utf-8").splitlines()
        path.unlink()
        for folder in (Path(line.removeprefix(MADE)) for line in lines if line.startswith(MADE)):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        print(f"disabled: removed {path}")
    if not present:
        print("not enabled: nothing to remove")
