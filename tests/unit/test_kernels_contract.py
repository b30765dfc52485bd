"""What holds for every op: opcheck, the same bits for any thread count, errors that teach."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from commlib import ops

C = torch.ops.commlib
NUM_ROWS, DIM = 3000, 65


def rows(dtype: torch.dtype, num_rows: int = NUM_ROWS) -> Tensor:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, DIM, generator=g, dtype=torch.float64)
    x *= torch.rand(num_rows, 1, generator=g) < 0.5
    return x.to(dtype)


def ids(count: int, limit: int) -> Tensor:
    return torch.randint(0, limit, (count,), generator=torch.Generator().manual_seed(2))


def in_place(op: Callable[..., Any], dst: Tensor, *args: Any) -> Tensor:
    op(dst, *args)
    return dst


def cases(dtype: torch.dtype, n: int = NUM_ROWS) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """One call of every op, as (name, arguments)."""
    x, some, every = rows(dtype, n), ids(n, n), torch.arange(n)
    sketched = rows(torch.float64 if dtype == torch.float64 else torch.float32, n)
    sketch = ops.sketch_encode(every, sketched, 3, n // 2, 5)
    bitmap = ops.scan_rows(x)
    owner, within = ops.balanced_owner(every, 3)
    yield "scan_rows", (x,)
    yield "bitmap_count", (bitmap,)
    yield "bitmap_to_indices", (bitmap, n)
    yield "indices_to_bitmap", (some, n)
    yield "indices_to_bitmap", (every, n)
    yield "bitmap_or", (torch.stack([bitmap, bitmap.flip(0)]),)
    yield "gather_rows", (x, some)
    yield "gather_rows", (x, some, torch.bfloat16)
    yield "gather_rows_out", (x, some, torch.empty_like(x))
    yield "scatter_rows_", (x.clone(), every.flip(0), x)
    yield "scatter_add_rows_", (x.clone(), some, x, 0.5)
    yield "scatter_add_rows_", (x.clone(), every, x)
    yield "scale_cast_rows", (x, 0.25, torch.float16)
    yield "coalesce_rows", (some, x, n)
    yield "unique_ids", (some.view(-1, 2), n)
    yield "encode_ids", (every,)
    yield "decode_ids", (ops.encode_ids(every), n)
    yield "murmur3_32", (some, 9)
    yield "sketch_encode", (every, x, 3, n // 4, 5)
    yield "sketch_decode", (sketch, every, 5, "mean", 0.5)
    yield "sketch_decode", (sketch, every, 5, "median")
    yield "sketch_peel", (sketch, every, 5)
    yield "quantize_rows", (x.float(), 6)
    yield "dequantize_rows", (ops.quantize_rows(x.float(), 6), DIM, 6)
    yield "balanced_owner", (some, 3)
    yield "balanced_row", (owner, within, 3)
    held = (torch.cat([every, every[::2], every[::3]]), torch.tensor([n, -(-n // 2), -(-n // 3)]))
    yield "unite_rows", (*held, n)
    yield "minimal_owner", (*held, n)
    yield "minimal_route", (*held, n, 1)


def test_there_is_a_case_for_every_op() -> None:
    named = {name for name, _ in cases(torch.float32, 16)}
    registered = {
        schema.name.removeprefix("commlib::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("commlib::")
    }
    assert named == registered


@pytest.mark.parametrize("dtype", ops.ROW_DTYPES)
def test_opcheck(dtype: torch.dtype) -> None:
    for name, args in cases(dtype, 24):
        torch.library.opcheck(getattr(C, name).default, args)


@pytest.mark.parametrize("dtype", ops.ROW_DTYPES)
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    def run() -> list[list[Tensor]]:
        results = []
        for name, args in cases(dtype):
            out = getattr(C, name)(*args)
            tensors = [out] if isinstance(out, Tensor) else list(out or [])
            results.append([*tensors, *(a.clone() for a in args if isinstance(a, Tensor))])
        return results

    threads, runs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            runs.append(run())
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


FLOATS, IDS, BYTES = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.zeros(1).byte()
SKETCH = torch.zeros(2, 5, 3)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: ops.scan_rows(IDS), TypeError, "dense.dtype = torch.int64"),
        (lambda: ops.scan_rows(torch.zeros(4)), ValueError, r"dense.shape = \(4,\)"),
        (lambda: ops.bitmap_count(IDS), TypeError, "bitmap.dtype"),
        (lambda: ops.bitmap_to_indices(BYTES, 9), ValueError, "num_rows = 9"),
        (lambda: ops.bitmap_to_indices(BYTES, -1), ValueError, "num_rows = -1"),
        (lambda: ops.bitmap_to_indices(BYTES + 255, 5), ValueError, "past num_rows = 5"),
        (lambda: ops.indices_to_bitmap(IDS.int(), 9), TypeError, "indices.dtype"),
        (lambda: ops.bitmap_or(BYTES), ValueError, "bitmaps.shape"),
        (lambda: ops.gather_rows(FLOATS, FLOATS), TypeError, "indices.dtype"),
        (lambda: ops.gather_rows(FLOATS, IDS, out=FLOATS[:2]), ValueError, "out.shape"),
        (
            lambda: ops.gather_rows(FLOATS, IDS, out=FLOATS, dtype=torch.float16),
            TypeError,
            "contradicts",
        ),
        (lambda: ops.gather_rows(FLOATS, IDS, dtype=torch.int8), TypeError, "torch.int8"),
        (lambda: ops.scatter_rows_(FLOATS, IDS, FLOATS.half()), TypeError, "src.dtype"),
        (lambda: ops.scatter_rows_(FLOATS, IDS, FLOATS[:, :2]), ValueError, "dst.shape"),
        (lambda: ops.scatter_rows_(FLOATS, IDS[:2], FLOATS), ValueError, "2 indices"),
        (lambda: ops.scatter_rows_(torch.zeros(3, 4).T, IDS, FLOATS), ValueError, "contiguous"),
        (lambda: ops.scatter_add_rows_(FLOATS.half(), IDS, FLOATS), TypeError, "src.dtype"),
        (lambda: ops.scale_cast_rows(FLOATS, 1.0, torch.int64), TypeError, "dtype"),
        (lambda: ops.coalesce_rows(IDS, FLOATS[:3], 5), ValueError, "values.shape"),
        (lambda: ops.unique_ids(FLOATS, 5), TypeError, "ids.dtype"),
        (lambda: ops.unique_ids(IDS, -5), ValueError, "num_rows = -5"),
        (lambda: ops.encode_ids(IDS), ValueError, r"indices\[1\] = 0"),
        (lambda: ops.encode_ids(IDS[:1] - 1), ValueError, r"indices\[0\] = -1"),
        (lambda: ops.decode_ids(BYTES, -1), ValueError, "count = -1"),
        (lambda: ops.murmur3_32(IDS, 2**32), ValueError, "seed = 4294967296"),
        (lambda: ops.sketch_encode(IDS, FLOATS, 0, 5, 0), ValueError, "num_hashes = 0"),
        (lambda: ops.sketch_encode(IDS, FLOATS, 17, 5, 0), ValueError, "num_hashes = 17"),
        (lambda: ops.sketch_encode(IDS, FLOATS, 1, 2**32, 0), ValueError, "num_buckets"),
        (lambda: ops.sketch_encode(IDS, FLOATS, 1, 0, 0), ValueError, "num_buckets = 0"),
        (lambda: ops.sketch_decode(SKETCH.half(), IDS, 0, "mean"), TypeError, "sketch.dtype"),
        (lambda: ops.sketch_decode(SKETCH[0], IDS, 0, "mean"), ValueError, "sketch.shape"),
        (lambda: ops.sketch_decode(SKETCH, IDS, 0, "mode"), ValueError, "decoder = 'mode'"),
        (lambda: ops.sketch_peel(SKETCH, IDS, -1), ValueError, "seed = -1"),
        (lambda: ops.balanced_owner(IDS - 1, 2), IndexError, r"rows\[0\] = -1"),
        (lambda: ops.balanced_owner(IDS, 0), ValueError, "num_ranks = 0"),
        (lambda: ops.balanced_row(IDS + 2, IDS, 2), IndexError, r"owner\[0\] = 2"),
        (lambda: ops.balanced_row(IDS, IDS[:1], 2), ValueError, "index_within"),
    ],
)
def test_errors_name_the_parameter_and_the_value(
    call: Callable[[], Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_the_ops_themselves_check_too() -> None:
    for call in (
        lambda: C.gather_rows(FLOATS, IDS + 4),
        lambda: C.gather_rows_out(FLOATS, IDS, torch.zeros(3, 3)),
        lambda: C.scatter_rows_(FLOATS, IDS, FLOATS.half()),
        lambda: C.scatter_add_rows_(FLOATS, IDS, FLOATS.double()),
        lambda: C.bitmap_to_indices(BYTES, 100),
        lambda: C.sketch_encode(IDS, FLOATS, 99, 5, 0, 1.0),
        lambda: C.sketch_decode(SKETCH, IDS.int(), 0, "mean", 1.0),
        lambda: C.balanced_owner(IDS, 0),
    ):
        with pytest.raises(RuntimeError, match=r"^(Value|Type|Index)Error: "):
            call()
