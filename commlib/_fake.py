"""Fake kernels: shapes and dtypes of every op of ``commlib._C``, for torch.compile and opcheck."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from commlib.route import Route


def _dynamic() -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()


def _sketch_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scan_rows(dense: Tensor) -> Tensor:
    return dense.new_empty(((dense.shape[0] + 7) // 8,), dtype=torch.uint8)


def _bitmap_count(bitmap: Tensor) -> Tensor:
    return bitmap.new_empty((), dtype=torch.int64)


def _bitmap_to_indices(bitmap: Tensor, num_rows: int) -> Tensor:
    return bitmap.new_empty((_dynamic(),), dtype=torch.int64)


def _indices_to_bitmap(indices: Tensor, num_rows: int) -> Tensor:
    return indices.new_empty(((num_rows + 7) // 8,), dtype=torch.uint8)


def _bitmap_or(bitmaps: Tensor) -> Tensor:
    return bitmaps.new_empty((bitmaps.shape[1],))


def _gather_rows(src: Tensor, indices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return src.new_empty((indices.shape[0], src.shape[1]), dtype=dtype or src.dtype)


def _gather_rows_out(src: Tensor, indices: Tensor, out: Tensor) -> None:
    return None


def _scatter_rows_(dst: Tensor, indices: Tensor, src: Tensor) -> None:
    return None


def _scatter_add_rows_(dst: Tensor, indices: Tensor, src: Tensor, scale: float = 1.0) -> None:
    return None


def _scale_cast_rows(src: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return src.new_empty(src.shape, dtype=dtype)


def _coalesce_rows(indices: Tensor, values: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    num_unique = _dynamic()
    return indices.new_empty((num_unique,)), values.new_empty((num_unique, values.shape[1]))


def _unique_ids(ids: Tensor, num_rows: int, drop: int = -1) -> Tensor:
    return ids.new_empty((_dynamic(),), dtype=torch.int64)


def _encode_ids(indices: Tensor) -> Tensor:
    return indices.new_empty((_dynamic(),), dtype=torch.uint8)


def _decode_ids(data: Tensor, count: int) -> Tensor:
    return data.new_empty((count,), dtype=torch.int64)


def _murmur3_32(keys: Tensor, seed: int) -> Tensor:
    return keys.new_empty(keys.shape)


def _sketch_encode(
    indices: Tensor,
    values: Tensor,
    num_hashes: int,
    num_buckets: int,
    seed: int,
    scale: float = 1.0,
) -> Tensor:
    shape = (num_hashes, num_buckets, values.shape[1])
    return values.new_empty(shape, dtype=_sketch_dtype(values.dtype))


def _sketch_decode(
    sketch: Tensor,
    indices: Tensor,
    seed: int,
    decoder: str,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return sketch.new_empty((indices.shape[0], sketch.shape[2]), dtype=dtype or sketch.dtype)


def _sketch_peel(sketch: Tensor, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    num_rows = indices.shape[0]
    values = sketch.new_empty((num_rows, sketch.shape[2]))
    return values, sketch.new_empty((num_rows,), dtype=torch.bool)


def _quantize_rows(values: Tensor, bits: int) -> Tensor:
    width = 4 + ((values.shape[1] * bits + 7) // 8 + 3) // 4 * 4
    return values.new_empty((values.shape[0], width), dtype=torch.uint8)


def _dequantize_rows(packed: Tensor, dim: int, bits: int) -> Tensor:
    return packed.new_empty((packed.shape[0], dim), dtype=torch.float32)


def _balanced_owner(rows: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(rows)


def _balanced_row(owner: Tensor, index_within: Tensor, num_ranks: int) -> Tensor:
    return torch.empty_like(owner)


def _unite_rows(indices: Tensor, counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return indices.new_empty((_dynamic(),)), torch.empty_like(indices)


def _minimal_owner(indices: Tensor, counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    num_union = _dynamic()
    union = indices.new_empty((num_union,))
    return union, indices.new_empty((num_union,), dtype=torch.int32)


_PER_RANK = ("spread_counts", "push_send", "push_recv", "pull_send", "pull_recv")


def _minimal_route(indices: Tensor, counts: Tensor, num_rows: int, rank: int) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(counts) if field.name in _PER_RANK else indices.new_empty((_dynamic(),))
        for field in fields(Route)
    )


for _kernel in (
    _scan_rows,
    _bitmap_count,
    _bitmap_to_indices,
    _indices_to_bitmap,
    _bitmap_or,
    _gather_rows,
    _gather_rows_out,
    _scatter_rows_,
    _scatter_add_rows_,
    _scale_cast_rows,
    _coalesce_rows,
    _unique_ids,
    _encode_ids,
    _decode_ids,
    _murmur3_32,
    _sketch_encode,
    _sketch_decode,
    _sketch_peel,
    _quantize_rows,
    _dequantize_rows,
    _balanced_owner,
    _balanced_row,
    _unite_rows,
    _minimal_owner,
    _minimal_route,
):
    torch.library.register_fake(f"commlib::{_kernel.__name__[1:]}", _kernel)
