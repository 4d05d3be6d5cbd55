# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One table says which releases are supported, and whoever meets another one says so and how to go
on.
"""

from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from tests.commands import Run
from tests.launching import ROOT
from zero_topo import lazy_hook
from zero_topo.versions import SUPPORTED, refusal, untried

OUTSIDE = [("torch", "2.5.1+cpu"), ("torch", "2.16.0a0"), ("deepspeed", "0.17.6")]
INSIDE = [
    ("torch", "2.6.0+rocm6.2"),
    ("torch", "2.15.3"),
    ("torch", "2.10"),
    ("deepspeed", "0.18.0+abc"),
    ("deepspeed", "0.19.8"),
]


def test_a_release_outside_the_range_is_refused() -> None:
    """In one line: what was found, what is supported, the way out. Patch releases of torch and
    builds of a vendor pass; 2.10 comes after 2.6.
    """
    for package, version in OUTSIDE:
        known, line = SUPPORTED[package], str(refusal(package, version))
        for word in (f"{package} {version}", f"{known.oldest} to {known.newest}", known.pinned):
            assert word in line and "\n" not in line
    assert not [given for given in INSIDE if refusal(*given) is not None]


def test_a_newer_deepspeed_is_left_to_the_seam() -> None:
    """It is not refused by its number; the log and `doctor` say that nobody has tried it."""
    newest = SUPPORTED["deepspeed"].newest
    assert refusal("deepspeed", "0.20.0") is None and refusal("deepspeed", "0.19.9.dev1") is None
    assert str(untried("deepspeed", "0.20.0")).endswith(
        f"is newer than {newest}, the last release that was tried"
    )
    assert untried("deepspeed", newest) is None and untried("deepspeed", "0.17.0") is None


@pytest.mark.parametrize(("package", "version"), OUTSIDE)
def test_the_import_refuses_it_before_the_hook(
    package: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook names privates that another release may not have: its own ImportError would not say
    which to install.
    """
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(__version__=version))
    with pytest.raises(
        ImportError, match=f"^{package} {version.replace('+', '.')} is installed, but"
    ):
        lazy_hook.install("no_module_of_this_name")


@pytest.mark.parametrize(("package", "version"), OUTSIDE)
def test_check_refuses_it(
    package: str, version: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """A config that is good would not start here; where nothing is installed, as on a login node,
    it is checked.
    """
    installed = {package: version}

    def reported(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", reported)
    config = (str(ROOT / "configs/demo.json"), "--world-size", "8")
    status, _, error = run("check", *config)
    assert status == 2 and f"{package} {version} is installed, but" in error
    installed.clear()
    assert run("check", *config)[0] == 0


def test_pip_and_make_go_by_the_same_table() -> None:
    """What is refused is not installed, and what `make setup` installs is what is tested."""
    text = (ROOT / "pyproject.toml").read_text()
    for package, known in SUPPORTED.items():
        *places, last = known.newest.split(".")
        below = "" if known.seam else f",<{'.'.join([*places, str(int(last) + 1)])}"
        assert f'"{package}>={known.oldest.removesuffix(".0")}{below}"' in text
    assert f'"deepspeed=={SUPPORTED["deepspeed"].pinned}"' in text
    make = (ROOT / "Makefile").read_text()
    assert f"TORCH_VERSION := {SUPPORTED['torch'].pinned}." in make
    assert f"PINNED_DEEPSPEED := deepspeed=={SUPPORTED['deepspeed'].pinned}\n" in make
