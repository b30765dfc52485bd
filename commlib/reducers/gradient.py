"""A gradient as a reducer sees it: rows when rows are asked for, dense when dense is, each once."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from commlib import ops
from commlib.rows import SparseRows


class Gradient(ABC):
    """One parameter's local gradient, `[V, D]`.

    Reducers that need no rows (dense) never cause the scan. `scan_s` holds the seconds that
    finding the rows took.
    """

    num_rows: int
    dim: int
    dtype: torch.dtype

    def __init__(self) -> None:
        self.scan_s = 0.0
        self._rows: SparseRows | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dim * self.dtype.itemsize

    def rows(self) -> SparseRows:
        """The non-zero rows, found at the first call."""
        if self._rows is None:
            start = time.perf_counter()
            self._rows = self._find_rows()
            self.scan_s += time.perf_counter() - start
        return self._rows

    def indices(self) -> Tensor:
        """The ids of the rows alone, where that is less work than the rows."""
        return self.rows().indices

    @abstractmethod
    def _find_rows(self) -> SparseRows: ...

    @abstractmethod
    def dense(self) -> Tensor:
        """The `[V, D]` matrix; may be the gradient's own memory."""


def scattered(rows: SparseRows) -> Tensor:
    """The `[V, D]` matrix of rows, zeros elsewhere."""
    matrix = torch.zeros(rows.num_rows, rows.dim, dtype=rows.values.dtype)
    return ops.scatter_rows_(matrix, rows.indices, rows.values)


class DenseGradient(Gradient):
    """A dense `[V, D]` gradient, contiguous; scanned for rows with any non-zero bit."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self._matrix = matrix
        self.num_rows, self.dim = int(matrix.shape[0]), int(matrix.shape[1])
        self.dtype = matrix.dtype
        self._indices: Tensor | None = None

    def indices(self) -> Tensor:
        if self._indices is None:
            start = time.perf_counter()
            self._indices = ops.bitmap_to_indices(ops.scan_rows(self._matrix), self.num_rows)
            self.scan_s += time.perf_counter() - start
        return self._indices

    def _find_rows(self) -> SparseRows:
        indices = self.indices()
        return SparseRows(indices, ops.gather_rows(self._matrix, indices), self.num_rows)

    def dense(self) -> Tensor:
        return self._matrix


class RowsGradient(Gradient):
    """Rows that are known already: a coalesced sparse gradient."""

    def __init__(self, rows: SparseRows) -> None:
        super().__init__()
        self._given = rows
        self.num_rows, self.dim, self.dtype = rows.num_rows, rows.dim, rows.values.dtype

    def _find_rows(self) -> SparseRows:
        return self._given

    def dense(self) -> Tensor:
        return scattered(self.rows())


class SparseGradient(Gradient):
    """An uncoalesced sparse COO gradient of an embedding: one sparse and one dense dimension."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        if tensor.sparse_dim() != 1 or tensor.dense_dim() != 1:
            raise ValueError(
                f"a sparse gradient needs 1 sparse and 1 dense dimension, got"
                f" {tensor.sparse_dim()} and {tensor.dense_dim()}: reduce it densely"
            )
        self._tensor = tensor
        self.num_rows, self.dim = int(tensor.shape[0]), int(tensor.shape[1])
        self.dtype = tensor.dtype

    def indices(self) -> Tensor:
        if self._rows is not None or self._tensor.is_coalesced():
            return self.rows().indices
        return ops.unique_ids(self._tensor._indices()[0], self.num_rows)

    def _find_rows(self) -> SparseRows:
        indices, values = self._tensor._indices()[0], self._tensor._values()
        if not self._tensor.is_coalesced():
            indices, values = ops.coalesce_rows(indices, values, self.num_rows)
        return SparseRows(indices.contiguous(), values.contiguous(), self.num_rows)

    def dense(self) -> Tensor:
        return scattered(self.rows())
