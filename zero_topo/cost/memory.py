# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes the bytes that one rank stores, by role: the shards between steps, and all else at the
peak of a step.

The shards are exact, as the engine allocates them, and those of the paper's table. Sizes are those
of Note [Sizes] in ``volume.py``. A rank that stores INT8 weights still has the weights it updates,
in DeepSpeed's own buffer, and the weights of parameters that are not quantized.

Note [Activations]
    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv
    2205.05198), without tensor parallelism (with it: Note [Tensor parallelism] in ``tensor.py``): a
    layer keeps ``s b h (34 + 5 a s / h)`` bytes in 16 bits (equation 1), with full recomputation
    only its input, ``2 s b h``, and all of one layer is stored at a time; embedding and last norm
    take ``4 s b h`` (section 4.3). The term in ``a s`` is the matrix of scores, which flash
    attention does not store: it stores one FP32 number per head and token. ``ModelPart.stored``
    replaces the ``34 h`` by a count of the tensors that a layer stores, which covers other widths,
    grouped-query attention and gated layers.

    The usual causal-LM loss holds several copies of the logits: the measured peak of Hugging Face's
    (transformers 5.24, BF16, 128,256 tokens of vocabulary) is 3.52 times the FP32 logits. No layer
    is alive then. Fused losses, which never store the logits, need none of it.

Note [In flight]
    DeepSpeed keeps gathered parameters up to ``stage3_max_live_parameters`` (10^9 elements by
    default), but at least the module in use and the prefetched modules. The buffers of the
    all-gather come in addition. In a backward pass gradients of up to ``reduce_bucket_size``
    elements (5 * 10^8 by default) wait for their scatter, or one gradient if it is larger. They are
    read in place: DeepSpeed's contiguous bucket is not allocated. The optimizer updates
    ``sub_group_size`` elements (10^9) at a time, and copies their gradients to FP32. With
    ``offload_optimizer`` its states and these copies are in host memory, which is not counted.

Note [Messages]
    Sync and publish carry a run of parameters at a time (``packed_runs``). Of the packed buffers
    that a rank stores at one time, sent and received, a hierarchical reduction of two groups needs
    most memory in the first group, an all-gather in the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from zero_topo.config import ResolvedConfig
from zero_topo.config.sync_config import FP32, ITEMSIZES, rows_message
from zero_topo.cost.job import Job
from zero_topo.cost.volume import Workload, gather_spec, largest_change_bytes, message_bytes
from zero_topo.plan import packed_runs

ADAM_BYTES = 12  # per parameter: FP32 master, momentum and variance
VARIANCE_BYTES = 4  # per parameter: the part of ADAM_BYTES that AdamS and Muon do not store
AGE_BYTES = 1  # per parameter: what AgedAdamW stores in addition to ADAM_BYTES
ADAM_BYTES_FP32 = 8  # per parameter when the weights are FP32 and serve as their own master
LOGITS = 3.52  # peak of the usual loss, in FP32 logits; see Note [Activations]


def memory_bytes(
    config: ResolvedConfig,
    work: Workload,
    accumulation_itemsize: int,
    optimizer_bytes: int = ADAM_BYTES,
) -> dict[str, int]:
    """Return the bytes per rank of each role's shard.

    Args:
        config: plan and formats.
        work: the model.
        accumulation_itemsize: bytes per element of the gradient buffer.
        optimizer_bytes: bytes per parameter of the optimizer states, FP32 master included.

    Returns:
        Role -> bytes; "frozen" only if some parameters are, "residual" only if sync keeps one. An
        unquantized secondary inside the weight shard is a view of it and costs nothing.
    """
    plan = config.plan
    columns = work.columns(plan)
    n = plan.world_size
    sizes = {
        "weights": _weights_bytes(config, work),
        "secondary": _secondary_bytes(config, work),
        "gradients": n // plan.gradients * columns * accumulation_itemsize,
        "optimizer": n // plan.optimizer * columns * optimizer_bytes,
    }
    sizes["optimizer"] -= (
        n // plan.optimizer * sum(map(plan.shard_numel, work.of_muon())) * VARIANCE_BYTES
    )
    if work.frozen is not None:  # no rank stores more exact weights than a world shard
        own = config.of_frozen()
        sizes["frozen"] = _weights_bytes(own, work.frozen) + _secondary_bytes(own, work.frozen)
    residual = config.sync.memory(plan, columns, work.loss_scaled)[0]
    return {**sizes, "residual": residual} if residual else sizes


def _weights_bytes(config: ResolvedConfig, work: Workload) -> int:
    plan = config.plan
    spec = config.resident_spec
    rows = plan.world_size // plan.weights
    columns = work.columns(plan)
    if spec is None:
        return rows * columns * work.itemsize
    pairs = zip(work.shards(plan), work.coded(config), strict=True)
    coded = work.once(
        ("coded sizes", plan.world_size, spec.block_size),
        lambda: Counter(width for width, kept in pairs if kept),
    )
    plain = columns
    codes = 0
    for width, count in coded.items():
        plain -= count * width
        codes += count * rows_message(rows, (width,), spec, work.itemsize)
    own = plan.world_size // plan.optimizer * columns
    return (rows * plain + own) * work.itemsize + codes


def _secondary_bytes(config: ResolvedConfig, work: Workload) -> int:
    """Return the bytes of the secondary copy."""
    plan = config.plan
    spec = config.secondary_spec
    if plan.secondary is None or plan.weights == 1:
        return 0
    rows = plan.world_size // plan.secondary
    if not config.captured and spec is None:  # rows of the primary
        return 0
    copied = 0
    shards = work.shards(plan)
    for _, part in work.by_itemsize(work.itemsize):
        sizes: Counter[int] = work.once(
            ("sizes", plan.world_size, part[0]), partial(Counter, map(shards.__getitem__, part))
        )
        copied += sum(
            count * message_bytes(rows * width, spec, work.itemsize)
            for width, count in sizes.items()
        )
    return copied


def predict_memory(config: ResolvedConfig, work: Workload, job: Job) -> dict[str, int]:
    """Return the bytes per rank at the peak of a step, by role.

    Args:
        config: plan and formats.
        work: the parameters, for the shards.
        job: the model's shape, the micro-batch and DeepSpeed's settings.

    Returns:
        The roles of :func:`memory_bytes`; "masks" of sparse modes; and the roles of the largest
        moment, see :func:`moments`. Roles of zero bytes are left out, except the four shards.
    """
    accumulated = (
        ITEMSIZES[config.accumulation_dtype] if config.accumulation_dtype else work.itemsize
    )
    states = ADAM_BYTES if work.itemsize < 4 else ADAM_BYTES_FP32
    states -= VARIANCE_BYTES if config.sync.OPTIMIZER == "AdamS" else 0
    sizes = memory_bytes(config, work, accumulated, states)
    columns = work.columns(config.plan)
    if job.offload:
        sizes["optimizer"] = 0
    most = max(moments(config, work, job), key=lambda roles: sum(roles.values()))
    masks = config.sync.memory(config.plan, columns, False)[1]
    extra = {"masks": masks, **most}
    return {**sizes, **{role: nbytes for role, nbytes in extra.items() if nbytes}}


def moments(config: ResolvedConfig, work: Workload, job: Job) -> tuple[dict[str, int], ...]:
    """Return the bytes in addition to the shards at each moment of a step that may be the peak.

    Args:
        config: plan and formats.
        work: the parameters.
        job: the model's shape, the micro-batch and DeepSpeed's settings.

    Returns:
        One mapping of role to bytes for each of these moments, in order:

        1. A backward pass: "gathered" parameters, "activations", the "bucket" of gradients that
           wait for their scatter, and "messages" of the scatter before and of sync if they overlap.
        2. The backward pass while a bucket is reduce-scattered, with the buffers of that in
           "messages".
        3. Sync after the backward pass.
        4. The optimizer step: FP32 gradients as "step"; in "messages" what sync keeps, and publish
           if it overlaps.
        5. Publish after the optimizer step.
    """
    plan = config.plan
    columns = work.columns(plan)
    run = widest_run(config, work, config.sync.run_numel(job.bucket, work.params))
    dtype = getattr(config.sync, "dtype", None) or config.accumulation_dtype
    peak, kept = config.sync.scratch(
        plan, columns, run, ITEMSIZES[dtype] if dtype else work.itemsize
    )
    publish = publish_bytes(config, work, job.bucket)
    rows = plan.world_size // plan.optimizer * columns
    copied = work.itemsize < 4 and not job.offload
    scatter = scatter_bytes(config, min(job.bucket, work.params), work)
    # In two groups, a bucket is sent between nodes until the next one has been sent inside the node
    staged = config.overlap and len(plan.stages(1, plan.gradients)) > 1
    before = scatter if staged else 0
    complete, coming = gathered_bytes(config, job, work.itemsize)
    waiting = min(max(job.bucket, work.largest), work.params) * work.itemsize
    computing = {"activations": activation_bytes(job, work.itemsize), "bucket": waiting}
    extra = peak if config.overlap else 0
    step = {"step": min(job.sub_group, rows) * 4 if copied else 0}
    return (
        {"gathered": complete, **computing, "messages": before + extra},
        {"gathered": coming, **computing, "messages": before + scatter + extra},
        {"messages": peak},
        {**step, "messages": kept + (publish if config.overlap else 0)},
        {"messages": kept + publish},
    )


def gathered_bytes(config: ResolvedConfig, job: Job, itemsize: int) -> tuple[int, int]:
    """Return the bytes of gathered parameters on a rank and of their receive buffers; see Note [In
    flight].

    Args:
        config: the wire formats.
        job: the model, whose modules are gathered one by one, and how many elements DeepSpeed
            gathers ahead and keeps.
        itemsize: bytes per weight.

    Returns:
        Two totals: while one module is assembled from the buffers of all ranks; and while one more
        module is in flight, for which this rank stores its own buffer and those received from the
        outermost group.
    """
    whole = job.gathered * itemsize
    largest = max(job.part.module_sizes)
    complete = coming = 0
    for phase in ("gather_forward", "gather_backward") if config.plan.weights > 1 else ():
        members = config.plan.pair_of(phase)[1]
        lo, hi = config.plan.stages(*config.plan.pair_of(phase))[-1]
        message = message_bytes(largest, gather_spec(config, phase), itemsize)
        complete = max(complete, message)
        coming = max(coming, message * (1 + hi // lo) // members)
    return whole + complete, whole + coming


def activation_bytes(job: Job, itemsize: int = 2) -> int:
    """Return the bytes of activations of one micro-batch at the peak; see Note [Activations].

    Args:
        job: gives the model's shape, sequences per micro-batch, and whether layers are recomputed.
        itemsize: bytes per activation.
    """
    model = job.part
    tokens = model.sequence * job.micro_batch
    h = model.hidden
    layer = tokens * (2 * model.stored + 4 * model.heads) * itemsize // 2
    logits = int(LOGITS * 4 * tokens * model.vocab)
    ends = 4 * tokens * h
    if job.checkpointing:  # the layers' inputs, and then either the loss or one layer
        return model.layers * tokens * h * itemsize + max(layer, logits) + ends
    return model.layers * layer + logits + ends


# -- packed buffers, see Note [Messages] -----------------------------------------------------------


def scatter_bytes(config: ResolvedConfig, bucket: int, work: Workload) -> int:
    """Return the bytes of the reduce-scatter of a bucket: the buffers sent to all group ranks and
    those received, or one sum of the backend.

    Args:
        config: plan and formats.
        bucket: elements of the bucket.
        work: the parameters, each of which is padded to whole blocks.
    """
    plan = config.plan
    spec = config.gradients_spec
    if plan.gradients == 1:
        return bucket * FP32
    if spec is None:
        lo, hi = plan.stages(1, plan.gradients)[0]
        sent = bucket * work.scatter_itemsize
        received = sent * lo // hi if config.backend_adds[0] else sent
        return sent + received
    run = widest_run(config, work, bucket)
    sizes = [plan.world_size // plan.gradients * width for width in run]
    added = sum(-size % spec.block_size for size in sizes)
    return 2 * spec.nbytes(bucket + plan.gradients * added)


def publish_bytes(config: ResolvedConfig, work: Workload, limit: int | None) -> int:
    """Return the bytes of a publish of one run of weights: differences, their packed buffer, and
    the receive buffer.

    For INT8 weights the packed buffer is the largest possible one, in which every block is sent
    whole.

    Args:
        config: plan and formats.
        work: the parameters.
        limit: elements of a run; None is all.
    """
    plan = config.plan
    codes = config.resident_spec
    rows = plan.world_size // plan.optimizer
    size = plan.optimizer // plan.weights
    widths, coded = (widest_run(config, work, limit, kind) for kind in (False, True))
    own = rows_message(rows, widths, None, work.itemsize)
    if codes is not None:
        own = max(own, largest_change_bytes(rows, coded, codes))
    if size == 1:
        return 0
    hierarchy = plan.stages(plan.weights, plan.optimizer)
    if len(hierarchy) == 1:
        return own + own * size
    came = own * (hierarchy[-1][1] // hierarchy[-1][0])
    return came + own * size


def widest_run(
    config: ResolvedConfig, work: Workload, limit: int | None, coded: bool | None = None
) -> Sequence[int]:
    """Return the elements, in a world shard, of each parameter of the largest run.

    Args:
        config: plan and formats.
        work: the parameters.
        limit: elements of a run; None is all.
        coded: selects parameters stored as INT8 (True) or not (False), as publish packs them; None
            takes all.
    """
    plan = config.plan
    int8 = config.resident_spec

    def widest() -> Sequence[int]:
        widths = work.shards(plan)
        if coded is not None:
            pairs = zip(widths, work.coded(config), strict=True)
            widths = [width for width, kept in pairs if kept == coded]
        runs = packed_runs([plan.world_size * width for width in widths], limit)
        return max((widths[run.start : run.stop] for run in runs), key=sum, default=())

    return work.once(("widest", plan.world_size, limit, coded, int8), widest)
