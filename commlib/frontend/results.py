"""Puts a reduced gradient back where it came from."""

from __future__ import annotations

import torch
from torch import Tensor

from commlib import ops
from commlib.reducers.base import Reduced


def write_back(reduced: Reduced, matrix: Tensor) -> None:
    """Put the result into a `[V, D]` gradient; rows outside the union are zero there already."""
    if reduced.rows is not None:
        ops.scatter_rows_(matrix, reduced.rows.indices, reduced.rows.values)
    elif reduced.dense is not None and reduced.dense.data_ptr() != matrix.data_ptr():
        matrix.copy_(reduced.dense)


def sparse_result(reduced: Reduced, shape: torch.Size) -> Tensor:
    """The result as a coalesced sparse COO gradient."""
    rows = reduced.to_rows()
    return torch.sparse_coo_tensor(
        rows.indices.unsqueeze(0),
        rows.values,
        tuple(shape),
        is_coalesced=True,
        check_invariants=False,
    )
