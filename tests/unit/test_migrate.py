# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's keys for ZeRO++, LoCo and MiCS: what they become, what contradicts them, and what
that costs.
"""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import Run
from tests.launching import ROOT as CHECKOUT
from tests.plans import printed, resolve
from zero_topo.config import ZeroTopoConfig, deepspeed_problems
from zero_topo.config.stock_keys import KEYS, ZERO, switched_on, translate
from zero_topo.cost import Workload, memory_bytes, step_bytes
from zero_topo.cost.rule import before_a_model
from zero_topo.cost.volume import loco_bytes, stock_config
from zero_topo.topology import Topology
from zero_topo.topology.presets import load_preset

ZEROPP = {
    "zero_quantized_weights": True,
    "zero_hpz_partition_size": 8,
    "zero_quantized_gradients": True,
}
LOCO = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
INT8_COPY = {"weights": "int8", "secondary": "int8"}
DGX = Topology("dgx", nodes=4, gpus_per_node=8, ranks_per_gpu=1)


def stock(block: Any = None, **zero: Any) -> dict[str, Any]:
    """A config of stage 3 with stock keys, and a block unless that is None."""
    return {ZERO: {"stage": 3, **zero}, **({} if block is None else {"zero_topo": block})}


MIGRATED = {
    "zero++": (
        ZEROPP,
        {"scheme": "zero++", "secondary": 8, "quantize": {**INT8_COPY, "gradients": "int4"}},
    ),
    "hpz": ({"zero_hpz_partition_size": 8.0}, {"scheme": "zero3", "secondary": 8}),
    "qwz": (
        {"zero_quantized_weights": "true"},
        {"scheme": "zero3", "quantize": {"weights": "int8"}},
    ),
    "nothing": (
        {"zero_hpz_partition_size": 1, "zero_quantized_weights": False},
        {"scheme": "zero3"},
    ),
    "auto": (dict.fromkeys(ZEROPP, "auto"), {"scheme": "zero3"}),
    "loco": (
        {"zero_quantized_gradients": True, **LOCO},
        {
            "weights": "node",
            "gradients": "node",
            "optimizer": "world",
            "sync": {"mode": "quantized"},
        },
    ),
    "loco alone": (LOCO, {"scheme": "zero3"}),
    "mics": ({"mics_shard_size": 4, **ZEROPP}, {"weights": 4, "gradients": 4, "optimizer": 4}),
    "mics in groups": (
        {"mics_shard_size": 4, "mics_hierarchical_params_gather": True},
        {"weights": 4, "gradients": 4, "optimizer": 4},
    ),
    "mics off": ({"mics_shard_size": -1}, {"scheme": "zero3"}),
}


@pytest.mark.parametrize(("zero", "block"), MIGRATED.values(), ids=list(MIGRATED))
def test_migrate_writes_a_config_that_does_the_same_and_that_check_accepts(
    zero: dict[str, Any], block: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    """On 8 and on 384 ranks; no key with an effect is left for DeepSpeed, and none that 0.19.8
    refuses.
    """
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "timers": {"throughput": {"synchronized": False}},
    }
    before.write_text(json.dumps({**settings, **stock(**zero)}))
    status, out, err = run("migrate", str(before), "--output", str(after))
    assert (status, err) == (0, "") and f"wrote {after}" in out
    written = json.loads(after.read_text())
    assert written["zero_topo"] == block and switched_on(written) == {}
    assert not {"mics_shard_size", "zeropp_loco_param"} & set(written[ZERO])
    for ranks in ("8", "384"):
        written["zero_topo"]["topology"] = "frontier"
        after.write_text(json.dumps(written))
        status, out, err = run("check", str(after), "--world-size", ranks)
        assert (status, err) == (0, "") and out.endswith("ok\n")


def test_keys_next_to_a_block_are_taken_into_it_where_it_leaves_them_open() -> None:
    """The same config in either form resolves to the same plan; each key is reported in one
    line.
    """
    config = stock({"scheme": "topo", "secondary": 8}, **ZEROPP)
    found = translate(config)
    assert found.config == stock(
        {"scheme": "topo", "secondary": 8, "quantize": {**INT8_COPY, "gradients": "int4"}}
    )
    assert len(found.lines) == 3 and all(line.startswith(f"{ZERO}.zero_") for line in found.lines)
    assert ZeroTopoConfig.from_ds_config(config) == ZeroTopoConfig.from_ds_config(found.config)
    assert deepspeed_problems(config) == []


@pytest.mark.parametrize(
    ("block", "zero", "words"),
    [
        (
            {"secondary": "node"},
            {"zero_hpz_partition_size": 8},
            ["zero_topo.secondary = 8", '"node"'],
        ),
        (
            {"secondary": None},
            {"zero_hpz_partition_size": 8},
            ["zero_hpz_partition_size = 8", "null"],
        ),
        ({"quantize": {"weights": None}}, ZEROPP, ["zero_quantized_weights = true", "null"]),
        (
            {"quantize": 4},
            {"zero_quantized_weights": True},
            ['zero_topo.quantize = {"weights": "int8"}', "which is 4"],
        ),
        ({"weights": 2}, {"mics_shard_size": 4}, ["mics_shard_size = 4", "weights", "which is 2"]),
        (
            {"sync": {"mode": "dense"}},
            {"zero_quantized_gradients": True, **LOCO},
            ["zeropp_loco_param", '"dense"'],
        ),
    ],
)
def test_keys_that_contradict_the_block_are_refused(
    block: Any, zero: dict[str, Any], words: list[str]
) -> None:
    """In one line that names both, and the key stays where it was."""
    config = stock(block, **zero)
    (problem,) = deepspeed_problems(config)
    assert all(word in problem for word in words) and problem.endswith("remove one of the two")
    (key,) = (key for key in KEYS if key in problem)
    assert key in translate(config).config[ZERO]


@pytest.mark.parametrize("machine", ["frontier", "dgx-h100", "perlmutter"])
def test_an_empty_block_next_to_any_keys_of_zeropp_resolves(machine: str) -> None:
    """The first try of every user of ZeRO++: each combination of its keys, on one node and on
    many.
    """
    values = {
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        **LOCO,
    }
    for keys in chain.from_iterable(combinations(values, n) for n in range(len(values) + 1)):
        config = stock({}, **{key: values[key] for key in keys})
        assert deepspeed_problems(config) == []
        block = ZeroTopoConfig.from_ds_config(config)
        assert block is not None
        for ranks in (8, 384):
            found = before_a_model(block, load_preset(machine, ranks))
            if found is not None and "zero_hpz_partition_size" in keys:
                assert (
                    found.plan.secondary == 8
                    or found.plan.weights == 1
                    or found.resident_spec is not None
                )


JSON: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.builds(list)
    | st.builds(dict)
)


@given(
    zero=st.dictionaries(st.sampled_from(KEYS), JSON),
    block=st.none() | st.dictionaries(st.just("quantize"), JSON),
)
def test_translation_takes_any_json_leaves_its_argument_and_is_done_once(
    zero: Any, block: Any
) -> None:
    config = stock(block, **zero)
    shown = repr(config)
    found = translate(config)
    assert repr(config) == shown
    assert repr(translate(found.config)) == repr(found) or found.lines
    assert translate(found.config).lines == ()


def test_every_key_is_known_to_the_installed_deepspeed() -> None:
    """Those that are gone stand in its list of what it refuses."""
    found = importlib.util.find_spec("deepspeed")
    assert found is not None and found.submodule_search_locations
    root = Path(found.submodule_search_locations[0]) / "runtime"
    text = (root / "config.py").read_text() + (root / "zero" / "config.py").read_text()
    assert [key for key in KEYS if f'"{key}"' not in text and f"{key}:" not in text] == []


@pytest.mark.parametrize("carried_by", ["config", "config_params", "args"])
def test_deepspeed_gets_the_config_without_the_keys(
    carried_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would act on them or refuse them itself. The caller's dict and arguments are not
    changed.
    """
    from deepspeed.utils import logger

    from zero_topo.hook.initialize import checked_first

    seen: list[Any] = []
    said: list[str] = []

    def initialize(
        args: Any = None, optimizer: Any = None, config: Any = None, config_params: Any = None
    ) -> None:
        seen.append(config or config_params or args.deepspeed_config)

    monkeypatch.setattr(logger, "warning", said.append)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(stock({"scheme": "topo"}, **ZEROPP)))
    given: dict[str, Any] = (
        {"args": Namespace(deepspeed_config=str(path))}
        if carried_by == "args"
        else {carried_by: str(path)}
    )
    checked_first(initialize)(**given)
    assert switched_on(seen[0]) == {} and seen[0]["zero_topo"]["secondary"] == 8
    assert carried_by != "args" or given["args"].deepspeed_config == str(path)
    assert len(said) == 3 and all("is taken as" in line for line in said)
    monkeypatch.setenv("RANK", "1")
    checked_first(initialize)(**given)
    assert len(said) == 3, "another rank says nothing"


# -- costs -----------------------------------------------------------------------------------------


def test_what_stock_zeropp_holds_and_sends_is_what_the_paper_says() -> None:
    """Of 2 psi bytes: half for INT8 forward over the world, half backward inside the node, a
    quarter for gradients.
    """
    numel = 2**25
    config, work = stock_config(ZEROPP, DGX), Workload.uniform([numel])
    stored = memory_bytes(replace(config, secondary_spec=None), work, 2)
    assert (stored["weights"], stored["secondary"]) == (numel // 16, numel // 4)
    sent, scales = step_bytes(config, work, stock=True), 1 + 4 / 256
    assert sent["gather_forward", "world"] == pytest.approx(numel * 31 / 32 * scales)
    assert sent["gather_backward", "node"] == pytest.approx(numel * 7 / 8 * scales)
    assert sent["scatter", "node"] == pytest.approx(numel / 2 * 7 / 8 * (1 + 8 / 256))
    assert sent["scatter", "world"] == pytest.approx(numel / 16 * 3 / 4 * (1 + 8 / 256))


def test_stock_quantizes_no_gradients_on_one_node_and_loco_keeps_them_in_int8() -> None:
    """As DeepSpeed 0.18 does."""
    numel = 2**25
    work = Workload.uniform([numel])
    one = Topology("dgx", nodes=1, gpus_per_node=8, ranks_per_gpu=1)
    plain = step_bytes(resolve(one, scheme="zero3"), work)
    assert (
        step_bytes(stock_config({"zero_quantized_gradients": True}, one), work, stock=True) == plain
    )
    loco = {"zero_quantized_gradients": True, **LOCO}
    assert loco_bytes(loco, work, DGX) == numel + numel // 8 and loco_bytes(loco, work, one) == 0


def test_migrate_shows_bytes_and_memory_before_and_after(run: Run, tmp_path: Path) -> None:
    """For the config's own micro-batches; a machine that is not named is asked for."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"gradient_accumulation_steps": 4, **stock(**ZEROPP, **LOCO)}))
    words = ("migrate", str(path), "--machine", "dgx-h100", "--nodes", "4", "--params", "13B")
    report = printed(run, *words)
    costs = report["costs"]
    assert set(costs) == {"before", "after", "empty"}
    before, after = (sum(costs[row]["memory"].values()) for row in ("before", "after"))
    assert after < before and costs["before"]["memory"]["residual"] > 13 * 10**9
    assert costs["before"]["at_most_s"] is None and costs["after"]["at_most_s"] > 0
    out = run(*words)[1]
    assert "…" not in out
    assert json.loads("{" + out.partition("\n{")[2]) == report["config"]
    status, out, _ = run("migrate", str(path))
    assert status == 0 and "give --machine" in out


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({ZERO: {"stage": 2}}, f"{ZERO}.stage = 2"),
        (stock({"secondary": "node"}, **ZEROPP), "remove one of the two"),
        (stock(offload_param={"device": "nvme"}), "parameter offload is not supported"),
    ],
)
def test_what_cannot_be_migrated_is_refused_and_nothing_is_written(
    config: dict[str, Any], words: str, run: Run, tmp_path: Path
) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(config))
    status, _, err = run("migrate", str(before), "--output", str(after))
    assert status == 2 and words in err and not after.exists()


def test_the_new_config_is_written_over_nothing(run: Run, tmp_path: Path) -> None:
    """Not over the config that is migrated, nor over another with a block, unless asked: any may be
    the user's own.
    """
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(stock(**ZEROPP)))
    assert run("migrate", str(before), "--output", str(after))[0] == 0
    written = after.read_text()
    after.write_text(json.dumps({"zero_topo": {"scheme": "paper"}}))
    for file in (before, after):
        kept = file.read_text()
        status, _, err = run("migrate", str(before), "--output", str(file))
        assert (
            status == 2
            and f"{file} exists" in err
            and "--force" in err
            and file.read_text() == kept
        )
    assert (
        run("migrate", str(before), "--output", str(after), "--force")[0] == 0
        and after.read_text() == written
    )


def test_a_config_of_ours_comes_back_as_it_was(run: Run) -> None:
    path = CHECKOUT / "configs" / "topo.json"
    assert printed(run, "migrate", str(path))["config"] == json.loads(path.read_text())


def test_the_page_shows_what_migrate_does(run: Run, tmp_path: Path) -> None:
    """Its second config is what becomes of the first, and its table has every key."""
    text, path = (CHECKOUT / "docs/removed-features.md").read_text(), tmp_path / "ds.json"
    before, after = (json.loads(part.partition("```")[0]) for part in text.split("```json")[1:3])
    path.write_text(json.dumps(before))
    assert printed(run, "migrate", str(path))["config"] == after
    assert [key for key in KEYS if key not in text] == []
