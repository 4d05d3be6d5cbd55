# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo carry``: take residuals and ages along when a run goes on with another number of
ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def carry(
    saved: Annotated[
        Path, typer.Argument(metavar="SAVED", help="Folder of one tag of the saved checkpoint.")
    ],
    universal: Annotated[
        Path,
        typer.Argument(
            metavar="UNIVERSAL", help="Folder that DeepSpeed's ds_to_universal made of it."
        ),
    ],
) -> None:
    """Copy residuals of sparse sync into a universal checkpoint. They are summed over the ranks."""
    from zero_topo.cli.residuals import carry as write
    from zero_topo.engine.residual_transfer import FILE

    residuals, ages = write(saved, universal)
    with_ages = ", with their ages" if ages else ""
    print(
        f"{universal / FILE}: {len(residuals)} parameters, "
        f"{sum(x.numel() for x in residuals.values()):,} elements{with_ages}"
    )
