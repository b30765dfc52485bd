"""The four baselines of the S2 paper, built as its authors built them, on torch.distributed.

    coo-allgather   per-element COO: int64 position and fp32 value of every non-zero, all-gathered
    dense-scan      allreduce of the whole table
    gather-bcast    rows gathered at rank 0, summed there, the sum broadcast
    union-fp32      float32 0/1 a row, allreduced; then a dense allreduce of the union's rows

All wait for their end in the hook, as the authors' do. They start from coalesced rows, which
spares them the authors' scan of the dense gradient: they are measured at their best.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations as objects.
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from commlib.cli.demo.methods import Touched

Reduce = Callable[[Tensor], Tensor]


def _sizes(count: int) -> list[int]:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([count]))
    return [int(size) for size in sizes]


def _padded(tensor: Tensor, length: int) -> Tensor:
    out = tensor.new_zeros(length, *tensor.shape[1:])
    out[: len(tensor)] = tensor
    return out


def _all_gather_uneven(tensor: Tensor, sizes: list[int]) -> Tensor:
    parts = [tensor.new_empty(max(sizes), *tensor.shape[1:]) for _ in sizes]
    dist.all_gather(parts, _padded(tensor, max(sizes)))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def coo_allgather(gradient: Tensor) -> Tensor:
    """All-gather of every non-zero element with its position; bytes (n-1) S D (8 + w)."""
    rows = gradient.coalesce()
    dim = gradient.shape[1]
    positions = (rows.indices()[0].unsqueeze(1) * dim + torch.arange(dim)).flatten()
    values = rows.values().flatten()
    keep = values != 0
    positions, values = positions[keep], values[keep]
    sizes = _sizes(len(values))
    positions = _all_gather_uneven(positions, sizes)
    values = _all_gather_uneven(values, sizes)
    ids, slot = torch.unique(torch.div(positions, dim, rounding_mode="floor"), return_inverse=True)
    total = torch.zeros(len(ids), dim)
    total.view(-1).index_add_(0, slot * dim + positions % dim, values)
    return _rows(ids, total / len(sizes), gradient)


def dense(gradient: Tensor) -> Tensor:
    """Allreduce of the whole table, which is the result; bytes 2(n-1)/n V D w."""
    table = gradient.to_dense()
    dist.all_reduce(table)
    return table.div_(dist.get_world_size())


def gather_bcast(gradient: Tensor) -> Tensor:
    """Rows to rank 0, sum back to all; rank 0 receives (n-1) S D w, sends (n-1) U D w."""
    rows = gradient.coalesce()
    sizes = _sizes(rows.indices().shape[1])
    parts = []
    for part in (rows.indices()[0], rows.values()):
        padded = _padded(part, max(sizes))
        here = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
        dist.gather(padded, here, dst=0)
        parts.append(here)
    if dist.get_rank() == 0:
        ids, values = (
            torch.cat([part[:size] for part, size in zip(here, sizes, strict=True)])
            for here in parts
        )
        ids, slot = torch.unique(ids, return_inverse=True)
        total = torch.zeros(len(ids), gradient.shape[1]).index_add_(0, slot, values)
        count = torch.tensor([len(ids)])
    else:
        count = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(count, 0)
    if dist.get_rank() != 0:
        ids = torch.empty(int(count), dtype=torch.int64)
        total = torch.empty(int(count), gradient.shape[1])
    dist.broadcast(ids, 0)
    dist.broadcast(total, 0)
    return _rows(ids, total / len(sizes), gradient)


def union_fp32(gradient: Tensor) -> Tensor:
    """Float bitmap allreduce, then the union's rows; bytes 2(n-1)/n (4 V + U D w)."""
    rows = gradient.coalesce()
    present = torch.zeros(gradient.shape[0])
    present[rows.indices()[0]] = 1
    dist.all_reduce(present)
    ids = present.nonzero().flatten()
    total = torch.zeros(len(ids), gradient.shape[1])
    total[torch.searchsorted(ids, rows.indices()[0])] = rows.values()
    dist.all_reduce(total)
    return _rows(ids, total / dist.get_world_size(), gradient)


def _rows(ids: Tensor, values: Tensor, like: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(ids.unsqueeze(0), values, like.shape, is_coalesced=True)


BASELINES: dict[str, Reduce] = {
    "coo-allgather": coo_allgather,
    "dense-scan": dense,
    "gather-bcast": gather_bcast,
    "union-fp32": union_fp32,
}


def estimate_bytes(name: str, touched: Touched) -> float:
    """Bytes that a baseline moves through its busiest rank for one table, one direction, fp32."""
    n, row_bytes, union = touched.num_ranks, touched.row_bytes, touched.union_rows
    ring = 2 * (n - 1) / n
    return {
        "coo-allgather": (n - 1) * touched.max_rows * row_bytes * 3,
        "dense-scan": ring * touched.num_rows * row_bytes,
        "gather-bcast": (n - 1) * union * (row_bytes + 8),
        "union-fp32": ring * (4 * touched.num_rows + union * row_bytes),
    }[name]


def hook(name: str) -> Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]:
    """A DDP comm hook: sparse buckets by this baseline, dense ones by allreduce."""
    reduce = BASELINES[name]

    def run(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            result = reduce(buffer)
        else:
            dist.all_reduce(buffer)
            result = buffer.div_(dist.get_world_size())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(result)
        return done

    return run
