"""Kernels against ``copy_``: how much of the memory's speed does each op keep?

    python -m bench.kernels --json FILE [--threads 1,2] [--mib 256]

Each op runs beside a ``copy_`` between preallocated tensors of the same bytes, interleaved, on two
sets of buffers that are larger than the cache. ``ratio`` is time of copy_ / time of the op. Bytes
are those of the rows (of the ids, for ops on ids), counted once. Results are checked on a small
input before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.harness import Timing, interleave, write_json
from commlib import ops

DIM = 256
NUM_SETS = 2
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
TARGETS = {"scan_rows": 0.7, "gather_rows": 0.5, "scatter_rows_": 0.5, "encode+decode": 0.3}


@dataclasses.dataclass(frozen=True)
class Case:
    """One op on one set of buffers: ``num_bytes`` is what ``ratio`` counts."""

    op: str
    num_bytes: int
    run: Callable[[], object]


def row_cases(dtype: torch.dtype, num_bytes: int, dim: int, seed: int) -> Iterator[Case]:
    """Ops on rows: a table of ``num_bytes``, a tenth of whose rows is non-zero, half gathered."""
    g = torch.Generator().manual_seed(seed)
    num_rows = num_bytes // (dim * dtype.itemsize)
    table = torch.zeros(num_rows, dim, dtype=dtype)
    table[torch.randperm(num_rows, generator=g)[: num_rows // 10]] = 1.0
    half = num_rows // 2
    some = torch.randperm(num_rows, generator=g)[:half].sort().values
    rows = torch.full((half, dim), 0.5, dtype=dtype)
    row_bytes = half * dim * dtype.itemsize
    dst = torch.zeros(num_rows, dim, dtype=dtype)
    repeated = torch.randint(0, half // 2 + 1, (half,), generator=g)
    sums = torch.full((half, dim), 0.5)
    narrow = torch.float16 if dtype == torch.float32 else dtype
    yield Case("scan_rows", num_rows * dim * dtype.itemsize, lambda: ops.scan_rows(table))
    yield Case("gather_rows", row_bytes, lambda: ops.gather_rows(table, some, out=rows))
    yield Case("scatter_rows_", row_bytes, lambda: ops.scatter_rows_(dst, some, rows))
    yield Case("scatter_add_rows_", row_bytes, lambda: ops.scatter_add_rows_(dst, some, rows))
    yield Case(
        "scatter_add_rows_ repeated", row_bytes, lambda: ops.scatter_add_rows_(dst, repeated, rows)
    )
    yield Case(
        f"scale_cast_rows to {narrow}".replace("torch.", ""),
        half * dim * 4,
        lambda: ops.scale_cast_rows(sums, 0.5, narrow),
    )
    yield Case("coalesce_rows", row_bytes, lambda: ops.coalesce_rows(repeated, rows, num_rows))


def sketch_cases(dtype: torch.dtype, num_bytes: int, dim: int, seed: int) -> Iterator[Case]:
    """Ops on sketches: half of ``num_bytes`` in rows."""
    g = torch.Generator().manual_seed(seed)
    num_rows = num_bytes // 2 // (dim * dtype.itemsize)
    ids = torch.randperm(8 * num_rows, generator=g)[:num_rows].sort().values
    rows = torch.full((num_rows, dim), 0.5, dtype=dtype)
    row_bytes = num_rows * dim * dtype.itemsize
    small, large = num_rows // 4, -(-13 * num_rows // 30)
    one = ops.sketch_encode(ids, rows, 1, small, 7)
    three = ops.sketch_encode(ids, rows, 3, large, 7)

    def decode(sketch: Tensor, decoder: Literal["mean", "median"]) -> Tensor:
        return ops.sketch_decode(sketch, ids, 7, decoder, dtype=dtype)  # rows as they came

    def both() -> Tensor:
        return decode(ops.sketch_encode(ids, rows, 1, small, 7), "mean")

    yield Case("sketch_encode r=1", row_bytes, lambda: ops.sketch_encode(ids, rows, 1, small, 7))
    yield Case("sketch_decode mean r=1", row_bytes, lambda: decode(one, "mean"))
    yield Case("encode+decode", 2 * row_bytes, both)
    yield Case("sketch_encode r=3", row_bytes, lambda: ops.sketch_encode(ids, rows, 3, large, 7))
    yield Case("sketch_decode median r=3", row_bytes, lambda: decode(three, "median"))
    yield Case("sketch_peel r=3", row_bytes, lambda: ops.sketch_peel(three, ids, 7))


def id_cases(num_bytes: int, seed: int) -> Iterator[Case]:
    """Ops on ids: an eighth of ``num_bytes`` in ids, one row in eight present."""
    g = torch.Generator().manual_seed(seed)
    count = num_bytes // 8 // 8
    num_rows = 8 * count
    ids = torch.randint(0, num_rows, (count,), generator=g).unique()
    id_bytes = 8 * ids.numel()
    batch = torch.randint(0, num_rows, (count,), generator=g)
    bitmap, packed = ops.indices_to_bitmap(ids, num_rows), ops.encode_ids(ids)
    maps = torch.stack([bitmap] * 8)
    owner, within = ops.balanced_owner(ids, 8)
    yield Case("bitmap_or k=8", maps.numel(), lambda: ops.bitmap_or(maps))
    yield Case("bitmap_count", bitmap.numel(), lambda: ops.bitmap_count(bitmap))
    yield Case("bitmap_to_indices", id_bytes, lambda: ops.bitmap_to_indices(bitmap, num_rows))
    yield Case("indices_to_bitmap", id_bytes, lambda: ops.indices_to_bitmap(ids, num_rows))
    yield Case("unique_ids", 8 * count, lambda: ops.unique_ids(batch, num_rows))
    yield Case("encode_ids", id_bytes, lambda: ops.encode_ids(ids))
    yield Case("decode_ids", id_bytes, lambda: ops.decode_ids(packed, ids.numel()))
    yield Case("murmur3_32", id_bytes, lambda: ops.murmur3_32(ids, 7))
    yield Case("balanced_owner", id_bytes, lambda: ops.balanced_owner(ids, 8))
    yield Case("balanced_row", id_bytes, lambda: ops.balanced_row(owner, within, 8))


def verify() -> None:
    """Raises RuntimeError unless a small sketch and gather come out right."""
    ids, rows = torch.arange(1000), torch.randn(1000, 8)
    decoded, peeled = ops.sketch_peel(ops.sketch_encode(ids, rows, 3, 500, 1), ids, 1)
    if not (peeled.all() and torch.allclose(decoded, rows, atol=1e-4)):
        raise RuntimeError("sketch_peel does not return what sketch_encode was given")
    if not torch.equal(ops.gather_rows(rows, ids.flip(0)), rows.flip(0)):
        raise RuntimeError("gather_rows does not return src[indices]")


def record(case: Case, dtype: str, op: Timing, copy: Timing) -> dict[str, Any]:
    """One line of the result."""
    return {
        "op": case.op,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "num_bytes": case.num_bytes,
        "gbs": case.num_bytes / op.median_s / 1e9,
        "copy_gbs": case.num_bytes / copy.median_s / 1e9,
        "ratio": copy.median_s / op.median_s,
        "p10_s": op.p10_s,
        "p90_s": op.p90_s,
    }


def measure(
    dtype: str, sets: list[list[Case]], num_rounds: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """Times each case beside a copy of the same bytes, alternating between the sets."""
    records = []
    for group in zip(*sets, strict=True):
        num_bytes = group[0].num_bytes
        copies = [torch.zeros(2, num_bytes, dtype=torch.uint8) for _ in sets]

        def copy(step: int, copies: list[Tensor] = copies) -> None:
            dst, src = copies[step % NUM_SETS]
            dst.copy_(src)

        def op(step: int, group: tuple[Case, ...] = group) -> object:
            return group[step % NUM_SETS].run()

        times = interleave({"op": op, "copy": copy}, num_rounds=num_rounds, clock=clock)
        records.append(record(group[0], dtype, times["op"], times["copy"]))
    return records


def show(records: list[dict[str, Any]]) -> None:
    """Prints the table."""
    table = Table(title="kernels against copy_ of the same bytes")
    for name in ("op", "dtype", "threads", "GB/s", "copy_ GB/s", "ratio", "target"):
        table.add_column(name, justify="left" if name in ("op", "dtype") else "right")
    for r in records:
        target = TARGETS.get(r["op"])
        style = "red" if target is not None and r["ratio"] < target else None
        numbers = (f"{r['gbs']:.2f}", f"{r['copy_gbs']:.2f}", f"{r['ratio']:.2f}")
        goal = "" if target is None else f"{target:.1f}"
        table.add_row(r["op"], r["dtype"], str(r["threads"]), *numbers, goal, style=style)
    Console().print(table)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--threads", default=str(torch.get_num_threads()), help="such as 1,2")
    parser.add_argument("--mib", type=int, default=256, help="MiB of a table")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="such as fp32,bf16")
    parser.add_argument("--dim", type=int, default=DIM, help="elements of a row")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: processor time, for one thread on a machine that others use too",
    )
    args = parser.parse_args()
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    verify()
    num_bytes, records = args.mib * 2**20, []
    for threads in (int(t) for t in args.threads.split(",")):
        torch.set_num_threads(threads)
        for name in args.dtypes.split(","):
            for make in (row_cases, sketch_cases):
                sets = [list(make(DTYPES[name], num_bytes, args.dim, s)) for s in range(NUM_SETS)]
                records += measure(name, sets, args.rounds, clock)
        sets = [list(id_cases(num_bytes, s)) for s in range(NUM_SETS)]
        records += measure("int64", sets, args.rounds, clock)
    show(records)
    if args.json:
        write_json(args.json, records)


if __name__ == "__main__":
    main()
