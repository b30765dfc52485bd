"""The kernels: a typed Python face of ``torch.ops.commlib.*``.

Rows are ``[R, D]``; ids are int64; a bitmap is uint8, one bit per row, row ``i`` at byte
``i >> 3``, bit ``i & 7``, tail bits zero. The dtypes of rows are float32, float64, float16 and
bfloat16; halves are summed in float32. Every op gives the same bits for any number of threads.
Nothing here is differentiable. A caller's mistake is a ValueError, TypeError or IndexError that
names the parameter.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, cast

import torch
from torch import Tensor

try:
    import_module("commlib._C")  # registers the ops
except ImportError as error:
    raise ImportError(
        f"commlib._C, the compiled kernels, cannot be loaded ({error}); build it with "
        "`pip install .` or `python setup.py build_ext --inplace`"
    ) from error

from commlib import _fake  # noqa: F401  (registers the fake kernels)

ROW_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MAX_HASHES = 16

_ops = torch.ops.commlib
_KINDS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "IndexError": IndexError,
}


def _call(op: Any, *args: Any) -> Any:
    """Calls an op; what its C++ checks throw comes out as the Python error it names."""
    try:
        return op(*args)
    except RuntimeError as error:
        kind, separator, text = str(error).partition(": ")
        if separator and kind in _KINDS:
            raise _KINDS[kind](text.split("\nException raised from")[0]) from None
        raise


def _tensor(op: Any, *args: Any) -> Tensor:
    return cast(Tensor, _call(op, *args))


def _pair(op: Any, *args: Any) -> tuple[Tensor, Tensor]:
    return cast(tuple[Tensor, Tensor], _call(op, *args))


def _check_rows(name: str, rows: Tensor) -> None:
    if rows.dtype not in ROW_DTYPES:
        raise TypeError(f"{name}.dtype = {rows.dtype} is not one of {ROW_DTYPES}; cast it first")
    if rows.dim() != 2:
        raise ValueError(f"{name}.shape = {tuple(rows.shape)} must be [R, D]; reshape it")


def _check_ids(name: str, ids: Tensor) -> None:
    if ids.dtype != torch.int64:
        raise TypeError(f"{name}.dtype = {ids.dtype} must be torch.int64; use {name}.long()")
    if ids.dim() != 1:
        raise ValueError(f"{name}.shape = {tuple(ids.shape)} must be one-dimensional; flatten it")


def _check_bytes(name: str, data: Tensor, dim: int = 1) -> None:
    if data.dtype != torch.uint8:
        raise TypeError(f"{name}.dtype = {data.dtype} must be torch.uint8")
    if data.dim() != dim:
        raise ValueError(f"{name}.shape = {tuple(data.shape)} must have {dim} dimension(s)")


def _check_pair(indices: Tensor, name: str, rows: Tensor) -> None:
    _check_ids("indices", indices)
    _check_rows(name, rows)
    if indices.shape[0] != rows.shape[0]:
        raise ValueError(
            f"{name}.shape = {tuple(rows.shape)} must have one row for each of the "
            f"{indices.shape[0]} indices"
        )


def _check_target(dst: Tensor, name: str, row_shape: tuple[int, ...]) -> None:
    _check_rows(name, dst)
    if tuple(dst.shape) != row_shape:
        raise ValueError(f"{name}.shape = {tuple(dst.shape)} must be {row_shape}")
    if not dst.is_contiguous():
        raise ValueError(
            f"{name} is written in place and must be contiguous; its strides are {dst.stride()}"
        )


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value < high:
        raise ValueError(f"{name} = {value} must be in [{low}, {high})")


def _check_num_rows(num_rows: int) -> None:
    if num_rows < 0:
        raise ValueError(f"num_rows = {num_rows} must not be negative")


def scan_rows(dense: Tensor) -> Tensor:
    """Finds the rows of a dense tensor that carry information.

    A row counts if any element has a bit other than its sign: NaN and denormals count, -0.0 does
    not.

    Args:
        dense: ``[V, D]``; copied first unless contiguous.

    Returns:
        Bitmap, uint8 ``[ceil(V / 8)]``.

    Raises:
        TypeError: dtype is not a row dtype.
        ValueError: not two-dimensional.

    Source: S2 Reducer, the bitmap of non-zero rows; exact by bits here.
    """
    _check_rows("dense", dense)
    return _tensor(_ops.scan_rows, dense)


def bitmap_count(bitmap: Tensor) -> int:
    """Counts the set bits of a bitmap (uint8 ``[B]``)."""
    _check_bytes("bitmap", bitmap)
    return int(_call(_ops.bitmap_count, bitmap).item())


def bitmap_to_indices(bitmap: Tensor, num_rows: int) -> Tensor:
    """Lists the rows of a bitmap.

    Args:
        bitmap: uint8 ``[ceil(num_rows / 8)]``, tail bits zero.
        num_rows: V.

    Returns:
        int64 ``[R]``, sorted, unique.

    Raises:
        ValueError: the bitmap's size is not that of ``num_rows``, or bits past it are set.
    """
    _check_bytes("bitmap", bitmap)
    _check_num_rows(num_rows)
    return _tensor(_ops.bitmap_to_indices, bitmap, num_rows)


def indices_to_bitmap(indices: Tensor, num_rows: int) -> Tensor:
    """Sets one bit per id; ids may be unsorted and repeated (sorted unique ids are faster).

    Args:
        indices: int64 ``[R]``, each in ``[0, num_rows)``.
        num_rows: V.

    Returns:
        Bitmap, uint8 ``[ceil(num_rows / 8)]``.

    Raises:
        IndexError: an id is outside ``[0, num_rows)``.
    """
    _check_ids("indices", indices)
    _check_num_rows(num_rows)
    return _tensor(_ops.indices_to_bitmap, indices, num_rows)


def bitmap_or(bitmaps: Tensor) -> Tensor:
    """Bitwise OR of k bitmaps: uint8 ``[k, B]`` to ``[B]`` (zeros where k is 0)."""
    _check_bytes("bitmaps", bitmaps, dim=2)
    return _tensor(_ops.bitmap_or, bitmaps)


def gather_rows(
    src: Tensor, indices: Tensor, out: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Copies rows out of a dense tensor: ``result[i] = src[indices[i]]``.

    Args:
        src: ``[V, D]``.
        indices: int64 ``[R]``, each in ``[0, V)``; any order, repeats allowed.
        out: contiguous ``[R, D]`` to write into, of any row dtype; must not overlap ``src``.
        dtype: dtype of the result where ``out`` is None; default ``src.dtype``.

    Returns:
        ``[R, D]``; ``out`` itself where given.

    Raises:
        IndexError: an id is outside ``[0, V)``; nothing has been written then.
        TypeError: ``dtype`` contradicts ``out.dtype``.
        ValueError: shapes do not fit, or ``out`` is not contiguous.
    """
    _check_rows("src", src)
    _check_ids("indices", indices)
    if out is None:
        if dtype is not None and dtype not in ROW_DTYPES:
            raise TypeError(f"dtype = {dtype} is not one of {ROW_DTYPES}")
        return _tensor(_ops.gather_rows, src, indices, dtype)
    if dtype is not None and dtype != out.dtype:
        raise TypeError(f"dtype = {dtype} contradicts out.dtype = {out.dtype}; give one of them")
    _check_target(out, "out", (indices.shape[0], src.shape[1]))
    _call(_ops.gather_rows_out, src, indices, out)
    return out


def scatter_rows_(dst: Tensor, indices: Tensor, src: Tensor) -> Tensor:
    """Overwrites rows in place: ``dst[indices[i]] = src[i]``.

    Args:
        dst: contiguous ``[V, D]``.
        indices: int64 ``[R]``, unique, each in ``[0, V)``.
        src: ``[R, D]`` of ``dst``'s dtype.

    Returns:
        ``dst``.

    Raises:
        IndexError: an id is outside ``[0, V)``; ``dst`` is unchanged then.
        TypeError, ValueError: dtypes or shapes do not fit, or ``dst`` is not contiguous.
    """
    _check_pair(indices, "src", src)
    _check_target(dst, "dst", (*dst.shape[:1], src.shape[1]))
    if src.dtype != dst.dtype:
        raise TypeError(f"src.dtype = {src.dtype} must be dst.dtype = {dst.dtype}")
    _call(_ops.scatter_rows_, dst, indices, src)
    return dst


def scatter_add_rows_(dst: Tensor, indices: Tensor, src: Tensor, scale: float = 1.0) -> Tensor:
    """Adds rows in place, in order of occurrence: ``dst[indices[i]] += scale * src[i]``.

    Args:
        dst: contiguous ``[V, D]``; float32, or ``src``'s dtype. Each add into a half is formed in
            float32 and rounded once.
        indices: int64 ``[R]``, each in ``[0, V)``; repeats allowed.
        src: ``[R, D]``.
        scale: factor of every row of ``src``.

    Returns:
        ``dst``.

    Raises:
        IndexError: an id is outside ``[0, V)``; ``dst`` is unchanged then.
        TypeError, ValueError: dtypes or shapes do not fit, or ``dst`` is not contiguous.
    """
    _check_pair(indices, "src", src)
    _check_target(dst, "dst", (*dst.shape[:1], src.shape[1]))
    if dst.dtype != src.dtype and not (dst.dtype == torch.float32 and src.element_size() == 2):
        raise TypeError(
            f"src.dtype = {src.dtype} cannot be added into dst.dtype = {dst.dtype}; give equal "
            "dtypes, or a float32 dst and a half src"
        )
    _call(_ops.scatter_add_rows_, dst, indices, src, scale)
    return dst


def scale_cast_rows(src: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``(scale * src).to(dtype)`` in one pass: from float32 sums to halves, rounded once.

    Args:
        src: ``[R, D]``, usually float32 sums.
        scale: factor, applied in float32 (float64 for float64).
        dtype: row dtype of the result.

    Returns:
        ``[R, D]`` of ``dtype``.

    Raises:
        TypeError, ValueError: not rows, or ``dtype`` is not a row dtype.
    """
    _check_rows("src", src)
    if dtype not in ROW_DTYPES:
        raise TypeError(f"dtype = {dtype} is not one of {ROW_DTYPES}")
    return _tensor(_ops.scale_cast_rows, src, scale, dtype)


def coalesce_rows(indices: Tensor, values: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Sums rows of equal ids: a COO gradient becomes sorted unique rows.

    Args:
        indices: int64 ``[N]``, each in ``[0, num_rows)``; any order, repeats allowed.
        values: ``[N, D]``.
        num_rows: V.

    Returns:
        ``(int64 [R] sorted unique, [R, D] of values' dtype)``; never views of the inputs. Sums run
        in order of occurrence, halves in float32 with one rounding at the end.

    Raises:
        IndexError: an id is outside ``[0, num_rows)``.
        TypeError, ValueError: dtypes or shapes do not fit.
    """
    _check_pair(indices, "values", values)
    _check_num_rows(num_rows)
    return _pair(_ops.coalesce_rows, indices, values, num_rows)


def unique_ids(ids: Tensor, num_rows: int, drop: int = -1) -> Tensor:
    """The sorted unique ids of a batch.

    Args:
        ids: int32 or int64, any shape, each in ``[0, num_rows)`` or equal to ``drop``.
        num_rows: V.
        drop: an id to leave out (padding); -1 leaves out none.

    Returns:
        int64 ``[R]``.

    Raises:
        IndexError: an id is outside ``[0, num_rows)``.
        TypeError: ids are neither int32 nor int64.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids.dtype = {ids.dtype} must be torch.int32 or torch.int64")
    _check_num_rows(num_rows)
    return _tensor(_ops.unique_ids, ids, num_rows, drop)


def encode_ids(indices: Tensor) -> Tensor:
    """Packs sorted unique ids as LEB128 varints of their gaps (the first gap is the first id).

    Args:
        indices: int64 ``[R]``, non-negative, sorted, unique.

    Returns:
        uint8 ``[B]``: one byte for each gap below 128, two below 16384, and so on.

    Raises:
        ValueError: ids are negative, unsorted or repeated.
    """
    _check_ids("indices", indices)
    return _tensor(_ops.encode_ids, indices)


def decode_ids(data: Tensor, count: int) -> Tensor:
    """Unpacks what :func:`encode_ids` packed.

    Args:
        data: uint8 ``[B]``, exactly ``count`` varints.
        count: R.

    Returns:
        int64 ``[count]``, sorted, unique.

    Raises:
        ValueError: data is truncated, has bytes left, holds an overlong varint, or ids that do not
            increase.
    """
    _check_bytes("data", data)
    if count < 0:
        raise ValueError(f"count = {count} must not be negative")
    return _tensor(_ops.decode_ids, data, count)


def murmur3_32(keys: Tensor, seed: int) -> Tensor:
    """MurmurHash3 x86_32 of each key's 8 little-endian bytes, as the ``mmh3`` package gives it.

    Args:
        keys: int64 ``[N]``.
        seed: in ``[0, 2**32)``.

    Returns:
        int64 ``[N]``, each in ``[0, 2**32)``.
    """
    _check_ids("keys", keys)
    _check_range("seed", seed, 0, 2**32)
    return _tensor(_ops.murmur3_32, keys, seed)


def _check_sketch(sketch: Tensor, indices: Tensor, seed: int) -> None:
    if sketch.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"sketch.dtype = {sketch.dtype} must be float32 or float64")
    if sketch.dim() != 3:
        raise ValueError(f"sketch.shape = {tuple(sketch.shape)} must be [r, c, D]")
    _check_range("sketch.shape[0] (hashes)", sketch.shape[0], 1, MAX_HASHES + 1)
    _check_range("sketch.shape[1] (buckets)", sketch.shape[1], 1, 2**32)
    _check_range("seed", seed, 0, 2**32)
    _check_ids("indices", indices)


def sketch_encode(
    indices: Tensor,
    values: Tensor,
    num_hashes: int,
    num_buckets: int,
    seed: int,
    scale: float = 1.0,
) -> Tensor:
    """Count sketch of rows: ``sketch[j, bucket_j(id)] += sign_j(id) * scale * row``.

    In table j, ``h = murmur3(id, seed + 2j)`` gives bucket ``h * c >> 32``; the top bit of
    ``murmur3(id, seed + 2j + 1)`` gives the sign. Linear: sketches of ranks add up.

    Args:
        indices: int64 ``[R]``, any ids.
        values: ``[R, D]``.
        num_hashes: r, in ``[1, 16]``.
        num_buckets: c, in ``[1, 2**32)``.
        seed: in ``[0, 2**32)``, agreed by all ranks.
        scale: factor of every row.

    Returns:
        ``[r, c, D]`` float32; float64 for float64 rows.

    Raises:
        TypeError, ValueError: dtypes, shapes or ranges do not fit.

    Source: S2 Reducer; hash by rule instead of tables.
    """
    _check_pair(indices, "values", values)
    _check_range("num_hashes", num_hashes, 1, MAX_HASHES + 1)
    _check_range("num_buckets", num_buckets, 1, 2**32)
    _check_range("seed", seed, 0, 2**32)
    return _tensor(_ops.sketch_encode, indices, values, num_hashes, num_buckets, seed, scale)


def sketch_decode(
    sketch: Tensor,
    indices: Tensor,
    seed: int,
    decoder: Literal["mean", "median"],
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Estimates rows from a sketch.

    Args:
        sketch: ``[r, c, D]`` float32 or float64.
        indices: int64 ``[U]``.
        seed: that of the encoder.
        decoder: ``mean`` (linear, unbiased; relative squared error about ``(U - 1) / (r * c)``) or
            ``median`` of the r estimates (of an even r the mean of the middle two; NaN if any
            estimate is NaN).
        scale: factor of every estimate.
        dtype: of the result; for a float32 sketch also float16 or bfloat16, rounded once.

    Returns:
        ``[U, D]`` of that dtype, by default the sketch's.

    Raises:
        TypeError, ValueError: dtypes, shapes or ranges do not fit; an unknown decoder.

    Source: S2 Reducer (mean, median).
    """
    _check_sketch(sketch, indices, seed)
    if decoder not in ("mean", "median"):
        raise ValueError(f"decoder = {decoder!r} must be 'mean' or 'median'")
    return _tensor(_ops.sketch_decode, sketch, indices, seed, decoder, scale, dtype)


def sketch_peel(sketch: Tensor, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Takes rows out of a sketch one by one, each from a bucket that holds nothing else any more.

    Up to rounding this is exact for every row that peels: nearly always all of them with three
    hashes, ``r * c >= 1.3 U`` and U of a thousand or more.

    Args:
        sketch: ``[r, c, D]`` float32 or float64, left unchanged.
        indices: int64 ``[U]``, unique: every row that was encoded.
        seed: that of the encoder.

    Returns:
        ``(values [U, D], peeled bool [U])``; rows that do not peel are decoded by the median.

    Raises:
        TypeError, ValueError: dtypes, shapes or ranges do not fit.

    Source: ours, after invertible Bloom lookup tables.
    """
    _check_sketch(sketch, indices, seed)
    return _pair(_ops.sketch_peel, sketch, indices, seed)


def packed_bytes(dim: int, bits: int) -> int:
    """Bytes of a quantised row of `dim` elements: a float scale and the integers, 4-aligned."""
    return 4 + ((dim * bits + 7) // 8 + 3) // 4 * 4


def quantize_rows(values: Tensor, bits: int) -> Tensor:
    """Rows in 8, 6 or 4 bits an element, with a float scale a row.

    Args:
        values: ``[R, D]`` float32. A row that is not finite decodes to NaN throughout.
        bits: 8 (integers up to 127), 6 (up to 31) or 4 (up to 7).

    Returns:
        uint8 ``[R, packed_bytes(D, bits)]``. What is rounded is the square root of an element
        over the row's largest, so small elements keep a relative precision too.

    Raises:
        ValueError: another number of bits, or ``values`` is not two-dimensional.
        TypeError: ``values`` is not float32.

    Source: ours.
    """
    if values.dtype != torch.float32:
        raise TypeError(f"values.dtype = {values.dtype} must be torch.float32; cast it first")
    return _tensor(_ops.quantize_rows, values, bits)


def dequantize_rows(packed: Tensor, dim: int, bits: int) -> Tensor:
    """What ``quantize_rows`` packed, as float32 ``[R, dim]``.

    Raises:
        ValueError: ``packed`` has not the width of ``dim`` and ``bits``.
        TypeError: ``packed`` is not uint8.

    Source: ours.
    """
    _check_bytes("packed", packed, dim=2)
    return _tensor(_ops.dequantize_rows, packed, dim, bits)


def balanced_owner(rows: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Which rank owns each row, and which of the owner's rows it is; computed, without a table.

    A bijection of rows and pairs. ``index_within = row // n``, so an owner holds at most
    ``ceil(V / n)`` rows; any n consecutive rows from a multiple of n have n different owners.

    Args:
        rows: int64 ``[N]``, non-negative.
        num_ranks: n.

    Returns:
        ``(owner int64 [N], index_within int64 [N])``.

    Raises:
        IndexError: a row is negative.
        ValueError: ``num_ranks`` is outside ``[1, 2**31)``.

    Source: ours; Zen's hash-based placement without its table.
    """
    _check_ids("rows", rows)
    _check_range("num_ranks", num_ranks, 1, 2**31)
    return _pair(_ops.balanced_owner, rows, num_ranks)


def balanced_row(owner: Tensor, index_within: Tensor, num_ranks: int) -> Tensor:
    """The inverse of :func:`balanced_owner`.

    Args:
        owner: int64 ``[N]``, each in ``[0, num_ranks)``.
        index_within: int64 ``[N]``, non-negative.
        num_ranks: n.

    Returns:
        rows, int64 ``[N]``.

    Raises:
        IndexError: an owner or an index is out of range.
        ValueError: lengths differ, or ``num_ranks`` is outside ``[1, 2**31)``.
    """
    _check_ids("owner", owner)
    _check_ids("index_within", index_within)
    _check_range("num_ranks", num_ranks, 1, 2**31)
    return _tensor(_ops.balanced_row, owner, index_within, num_ranks)
