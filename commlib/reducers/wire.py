"""How rows look on the wire: as they are, rounded, or quantised with a scale a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commlib import ops


@dataclass(frozen=True, slots=True)
class Wire:
    """One format. `encode` and `decode` are each other's inverse up to `omega`.

    Args:
        name: As in the config of `S2`.
        bits: Per element.
        omega: Squared error over signal that one rounding costs rows of normal numbers.
    """

    name: str
    bits: int
    omega: float

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """Bytes of an encoded row whose wide dtype is `dtype`."""
        if self.bits == 32:
            return dim * dtype.itemsize
        return dim * 2 if self.bits == 16 else ops.packed_bytes(dim, self.bits)

    def encode(self, rows: Tensor) -> Tensor:
        """`[R, D]` fp32 or fp64 to `[R, width]` of some float dtype, to be moved as bits only."""
        if self.bits == 32:
            return rows
        if self.bits == 16:
            return rows.to(torch.bfloat16)
        return ops.quantize_rows(rows.to(torch.float32), self.bits).view(torch.float32)

    def decode(self, coded: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """`[R, D]` of `dtype`."""
        if self.bits == 32:
            return coded
        if self.bits == 16:
            return coded.to(dtype)
        return ops.dequantize_rows(coded.view(torch.uint8), dim, self.bits).to(dtype)


# The error of b-bit rows: the step is the row's peak (about 3 sigma) over 2^(b-1)-1.
WIRES: dict[str, Wire] = {
    wire.name: wire
    for wire in (
        Wire("fp32", 32, 0.0),
        Wire("bf16", 16, 2.0**-18),
        Wire("int8", 8, 5e-5),
        Wire("int6", 6, 8e-4),
        Wire("int4", 4, 1.6e-2),
    )
}
