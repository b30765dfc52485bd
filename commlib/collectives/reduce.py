"""How n contributions become one: shared by every transport, so that all give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.collectives.requests import ReduceOp
from commlib.rows import accumulate_dtype


def combine(parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Reduce equally shaped parts in rank order; half types in fp32 with one rounding at the end.

    Args:
        parts: One tensor a rank, same shape and dtype; left as they are.
        op: `sum`, `mean` (over the number of parts), `max`, or `bor` (uint8).

    Returns:
        A new tensor of that shape and dtype.

    Source: ours.
    """
    first = parts[0]
    wide = first.to(accumulate_dtype(first.dtype), copy=True)
    for part in parts[1:]:
        if op == "bor":
            wide.bitwise_or_(part)
        elif op == "max":
            torch.maximum(wide, part.to(wide.dtype), out=wide)
        else:
            wide.add_(part)
    if op == "mean":
        wide.div_(len(parts))
    return wide.to(first.dtype)
