"""What `bench.sparse_allreduce` compares: reducers, torch's collectives, baselines, Horovod."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bench import horovod_peer
from bench.baselines import BASELINES, estimate_bytes
from bench.gradients import distinct_rows, sparse_gradient, zipf_tokens
from commlib.cli.demo.methods import Touched, dense_bytes, torch_sparse_bytes
from commlib.collectives.usage import Usage
from commlib.reducers import Context, Reduced, Reducer, ReducerState, as_reducer
from commlib.reducers.gradient import SparseGradient
from commlib.schedule import Lane
from commlib.topology import Link

REDUCERS = ("auto", "minimal", "allgather", "balanced", "union", "dense", "sketch", "noop")
_TORCH = ("torch-sparse", "torch-dense")
_OVER_HOROVOD = {"horovod-exact": "auto", "horovod-sketch": "sketch"}
_HOROVOD = ("horovod-dense", "horovod-sparse", *_OVER_HOROVOD)
METHODS = (*REDUCERS, *_TORCH, *BASELINES, *_HOROVOD)

_ESTIMATES = {
    "torch-sparse": torch_sparse_bytes,
    "torch-dense": dense_bytes,
    "horovod-dense": dense_bytes,
}


def _torch_dense(table: Tensor) -> Tensor:
    dist.all_reduce(table)
    return table.div_(dist.get_world_size())


_IN_PLACE = {"torch-dense": _torch_dense, "horovod-dense": horovod_peer.reduce_dense}
"""To the mean of a whole table."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One point of the benchmark; `density` > 0 asks for that share of rows, else `tokens`."""

    rows: int
    dim: int
    tokens: int
    zipf: float
    density: float = 0.0

    def gradient(self, rank: int) -> Tensor:
        """This rank's sparse gradient."""
        if self.density:
            count = max(1, round(self.density * self.rows))
            ids = distinct_rows(self.rows, count, self.zipf, seed=rank)
        else:
            ids = zipf_tokens(self.rows, self.tokens, self.zipf, seed=rank)
        return sparse_gradient(ids, self.rows, self.dim, seed=1000 + rank)


class Candidates:
    """All candidates over one process group and one input.

    Args:
        shape: Of the input.
        lane: For reducers.
        link: Its costs.
        horovod: A lane over Horovod and its costs, where Horovod is wanted.
    """

    def __init__(
        self, shape: Shape, lane: Lane, link: Link, horovod: tuple[Lane, Link] | None = None
    ) -> None:
        self.lane, self.horovod = (lane, link), horovod
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.gradient = shape.gradient(self.rank)
        self.states: dict[str, ReducerState] = {}
        self.usages: dict[str, Usage] = {}
        self.reduced: dict[str, Reduced] = {}
        own = self.gradient.coalesce()
        union = torch.zeros(shape.rows, dtype=torch.uint8)
        union[own.indices()[0]] = 1
        dist.all_reduce(union, op=dist.ReduceOp.MAX)
        mean_rows = torch.tensor([float(own.indices().shape[1])], dtype=torch.float64)
        max_rows = mean_rows.clone()
        dist.all_reduce(mean_rows)
        dist.all_reduce(max_rows, op=dist.ReduceOp.MAX)
        self.touched = Touched(
            num_ranks=self.num_ranks,
            num_rows=shape.rows,
            row_bytes=shape.dim * 4,
            mean_rows=float(mean_rows) / self.num_ranks,
            max_rows=int(max_rows),
            union_rows=int(union.sum()),
        )

    def candidate(self, name: str) -> Callable[[], Tensor]:
        """A call that reduces the gradient once, and gives the mean as sparse rows or dense."""
        if name in BASELINES:
            return lambda: BASELINES[name](self.gradient)
        if name == "torch-sparse":
            return self._torch_sparse
        if name == "horovod-sparse":
            return lambda: horovod_peer.reduce_sparse(self.gradient)
        if name in _IN_PLACE:
            table = self.gradient.to_dense()
            return lambda: _IN_PLACE[name](table)
        reducer = as_reducer(_OVER_HOROVOD.get(name, name))
        lane = self.horovod if name in _OVER_HOROVOD else self.lane
        assert lane is not None
        self.states[name] = ReducerState()
        return lambda: self._commlib(name, reducer, *lane)

    def _torch_sparse(self) -> Tensor:
        total = self.gradient.clone()
        dist.all_reduce(total)
        return total / self.num_ranks

    def _commlib(self, name: str, reducer: Reducer, lane: Lane, link: Link) -> Tensor:
        state, usage = self.states[name], Usage()
        context = Context(name=name, rank=self.rank, num_ranks=self.num_ranks, link=link)
        protocol = reducer.protocol(SparseGradient(self.gradient), state, context)
        reduced = lane.run(name, protocol, usage)
        state.step += 1
        self.usages[name], self.reduced[name] = usage, reduced
        rows = reduced.to_rows()
        return torch.sparse_coo_tensor(
            rows.indices.unsqueeze(0), rows.values, self.gradient.shape, is_coalesced=True
        )

    def verified(self, name: str, call: Callable[[], Tensor]) -> bool:
        """Whether the result is the mean over ranks (for lossy ones: equal on all ranks)."""
        fresh = _IN_PLACE.get(name)
        result = fresh(self.gradient.to_dense()) if fresh else call().to_dense()
        if name == "noop":
            return bool(torch.isfinite(result).all())
        if _OVER_HOROVOD.get(name, name) == "sketch":
            first = result.clone()
            dist.broadcast(first, 0)
            return torch.equal(first, result)
        exact = self.gradient.double().to_dense()
        dist.all_reduce(exact)
        return torch.allclose(result.double(), exact / self.num_ranks, rtol=1e-4, atol=1e-5)

    def bytes_per_rank(self, name: str) -> float:
        """Bytes through the busiest rank in one reduction, the larger direction."""
        if name in BASELINES:
            return estimate_bytes(name, self.touched)
        if name == "horovod-sparse":
            num_lookups = self.gradient._nnz()
            row_bytes = self.touched.row_bytes
            return horovod_peer.gathered_bytes(self.num_ranks, num_lookups, row_bytes)
        if name in _ESTIMATES:
            return _ESTIMATES[name](self.touched)
        busiest = torch.zeros(1, dtype=torch.float64)
        usage = self.usages[name]
        busiest += max(usage.sent_bytes, usage.received_bytes)
        dist.all_reduce(busiest, op=dist.ReduceOp.MAX)
        return float(busiest)
