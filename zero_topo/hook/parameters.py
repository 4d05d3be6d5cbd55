# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Connects DeepSpeed's parameters to the engine: their gather and partition calls, and their
states.

DeepSpeed sets ``all_gather``, ``all_gather_coalesced`` and ``partition`` on each parameter; its
coordinator, hooks, ``GatheredParameters`` and checkpoint code call them. :class:`ParameterGathers`
replaces these calls on every parameter that the engine shards, and serves them from its shards.
Other parameters keep DeepSpeed's calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles, ZeroParamStatus
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.config import ResolvedConfig
from zero_topo.engine.stage3 import Stage3
from zero_topo.engine.weights import Weights
from zero_topo.hook.passes import graph_task
from zero_topo.hook.seam import wrapping
from zero_topo.plan import Phase
from zero_topo.sync import Parameter

logger = logging.getLogger(__name__)

METHODS = ("all_gather", "all_gather_coalesced", "partition")


@wrapping
def by_owner(convert: Callable[[Any, Any], None], init: Any, param: Any) -> None:
    """Wrap DeepSpeed's ``convert``, which sets a parameter's calls, to split a call for a list by
    engine.

    DeepSpeed uses the first parameter's call for the whole list, whose parameters may be of several
    engines and models.
    """
    convert(init, param)
    for name in METHODS:
        setattr(param, name, wrapping(partial(_split_by_owner, name))(getattr(param, name)))


def _split_by_owner(
    name: str,
    stock: Callable[..., Any],
    params: Any = None,
    **options: Any,
) -> Any:
    params = options.pop("param_list", params)
    if params is None:
        return stock(**options)
    found = [
        (getattr(part[0], name) if owner else stock)(part, **options)
        for owner, part in by_server(params).items()
    ]
    if name == "all_gather_coalesced":
        return found[0] if len(found) == 1 else MultipleAllGatherHandles(found)
    return [handle for handles in found for handle in handles or ()]


def lower_dtype(param: Any) -> torch.dtype | None:
    """Return the dtype in which ``torch_autocast`` of the DeepSpeed config sends a parameter; None
    if it is its own.
    """
    sent: torch.dtype | None = getattr(param, "comm_dtype", None)
    return None if sent == param.ds_tensor.dtype else sent


class ParameterHandle(Handle[None]):
    """A pending gather that DeepSpeed waits for."""

    def wait(self, handle_dependency: bool = True) -> None:  # type: ignore[override]  # DeepSpeed's signature
        """Wait until the parameters are whole. ``handle_dependency`` is DeepSpeed's argument, and
        ignored.
        """
        super().wait()


def served_by(param: Any) -> ParameterGathers | None:
    """Return what serves a parameter's calls for a zero_topo engine; None if DeepSpeed does."""
    call = getattr(param, "partition", None)
    # Our calls are partials of bound methods; DeepSpeed's are plain functions.
    bound: Any = call.func if isinstance(call, partial) else None
    return getattr(bound, "__self__", None)


def by_server(params: Iterable[Any]) -> dict[ParameterGathers | None, list[Any]]:
    """Return parameters, each once, by what serves their calls, in one order on all ranks.

    DeepSpeed gives the parameters of a module as a set, whose order differs between ranks, and
    calls the first one's method for all. Ranks that begin the gathers of two engines in different
    orders wait for each other for ever.
    """
    found: dict[ParameterGathers | None, list[Any]] = {}
    for _, param in sorted({param.ds_id: param for param in params}.items()):
        found.setdefault(served_by(param), []).append(param)
    return found


def can_freeze(param: Any, module: torch.nn.Module) -> bool:
    """Return whether a new engine of a module can store a parameter of it as a frozen one.

    It cannot if an engine trains it, or if an engine of another module stores it already.
    """
    server = served_by(param)
    return server is None or (
        getattr(server, "module", None) is module and not server.trains(param)
    )


@dataclass
class Calls:
    """The calls of one parameter: an attribute of it while engines serve it.

    Attributes:
        own: DeepSpeed's own calls, by name.
        servers: those that serve the parameter, newest last: the newest is active.
    """

    own: dict[str, Any]
    servers: list[ParameterGathers]


def calls_of(param: Any) -> Calls:
    """Return a parameter's calls; DeepSpeed's own are kept once, by the first engine."""
    if not hasattr(param, "zero_topo_calls"):
        # Kept with the parameter, not with an engine: engines end in any order.
        own = {name: getattr(param, name) for name in METHODS}
        param.zero_topo_calls = Calls(own, [])
    found: Calls = param.zero_topo_calls
    return found


def ranks_of(config: ResolvedConfig) -> tuple[int, ...]:
    """Return the global ranks of this rank's plan, ascending."""
    if config.groups is None:
        return tuple(range(dist.get_world_size()))
    return config.groups.ranks(dist.get_rank())


def wrong_group(name: str, ranks: int, planned: int) -> str:
    """Return the line that refuses a parameter partitioned over other ranks than a plan's.

    Args:
        name: of the parameter.
        ranks: number of ranks over which DeepSpeed partitions it.
        planned: number of ranks of the data-parallel group.
    """
    return (
        f"{name} is partitioned over {ranks} ranks, but the data-parallel group has {planned}: "
        "build the model under deepspeed.zero.Init(data_parallel_group=...) of that group, which "
        "also keeps tensor-parallel ranks from getting rank 0's weights, or without zero.Init; a "
        "domain in the block stores parameters in fewer ranks"
    )


def by_plan(
    module: torch.nn.Module,
    names: Mapping[Any, str],
    configs: Sequence[ResolvedConfig],
) -> list[tuple[ResolvedConfig, list[Any]]]:
    """Return for each plan the parameters that DeepSpeed partitions over its ranks.

    Raises:
        ValueError: if a parameter is partitioned over other ranks, as under ``zero.Init``. Stock
            trains it, but with tensor parallelism from the values of rank 0's part.
    """
    found: dict[tuple[int, ...], list[Any]] = {ranks_of(config): [] for config in configs}
    planned = next(iter(found))
    ranks_by_group: dict[Any, tuple[int, ...]] = {}
    params: list[Any] = [*module.parameters()]
    for param in params:
        group = param.ds_process_group
        if group not in ranks_by_group:
            ranks_by_group[group] = tuple(dist.get_process_group_ranks(group))
        ranks = ranks_by_group[group]
        if ranks not in found:
            raise ValueError(
                wrong_group(str(names.get(param, param.ds_id)), len(ranks), len(planned))
            )
        found[ranks].append(param)
    return list(zip(configs, found.values(), strict=True))


class ParameterGathers:
    """Selects a module's parameters that follow the plan, and serves their gather and partition
    calls from an engine.

    Args:
        module: the module.
        trained: the parameters that the optimizer updates, in DeepSpeed's flat order.
        names: parameter -> name.
        dtype: the model's dtype.
        params: the module's parameters that may follow the plan.

    Attributes:
        module: the module.
        trained: the parameters that the optimizer updates.
        frozen: the other parameters that follow the plan.
        param_indices: ``ds_id`` -> parameter index in its set of weights, trained or frozen.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        trained: list[Any],
        names: Mapping[Any, str],
        dtype: torch.dtype,
        params: list[Any],
    ) -> None:
        self.module = module
        self.trained = trained
        self._names = names
        self._dtype = dtype
        self._updated = {param.ds_id for param in trained}
        rest = [param for param in params if not self.trains(param) and param.ds_numel]
        self.frozen = [p for p in rest if p.ds_tensor.dtype == dtype and can_freeze(p, module)]
        self._never_trained = {self._name(p): p for p in rest if not p.requires_grad}
        self._others = len(rest) - len(self.frozen)
        self.param_indices: dict[int, int] = {}
        for members in (trained, self.frozen):
            self.param_indices |= {param.ds_id: index for index, param in enumerate(members)}
        # By `ds_id`, the engine's shard of it, to detect that a user has set `ds_tensor.data` to
        # another tensor.
        self._homes: dict[int, Tensor] = {}
        # Gathers still referenced: `release` waits for those not waited for yet, as every
        # collective must finish.
        self._started: WeakSet[ParameterHandle] = WeakSet()

    def _name(self, param: Any) -> str:
        return str(self._names.get(param, param.ds_id))

    def described(self) -> tuple[list[Parameter], list[Parameter]]:
        """Describe the trained and the frozen parameters for the engine."""

        def described(param: Any) -> Parameter:
            persistent = bool(param.ds_persist)
            whole = bool(getattr(param, "use_muon", False))
            name = self._name(param)
            dims = len(param.ds_shape)
            sent = lower_dtype(param)
            # `ds_id` counts parameters in the order in which modules create them.
            return Parameter(
                name,
                param.ds_numel,
                dims,
                persistent=persistent,
                place=param.ds_id,
                whole=whole,
                sent=sent,
            )

        return [described(param) for param in self.trained], [
            described(param) for param in self.frozen
        ]

    def note(self) -> str | None:
        """Return a log line about frozen parameters outside the plan: of another dtype, or of
        another engine.
        """
        if not self._others:
            return None
        return (
            f"{self._others} frozen parameters are not {self._dtype}, or another engine already "
            "gathers them: unmodified ZeRO-3 shards them over all ranks"
        )

    def warn_of_unfrozen(self) -> None:
        """Log once, before a forward pass, that a frozen parameter has ``requires_grad`` now:
        nothing updates it.

        Training continues, as under stock ZeRO-3. PEFT sets ``requires_grad`` of all active
        adapters when it leaves ``disable_adapter``, in trainers whose user cannot change that.
        """
        if not torch.is_grad_enabled():
            return
        thawed = [name for name, param in self._never_trained.items() if param.requires_grad]
        if not thawed:
            return
        self._never_trained.clear()
        if dist.get_rank() == 0:
            logger.warning(
                f"zero_topo: {len(thawed)} parameters were frozen when DeepSpeed was initialized "
                f"and have requires_grad now, such as {thawed[0]}: they are not trained, because "
                "no optimizer has them, as under stock ZeRO-3; to train them, save a checkpoint "
                "and call deepspeed.initialize on the model as it is to be trained"
            )

    def serve(
        self,
        engine: Stage3,
        write_back: Callable[[Any], None] | None = None,
        require_weights: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve the parameters from the engine's shards, of which the frozen ones are filled first.
        Collective.

        Args:
            engine: built from :meth:`described`.
            write_back: called with a whole parameter, edited equally on every rank, before it is
                partitioned; by default it is stored in the shards.
            require_weights: called before each gather; raises if the shards are not on the
                accelerator.
        """
        self._engine = engine
        self._require_weights = require_weights
        self._write_back = write_back or (
            lambda p: self.weights_of(p).write_back(self.param_indices[p.ds_id], p.data)
        )
        for frozen in engine.sets[1:]:
            numels = [param.ds_tensor.numel() for param in self.frozen]
            shards = frozen.own_row.split(numels)
            for param, own in zip(self.frozen, shards, strict=True):
                self._homes[param.ds_id] = own
            self._fill(self.frozen)
        for param in (*self.trained, *self.frozen):
            calls_of(param).servers.append(self)
            self._homes[param.ds_id] = param.ds_tensor.data
            self._set_calls(param)

    def trains(self, param: Any) -> bool:
        """Return whether this engine updates a parameter."""
        return param.ds_id in self._updated

    def weights_of(self, param: Any) -> Weights:
        """Return the set of weights to which a parameter that the engine serves belongs."""
        return self._engine.sets[0 if self.trains(param) else 1]

    def _fill(self, frozen: Iterable[Any]) -> None:
        """Fill the shards of frozen parameters from DeepSpeed's, which become views of the engine's
        row. Collective.
        """
        for param in frozen:
            own = self._homes[param.ds_id]
            own.copy_(param.ds_tensor)
            param.ds_tensor.data = own  # frees DeepSpeed's storage
        self._engine.restart_frozen()

    def _set_calls(self, param: Any) -> None:
        own = calls_of(param).own
        param.all_gather = partial(self._gather_now, param, own["all_gather"])
        param.all_gather_coalesced = partial(self._gather_coalesced, own["all_gather_coalesced"])
        param.partition = partial(self._partition, param, own["partition"])

    def release(self) -> None:
        """Finish pending gathers, and give up the calls of the parameters. Collective.

        A parameter that an older engine of the module stores as a frozen one goes back to that
        engine, with its weights of now. The others get DeepSpeed's own calls.
        """
        for handle in list(self._started):
            handle.wait()
        returned: dict[ParameterGathers, list[Any]] = {}
        for param in (*self.trained, *self.frozen):
            calls = calls_of(param)
            active = served_by(param) is self
            # Any engine may end first; only the newest one of a parameter hands it back.
            calls.servers.remove(self)
            if not active:
                continue
            for name, method in calls.own.items():
                setattr(param, name, method)
            if not calls.servers:
                del param.zero_topo_calls
            elif not calls.servers[-1].trains(param):
                returned.setdefault(calls.servers[-1], []).append(param)
        for server, params in returned.items():
            server.take_back(params)

    def take_back(self, params: list[Any]) -> None:
        """Serve frozen parameters again that a newer engine has released, and may have trained.
        Collective.
        """
        self._fill(params)
        for param in params:
            self._set_calls(param)

    def _groups(self, params: Iterable[Any]) -> list[list[Any]]:
        """Group parameters that this engine serves: trained ones, trained persistent ones, then
        frozen ones alike; each by the dtype that is sent.
        """
        groups = dict[tuple[bool, bool, str], list[Any]]()
        for param in params:
            frozen = not self.trains(param)
            sent = str(lower_dtype(param))
            groups.setdefault((frozen, bool(param.ds_persist), sent), []).append(param)
        return [groups[key] for key in sorted(groups)]

    def _gather_coalesced(
        self,
        stock: Callable[..., Any],
        params: Iterable[Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        handles = self._start_all(
            params, _phase_of_pass(), lambda others: [stock(others, *args, **options)]
        )
        return handles[0] if len(handles) == 1 else MultipleAllGatherHandles(handles)

    def _start_all(
        self,
        params: Iterable[Any],
        phase: Phase,
        stock: Callable[[list[Any]], Any],
    ) -> list[Any]:
        """Begin to gather parameters, others than ours by DeepSpeed's ``stock``; return the
        handles.
        """
        self._require_weights()
        handles: list[Any] = []
        for server, part in by_server(params).items():
            if server is self:
                handles += [self._start(alike, phase) for alike in self._groups(part)]
                continue
            if server is None:
                self._count_stock(part, phase)
            handles += stock(part) or []
        return handles

    def _start(self, params: list[Any], phase: Phase) -> ParameterHandle:
        """Begin to gather parameters of one group of :meth:`_groups`: persistent ones exactly."""
        phase = "gather_exact" if params[0].ds_persist else phase
        for param in params:
            if param.ds_status != ZeroParamStatus.NOT_AVAILABLE:
                raise RuntimeError(
                    f"cannot gather a parameter that is not partitioned: {param.ds_summary()}"
                )
            # Our shard would be gathered, and the user's tensor silently ignored.
            if param.ds_tensor.data_ptr() != self._homes[param.ds_id].data_ptr():
                raise RuntimeError(
                    f"param.ds_tensor.data of a parameter of shape {tuple(param.ds_shape)} was set "
                    "to another tensor, which zero_topo does not read: edit parameters under "
                    "deepspeed.zero.GatheredParameters"
                )
            param.ds_status = ZeroParamStatus.INFLIGHT
        with self._engine.meter.timing(phase):
            param_indices = [self.param_indices[param.ds_id] for param in params]
            handle = self.weights_of(params[0]).gather(param_indices, phase)
        started = ParameterHandle()
        started.then(lambda _: self._finish(params, handle, phase))
        self._started.add(started)
        return started

    def _finish(self, params: list[Any], handle: Handle[list[Tensor]], phase: Phase) -> None:
        """Wait for a gather, and set the parameters' data."""
        with self._engine.meter.timing(phase):
            whole = handle.wait()
        for param, full in zip(params, whole, strict=True):
            param.data = full.view(param.ds_shape)
            param.ds_status = ZeroParamStatus.AVAILABLE

    def _count_stock(self, params: list[Any], phase: Phase) -> None:
        absent = [param for param in params if param.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        sent = sum(
            (dist.get_world_size(p.ds_process_group) - 1) * p.ds_tensor.nbytes for p in absent
        )
        topology = self._engine.config.topology
        self._engine.meter.record(phase, topology.domain(topology.world_size), sent)

    def _gather_now(
        self,
        param: Any,
        stock: Callable[..., Any],
        param_list: Any = None,
        async_op: bool = False,
        hierarchy: int = 0,
    ) -> list[Any] | None:
        params = [param] if param_list is None else param_list
        missing = [
            p
            for p in params
            if p.ds_id not in self.param_indices or p.ds_status == ZeroParamStatus.NOT_AVAILABLE
        ]
        # DeepSpeed gathers a single parameter here if a pass reads it outside its module; from the
        # next pass on it gathers it with the parameters of the module that read it.
        # An attribute of DeepSpeed's dictionary
        in_forward = getattr(self.module._parameters, "_in_forward", False)
        reads = param_list is None and (in_forward or graph_task() != -1)
        phase: Phase = _phase_of_pass() if reads else "gather_exact"
        handles = self._start_all(
            missing, phase, partial(stock, async_op=async_op, hierarchy=hierarchy)
        )
        if async_op:
            return handles
        for handle in handles:
            handle.wait()
        return None

    def _partition(
        self,
        param: Any,
        stock: Callable[..., Any],
        param_list: Any = None,
        **options: Any,
    ) -> None:
        params = [param] if param_list is None else list(param_list)
        if options.get("has_been_updated"):
            for p in params:
                if p.ds_id in self.param_indices and p.ds_status == ZeroParamStatus.AVAILABLE:
                    self._write_back(p)
        others = [p for p in params if p.ds_id not in self.param_indices]
        getattr(stock, "__wrapped__", stock)(
            [p for p in params if p.ds_id in self.param_indices], **options
        )
        if others:
            stock(others, **options)


def _phase_of_pass() -> Phase:
    # Prefetches of a forward pass have no graph task either.
    return "gather_forward" if graph_task() == -1 else "gather_backward"
