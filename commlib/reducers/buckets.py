"""Where rows go in a sketch, and how they come back out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from commlib import ops
from commlib.reducers.index import Index
from commlib.route import unite_rows


@dataclass(frozen=True, slots=True)
class Buckets:
    """The buckets of one step: `num_hashes` tables of `count`.

    Hashed, a row's bucket follows from its id alone. Placed, it is the row's position in the
    union, modulo the number of buckets, in one table.

    Args:
        num_hashes: r.
        count: c.
        seed: Of the hashes.
        decoder: How estimates become one row.
        union: The union `[U]` of placed buckets, None of hashed ones.
    """

    num_hashes: int
    count: int
    seed: int
    decoder: Literal["mean", "median", "peel"]
    union: Tensor | None = None

    @classmethod
    def hashed(
        cls, num_hashes: int, count: int, seed: int, decoder: Literal["mean", "median", "peel"]
    ) -> Buckets:
        """Buckets by hash of the row id."""
        return cls(num_hashes, count, seed, decoder)

    @classmethod
    def placed(cls, union: Tensor, count: int, seed: int) -> Buckets:
        """Buckets by position in the union, signs by hash."""
        return cls(1, count, seed, "mean", union)

    @property
    def alone(self) -> bool:
        """Whether every row has a bucket of its own, so that a bucket is its row."""
        return self.union is not None and self.count >= len(self.union)

    def omega(self, union: int) -> float:
        """Squared error over signal of `mean`, from collisions alone.

        Hashed: (U-1)/(r c). Placed: U/c - 1, nothing while every row has its own bucket.
        """
        if self.union is not None:
            return max(0.0, union / self.count - 1.0)
        return max(0, union - 1) / (self.num_hashes * self.count)

    def encode(self, indices: Tensor, values: Tensor) -> Tensor:
        """The sketch `[r c, D]` of rows `[R, D]`, wide."""
        if self.union is None:
            sketch = ops.sketch_encode(indices, values, self.num_hashes, self.count, self.seed)
            return sketch.view(-1, values.shape[1])
        sketch = torch.zeros(self.count, values.shape[1], dtype=values.dtype)
        place = torch.searchsorted(self.union, indices)
        return ops.scatter_add_rows_(sketch, place % self.count, self._signed(values, indices))

    def encode_filled(self, indices: Tensor, values: Tensor, filled: Tensor) -> Tensor:
        """Only the placed buckets that the rows fill, `[len(filled), D]`."""
        if self.alone:
            return values
        return self.encode(indices, values).index_select(0, filled)

    def decode(self, sketch: Tensor, indices: Tensor, scale: float) -> Tensor:
        """Rows `[U, D]` of the union's `indices` out of `[r c, D]`, times `scale`."""
        if self.alone:
            return sketch if scale == 1.0 else sketch * scale
        if self.union is None:
            tables = sketch.view(self.num_hashes, self.count, -1)
            if self.decoder == "peel":
                return ops.sketch_peel(tables, indices, self.seed)[0].mul_(scale)
            return ops.sketch_decode(tables, indices, self.seed, self.decoder, scale)
        place = torch.arange(len(indices)) % self.count
        rows = self._signed(ops.gather_rows(sketch, place), indices)
        return rows if scale == 1.0 else rows.mul_(scale)

    def filled(self, index: Index) -> tuple[Tensor, Tensor]:
        """Buckets that each rank fills, sorted and unique, one list after the other; and counts."""
        counts = index.counts_tensor
        position = unite_rows(index.indices, counts, index.num_rows)[1]
        if self.alone:
            return position, counts
        parts = [part.unique() for part in (position % self.count).split(list(index.counts))]
        return torch.cat(parts), torch.tensor([len(part) for part in parts])

    def _signed(self, rows: Tensor, indices: Tensor) -> Tensor:
        """Rows with the sign of their id."""
        minus = ops.murmur3_32(indices, self.seed).bitwise_and(1).bool()
        return torch.where(minus.unsqueeze(1), -rows, rows)
