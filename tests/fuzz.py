# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Hostile input for the commands: `python -m tests.fuzz EXAMPLES [TARGET ...]`, in a folder of its
own, under limits.

Whatever a config, a machine, a capture, a launcher's variables or an option hold, a command works,
or ends with status 2 and short lines on stderr: no traceback, at most 10 s of a processor and 1 GB.
The process writes below its folder alone, and starts no other and no connection.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.launching import ROOT
from zero_topo.cli import main
from zero_topo.config import json_schema
from zero_topo.config.deepspeed_parts import NUMBERS, PARTS, TRUTHS
from zero_topo.config.stock_keys import FIELDS, IGNORED
from zero_topo.doctor.refusals import BATCHES
from zero_topo.launch.env import rank_environment
from zero_topo.neox.__main__ import main as neox
from zero_topo.strict import plain
from zero_topo.topology.model import Topology
from zero_topo.topology.rates import Rates

SECONDS, MEMORY, FILE_SIZE, LINE = 10.0, 1 << 30, 1 << 20, 520
STARTS = ("subprocess.Popen", "os.fork", "os.exec", "os.posix_spawn", "os.system", "socket.connect")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

Values = st.SearchStrategy[Any]
HOSTILE: Values = st.sampled_from(
    [
        *(
            None,
            True,
            -1,
            0,
            1,
            7,
            1.5,
            1e308,
            5e-324,
            float("nan"),
            float("inf"),
            10**17,
            10**400,
            [],
            {},
            [[]],
        ),
        *(
            "",
            "auto",
            "none",
            "/dev/zero",
            "no/such.json",
            "x" * 9999,
            "é\0\n",
            "9" * 400,
            "-0",
            "1e400",
            "NaN",
        ),
        *({"a": {"b": [{}]}}, [1, "2"], {"mode": {}}, json.loads("[" * 60 + "]" * 60)),
    ]
)


class TooLong(BaseException):
    """Ten seconds of a processor are over; no command catches it."""


# -- values ----------------------------------------------------------------------------------------


def mostly(usual: Values) -> Values:
    """The usual, but for one in forty: a value has many parts, and one that is wrong should not
    hide the others.
    """
    return st.integers(0, 39).flatmap(lambda n: HOSTILE if n == 13 else usual)


def of_schema(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> Values:
    """Values that a JSON schema describes, parts of them mostly."""
    if "$ref" in schema:
        return st.deferred(lambda: of_schema(defs[schema["$ref"].rpartition("/")[2]], defs))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return mostly(st.one_of([of_schema(one, defs) for one in schema[key]]))
    if "enum" in schema or "const" in schema:
        return mostly(st.sampled_from(schema.get("enum", [schema.get("const")])))
    parts = {key: of_schema(part, defs) for key, part in schema.get("properties", {}).items()}
    needed = {key: parts.pop(key) for key in schema.get("required", ())}
    extra, item = schema.get("additionalProperties"), schema.get("items", {})
    kinds: dict[str, Callable[[], Values]] = {
        "object": lambda: (
            st.fixed_dictionaries(needed, optional=parts)
            if parts or needed
            else st.dictionaries(
                st.sampled_from(["gpu", "node", "world", "gather", "é"]),
                of_schema(extra if isinstance(extra, Mapping) else {}, defs),
                max_size=3,
            )
        ),
        "array": lambda: st.lists(of_schema(item, defs), max_size=4),
        "integer": lambda: st.integers(1, 8),
        "number": lambda: st.floats(1e-9, 1e12),
        "boolean": st.booleans,
        "null": st.none,
        "string": lambda: (
            st.sampled_from(["topo", "node", "frontier", "a[1-2]"]) | st.text(max_size=5)
        ),
    }
    return mostly(kinds[schema["type"]]()) if "type" in schema else HOSTILE


def described(schema: Mapping[str, Any]) -> Values:
    """Values of a whole schema."""
    return of_schema(schema, schema.get("$defs", {}))


@st.composite
def mangled(draw: Callable[[Any], Any], texts: list[str]) -> str:
    """One of the texts with lines or words lost, doubled, moved or replaced, or cut short."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 4))):
        apart = draw(st.sampled_from([mark for mark in '\n \t":=<' if mark in text] or ["\n"]))
        parts = text.split(apart)
        at, to = (draw(st.integers(0, len(parts) - 1)) for _ in range(2))
        strange = draw(
            st.sampled_from(
                ["", "9" * 400, "-1", "NV0", "X", "{", "]", "\0", "é", "GPU0", "0x", "*", "1e999"]
            )
        )
        changes = {"lose": [], "double": [parts[at]] * 2, "move": [parts[to]], "replace": [strange]}
        parts[at : at + 1] = changes[draw(st.sampled_from(sorted(changes)))]
        text = apart.join(parts)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 7)) == 0 else text


# -- what must hold --------------------------------------------------------------------------------


def obeys(*words: str, command: Callable[[list[str]], int] = main) -> None:
    """Run a command: status 0, or 2 and short lines."""
    out, err = io.StringIO(), io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = command(list(words))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    said = out.getvalue() + err.getvalue()
    assert plain(said) == said, f"control characters in {said!r}"
    lines = err.getvalue().splitlines()
    assert (status, lines) == (0, []) or (status == 2 and 0 < len(lines) <= 20), (
        status,
        words,
        lines,
    )
    assert all(0 < len(line) <= LINE and line.startswith("zero") for line in lines), lines


def config(data: st.DataObject) -> None:
    """A DeepSpeed config, for DeepSpeed and as part of NeoX's."""
    found = data.draw(CONFIG)
    Path("ds.json").write_text(json.dumps(found))
    obeys("check", "ds.json", "--world-size", "8")
    extra = {"zero_topo": found.pop("zero_topo")}
    Path("neox.yml").write_text(json.dumps({**NEOX, **found, "deepspeed_extra_args": extra}))
    obeys("check", "neox.yml", "--ranks", "8", command=neox)


def machine(data: st.DataObject) -> None:
    """A machine's description, and rates."""
    Path("machine.json").write_text(json.dumps(data.draw(MACHINE)))
    obeys("topology", "--from", "./machine.json")
    obeys("plan", "--params", "1B", "--machine", "./machine.json", "--json")
    Path("rates.json").write_text(json.dumps(data.draw(RATES)))
    obeys(
        "simulate",
        "--gcds",
        "8",
        "--model",
        "gpt2",
        "--schemes",
        "topo",
        "--set",
        "rates=rates.json",
    )


def capture(data: st.DataObject) -> None:
    """Output of a device tool, broken."""
    Path("capture").write_text(data.draw(mangled(CAPTURES)))
    obeys("topology", "--from", "capture")


def launcher(data: st.DataObject) -> None:
    """Variables of a launcher, broken; in the environment of every command and of every rank."""
    lines = [line.partition("=") for line in data.draw(mangled(LAUNCHERS)).splitlines()]
    env = {
        name.strip(): value for name, _, value in lines if name.strip() and "\0" not in name + value
    }
    before = dict(os.environ)
    os.environ.update(env)
    try:
        obeys("topology")
        rank_environment(env)
    except ValueError as error:
        assert "\n" not in str(error)
    finally:
        os.environ.clear()
        os.environ.update(before)


def options(data: st.DataObject) -> None:
    """Numbers and names on the command line, and files of anything."""
    Path("any").write_bytes(
        data.draw(st.binary(max_size=64) | st.sampled_from([b"[" * 9999, b"a: " + b"[" * 9999]))
    )
    file = data.draw(
        st.sampled_from(
            ["any", "frontier", "no/such.json", "é\0", "{", '{"nodes":1}', "/dev/zero", "/", ""]
        )
    )
    odd = st.sampled_from(
        ["0", "-1", "1e9", "1e400", "9" * 400, "é", "", "1e-9", "inf", "2,,8", "1_0"]
    )
    number, other = (data.draw(st.sampled_from(["1", "2", "8", "1B"]) | odd) for _ in range(2))
    obeys("plan", "--params", number, "--machine", "frontier", "--nodes", other)
    obeys("plan", "--model", file, "--machine", "frontier", "--world-size", number)
    obeys(
        "simulate",
        "--gcds",
        number,
        "--model",
        "gpt2",
        "--micro-batches",
        other,
        "--schemes",
        "topo",
    )
    obeys("check", file)
    obeys("topology", "--from", file, "--world-size", number)


def model(data: st.DataObject) -> None:
    """Files that describe a model, broken, and a machine of launches."""
    Path("model.yml").write_text(data.draw(mangled(SHAPES)))
    obeys("plan", "--model", "model.yml", "--machine", "frontier", "--nodes", "1")
    Path("launch.json").write_text(data.draw(mangled(LAUNCHED)))
    obeys("launch", "slurm", "--machine", "./launch.json", "--", "true")


def stock(data: st.DataObject) -> None:
    """A config to migrate, and names of results."""
    Path("ds.json").write_text(json.dumps(data.draw(CONFIG)))
    obeys("migrate", "ds.json", "--machine", "frontier", "--world-size", "8")
    odd = data.draw(
        st.sampled_from(["ds.json", "/dev/full", "/", "", "a\x1b", "x" * 300, "no/such"])
    )
    obeys("migrate", "ds.json", "-o", odd)


def parts(data: st.DataObject) -> None:
    """Parts of a config that are words, lists, switches or objects of anything, for every command
    that reads one.
    """
    found = data.draw(CONFIG)
    for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=4)):
        *parents, key = name.split(".")
        place = found
        for parent in parents:
            if not isinstance(place.get(parent), dict):
                place[parent] = {}
            place = place[parent]
        place[key] = data.draw(
            HOSTILE | st.dictionaries(st.sampled_from(KEYS_OF_PARTS), HOSTILE, max_size=3)
        )
    Path("ds.json").write_text(json.dumps(found))
    there = ("--machine", "frontier", "--nodes", "1")
    obeys("check", "ds.json", "--params", "1B", *there)
    obeys("migrate", "ds.json", *there)
    obeys("plan", "--params", "1B", "--set", "deepspeed-config=ds.json", *there)
    obeys("plan", "--max-params", "--set", "deepspeed-config=ds.json", *there)
    obeys("simulate", "--model", "gpt2", "--micro-batches", "1", "--schemes", "./ds.json", *there)
    Path("neox.yml").write_text(json.dumps({**NEOX, **found}))
    obeys("check", "neox.yml", "--ranks", "8", command=neox)


NAMES = (
    *PARTS,
    *TRUTHS,
    *NUMBERS,
    *(
        f"zero_optimization.{name}"
        for name in ("offload_param", "offload_optimizer", "leaf_module", *FIELDS, *IGNORED)
    ),
    *(
        "optimizer.type",
        "scheduler.type",
        "timers.throughput",
        "tensor_parallel.tp",
        "zero_topo",
        "deepspeed_extra_args",
    ),
)
KEYS_OF_PARTS = ("enabled", "device", "type", "params", "stage", "lr", "mode", "zero_topo")
NEOX = {
    "pipe_parallel_size": 0,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
}
ZERO_KEYS = {
    **{
        name: mostly(st.fixed_dictionaries({"device": HOSTILE}))
        for name in ("offload_param", "offload_optimizer")
    },
    **{
        f"zero_{name}": HOSTILE
        for name in ("hpz_partition_size", "quantized_weights", "quantized_gradients")
    },
}
CONFIG = st.fixed_dictionaries(
    {"zero_topo": described(json_schema()), "train_micro_batch_size_per_gpu": mostly(st.just(1))},
    optional={
        "zero_optimization": mostly(
            st.fixed_dictionaries({"stage": mostly(st.just(3))}, optional=ZERO_KEYS)
        ),
        **{
            key: mostly(st.fixed_dictionaries({"enabled": mostly(st.booleans())}))
            for key in ("fp16", "bf16")
        },
        **{key: mostly(st.sampled_from([1, 8, 64])) for key in BATCHES[::2]},
        **{key: HOSTILE for key in ("optimizer", "timers", "precision", "attention_config", "amp")},
    },
).map(
    lambda found: (
        {**found, "zero_optimization": {"stage": 3}} if "zero_optimization" not in found else found
    )
)
MACHINE = described(TypeAdapter(Topology).json_schema())
RATES = described(TypeAdapter(Rates).json_schema())
CAPTURES = [path.read_text() for path in sorted((ROOT / "tests/data/devices").iterdir())]
SHAPES = [
    json.dumps(
        {
            "model_type": kind,
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 8),
            **MORE,
        }
    )
    for kind, MORE in (
        ("llama", {"hidden_size": 512, "vocab_size": 1000, "num_key_value_heads": 4}),
        ("gpt2", {"n_embd": 512, "n_head": 8, "n_layer": 2}),
        (
            [],
            {
                "num_layers": 2,
                "hidden_size": 512,
                "mlp_type": "llama",
                "attention_config": [[["flash"], 2]],
            },
        ),
    )
]
LAUNCHED = [(ROOT / "tests/data/launch/half-frontier.json").read_text()]
LAUNCHERS = [path.read_text() for path in sorted((ROOT / "tests/data/launchers").iterdir())]
TARGETS = {
    target.__name__: target
    for target in (config, parts, machine, capture, launcher, options, model, stock)
}


# -- limits ----------------------------------------------------------------------------------------


def confine(folder: Path) -> None:
    """Holds this process to its folder, its memory and itself, for good."""
    os.environ["PATH"] = ""  # no device tools
    sys.dont_write_bytecode = True
    for limit, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE_SIZE),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))

    def guard(event: str, words: tuple[Any, ...]) -> None:
        assert not event.startswith(STARTS), f"{event}{words}"
        if event == "open" and words[2] & WRITES and not isinstance(words[0], int):
            assert Path(os.fsdecode(words[0])).absolute().is_relative_to(folder), (
                f"writes {words[0]}"
            )

    def over(*_: object) -> None:
        raise TooLong

    sys.addaudithook(guard)
    signal.signal(signal.SIGPROF, over)


if __name__ == "__main__":
    examples, *targets = sys.argv[1:]
    confine(Path.cwd())
    patch(
        "zero_topo.doctor.refusals.installed", return_value=None
    ).start()  # DeepSpeed answers in another process
    limits = settings(
        max_examples=int(examples),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    for target in targets or TARGETS:
        limits(given(st.data())(TARGETS[target]))()
