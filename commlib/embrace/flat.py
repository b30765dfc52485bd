"""Tensors as flat bytes, which is how tables of several dtypes share one message."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Its memory, uint8 `[num_bytes]`; copied unless contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def as_matrix(data: Tensor, dtype: torch.dtype, num_rows: int, width: int) -> Tensor:
    """Bytes as `[num_rows, width]`; copied where bytes before them leave them unaligned."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(num_rows, width)
