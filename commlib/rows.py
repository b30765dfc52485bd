"""Rows: the one data shape that every sparse collective speaks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of `dtype` are held: fp32 for half types, else itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass(frozen=True, slots=True)
class SparseRows:
    """The non-zero rows of a `[V, D]` matrix.

    Args:
        indices: int64 `[R]`, sorted and unique, each in `[0, V)`.
        values: `[R, D]`, fp32, fp64, fp16 or bf16.
        num_rows: V.

    Raises:
        TypeError: A dtype that is not one of those.
        ValueError: Shapes that do not belong together.

    Source: ours.
    """

    indices: Tensor
    values: Tensor
    num_rows: int

    def __post_init__(self) -> None:
        if self.indices.dtype != torch.int64:
            raise TypeError(
                f"indices must be int64, got {self.indices.dtype}: convert with .to(torch.int64)"
            )
        if self.values.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"values must be fp32, fp64, fp16 or bf16, got {self.values.dtype}:"
                " convert before reducing"
            )
        if self.values.dim() != 2 or self.indices.shape != self.values.shape[:1]:
            raise ValueError(
                f"indices [R] and values [R, D] expected, got {tuple(self.indices.shape)}"
                f" and {tuple(self.values.shape)}"
            )

    @property
    def dim(self) -> int:
        """D, elements per row."""
        return int(self.values.shape[1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of values."""
        return self.dim * self.values.element_size()

    def to_dense(self) -> Tensor:
        """The `[V, D]` matrix, zeros elsewhere."""
        dense = self.values.new_zeros(self.num_rows, self.dim)
        dense[self.indices] = self.values
        return dense
