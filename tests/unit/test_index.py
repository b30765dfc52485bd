"""The index round: slots, overflow, bitmaps, ranks out of step; and the guard on announced ids."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.collectives.local import LocalTransport
from commlib.collectives.requests import Ticket
from commlib.errors import CommError
from commlib.reducers import REDUCERS, AllGatherRows, Minimal
from commlib.reducers.index import FIRST_SLOT_BYTES, HEADER_BYTES, Index, first_slot, index_round
from commlib.rows import SparseRows
from tests.dist.harness import bits
from tests.twins import as_matrix, dense_mean, index_of, random_rows, reduce_local


def run_round(ids, num_rows, slot_bytes, names=None):
    n = len(ids)
    transport = LocalTransport(n)
    names = names or ["round"] * n
    indices = transport.run(
        [
            index_round(
                names[rank],
                torch.tensor(sorted(ids[rank]), dtype=torch.int64),
                num_rows,
                slot_bytes,
                rank,
                n,
            )
            for rank in range(n)
        ]
    )
    return indices, transport


@given(
    ids=st.lists(st.sets(st.integers(0, 299)), min_size=1, max_size=4),
    slot=st.integers(0, 40),
)
def test_everyone_learns_everyones_ids(ids, slot):
    for num_rows in (300, 10**6):
        indices, transport = run_round(ids, num_rows, slot)
        for index in indices:
            assert index.counts == tuple(len(own) for own in ids)
            assert index.union().tolist() == sorted(set().union(*ids))
            assert index.next_slot_bytes == indices[0].next_slot_bytes
            for rank, own in enumerate(ids):
                assert index.of_rank(rank).tolist() == sorted(own)
        assert transport.sent_bytes() == tuple(
            (len(ids) - 1) * index.sent_bytes for index in indices
        )


def test_one_round_where_the_slot_holds_the_ids_two_where_not():
    ids = [set(range(0, 4000, 40)), {7}]  # 100 gaps of 40: one byte each
    _, transport = run_round(ids, 10**6, 100)
    assert [entry.name for entry in transport.traffic] == ["round"]
    assert transport.sent_bytes() == (HEADER_BYTES + 100,) * 2
    indices, transport = run_round(ids, 10**6, 60)
    assert [entry.name for entry in transport.traffic] == ["round", "round.rest"]
    assert transport.sent_bytes() == (HEADER_BYTES + 100, HEADER_BYTES + 60)
    assert indices[0].next_slot_bytes == 128  # a quarter more than 100, in steps of 64
    _, transport = run_round(ids, 10**6, indices[0].next_slot_bytes)
    assert transport.num_rounds == 1


def test_dense_ids_go_as_a_bitmap():
    indices, transport = run_round([set(range(80)), {79}], 80, 10)
    assert transport.num_rounds == 1  # 80 deltas would not fit into 10 bytes
    assert indices[1].of_rank(0).tolist() == list(range(80))
    assert indices[0].next_slot_bytes == 10


def test_first_slot():
    assert first_slot(0) == 0
    assert first_slot(80) == 10
    assert first_slot(10**9) == FIRST_SLOT_BYTES


def test_a_rank_at_another_request_is_named():
    protocols = [
        index_round(name, torch.tensor([1]), 10, 2, rank, 2)
        for rank, name in enumerate(("a@3.announce", "a@4.announce"))
    ]
    requests = [next(protocol).request for protocol in protocols]
    slots = torch.cat([request.tensor for request in requests])
    for rank, protocol in enumerate(protocols):
        ticket = Ticket(requests[rank], lambda: slots)
        assert protocol.send(ticket) is ticket
        with pytest.raises(CommError, match=rf"rank {1 - rank} is at another request") as caught:
            protocol.send(slots)
        assert caught.value.rank == rank
        assert "same forward passes" in str(caught.value)


def test_cover_lays_rows_out_over_the_announced_ids():
    index = Index(torch.tensor([1, 4, 7, 2]), (3, 1), 9, 0, 0, True)
    rows = SparseRows(torch.tensor([4]), torch.tensor([[5.0]]), 9)
    covered = index.cover(rows, 0)
    assert covered.indices.tolist() == [1, 4, 7]
    assert covered.values.flatten().tolist() == [0, 5, 0]
    assert index.cover(rows, 1) is None
    for outside in (0, 8):
        assert index.cover(SparseRows(torch.tensor([outside]), torch.ones(1, 1), 9), 0) is None
    same = SparseRows(torch.tensor([1, 4, 7]), torch.ones(3, 1), 9)
    assert index.cover(same, 0) is same
    empty = SparseRows(torch.empty(0, dtype=torch.int64), torch.empty(0, 1), 9)
    assert index.cover(empty, 0).values.flatten().tolist() == [0, 0, 0]


@pytest.mark.parametrize("liar", [0, 2, (0, 1, 2)])
@pytest.mark.parametrize("reducer", [Minimal(), AllGatherRows()], ids=lambda r: r.name)
def test_guard_an_unannounced_row_makes_all_ranks_start_again(reducer, liar):
    parts = random_rows((5, 8, 3), 60, 4)
    announced = list(parts)
    for rank in (liar,) if isinstance(liar, int) else liar:
        own = parts[rank]
        announced[rank] = SparseRows(own.indices[1:], own.values[1:], 60)
    results, transport, states = reduce_local(
        reducer, parts, index=index_of(announced, announced=True)
    )
    assert torch.allclose(as_matrix(results[0]).double(), dense_mean(parts), atol=1e-6)
    assert all(torch.equal(bits(as_matrix(r)), bits(as_matrix(results[0]))) for r in results)
    assert [state.announce for state in states] == [False] * 3
    what = [entry.name.split(".")[1] for entry in transport.traffic]
    first = ["push", "spread"] if reducer.name == "minimal" else ["gather"]
    assert what[: len(first) + 2] == [*first, "index", first[0]]  # one wasted round, no more


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1.0])
def test_guard_is_not_tripped_by_any_value(value):
    parts = [SparseRows(torch.tensor([r, 5]), torch.full((2, 3), value), 9) for r in range(3)]
    for name in ("minimal", "allgather"):
        _, _, states = reduce_local(REDUCERS[name](), parts, index=index_of(parts, True))
        assert all(state.announce for state in states)


def test_announced_superset_is_fine():
    parts = random_rows((5, 8), 60, 4)
    every = SparseRows(torch.arange(60), torch.zeros(60, 4), 60)
    results, _, states = reduce_local(Minimal(), parts, index=index_of([every, every], True))
    assert torch.allclose(as_matrix(results[1]).double(), dense_mean(parts), atol=1e-6)
    assert all(state.announce for state in states)
