# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What Muon updates, and that equal matrices are one batch; ``tests/launcher/test_muon.py`` holds
the formulas to what ranks send and store.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.counting import Launches
from zero_topo.cost.job import Job
from zero_topo.cost.transformer import Transformer
from zero_topo.hook.muon import orthogonalized

LLAMA = Transformer("7b", 32, 4096, 32, 32000, 4096, 11008, gated=True, biases=False)


def test_muon_has_the_matrices_of_layers() -> None:
    """Not those of the embedding and the head, nor vectors."""
    job = Job(LLAMA, muon=True)
    elements = sum(n for n, muon in zip(job.work.numels, job.work.whole, strict=True) if muon)
    assert elements == 32 * (4 * 4096**2 + 3 * 4096 * 11008)


# DeepSpeed compiles Muon's functions, which takes minutes
@torch.compiler.set_stance("force_eager")
@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_equal_matrices_are_one_batch(method: str, heads: int | None) -> None:
    """Sixteen take no more launches than two, whole or head by head, and give what each gives by
    itself.
    """
    matrices, found = torch.randn(16, 32, 24), Launches()
    for count in (2, 16):
        with found.phase(str(count)):
            together = orthogonalized(matrices[:count].clone(), [heads] * count, method)
    alone = [orthogonalized(matrix[None].clone(), [heads], method)[0] for matrix in matrices]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-5)
    assert found.phases["2"].launches == found.phases["16"].launches
