# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Selections: what goes into a message comes out, sums have the bits of a loop, thresholds pass as
many as they should.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero_topo.config.sparse_config import share
from zero_topo.quant import ops, reference_sparse
from zero_topo.sync import selection
from zero_topo.sync.masked import masked_of_rows
from zero_topo.sync.selection import (
    TINY,
    Records,
    Selected,
    above,
    added,
    count_reaching,
    in_runs,
    kth_largest,
    largest,
    largest_of_each,
    positions,
)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = st.lists(FLOATS, min_size=1, max_size=200).map(torch.tensor)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
NORMAL = torch.randn(10_000, generator=torch.Generator().manual_seed(4))
NUMELS = st.sampled_from([2**31, 2**31 + 5, 2**32, 2**32 + 1, 2**40])


def non_zero(x: Tensor) -> Selected:
    """All elements but zeros."""
    return Selected(torch.arange(x.numel()), x).non_zero(int(x.count_nonzero()))


@given(NUMELS, DTYPES)
def test_indices_do_not_wrap(numel: int, dtype: torch.dtype) -> None:
    """Above 2**31 an index of 32 bits has no sign, above 2**32 it has 64 bits: the last elements
    arrive as they are.
    """
    records = Records(dtype, numel)
    indices = torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, numel - 1])
    indices = indices[indices < numel]
    selected = Selected(indices, torch.ones(len(indices)))
    assert torch.equal(records.decode(records.encode(selected)).indices, indices)
    assert records.nbytes == (4 if numel <= 2**32 else 8) + dtype.itemsize


@given(st.lists(VECTORS, min_size=1, max_size=40))
def test_sums_have_the_bits_of_a_loop_over_the_peers(vectors: list[Tensor]) -> None:
    """On a CPU, and by the sort and the segments that a GPU takes; of any number of peers that
    select one element.
    """
    numel = max(x.numel() for x in vectors)
    parts = [non_zero(x) for x in vectors]
    expected = torch.zeros(numel)
    for part in parts:
        expected[part.indices] += part.values
    came = Selected(
        torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
    )
    runs = in_runs(came)
    assert torch.equal(added(came, partial(torch.zeros, numel)), expected) or expected.isnan().any()
    assert len(runs) == len(came) and (runs.indices.diff() >= 0).all()
    assert torch.equal(added(runs, partial(torch.zeros, numel)), expected) or expected.isnan().any()


@given(VECTORS, st.floats(0.001, 1))
def test_the_kth_largest_passes_k(x: Tensor, density: float) -> None:
    """At least k elements reach it, zeros aside, and fewer than k are above it."""
    k = share(density, x.numel())
    assert 1 <= k <= x.numel()
    bound = kth_largest(x, k)
    count = int(count_reaching(x, bound))
    best = largest(x, k)
    with patch.object(selection, "_on_cpu", lambda _: False):
        assert count == int(count_reaching(x, bound)) and bound == kth_largest(x, k)
        assert torch.equal(
            best.values.abs().sort().values, largest(x, k).values.abs().sort().values
        )
    passed = above(x, float(bound), count)
    assert len(passed) >= min(k, int((x.abs() >= TINY).sum()))
    assert bound == TINY or int((x.abs() > bound).sum()) < k
    assert best.indices.diff().gt(0).all() and torch.equal(best.values, x[best.indices])
    assert set(best.non_zero(int(best.values.count_nonzero())).indices.tolist()) <= set(
        passed.indices.tolist()
    )
    assert torch.equal(passed.values, x[passed.indices])


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_always_selected(bad: float, on_cpu: bool) -> None:
    """NaN is above every threshold, and makes the one that the largest give infinite; then one of
    them is enough.
    """
    x = NORMAL.clone()
    x[[7, 50, 9_000]] = bad
    with patch.object(selection, "_on_cpu", lambda _: on_cpu):
        assert not largest(x, 5).values.isfinite().all()
        assert int(count_reaching(x, torch.tensor(2.0))) == len(x) - int((x.abs() < 2).sum())
        assert not above(x, 2.0, 999).values.isfinite().all()
        bound = kth_largest(x, 3)
        assert bound == torch.inf and int(count_reaching(x, bound)) == 3
        assert above(x, float(bound), 3).indices.tolist() == [7]


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those of the vectors from which torch selects, on what is taken for a GPU."""
    topk, found = torch.topk, list[int]()

    def counted(x: Tensor, *rest: Any, **more: Any) -> Any:
        found.append(len(x))
        return topk(x, *rest, **more)

    monkeypatch.setattr(selection, "_on_cpu", lambda _: False)
    monkeypatch.setattr(torch, "topk", counted)
    return found


def test_a_vector_longer_than_torch_selects_from_is_cut(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    """As on a GPU: the same elements as of the whole, and the same threshold; 2**31 - 1 is
    pretended to be 200.
    """
    x = torch.randn(950, generator=torch.Generator().manual_seed(3))
    x[:100] = 0  # the whole of one part
    whole, bound = largest(x, 120), kth_largest(x, 120)
    monkeypatch.setattr(selection, "LONGEST", 200)
    lengths.clear()
    few = largest(x, 20)
    assert lengths == [200] * 4 + [150, 100] and set(few.indices.tolist()) <= set(
        whole.indices.tolist()
    )
    cut = largest(x, 120)
    assert torch.equal(cut.indices, whole.indices) and torch.equal(cut.values, whole.values)
    assert torch.equal(kth_largest(x, 120), bound)


@pytest.mark.parametrize(
    ("processors", "dtype"), [(132, torch.bool), (256, torch.bool), (304, torch.int16)]
)
def test_a_gpu_of_many_multiprocessors_gets_masks_of_two_bytes(
    processors: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's scan of a mask of bytes leaves out offsets on more than 256; no mode calls it another
    way.
    """
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    on_a_gpu = reference_sparse._scans_half.__wrapped__(torch.device("cuda", 0))
    monkeypatch.setattr(reference_sparse, "_scans_half", lambda device: on_a_gpu)
    x = torch.tensor([[0.0, 1.0, 2.0, -4.0]])
    indices = reference_sparse.set_positions(x > 0, 2)
    with patch.object(torch, "nonzero_static", wraps=torch.nonzero_static) as scan:
        assert positions(x[0] > 0, 2).tolist() == indices[:, 1].tolist() == [1, 2]
        largest = torch.empty(1, 2, dtype=torch.int64)
        reference_sparse.row_largest(x, largest)
        packets, _ = ops.ternary_encode(x, 1, largest, 1, torch.float32)
        room = torch.empty(2, dtype=torch.int64), torch.empty(2)
        first = torch.zeros(1, 1, dtype=torch.int64)
        reference_sparse.ternary_decode(packets, first, [4, 2, 1, 0], *room)
    assert [call.args[0].dtype for call in scan.call_args_list] == [dtype] * 3
    assert largest.tolist() == [[2, 3]]


@given(st.lists(VECTORS, min_size=1, max_size=4), st.data())
def test_the_largest_of_each_part_are_those_of_a_sort(
    vectors: list[Tensor], data: st.DataObject
) -> None:
    """Part by part; of equal magnitudes the first."""
    counts = [data.draw(st.integers(0, len(x))) for x in vectors]
    x = torch.cat(vectors).round()
    mask = largest_of_each(x, torch.tensor([len(part) for part in vectors]), torch.tensor(counts))
    for part, stored, count in zip(
        vectors, mask.split([len(part) for part in vectors]), counts, strict=True
    ):
        sizes = part.round().abs().tolist()
        assert stored.nonzero()[:, 0].tolist() == sorted(
            sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))[:count]
        )


@pytest.mark.parametrize("kind", ["normal", "nan"])
def test_on_rocm_only_likely_elements_are_sorted(
    kind: str, monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    """A threshold leaves few of a long vector, and the same are selected; where it tells nothing,
    all are sorted.
    """
    monkeypatch.setattr(torch.version, "hip", "6.2")
    x = torch.randn(1 << 22, generator=torch.Generator().manual_seed(3))
    if kind != "normal":
        x[torch.rand(x.shape, generator=torch.Generator().manual_seed(4)) < 0.999] = torch.nan
    k = 40_000
    found = largest(x, k)
    assert len(found.indices.unique()) == k and (lengths[-1] < x.numel() // 50) == (
        kind == "normal"
    )
    expected = x.abs().sort(descending=True).values[:k].flip(0)
    assert torch.equal(x[found.indices].abs().sort().values, expected) or kind == "nan"


def test_a_mask_without_elements_of_a_part_is_refused() -> None:
    """A rank marks values that are not finite in the first masked element, which each part must
    have.
    """
    bits = ops.pack(torch.arange(8) < 2)[None]
    assert masked_of_rows(bits, [(0, 4), (4, 4)]) == (2, 0)
    with pytest.raises(ValueError, match="selected of other parts"):
        masked_of_rows(bits, [(0, 4), (4, 8)])
