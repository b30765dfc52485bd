"""Rows of tables that are to travel, and stacks of tables that travel like one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from commlib import ops
from commlib.rows import SparseRows


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows of one table, by rank; all but `weight` is equal on all ranks.

    Args:
        weight: `[V, d_r]` this rank's columns, r this rank.
        indices: int64 `[sum of R_r]`, sorted and unique within each rank.
        counts: R_r of each rank.
        widths: d_r of each rank; their sum is D.
        wire: Dtype that travels; None for the weight's own.
    """

    weight: Tensor
    indices: Tensor
    counts: tuple[int, ...]
    widths: tuple[int, ...]
    wire: torch.dtype | None = None

    @property
    def num_rows(self) -> int:
        """V."""
        return int(self.weight.shape[0])

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of what travels."""
        return self.wire or self.weight.dtype


@dataclass(slots=True, eq=False)
class Stack:
    """Parts of equal widths and dtypes, as one part whose rows are theirs one behind the other.

    Many small tables then cost a few operations together instead of a few each.

    Args:
        parts: What is stacked, all alike.
        numbers: Their places among all parts.
        indices: As a part's.
        counts: As a part's.
        first_rows: Where each table's rows begin.
        num_rows: Of all tables.
    """

    parts: list[Part]
    numbers: list[int]
    indices: Tensor = field(init=False)
    counts: tuple[int, ...] = field(init=False)
    first_rows: list[int] = field(init=False)
    num_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.first_rows = [0, *accumulate(part.num_rows for part in self.parts)]
        self.num_rows = self.first_rows.pop()
        self.counts = tuple(map(sum, zip(*(part.counts for part in self.parts), strict=True)))
        shifted = [
            part.indices if first == 0 else part.indices + first
            for part, first in zip(self.parts, self.first_rows, strict=True)
        ]
        self.indices = self._by_rank(shifted)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each rank."""
        return self.parts[0].widths

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.parts[0].weight.dtype

    @property
    def wire_dtype(self) -> torch.dtype:
        """Of what travels."""
        return self.parts[0].wire_dtype

    def size(self, source: int, target: int) -> int:
        """Elements from `source` to `target` in a fetch; the other way in a return."""
        return self.counts[target] * self.widths[source]

    def gather(self) -> Tensor:
        """The own columns of what every rank asks for, by rank: `[sum of R_r, d_me]`."""
        return self._by_rank(
            [
                ops.gather_rows(part.weight, part.indices, dtype=part.wire_dtype)
                for part in self.parts
            ]
        )

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """The stack's own among `values` of all parts, one behind the other, in wire's dtype."""
        own = [values[number] for number in self.numbers]
        return (own[0] if len(own) == 1 else torch.cat(own)).to(self.wire_dtype)

    def apart(self, values: Tensor, rank: int) -> list[Tensor]:
        """`[R_rank, D]` of the stack to those of its tables."""
        return list(values.split([part.counts[rank] for part in self.parts]))

    def sums_apart(self, union: Tensor, values: Tensor) -> list[SparseRows]:
        """Rows over the stack's union to those of its tables."""
        if len(self.parts) == 1:
            return [SparseRows(union, values, self.num_rows)]
        ends = torch.tensor([*self.first_rows, self.num_rows], dtype=torch.int64)
        sizes = torch.searchsorted(union, ends).diff().tolist()
        return [
            SparseRows(own - first, rows, part.num_rows)
            for own, rows, first, part in zip(
                union.split(sizes), values.split(sizes), self.first_rows, self.parts, strict=True
            )
        ]

    def _by_rank(self, of_tables: list[Tensor]) -> Tensor:
        """`[sum of R_r, ...]` of each table, each by rank, to one of all tables, by rank."""
        if len(of_tables) == 1:
            return of_tables[0]
        pieces = [
            own.split(list(part.counts)) for own, part in zip(of_tables, self.parts, strict=True)
        ]
        return torch.cat([piece for rank in zip(*pieces, strict=True) for piece in rank])


def stack_parts(parts: Sequence[Part]) -> list[Stack]:
    """Parts that are alike, together; the same on every rank."""
    alike: dict[object, list[int]] = {}
    for number, part in enumerate(parts):
        key = part.widths, part.weight.dtype, part.wire_dtype
        alike.setdefault(key, []).append(number)
    return [Stack([parts[number] for number in numbers], numbers) for numbers in alike.values()]
