# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Values of DeepSpeed's keys are read as DeepSpeed reads them: what is off there is off here, in
every command.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import Run
from tests.launching import ROOT
from tests.unit.test_config_deepspeed import GOOD, changed
from zero_topo.config import ZeroTopoConfig, deepspeed_problems, json_schema
from zero_topo.config.deepspeed_parts import NUMBERS, PARTS, TRUTHS, ZERO, on, wrong_values
from zero_topo.config.stock_keys import FIELDS, read_stock, translate
from zero_topo.doctor.refusals import setting_refusals
from zero_topo.hook import initialize
from zero_topo.neox.__main__ import main as neox
from zero_topo.versions import SUPPORTED, installed

CONFIGS = ROOT / "tests/data/configs"
WORDS = {
    "check_block_is_auto.json": 'bf16 = "auto": DeepSpeed reads a JSON object there',
    "hint_two_names.json": "bf16.loss_scale: unknown key; remove it",
    "plan_zero_optimization_is_true.json": "zero_optimization = true: DeepSpeed reads a JSON "
    "object there",
    "quantized_gradients_switched_off.json": 'zero_quantized_gradients = {"enabled": false}: must '
    "be true or false",
    "sync_numbers_of_wrong_type.json": 'zero_topo.sync.start: should be a valid integer, got "2"',
}
COMMANDS = {
    "check": "check FILE --machine frontier --world-size 16",
    "check of a model": "check FILE --machine frontier --world-size 16 --params 1B",
    "migrate": "migrate FILE --machine frontier --world-size 16",
    "plan": "plan --params 1B --machine frontier --nodes 2 --set deepspeed-config=FILE",
    "largest": "plan --max-params --machine frontier --nodes 2 --set deepspeed-config=FILE",
    "simulate": "simulate --model gpt2 --machine frontier --gcds 16 --micro-batches 1 --schemes "
    "FILE",
}
TYPES: dict[str, Any] = {
    "auto": "auto",
    "word": "x",
    "null": None,
    "true": True,
    "number": 3,
    "list": [],
    "object": {},
}
PINNED = pytest.mark.skipif(
    installed("deepspeed") != SUPPORTED["deepspeed"].pinned,
    reason="read from the source of one release",
)
SWITCHED: list[Any] = [
    *(
        True,
        False,
        0,
        1,
        2,
        -1,
        0.0,
        1.0,
        0.5,
        None,
        [],
        [1],
        {},
        {"enabled": False},
        {"enabled": True},
    ),
    *(
        "true",
        "False",
        "on",
        "off",
        "OFF",
        "yes",
        "no",
        "y",
        "n",
        "t",
        "f",
        "0",
        "1",
        "2",
        "",
        "none",
        "disabled",
    ),
    *(8, 8.0, 8.5, "8", "8.0"),
]


def ds_config(config: dict[str, Any]) -> Any:
    """DeepSpeed's own reading of a config, without its log."""
    module = pytest.importorskip("deepspeed.runtime.config")
    logging.disable(logging.WARNING)
    try:
        return module.DeepSpeedConfig(copy.deepcopy(config))
    finally:
        logging.disable(logging.NOTSET)


def refused_by_deepspeed(config: dict[str, Any]) -> bool:
    """Whether DeepSpeed cannot read a config."""
    try:
        ds_config(config)
    except Exception:
        return True
    return False


# -- configs that were taken for another, or ended in a traceback ----------------------------------


@pytest.mark.parametrize("name", sorted(WORDS))
def test_check_refuses_each_in_one_line_that_names_the_file(name: str, run: Run) -> None:
    """Status 2; nothing is printed but the line."""
    path = str(CONFIGS / name)
    status, out, err = run(*COMMANDS["check"].replace("FILE", path).split())
    assert (status, out) == (2, "")
    lines = err.splitlines()
    assert any(WORDS[name] in line for line in lines), err
    assert all(line.startswith("zero-topo: ") and path in line for line in lines)


def test_the_block_of_a_part_with_four_wrong_numbers_names_all_four() -> None:
    """Of text, of true, of text with spaces: each was taken as a number."""
    block = json.loads((CONFIGS / "sync_numbers_of_wrong_type.json").read_text())["zero_topo"]
    with pytest.raises(ValueError, match=r"also zero_topo\.sync") as caught:
        ZeroTopoConfig.parse(block)
    assert all(
        f"zero_topo.sync.{key}: " in str(caught.value)
        for key in ("start", "interval", "density", "warmup")
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_no_part_of_a_wrong_type_ends_in_a_traceback(
    command: str, run: Run, tmp_path: Path
) -> None:
    """In any command that reads a config: it works, or ends with status 2 and short lines."""
    path = tmp_path / "ds.json"
    kinds = [kind for kind in TYPES if kind != "object"]
    parts = (*PARTS, f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param", "timers.throughput")
    for place, part in enumerate(parts, list(COMMANDS).index(command)):
        kind = kinds[place % len(kinds)]
        path.write_text(json.dumps(changed(**{part.replace(".", "__"): TYPES[kind]})))
        status, _, err = run(*COMMANDS[command].replace("FILE", str(path)).split())
        assert status == 0 or (status == 2 and err and "Traceback" not in err), (part, kind, err)
        assert all(
            line.startswith("zero-topo: ") and len(line) < 520 for line in err.splitlines()
        ), err


def test_neox_names_its_files_in_a_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where two were merged, both."""
    pytest.importorskip("yaml")
    one, two = tmp_path / "one.yml", tmp_path / "two.yml"
    one.write_text('{"pipe_parallel_size": 1, "train_micro_batch_size_per_gpu": 1}')
    two.write_text('{"optimizer": "auto", "deepspeed_extra_args": {"zero_topo": {}}}')
    assert neox(["check", str(one), str(two)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith(f"zero_topo.neox: {one}, {two}: ") for line in lines)


# -- parts -----------------------------------------------------------------------------------------


UNREAD = ("timers", "expert_parallel", "scheduler.params", ZERO)
"""Parts of which DeepSpeed reads some wrong types as nothing or as stage 1, or which it reads when
it builds.
"""


@PINNED
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_refused_where_deepspeed_cannot_read_it(part: str) -> None:
    """By `initialize` too, as a problem of one line; what DeepSpeed reads is left to it."""
    parent, _, key = part.rpartition(".")
    for kind, value in TYPES.items():
        config = {name: of for name, of in GOOD.items() if name != "bf16"}
        if parent:
            config[parent] = {"type": "AdamW" if parent == "optimizer" else "WarmupLR", key: value}
        else:
            config[part] = value
        refused = part in wrong_values(config)
        if part not in UNREAD and kind != "object":
            assert refused == refused_by_deepspeed(config), (part, kind)
        if refused:
            (line,) = deepspeed_problems(config)
            assert line.startswith(f"{part} = {json.dumps(value)}: ") and "\n" not in line


def test_initialize_refuses_a_part_in_the_same_line() -> None:
    """Before a process group exists."""
    config = changed(bf16="auto")
    with pytest.raises(ValueError, match=r'^bf16 = "auto": DeepSpeed reads a JSON object there'):
        initialize.check_call({"config": config}, config)


@pytest.mark.parametrize("part", ["optimizer", "scheduler"])
def test_a_part_without_its_type_is_refused(part: str) -> None:
    """DeepSpeed would build nothing of it, without a word."""
    (line,) = deepspeed_problems(changed(**{part: {"params": {"lr": 0.1}}}))
    assert line.startswith(f"{part}.type is missing: ")
    (line,) = deepspeed_problems(changed(**{part: {"type": 3}}))
    assert line.startswith(f"{part}.type = 3: ")
    assert deepspeed_problems(changed(**{part: {"type": "auto", "params": {"lr": "auto"}}})) == []


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_the_optimizer_is_no_text_and_no_switch(name: str) -> None:
    """Without torch: a login node has none."""
    wrong: list[Any] = ["1e-3", True, None, [0.1], {}]
    for value in wrong:
        config = changed(optimizer__type="AdamW", **{name.replace(".", "__"): value})
        (line,) = deepspeed_problems(config)
        assert line.startswith(f"{name} = {json.dumps(value)}: ")
    right: list[Any] = [0.1, 1, "auto"]
    for value in right:
        config = changed(optimizer__type="AdamW", **{name.replace(".", "__"): value})
        assert deepspeed_problems(config) == []


# -- on and off ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", FIELDS)
def test_a_stock_key_is_taken_and_refused_as_deepspeeds_field_does(key: str) -> None:
    """Each of many values, also those of the releases that no longer have the key, whose fields are
    of these types.
    """
    zero = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    for value in SWITCHED:
        values, lines = read_stock({key: value})
        assert (key in values) != (key in lines)
        if key not in zero.model_fields:
            continue
        try:
            expected = getattr(zero(stage=3, **{key: value}), key)
        except ValueError:
            assert key in lines, value
        else:
            assert values[key] == expected, value


def test_a_switch_that_deepspeed_refuses_is_refused_by_initialize_and_check() -> None:
    """Once each, although DeepSpeed would refuse it too."""
    config = changed(zero_optimization__zero_quantized_weights={"enabled": False})
    (line,) = deepspeed_problems(config)
    assert line == f'{ZERO}.zero_quantized_weights = {{"enabled": false}}: must be true or false'
    assert setting_refusals(config) == [line]
    assert translate(changed(zero_optimization__zero_quantized_weights="off")).config[
        "zero_topo"
    ] == {"scheme": "topo"}


@pytest.mark.parametrize(
    "value", [value for value in SWITCHED if not isinstance(value, dict | list)]
)
def test_refused_switches_are_on_where_deepspeed_takes_them_as_on(value: Any) -> None:
    """ "t" and "y" were taken as off, and the setting went on to DeepSpeed."""
    zero = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    key = "zero_quantized_nontrainable_weights"
    try:
        expected = getattr(zero(stage=3, **{key: value}), key)
    except ValueError:
        expected = False
    assert on(value) == expected
    assert bool(deepspeed_problems(changed(**{f"{ZERO}__{key}": value}))) == expected


@PINNED
@pytest.mark.parametrize("name", TRUTHS)
def test_a_text_that_deepspeed_would_take_as_true_is_refused(name: str) -> None:
    """DeepSpeed itself reads "false" as it stands there, which Python takes as true."""
    config = changed(**{name.replace(".", "__"): "false"})
    assert list(wrong_values(config)) == [name]
    for value in (True, False, "auto"):
        assert wrong_values(changed(**{name.replace(".", "__"): value})) == {}


def test_the_switches_of_the_table_are_read_unconverted() -> None:
    """By the installed DeepSpeed; one that converts its switch would not belong there."""
    attributes = {
        "prescale_gradients": "prescale_gradients",
        "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
        "dataloader_drop_last": "dataloader_drop_last",
        "memory_breakdown": "memory_breakdown",
        "dump_state": "dump_state",
    }
    for name, attribute in attributes.items():
        assert name in TRUTHS
        assert getattr(ds_config({**GOOD, name: "false"}), attribute) == "false"


# -- numbers of the block --------------------------------------------------------------------------


def numbers(
    schema: dict[str, Any], defs: dict[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every key of the block that is a number or a switch alone, with its mode and its type."""
    if "$ref" in schema:
        schema = defs[schema["$ref"].rpartition("/")[2]]
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        mode = choice.get("$ref", "").rpartition("/")[2]
        if mode:
            yield from numbers(choice, defs, (*path, mode))
    for key, part in schema.get("properties", {}).items():
        kinds = {choice.get("type") for choice in part.get("anyOf", (part,))}
        if (
            kinds & {"integer", "number", "boolean"}
            and not kinds & {"string"}
            and "enum" not in part
        ):
            yield (*path, key), next(iter(kinds - {"null"}))
        else:
            yield from numbers(part, defs, (*path, key))


def test_no_number_and_no_switch_of_the_block_is_taken_from_another_type() -> None:
    """As `docs/config.schema.json` says: text, true and false are no numbers, and numbers are no
    switches.
    """
    schema = json_schema()
    found = sorted(set(numbers(schema, schema["$defs"], ())))
    assert len(found) > 60
    modes = {
        name: part["properties"]["mode"]["default"]
        for name, part in schema["$defs"].items()
        if "mode" in part.get("properties", {})
    }
    for path, kind in found:
        wrong: list[Any] = ["1", " 4 ", [1], {}, 1 if kind == "boolean" else True]
        for value in wrong:
            block: Any = {path[-1]: value}
            if path[0] == "sync":
                block = {"sync": {"mode": modes[path[1]], path[-1]: value}}
            elif len(path) > 1:
                block = {path[0]: {path[-1]: value}}
            with pytest.raises(ValueError, match=path[-1]) as caught:
                ZeroTopoConfig.parse(block)
            assert "\n" not in str(caught.value)


# -- a search by machine ---------------------------------------------------------------------------

OF_PYTHON = re.compile(
    r"NoneType|positional|keyword|attribute|\bhas no |<class|Traceback|not supported "
    r"between|unpack|\*\*"
)
"""Words of errors that Python wrote."""
VALUES = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        0.5,
        10**17,
        "",
        "x",
        "auto",
        "false",
        [],
        [1],
        [0.9, 0.95],
        ["a"],
        {},
        {"a": 1},
    ]
)
KINDS = st.sampled_from(
    ["AdamW", "Adam", "Muon", "Lion", "Adagrad", "AdamS", "AgedAdamW", "SGD", "Lamb", "x", ""]
)
SCHEDULES = st.sampled_from(
    ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", "StepLR", "x"]
)
OPTIONS = st.sampled_from(
    [
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "momentum",
        "torch_adam",
        "amsgrad",
        "ns_method",
        "muon_lr",
        "foreach",
    ]
)
STEPS = st.sampled_from(
    [
        "total_num_steps",
        "warmup_num_steps",
        "warmup_min_lr",
        "warmup_max_lr",
        "warmup_type",
        "cycle_min_lr",
    ]
)
BUILT = {
    "optimizer": st.fixed_dictionaries(
        {"type": KINDS, "params": st.dictionaries(OPTIONS, VALUES, max_size=4)}
    ),
    "scheduler": st.fixed_dictionaries(
        {"type": SCHEDULES, "params": st.dictionaries(STEPS, VALUES, max_size=4)}
    ),
}
KEYS = st.sampled_from(
    ["enabled", "stage", "device", "throughput", "prof_ops", "tp", "dtype", "loss_scale", "foo"]
)
ANYTHING = VALUES | st.dictionaries(KEYS, VALUES, max_size=3)
PART_NAMES = [part for part in PARTS if "." not in part]


@given(
    config=st.dictionaries(st.sampled_from(PART_NAMES), ANYTHING, max_size=3),
    built=st.fixed_dictionaries({}, optional=BUILT),
)
def test_whatever_deepspeed_and_torch_refuse_is_said_in_our_words(config: Any, built: Any) -> None:
    """A line each, with the key, and without an exception of Python's; the installed libraries
    decide.
    """
    lines = setting_refusals({**GOOD, **config, **built})
    for line in lines:
        assert "\n" not in line and len(line) < 520 and not OF_PYTHON.search(line), line
        assert not line.startswith("DeepSpeed cannot read this config"), line
