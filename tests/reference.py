"""Slow, obvious twins of every kernel in ``commlib.ops``: loops over rows, Python integers.

Each sums in the order of occurrence, halves in float32, so tests compare bits, not tolerances.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits; any NaN equals any NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = a.contiguous().view(bits) == b.contiguous().view(bits)
    return bool((equal | (a.isnan() & b.isnan())).all())


# rows


def row_counts(row: Tensor) -> bool:
    return any(x != 0.0 or x != x for x in row.double().tolist())


def pack(flags: list[bool]) -> Tensor:
    data = [0] * ((len(flags) + 7) // 8)
    for i, flag in enumerate(flags):
        data[i // 8] |= int(flag) << (i % 8)
    return torch.tensor(data, dtype=torch.uint8)


def scan_rows(dense: Tensor) -> Tensor:
    return pack([row_counts(row) for row in dense])


def bitmap_to_indices(bitmap: Tensor, num_rows: int) -> Tensor:
    data = bitmap.tolist()
    rows = [i for i in range(num_rows) if data[i // 8] >> (i % 8) & 1]
    return torch.tensor(rows, dtype=torch.int64)


def bitmap_count(bitmap: Tensor) -> int:
    return sum(bin(byte).count("1") for byte in bitmap.tolist())


def indices_to_bitmap(indices: Tensor, num_rows: int) -> Tensor:
    present = set(indices.tolist())
    return pack([i in present for i in range(num_rows)])


def bitmap_or(bitmaps: Tensor) -> Tensor:
    out = torch.zeros(bitmaps.shape[1], dtype=torch.uint8)
    for bitmap in bitmaps:
        out = out | bitmap
    return out


def gather_rows(src: Tensor, indices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    out = src.new_empty((len(indices), src.shape[1]), dtype=dtype or src.dtype)
    for i, row in enumerate(indices.tolist()):
        out[i] = src[row]
    return out


def scatter_rows_(dst: Tensor, indices: Tensor, src: Tensor) -> None:
    for i, row in enumerate(indices.tolist()):
        dst[row] = src[i]


def scatter_add_rows_(dst: Tensor, indices: Tensor, src: Tensor, scale: float = 1.0) -> None:
    acc = acc_dtype(src.dtype)
    factor = torch.tensor(scale, dtype=acc)
    for i, row in enumerate(indices.tolist()):
        dst[row] = (dst[row].to(acc) + factor * src[i].to(acc)).to(dst.dtype)


def scale_cast_rows(src: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    acc = acc_dtype(src.dtype)
    return (src.to(acc) * torch.tensor(scale, dtype=acc)).to(dtype)


def ordered_sum(rows: list[Tensor]) -> Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def coalesce_rows(indices: Tensor, values: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    groups: dict[int, list[Tensor]] = {}
    for i, row in enumerate(indices.tolist()):
        groups.setdefault(row, []).append(values[i].to(acc_dtype(values.dtype)))
    ids = sorted(groups)
    sums = [ordered_sum(groups[i]).to(values.dtype) for i in ids]
    out = torch.stack(sums) if sums else values.new_empty((0, values.shape[1]))
    return torch.tensor(ids, dtype=torch.int64), out


def unique_ids(ids: Tensor, num_rows: int, drop: int = -1) -> Tensor:
    return torch.tensor(sorted(set(ids.flatten().tolist()) - {drop}), dtype=torch.int64)


def encode_ids(indices: Tensor) -> Tensor:
    data, previous = [], 0
    for row in indices.tolist():
        gap, previous = row - previous, row
        while gap >= 128:
            data.append(gap % 128 + 128)
            gap //= 128
        data.append(gap)
    return torch.tensor(data, dtype=torch.uint8)


# sketch

MASK = 2**32 - 1


def murmur3_32(key: int, seed: int) -> int:
    """MurmurHash3 x86_32 of the 8 little-endian bytes of ``key``, in Python integers."""

    def rotl(x: int, k: int) -> int:
        return (x << k | x >> (32 - k)) & MASK

    h = seed
    for k in (key & MASK, key >> 32 & MASK):
        k = rotl(k * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
        h = (rotl(h ^ k, 13) * 5 + 0xE6546B64) & MASK
    h ^= 8
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def bucket_of(row: int, num_buckets: int, seed: int, j: int) -> int:
    return murmur3_32(row, (seed + 2 * j) & MASK) * num_buckets >> 32


def sign_of(row: int, seed: int, j: int) -> int:
    return -1 if murmur3_32(row, (seed + 2 * j + 1) & MASK) >> 31 else 1


def sketch_encode(
    indices: Tensor,
    values: Tensor,
    num_hashes: int,
    num_buckets: int,
    seed: int,
    scale: float = 1.0,
) -> Tensor:
    acc = acc_dtype(values.dtype)
    sketch = torch.zeros(num_hashes, num_buckets, values.shape[1], dtype=acc)
    factor = torch.tensor(scale, dtype=acc)
    for j in range(num_hashes):
        held: dict[int, list[Tensor]] = {}
        for i, row in enumerate(indices.tolist()):
            term = values[i].to(acc) * (factor * sign_of(row, seed, j))
            held.setdefault(bucket_of(row, num_buckets, seed, j), []).append(term)
        for bucket, terms in held.items():
            sketch[j, bucket] = ordered_sum(terms)
    return sketch


def estimates(sketch: Tensor, row: int, seed: int) -> list[Tensor]:
    num_hashes, num_buckets, _ = sketch.shape
    return [
        sketch[j, bucket_of(row, num_buckets, seed, j)] * sign_of(row, seed, j)
        for j in range(num_hashes)
    ]


def median(rows: list[Tensor]) -> Tensor:
    ordered = torch.stack(rows).sort(dim=0).values
    low, high = ordered[(len(rows) - 1) // 2], ordered[len(rows) // 2]
    middle = low if len(rows) % 2 else (low + high) * 0.5
    return torch.where(torch.stack(rows).isnan().any(dim=0), float("nan"), middle)


def sketch_decode(
    sketch: Tensor, indices: Tensor, seed: int, decoder: str, scale: float = 1.0
) -> Tensor:
    out = sketch.new_empty((len(indices), sketch.shape[2]))
    factor = torch.tensor(scale, dtype=sketch.dtype)
    for i, row in enumerate(indices.tolist()):
        parts = estimates(sketch, row, seed)
        value = ordered_sum(parts) / len(parts) if decoder == "mean" else median(parts)
        out[i] = value * factor
    return out


def sketch_peel(sketch: Tensor, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    num_hashes, num_buckets, _ = sketch.shape
    work, ids = sketch.clone(), indices.tolist()
    out = sketch_decode(sketch, indices, seed, "median")
    peeled = torch.zeros(len(ids), dtype=torch.bool)
    left: dict[tuple[int, int], set[int]] = {}
    for j in range(num_hashes):
        for i, row in enumerate(ids):
            left.setdefault((j, bucket_of(row, num_buckets, seed, j)), set()).add(i)
    queue = [key for key in sorted(left) if len(left[key]) == 1]
    for j, bucket in queue:
        if not left[j, bucket]:
            continue
        (i,) = left[j, bucket]
        value = work[j, bucket] * sign_of(ids[i], seed, j)
        out[i], peeled[i] = value, True
        for k in range(num_hashes):
            key = (k, bucket_of(ids[i], num_buckets, seed, k))
            left[key].remove(i)
            if k != j:
                work[key] = work[key] - value * sign_of(ids[i], seed, k)
            if len(left[key]) == 1:
                queue.append(key)
    return out, peeled


# owners


def balanced_owner(rows: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    owner, within = [], []
    for row in rows.tolist():
        shift = murmur3_32(row // num_ranks, 0x5BD1E995) * num_ranks >> 32
        owner.append((row + shift) % num_ranks)
        within.append(row // num_ranks)
    return torch.tensor(owner, dtype=torch.int64), torch.tensor(within, dtype=torch.int64)
