"""Slow, obvious twins of the reducers, and n ranks of one reducer in this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.collectives.local import LocalTransport
from commlib.reducers import Context, Reduced, Reducer, ReducerState
from commlib.reducers.gradient import Gradient, RowsGradient
from commlib.reducers.index import Index
from commlib.rows import SparseRows
from commlib.topology import Link


def random_rows(
    counts: Sequence[int],
    num_rows: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[SparseRows]:
    """One set of rows a rank, `counts[r]` of them, uniform without repeats."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for count in counts:
        ids = torch.randperm(num_rows, generator=generator)[:count].sort().values
        values = torch.randn(count, dim, generator=generator).to(dtype)
        parts.append(SparseRows(ids, values, num_rows))
    return parts


def zipf_rows(num_ranks: int, tokens: Sequence[int], num_rows: int, dim: int) -> list[SparseRows]:
    """Rows of Zipf(1) token ids; values are small integers, so that sums are exact."""
    weights = 1.0 / torch.arange(1, num_rows + 1, dtype=torch.float64)
    parts = []
    for rank in range(num_ranks):
        generator = torch.Generator().manual_seed(1000 + rank)
        ids = torch.multinomial(weights, tokens[rank], True, generator=generator).unique()
        parts.append(SparseRows(ids, torch.full((len(ids), dim), float(rank + 1)), num_rows))
    return parts


def dense_mean(parts: Sequence[SparseRows], average: bool = True) -> Tensor:
    """The fp64 sum of dense matrices, over n where `average`."""
    total = sum(part.to_dense().double() for part in parts)
    assert isinstance(total, Tensor)
    return total / len(parts) if average else total


def union_of(parts: Sequence[SparseRows]) -> list[int]:
    return sorted({row for part in parts for row in part.indices.tolist()})


def index_of(parts: Sequence[SparseRows], announced: bool = False) -> Index:
    """What an index round would have told."""
    counts = tuple(len(part.indices) for part in parts)
    indices = torch.cat([part.indices for part in parts])
    return Index(indices, counts, parts[0].num_rows, 0, 64, announced)


def reduce_local(
    reducer: Reducer,
    gradients: Sequence[SparseRows | Gradient],
    states: Sequence[ReducerState] | None = None,
    *,
    average: bool = True,
    index: Index | None = None,
    link: Link | None = None,
    name: str = "table",
) -> tuple[list[Reduced], LocalTransport, list[ReducerState]]:
    """One step on every rank, in lockstep; advances the states' step as a frontend does."""
    n = len(gradients)
    states = list(states) if states is not None else [ReducerState() for _ in range(n)]
    transport = LocalTransport(n)
    results = transport.run(
        [
            reducer.protocol(
                part if isinstance(part, Gradient) else RowsGradient(part),
                states[rank],
                Context(
                    name=name,
                    rank=rank,
                    num_ranks=n,
                    average=average,
                    index=index,
                    link=link or Link(),
                ),
            )
            for rank, part in enumerate(gradients)
        ]
    )
    for state in states:
        state.step += 1
    return results, transport, states


def as_matrix(reduced: Reduced) -> Tensor:
    if reduced.dense is not None:
        return reduced.dense
    assert reduced.rows is not None
    return reduced.rows.to_dense()


def agreed(state: ReducerState) -> tuple[object, ...]:
    """All of a state that must be equal on every rank."""
    return state.step, state.rows, state.union, state.slot_bytes, state.announce


# The owner assignment of `minimal`, as a plain greedy choice.


def greedy_owners(rows_of: Sequence[set[int]]) -> dict[int, int]:
    """Shared rows, fewest holders first, to the holder whose busier direction is least loaded;
    then sole rows move from the rank that sends most to the one that sends least."""
    n = len(rows_of)
    union = sorted(set().union(*rows_of))
    holders = {row: [rank for rank in range(n) if row in rows_of[rank]] for row in union}
    sent = [len(rows) for rows in rows_of]
    received = [len(union)] * n
    shared = [0] * n
    owner = {}
    for row in sorted(union, key=lambda row: (len(holders[row]), row)):
        more = len(holders[row]) - 2

        def load(rank: int, more: int = more) -> tuple[int, ...]:
            s, r = sent[rank] + n - 2, received[rank] + more
            return max(s, r), s + r, shared[rank], rank

        best = min(holders[row], key=load)
        owner[row] = best
        sent[best] += n - 2
        received[best] += more
        shared[best] += len(holders[row]) > 1
    if n <= 2:
        return owner
    sole = [[row for row in union if holders[row] == [rank]] for rank in range(n)]
    floor = max(*received, -(-sum(sent) // n))
    while True:
        giver = max(range(n), key=lambda rank: (sent[rank], rank))
        taker = min(range(n), key=lambda rank: (sent[rank], rank))
        gap = sent[giver] - sent[taker]
        if sent[giver] <= floor or gap <= n - 2 or not sole[giver]:
            return owner
        owner[sole[giver].pop()] = taker
        sent[giver] -= n - 2
        sent[taker] += n - 2


def messages(rows_of: Sequence[set[int]], owner: dict[int, int]) -> tuple[list[int], list[int]]:
    """Rows that each rank sends and receives: to the owner, and from it to all who lack the sum."""
    n = len(rows_of)
    sent, received = [0] * n, [0] * n
    for row, own in owner.items():
        holders = [rank for rank in range(n) if row in rows_of[rank]]
        hops = [(rank, own) for rank in holders if rank != own]
        knows = {own, *(holders if len(holders) == 1 else ())}
        hops += [(own, rank) for rank in range(n) if rank not in knows]
        assert len(hops) == len(holders) + n - 2 or n == 1
        for source, target in hops:
            sent[source] += 1
            received[target] += 1
    return sent, received
