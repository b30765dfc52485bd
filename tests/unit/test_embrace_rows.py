"""The exchanges of column-wise tables in one process: values, exact bytes, any number of ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.collectives.local import LocalTransport
from commlib.collectives.requests import AllToAll
from commlib.embrace.ids import ids_round, unique_ids
from commlib.embrace.parts import Part
from commlib.embrace.rows import fetch_bytes, fetch_rows, return_bytes, return_rows
from commlib.reducers.index import HEADER_BYTES, first_slot

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def widths_of(dim, n):
    """As torch.chunk cuts columns, and 0 for the ranks that are left over."""
    widths = [len(part) for part in torch.arange(dim).chunk(n)]
    return tuple(widths + [0] * (n - len(widths)))


def random_ids(n, num_rows, most, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(
            num_rows, (int(torch.randint(most + 1, (1,), generator=generator)),),
            generator=generator,
        ).unique()
        for _ in range(n)
    ]  # fmt: skip


def parts_of(table, ids, wire=None):
    """One Part a rank."""
    n = len(ids)
    widths = widths_of(table.shape[1], n)
    columns = table.split(list(widths), 1)
    counts = tuple(map(len, ids))
    joined = torch.cat(ids)
    return [Part(columns[r].contiguous(), joined, counts, widths, wire) for r in range(n)]


def both_ways(tables, ids, gradients, scale=1.0, wire=None):
    """Fetch, then return: rows[r][t] and sums[r][t] of tables[t], ids[t][r], gradients[t][r]."""
    n = len(ids[0])
    parts = [parts_of(table, own, wire) for table, own in zip(tables, ids, strict=True)]
    of_rank = [[part[r] for part in parts] for r in range(n)]
    there, back = LocalTransport(n), LocalTransport(n)
    rows = there.run([fetch_rows("t@0.rows", of_rank[r], r, n) for r in range(n)])
    sums = back.run(
        [
            return_rows("t@0.grads", of_rank[r], [g[r] for g in gradients], scale, r, n)
            for r in range(n)
        ]
    )
    assert there.sent_bytes() == tuple(fetch_bytes(of_rank[r], r) * (n > 1) for r in range(n))
    assert back.sent_bytes() == tuple(return_bytes(of_rank[r], r) * (n > 1) for r in range(n))
    assert len(there.traffic) == len(back.traffic) == (n > 1)
    return rows, sums


def check(tables, ids, scale=1.0):
    n = len(ids[0])
    gradients = [
        [torch.randint(-8, 9, (len(own), table.shape[1])).to(table.dtype) for own in of_table]
        for table, of_table in zip(tables, ids, strict=True)
    ]
    rows, sums = both_ways(tables, ids, gradients, scale)
    for t, table in enumerate(tables):
        total = torch.zeros(table.shape, dtype=torch.float64)
        for own, gradient in zip(ids[t], gradients[t], strict=True):
            total.index_add_(0, own, gradient.double())
        union = torch.cat(ids[t]).unique()
        columns = (
            (total * scale)[union].to(table.dtype).split(list(widths_of(table.shape[1], n)), 1)
        )
        for r in range(n):
            assert torch.equal(rows[r][t], table[ids[t][r]])
            assert torch.equal(sums[r][t].indices, union)
            assert torch.equal(sums[r][t].values, columns[r])  # small integers: sums are exact


@given(
    n=st.integers(1, 6),
    shapes=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 9), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40)
def test_rows_there_and_gradients_back(n, shapes, seed):
    """Uneven columns, more ranks than columns, empty ranks, mixed dtypes."""
    torch.manual_seed(seed)
    tables = [torch.randn(rows, dim).to(dtype) for rows, dim, dtype in shapes]
    ids = [random_ids(n, rows, 12, seed + k) for k, (rows, _, _) in enumerate(shapes)]
    check(tables, ids, scale=0.5)


@pytest.mark.parametrize("n", [8, 64])
def test_many_ranks(n):
    check([torch.randn(100, 70), torch.randn(9, 5)], [random_ids(n, 100, 40), random_ids(n, 9, 4)])


def test_nobody_asks_for_anything():
    none = torch.empty(0, dtype=torch.int64)
    check([torch.randn(5, 4)], [[none] * 3])


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wire_rounds_once_and_sums_wide(wire, dtype):
    torch.manual_seed(0)
    table, ids = torch.randn(20, 7, dtype=dtype), random_ids(3, 20, 15)
    gradients = [torch.randn(len(own), 7, dtype=dtype) for own in ids]
    rows, sums = both_ways([table], [ids], [gradients], wire=wire)
    total = torch.zeros_like(table)
    for own, gradient in zip(ids, gradients, strict=True):
        total.index_add_(0, own, gradient.to(wire).to(dtype))
    union = torch.cat(ids).unique()
    for r in range(3):
        assert torch.equal(rows[r][0], table[ids[r]].to(wire).to(dtype))  # own columns too
    assert torch.equal(torch.cat([sums[r][0].values for r in range(3)], 1), total[union])
    alone, _ = both_ways([table], [ids[:1]], [gradients[:1]], wire=wire)
    assert torch.equal(alone[0][0], rows[0][0])  # the same row whatever the number of ranks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_summed_wide_and_rounded_once(dtype):
    """C07: four ranks of 30000 average to 30000, which their fp16 sum would not."""
    ids = [torch.tensor([1])] * 4
    gradients = [torch.full((1, 4), 30000.0).to(dtype)] * 4
    _, sums = both_ways([torch.zeros(2, 4, dtype=dtype)], [ids], [gradients], 0.25)
    for r in range(4):
        assert torch.equal(sums[r][0].values, gradients[0][:, :1])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_overflow_in_one_column_shows_in_all(value):
    ids = [torch.tensor([1, 2]), torch.tensor([2, 3])]
    gradients = [torch.ones(2, 4), torch.ones(2, 4)]
    gradients[0][1, 3] = value
    _, sums = both_ways([torch.zeros(5, 4)], [ids], [gradients])
    for r in range(2):
        assert torch.isnan(sums[r][0].values[1]).all()
        assert torch.isfinite(sums[r][0].values[[0, 2]]).all()
    assert gradients[0][1, 3] == value or value != value  # the caller's gradient stays as it was
    assert torch.isfinite(gradients[0][1, :3]).all()


def test_a_gradient_that_is_too_large_for_the_wire_shows_in_all():
    ids = [torch.tensor([1]), torch.tensor([2])]
    gradients = [torch.ones(1, 4), torch.ones(1, 4)]
    gradients[1][0, 0] = 1e6
    _, sums = both_ways([torch.zeros(5, 4)], [ids], [gradients], wire=torch.float16)
    assert all(torch.isnan(sums[r][0].values[1]).all() for r in range(2))


# Bytes


def zipf_ids(n, tokens, num_rows):
    weights = 1.0 / torch.arange(1, num_rows + 1, dtype=torch.float64)
    return [
        torch.multinomial(
            weights, tokens, True, generator=torch.Generator().manual_seed(100 + r)
        ).unique()
        for r in range(n)
    ]


def lookup_bytes(n, dim=256, tokens=2048, num_rows=30_000):
    """Mean bytes sent by a rank for ids and for values both ways, and 2(n-1)/n t D w."""
    ids = zipf_ids(n, tokens, num_rows)
    transport = LocalTransport(n)
    asked = transport.run(
        [ids_round("t@0.ids", [ids[r]], [num_rows], first_slot(num_rows), r, n) for r in range(n)]
    )
    index_bytes = sum(transport.sent_bytes()) / n
    table = torch.zeros(num_rows, dim)
    widths = widths_of(dim, n)
    transport = LocalTransport(n)
    parts = [[Part(table[:, : widths[r]], *asked[r].tables[0], widths)] for r in range(n)]
    rows = transport.run([fetch_rows("t@0.rows", parts[r], r, n) for r in range(n)])
    transport.run([return_rows("t@0.grads", parts[r], rows[r], 1.0, r, n) for r in range(n)])
    bound = 2 * (n - 1) / n * (sum(map(len, ids)) / n) * dim * 4
    return index_bytes, sum(transport.sent_bytes()) / n, bound


def test_bytes_are_flat_from_4_to_64_ranks():
    ratios = {}
    for n in (4, 16, 64):
        index_bytes, value_bytes, bound = lookup_bytes(n)
        assert value_bytes == pytest.approx(bound)  # even columns: nothing but the values
        ratios[n] = (index_bytes + value_bytes) / bound
    assert max(ratios.values()) < 1.1
    assert max(ratios.values()) / min(ratios.values()) < 1.1


def test_bytes_with_uneven_columns():
    _, value_bytes, bound = lookup_bytes(6, dim=250)
    assert bound <= value_bytes * 1.001 <= 1.1 * bound


# Ids


def test_one_round_of_ids_for_all_tables():
    n, sizes = 3, [10, 1, 300, 7]
    ids = [random_ids(n, rows, 20, seed) for seed, rows in enumerate(sizes)]
    slot = first_slot(sum(sizes))
    transport = LocalTransport(n)
    asked = transport.run(
        [ids_round("a@0.ids", [own[r] for own in ids], sizes, slot, r, n) for r in range(n)]
    )
    assert [entry.name for entry in transport.traffic] == ["a@0.ids"]
    assert transport.sent_bytes() == ((n - 1) * (HEADER_BYTES + slot),) * n
    for answer in asked:
        for (indices, counts), own in zip(answer.tables, ids, strict=True):
            assert counts == tuple(map(len, own))
            assert torch.equal(indices, torch.cat(own))


def test_a_rank_that_refuses_is_named_everywhere_in_the_same_round():
    transport = LocalTransport(3)
    own = [[torch.tensor([1])], None, None]
    asked = transport.run([ids_round("a@0.ids", own[r], [10**6], 0, r, 3) for r in range(3)])
    assert [answer.index.refused for answer in asked] == [(1, 2)] * 3
    assert all(answer.tables[0][1] == (0, 0, 0) for answer in asked)
    assert [answer.index.next_slot_bytes for answer in asked] == [0] * 3
    assert len(transport.traffic) == 1


def test_one_rank_asks_nothing():
    ids = [[torch.tensor([3, 7]), torch.tensor([0])]]
    transport = LocalTransport(1)
    (asked,) = transport.run([ids_round("a@0.ids", ids[0], [9, 2], 4, 0, 1)])
    assert [indices.tolist() for indices, _ in asked.tables] == [[3, 7], [0]]
    assert not transport.traffic
    (refused,) = transport.run([ids_round("a@1.ids", None, [9, 2], 4, 0, 1)])
    assert refused.index.refused == (0,)


@pytest.mark.parametrize("bad", [-1, 10, 2**31, -(2**40)])
def test_a_bad_id_is_named(bad):
    with pytest.raises(
        IndexError, match=rf"id {bad} is outside table 'words', whose rows are 0 to 9"
    ):
        unique_ids(torch.tensor([[3, bad], [bad, 4]]), 10, "words")


def test_ids_of_any_shape_and_integer_type():
    ids = torch.tensor([[5, 1, 5], [2, 2, 9]])
    for given_ids in (ids, ids.int(), ids.t(), ids[:, ::2], ids[0, 0], ids[:0]):
        assert torch.equal(unique_ids(given_ids, 10, "t"), given_ids.flatten().unique().long())
    for wrong in (ids.float(), ids.bool(), ids.to(torch.int16)):
        with pytest.raises(TypeError, match=r"must be torch\.int32 or torch\.int64"):
            unique_ids(wrong, 10, "t")
    with pytest.raises(TypeError, match="are list, not a tensor"):
        unique_ids([1, 2], 10, "t")


# C33: split lists that do not fit are refused before any byte moves.


@pytest.mark.parametrize(
    "send, recv, message",
    [
        ((1, 2), (1, 1), "send sums to 3 but the tensor has 2"),
        ((3, -1), (3, 1), "one non-negative number for each"),
        ((1, 1, 0), (1, 1), "one non-negative number for each"),
        ((1, 1), (2, 1), "must be equal, both are this rank's own"),
    ],
)
def test_wrong_splits(send, recv, message):
    def protocol(rank):
        yield AllToAll(name="t@0.rows", tensor=torch.zeros(2), send=send, recv=recv)

    transport = LocalTransport(2)
    with pytest.raises(ValueError, match=message):
        transport.run([protocol(r) for r in range(2)])
    assert not transport.traffic


def test_ranks_that_disagree_about_counts():
    table, ids = torch.randn(9, 4), [torch.tensor([1, 2]), torch.tensor([3])]
    parts = parts_of(table, ids)
    lie = Part(parts[1].weight, parts[1].indices, (1, 2), parts[1].widths)
    transport = LocalTransport(2)
    with pytest.raises(ValueError, match=r"rank \d expects \d+ entries from rank \d"):
        transport.run(
            [fetch_rows("t@0.rows", [part], r, 2) for r, part in enumerate((parts[0], lie))]
        )
