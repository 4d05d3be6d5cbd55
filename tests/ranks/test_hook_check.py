# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The hook gets into DeepSpeed once, whatever is imported first, and refuses a DeepSpeed it was not
built for.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch

from tests.launching import ROOT, output
from zero_topo.hook import install, optimizer, seam

# -- what the hook relies on -----------------------------------------------------------------------

OVERRIDES = ast.parse(inspect.getsource(optimizer.TopoStage3))


DECLARED = [(owner, *required.partition("(")[:2]) for owner, required in seam.REQUIRED]


@pytest.mark.parametrize(
    ("owner", "name", "parameters"), DECLARED, ids=[name for _, name, _ in DECLARED]
)
def test_a_missing_or_changed_private_is_named(
    owner: type, name: str, parameters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every method declared is looked for, on its class; one that takes something else would be
    called wrongly.
    """

    def changed(self: Any, surprise: int) -> None: ...

    monkeypatch.setattr(owner, name, changed)
    if parameters:
        with pytest.raises(
            ImportError, match=rf"{owner.__name__}\.{name}\(self, surprise\) was expected as \(self"
        ):
            seam.check_deepspeed()
    monkeypatch.delattr(owner, name)
    with pytest.raises(ImportError, match=rf"{owner.__name__}\.{name} is gone") as caught:
        seam.check_deepspeed()
    assert "Install deepspeed==0.19.8" in str(caught.value) and "\n" not in str(caught.value)


def test_a_renamed_attribute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes exist only on instances: one that no method of the class sets any more is missed
    all the same.
    """
    monkeypatch.setattr(seam, "ATTRIBUTES", ((seam.Stock, ("lp_param_buffer", "lp_param_bufer")),))
    with pytest.raises(
        ImportError,
        match=r"matters: DeepSpeedZeroOptimizer_Stage3\.lp_param_bufer is gone\. Install",
    ):
        seam.check_deepspeed()


@pytest.mark.parametrize("name", seam.SINCE)
def test_a_release_unlike_the_table_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of differences is compared with the installed release: a wrong entry would call it
    wrongly, silently.
    """
    wrong, found = ("9.9", "there") if seam.has(name) else ("0.1", "gone")
    monkeypatch.setattr(seam, "SINCE", {**seam.SINCE, name: wrong})
    with pytest.raises(
        ImportError, match=rf"{re.escape(name)} is {found}, which came with {wrong}\. Install"
    ):
        seam.check_deepspeed()


@pytest.mark.parametrize(
    ("version", "counts"), [("0.18.2", False), ("0.18.3", True), ("0.19.8", True)]
)
def test_a_failed_backward_pass_is_forgotten_where_it_is_counted(
    version: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed before 0.18.3 does not count passes; after, a count that stays would never end
    another pass.
    """
    monkeypatch.setattr(deepspeed, "__version__", version)
    optimizer = SimpleNamespace(is_gradient_accumulation_boundary=True)
    seam.forget_backward(optimizer)
    assert getattr(optimizer, "_backward_active_depth", None) == (0 if counts else None)


def test_a_bucket_is_emptied_without_what_came_late() -> None:
    """DeepSpeed 0.18.0 has no ``clear_params``; the buffer, which its own ``clear`` would drop, is
    used again.
    """
    buffer = object()
    bucket = SimpleNamespace(buffer=buffer, params=[1, 2], elements=5)
    seam.empty_bucket(bucket)
    assert (bucket.buffer, bucket.params, bucket.elements) == (buffer, [], 0)


@pytest.mark.parametrize(("version", "reported"), [("0.19.4", False), ("0.19.5", lambda: False)])
def test_the_boundary_is_read_as_each_release_has_it(
    version: str, reported: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that is not called is always true: gradients would be synced after each
    micro-batch.
    """
    monkeypatch.setattr(deepspeed, "__version__", version)
    assert seam.at_boundary(SimpleNamespace(is_gradient_accumulation_boundary=reported)) is False


def test_closures_that_hold_themselves_or_nothing_are_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers hangs a recursive closure on ``torch.nn.Module``, other libraries hang wrappers
    on DeepSpeed.
    """

    def odd(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any) -> Any:
            return wrapper, empty, function

        if not function.__name__:
            empty = 0
        return wrapper

    foreign = odd(lambda self: self.of_another_package)
    monkeypatch.setattr(torch.nn.Module, "smart_apply", foreign, raising=False)
    monkeypatch.setattr(install.DeepSpeedEngine, "train", odd(lambda self: self.inside_a_closure))
    seam.check_deepspeed()
    found = seam.attributes(install.DeepSpeedEngine)
    assert "inside_a_closure" in found and "of_another_package" not in found


def test_all_that_the_hook_uses_is_checked() -> None:
    """Whatever our class takes from DeepSpeed's is declared, so that a change cannot pass
    unseen.
    """
    used = {
        node.attr
        for node in ast.walk(OVERRIDES)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()")
    }
    checked = {name for _, name, _ in DECLARED} | {
        name for _, names in seam.ATTRIBUTES for name in names
    }
    checked |= {name.removesuffix("()") for name in seam.SINCE}
    assert sorted((used & seam.attributes(seam.Stock)) - checked - {"__init__"}) == []


def test_a_stranger_is_refused_before_anything_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DeepSpeed that does not fit stays as it is."""
    monkeypatch.setattr(install.DeepSpeedEngine, "_zero_topo_hook", False)
    monkeypatch.delattr(seam.Stock, "step")
    before = install.DeepSpeedEngine._configure_zero_optimizer
    with pytest.raises(ImportError, match=r"Stage3\.step is gone"):
        install.enable()
    assert install.DeepSpeedEngine._configure_zero_optimizer is before
    assert not install.DeepSpeedEngine._zero_topo_hook


# -- ways to install it ----------------------------------------------------------------------------

REPORT = """
import inspect, json, sys
from deepspeed.runtime.engine import DeepSpeedEngine
def layers(function):
    count = 0
    while "/zero_topo/hook/" in function.__code__.co_filename:
        count, function = count + 1, function.__wrapped__
    return count
configure = DeepSpeedEngine._configure_zero_optimizer
places = configure, deepspeed.initialize, deepspeed.zero.Init.__init__
print(json.dumps([layers(place) for place in places]))
"""
MODEL = """
import importlib.util
if importlib.util.find_spec("transformers"):
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
"""
WAYS = {
    "zero_topo_first": "import zero_topo, sys; assert 'deepspeed' not in sys.modules\nimport "
    "deepspeed",
    "deepspeed_first": "import deepspeed\nimport zero_topo; zero_topo.enable(); zero_topo.enable()",
    "enable_alone": "import zero_topo; zero_topo.enable(); import deepspeed, importlib; "
    "importlib.reload(zero_topo)",
    "hook_module_first": "import zero_topo.hook.install, deepspeed",
    "run": f"{MODEL}\nimport deepspeed",
}

# Each way in a process of its own, forked after the import of torch, which takes most of
# DeepSpeed's.
FORKS = """
import os, runpy, sys, torch
for script in sys.argv[1:]:
    if os.fork() == 0:
        if script.endswith("run.py"):
            sys.argv = ["zero_topo.run", script]
            runpy.run_module("zero_topo.run", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
        sys.exit()
    assert os.wait()[1] == 0, script
"""


def test_the_hook_is_installed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """However often a process asks for it."""
    install.enable()
    exec(REPORT, {"deepspeed": deepspeed})
    assert json.loads(capsys.readouterr().out) == [1, 1, 1]


@pytest.mark.long
def test_every_way_installs_the_hook_once(tmp_path: Path) -> None:
    """One layer of ours around each of the three functions; so the installed DeepSpeed fits, which
    is checked first.
    """
    scripts = [tmp_path / f"{name}.py" for name in WAYS]
    for script in scripts:
        script.write_text(f"{WAYS[script.stem]}\n{REPORT}")
    command = [sys.executable, "-c", FORKS, *map(str, scripts)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    lines = output(command, env=env).splitlines()
    assert [json.loads(line) for line in lines if line.startswith("[")] == [[1, 1, 1]] * len(WAYS)
