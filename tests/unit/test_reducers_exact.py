"""Every exact reducer against the dense fp64 twin, on up to 64 ranks in one process."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from commlib import ops
from commlib.collectives.requests import request_bytes, started
from commlib.reducers import REDUCERS, Reducer, as_reducer
from commlib.reducers.gradient import DenseGradient, SparseGradient
from commlib.reducers.index import HEADER_BYTES
from commlib.rows import FLOAT_DTYPES, SparseRows
from commlib.topology import Workload
from tests.dist.harness import bits
from tests.twins import (
    agreed,
    as_matrix,
    dense_mean,
    index_of,
    random_rows,
    reduce_local,
    union_of,
)

EXACT = ["dense", "allgather", "union", "balanced", "minimal", "auto"]
ROUNDING = {
    torch.float64: 1e-14,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def check_exact(name, parts, average=True, **how):
    results, transport, states = reduce_local(REDUCERS[name](), parts, average=average, **how)
    want, dtype = dense_mean(parts, average), parts[0].values.dtype
    first = as_matrix(results[0])
    assert first.dtype == dtype
    scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    assert torch.allclose(first.double(), want, rtol=0, atol=ROUNDING[dtype] * scale)
    for result in results:  # H2, the sign of zero included
        assert torch.equal(bits(as_matrix(result)), bits(first))
    for state in states:
        assert agreed(state) == agreed(states[0])
    return results, transport, states


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("counts", [(7,), (5, 9), (3, 0, 12), (8, 8, 1, 0)], ids=len)
def test_equals_the_dense_mean(name, counts, dtype):
    check_exact(name, random_rows(counts, 40, 6, dtype))


@pytest.mark.parametrize("name", EXACT)
def test_sum(name):
    check_exact(name, random_rows((5, 9, 2), 40, 3), average=False)


@pytest.mark.parametrize("name", EXACT)
def test_64_ranks(name):
    check_exact(name, random_rows([20 + r % 7 for r in range(64)], 300, 2))


@st.composite
def cases(draw):
    """(rows of each rank, V, D, dtype, values from a few that cancel and carry signs)."""
    n = draw(st.integers(1, 5))
    num_rows = draw(st.integers(0, 30))
    dim = draw(st.sampled_from([1, 2, 5]))
    dtype = draw(st.sampled_from(FLOAT_DTYPES))
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e-40])
    parts = []
    for _ in range(n):
        ids = sorted(draw(st.sets(st.integers(0, num_rows - 1)))) if num_rows else []
        data = draw(st.lists(values, min_size=len(ids) * dim, max_size=len(ids) * dim))
        matrix = torch.tensor(data, dtype=torch.float64).to(dtype).view(len(ids), dim)
        parts.append(SparseRows(torch.tensor(ids, dtype=torch.int64), matrix, num_rows))
    return parts


@pytest.mark.parametrize("name", EXACT)
@hypothesis_settings(max_examples=60)
@given(parts=cases())
def test_any_rows(name, parts):
    check_exact(name, parts)


@pytest.mark.parametrize("name", ["allgather", "minimal", "auto"])
@hypothesis_settings(max_examples=30)
@given(parts=cases())
def test_any_rows_with_announced_ids(name, parts):
    _, transport, states = check_exact(name, parts, index=index_of(parts, announced=True))
    assert not any("index" in entry.name for entry in transport.traffic)
    assert all(state.announce for state in states)


@pytest.mark.parametrize("name", ["allgather", "union", "balanced", "minimal"])
def test_result_rows_are_the_union(name):
    parts = random_rows((5, 0, 9), 200, 2)
    results, _, _ = reduce_local(REDUCERS[name](), parts)
    assert results[0].rows.indices.tolist() == union_of(parts)


@pytest.mark.parametrize("name", EXACT)
def test_dense_and_sparse_inputs_agree(name):
    parts = random_rows((5, 9, 0), 50, 4)
    _, _, _ = check_exact(name, parts)
    dense = [DenseGradient(part.to_dense()) for part in parts]
    coo = [
        SparseGradient(
            torch.sparse_coo_tensor(
                torch.cat([part.indices, part.indices])[None],
                torch.cat([part.values / 2, part.values / 2]),
                (50, 4),
            )
        )
        for part in parts
    ]
    want = as_matrix(reduce_local(REDUCERS[name](), parts)[0][0])
    for gradients in (dense, coo):
        results, _, _ = reduce_local(REDUCERS[name](), gradients)
        assert torch.equal(as_matrix(results[0]), want)


def workload_of(parts, reducer, **more):
    n, rows = len(parts), parts[0]
    if reducer.name == "balanced":
        own = [int((ops.balanced_owner(p.indices, n)[0] == r).sum()) for r, p in enumerate(parts)]
        more["own_rows"] = sum(own) / n
    return Workload(
        num_ranks=n,
        num_rows=rows.num_rows,
        dim=rows.dim,
        element_bytes=rows.values.element_size(),
        rows=sum(len(part.indices) for part in parts) / n,
        union=len(union_of(parts)),
        **more,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("name", ["noop", "dense", "allgather", "union", "balanced", "minimal"])
def test_estimate_is_what_was_counted(name, n, dtype):
    parts = random_rows([30 + 5 * (r % 3) for r in range(n)], 900, 8, dtype)
    reducer = REDUCERS[name]()
    _, transport, _ = reduce_local(reducer, parts)
    slot = (900 + 7) // 8  # that of a first round; holds these ids
    index_bytes = (n - 1) * (HEADER_BYTES + slot) if reducer.uses_index else 0
    want = reducer.estimate_bytes(workload_of(parts, reducer, index_bytes=index_bytes))
    assert sum(transport.sent_bytes()) / n == pytest.approx(want, rel=1e-12)
    assert sum(transport.received_bytes()) == sum(transport.sent_bytes())
    rounds = ("index", "push", "spread", "pull", "gather", "values", "bitmap")
    names = {f"table@0.{what}" for what in rounds}
    if name in ("allgather", "minimal"):
        assert transport.num_rounds == {"allgather": 2, "minimal": 3}[name]
        assert {entry.name for entry in transport.traffic} <= names


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("name", ["allgather", "minimal"])
def test_announced_ids_cost_one_guard_row_a_part_and_no_index(name, n):
    parts = random_rows([30] * n, 900, 8)
    reducer = REDUCERS[name]()
    _, transport, _ = reduce_local(reducer, parts, index=index_of(parts, announced=True))
    want = reducer.estimate_bytes(workload_of(parts, reducer)) + (n - 1) * 8 * 4
    assert sum(transport.sent_bytes()) / n == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", ["dense", "allgather", "union", "balanced", "minimal"])
def test_request_bytes_are_those_that_local_counts(name):
    """What C10dTransport reports per request (its `Usage`) is the same sum."""
    parts = random_rows((30, 0, 12, 5), 333, 3)
    reducer = REDUCERS[name]()
    counted = [[0, 0] for _ in parts]

    def spy(protocol, rank):
        answer = None
        while True:
            try:
                yielded = protocol.send(answer)
            except StopIteration as stop:
                return stop.value
            for request in started(yielded):
                sent, received = request_bytes(request, rank, len(parts))
                counted[rank][0] += sent
                counted[rank][1] += received
            answer = yield yielded

    original = type(reducer).protocol

    class Spied(type(reducer)):
        def protocol(self, gradient, state, context):
            return spy(original(self, gradient, state, context), context.rank)

    _, transport, _ = reduce_local(Spied(), parts)
    assert tuple(sent for sent, _ in counted) == transport.sent_bytes()
    assert tuple(received for _, received in counted) == transport.received_bytes()


def test_c01_bitmap_union_is_an_or():
    for ids, want in (((1, 2), (1,)), [1, 2]), (((0,),) * 5, [0]):
        parts = [SparseRows(torch.tensor(own), torch.ones(len(own), 1), 13) for own in ids]
        results, transport, _ = reduce_local(REDUCERS["union"](), parts)
        assert results[0].rows.indices.tolist() == want
        assert transport.traffic[0].name.startswith("table@0.bitmap")


def test_c02_rows_that_sum_to_zero_and_denormals_and_nan_are_rows():
    matrix = torch.zeros(6, 2)
    matrix[1] = torch.tensor([1.0, -1.0])
    matrix[2, 0] = 1e-40
    matrix[3, 1] = float("nan")
    matrix[4] = -0.0
    for name in ("allgather", "union", "balanced", "minimal"):
        results, _, _ = reduce_local(
            REDUCERS[name](), [DenseGradient(matrix), DenseGradient(torch.zeros(6, 2))]
        )
        assert results[0].rows.indices.tolist() == [1, 2, 3]
        assert results[1].rows.values[0].tolist() == [0.5, -0.5]
        assert results[1].rows.values[2].isnan().tolist() == [False, True]


@pytest.mark.parametrize("name", EXACT)
def test_c05_one_rank_with_nothing_then_all_then_an_empty_table(name):
    states = None
    for mine, want in (([0, 0, 5, 0], [0, 0, 2.5, 0]), ([0, 0, 0, 0], [0, 0, 0, 0])):
        matrices = [torch.tensor(mine).float().view(4, 1), torch.zeros(4, 1)]
        results, _, states = reduce_local(
            REDUCERS[name](), [DenseGradient(matrix) for matrix in matrices], states
        )
        assert as_matrix(results[0]).flatten().tolist() == want
        assert as_matrix(results[1]).flatten().tolist() == want
    empty = [DenseGradient(torch.zeros(0, 4)) for _ in range(2)]
    results, _, _ = reduce_local(REDUCERS[name](), empty)
    assert as_matrix(results[0]).shape == (0, 4)


@pytest.mark.parametrize("name", EXACT)
def test_c06_one_row_against_a_thousand(name):
    check_exact(name, random_rows((1, 1000), 4096, 1))


@pytest.mark.parametrize("name", EXACT)
def test_c07_halves_do_not_overflow_on_the_way(name):
    def rows(*values):
        return [
            SparseRows(torch.tensor([0]), torch.tensor([[v]], dtype=torch.float16), 1)
            for v in values
        ]

    for values, want in (((60000,) * 2, 60000), ((30000,) * 4, 30000), ((40000, -40000), 0)):
        results, _, _ = reduce_local(REDUCERS[name](), rows(*values))
        assert as_matrix(results[0]).item() == want
        assert as_matrix(results[-1]).item() == want


def test_noop_gives_back_what_it_got():
    parts = random_rows((3, 4), 9, 2)
    results, transport, _ = reduce_local(REDUCERS["noop"](), parts)
    assert all(torch.equal(as_matrix(r), p.to_dense()) for r, p in zip(results, parts, strict=True))
    assert transport.num_rounds == 0


def test_as_reducer():
    assert as_reducer(None).name == "auto"
    assert all(isinstance(as_reducer(name), Reducer) for name in REDUCERS)
    with pytest.raises(ValueError, match=r"reducer = 'powersgd' must be one of .*minimal"):
        as_reducer("powersgd")
    with pytest.raises(TypeError, match=r"reducer = 3 must be a name"):
        as_reducer(3)


def test_reducers_leave_the_gradient_as_it_was():
    for name in ("allgather", "union", "balanced", "minimal"):
        parts = random_rows((5, 9, 2), 40, 3)
        before = [part.values.clone() for part in parts]
        reduce_local(REDUCERS[name](), parts)
        assert all(torch.equal(p.values, b) for p, b in zip(parts, before, strict=True))


def test_sparse_gradient_of_another_shape_is_refused():
    coo = torch.sparse_coo_tensor([[0], [1]], [1.0], (3, 3))
    with pytest.raises(ValueError, match="1 sparse and 1 dense dimension"):
        SparseGradient(coo)
