"""The owner assignment and the bytes of `minimal`, against a brute greedy twin and the bound."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from commlib.reducers import Minimal
from commlib.reducers.index import HEADER_BYTES
from commlib.route import minimal_owner, minimal_route, unite_rows
from commlib.rows import SparseRows
from commlib.topology import Workload
from tests.twins import (
    as_matrix,
    dense_mean,
    greedy_owners,
    messages,
    reduce_local,
    union_of,
    zipf_rows,
)


def lists(rows_of):
    indices = torch.tensor([row for rows in rows_of for row in sorted(rows)], dtype=torch.int64)
    return indices, torch.tensor([len(rows) for rows in rows_of], dtype=torch.int64)


def owners(rows_of, num_rows):
    union, owner = minimal_owner(*lists(rows_of), num_rows)
    return dict(zip(union.tolist(), owner.tolist(), strict=True))


any_rows = st.lists(st.sets(st.integers(0, 40)), min_size=1, max_size=7)


@hypothesis_settings(max_examples=200)
@given(rows_of=any_rows)
def test_owners_are_those_of_the_greedy_twin(rows_of):
    assert owners(rows_of, 41) == greedy_owners(rows_of)
    assert owners(rows_of, 41_000_000) == greedy_owners(rows_of)  # the union by sorting


def test_owners_among_more_than_64_ranks():
    rows_of = [{r % 5, 5 + r % 3, 10 + r} for r in range(70)]
    assert owners(rows_of, 100) == greedy_owners(rows_of)


@pytest.mark.parametrize(
    ("rows_of", "owner"),
    [
        ([{0, 1}, {2, 3}], {0: 0, 1: 0, 2: 1, 3: 1}),  # sole rows stay
        ([{5}, {5}], {5: 0}),  # a tie goes to the lower rank
        ([{1, 2}, {1, 2}], {1: 0, 2: 1}),  # shared rows alternate
        ([{0}, {0, 1, 2}, {0}], {0: 0, 1: 1, 2: 2}),  # a sole row moves to whom sends least
        ([set(), set()], {}),
    ],
)
def test_owners_drawn(rows_of, owner):
    assert owners(rows_of, 6) == owner


def test_a_rank_with_many_sole_rows_has_some_relayed():
    rows_of = [set(range(20)), set(), set(), set()]
    owner = owners(rows_of, 20)
    assert set(owner.values()) == {1, 2, 3}
    sent, received = messages(rows_of, owner)
    assert sum(sent) == 20 * 3
    assert max(sent) == 20 and max(received) <= 20  # without relays rank 0 would send 60


@hypothesis_settings(max_examples=100)
@given(rows_of=any_rows)
def test_messages_per_row_are_k_plus_n_minus_2_and_what_travels(rows_of):
    parts = [
        SparseRows(own, torch.ones(len(own), 1), 41)
        for own in (torch.tensor(sorted(rows), dtype=torch.int64) for rows in rows_of)
    ]
    results, transport, _ = reduce_local(Minimal(), parts, average=False)
    sent, received = messages(rows_of, owners(rows_of, 41))
    moved = [entry for entry in transport.traffic if "index" not in entry.name]
    assert [entry.kind for entry in moved] == ["AllToAll", "AllGather", "AllToAll"]
    assert [sum(e.sent_bytes[r] for e in moved) // 4 for r in range(len(parts))] == sent
    assert [sum(e.received_bytes[r] for e in moved) // 4 for r in range(len(parts))] == received
    assert torch.equal(as_matrix(results[-1]).double(), dense_mean(parts, average=False))


def test_two_ranks_share_the_work_of_push_and_pull():
    rows_of = [set(range(100)), set(range(100))]
    assert sum(owners(rows_of, 100).values()) == 50


@hypothesis_settings(max_examples=100)
@given(rows_of=any_rows)
def test_halves_of_the_exchanges_fit(rows_of):
    n = len(rows_of)
    routes = [minimal_route(*lists(rows_of), 41, rank) for rank in range(n)]
    for a in range(n):
        for b in range(n):
            assert routes[a].push_send[b] == routes[b].push_recv[a]
            assert routes[a].pull_send[b] == routes[b].pull_recv[a]
        assert routes[a].push_send[a] == routes[a].pull_send[a] == 0
        assert routes[a].spread_counts[a] == len(routes[a].spread_src)
        assert torch.equal(routes[a].spread_dst, routes[0].spread_dst)
        parts = (routes[a].owned, routes[a].pull_dst, routes[a].kept_dst, routes[a].spread_dst)
        covered = torch.cat(parts)
        assert covered.sort().values.tolist() == list(range(len(routes[a].union)))


@hypothesis_settings(max_examples=60)
@given(rows_of=any_rows)
def test_unite_rows(rows_of):
    indices, counts = lists(rows_of)
    for num_rows in (41, 41_000_000):
        union, position = unite_rows(indices, counts, num_rows)
        assert union.tolist() == sorted(set().union(*rows_of))
        assert torch.equal(union[position], indices)


def bound_bytes(parts):
    n = len(parts)
    return Workload(
        num_ranks=n,
        num_rows=parts[0].num_rows,
        dim=parts[0].dim,
        element_bytes=4,
        rows=sum(len(part.indices) for part in parts) / n,
        union=len(union_of(parts)),
    ).bound_bytes()


ZIPF_ROWS, ZIPF_DIM = 100_000, 256


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16, 32, 64])
def test_zipf_busiest_rank_is_within_5_percent_of_the_bound(n):
    """2048 tokens of Zipf(1.0), V = 100000, D = 256, indices included."""
    dim = ZIPF_DIM if n <= 4 else 8  # fewer elements for many ranks; row bytes scale, not rows
    parts = zipf_rows(n, [2048] * n, ZIPF_ROWS, dim)
    results, transport, _ = reduce_local(Minimal(), parts)
    values = [entry for entry in transport.traffic if "index" not in entry.name]
    index = [entry for entry in transport.traffic if "index" in entry.name]
    scale = ZIPF_DIM // dim
    ranks = range(n)
    sent = [sum(e.sent_bytes[r] for e in values) * scale for r in ranks]
    received = [sum(e.received_bytes[r] for e in values) * scale for r in ranks]
    for entry in index:
        sent = [have + more for have, more in zip(sent, entry.sent_bytes, strict=True)]
        received = [have + more for have, more in zip(received, entry.received_bytes, strict=True)]
    bound = bound_bytes(parts) * scale
    assert max(*sent, *received) <= 1.05 * bound
    assert torch.equal(as_matrix(results[0]), as_matrix(results[-1]))


@pytest.mark.parametrize("n", [4, 8, 16])
def test_skew_busiest_rank_stays_near_the_mean_bound(n):
    """One rank with four times the tokens: its sole rows are relayed."""
    parts = zipf_rows(n, [4 * 2048, *[2048] * (n - 1)], ZIPF_ROWS, 16)
    _, transport, _ = reduce_local(Minimal(), parts)
    assert transport.busiest_bytes() <= 1.3 * bound_bytes(parts)


def test_bad_index_lists_are_refused():
    with pytest.raises(RuntimeError, match=r"not sorted, not unique or not below num_rows"):
        minimal_owner(torch.tensor([3, 1]), torch.tensor([2]), 5)
    with pytest.raises(RuntimeError, match=r"not sorted, not unique or not below num_rows"):
        minimal_owner(torch.tensor([5]), torch.tensor([1]), 5)
    with pytest.raises(RuntimeError, match=r"counts sum to 1 but there are 2"):
        unite_rows(torch.tensor([0, 1]), torch.tensor([1]), 5)
    with pytest.raises(RuntimeError, match=r"rank = 2"):
        minimal_route(torch.tensor([0, 1]), torch.tensor([1, 1]), 5, 2)


def test_steps_and_rounds():
    parts = zipf_rows(3, [50] * 3, 1000, 4)
    _, transport, states = reduce_local(Minimal(), parts)
    assert [entry.name for entry in transport.traffic] == [
        "table@0.index",
        "table@0.push",
        "table@0.spread",
        "table@0.pull",
    ]
    assert transport.num_rounds == 3  # spread travels with push and pull
    longest = transport.traffic[0].sent_bytes[0] // 2 - HEADER_BYTES
    assert longest == 125  # the bitmap's length bounds the slot
    assert states[0].slot_bytes <= 125
