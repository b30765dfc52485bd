"""The sketch reducer and its error feedback, on ranks in one process."""

import pytest
import torch

from commlib.reducers import S2, ReducerState
from commlib.reducers import sketch as sketch_module
from commlib.reducers.gradient import DenseGradient
from commlib.rows import FLOAT_DTYPES, SparseRows
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
from tests.unit.test_reducers_exact import workload_of


def mean_residual(states):
    return sum(state.residual.double() for state in states) / len(states)


def check_conservation(reducer, steps, atol, average=True, states=None):
    """H2 and H3: mean_r(g + e) = out + mean_r(e'), for every step."""
    n = len(steps[0])
    for parts in steps:
        before = 0.0
        if states is not None and states[0].residual is not None:
            before = mean_residual(states)
        results, _, states = reduce_local(reducer, parts, states, average=average)
        out = as_matrix(results[0]).double()
        for result in results:
            assert torch.equal(bits(as_matrix(result)), bits(as_matrix(results[0])))
        for state in states:
            assert agreed(state) == agreed(states[0])
        have = dense_mean(parts) + before
        got = (out if average else out / n) + mean_residual(states)
        assert torch.allclose(have, got, rtol=0, atol=atol), (have - got).abs().max()
    return states


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 16])
def test_conservation(n, average):
    steps = [random_rows([40 - (r % 4) * 13 for r in range(n)], 300, 5, seed=s) for s in range(6)]
    check_conservation(S2(ratio=0.3), steps, 2e-5, average)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_conservation_in_every_dtype(dtype):
    steps = [random_rows((20, 0, 31), 90, 3, dtype, seed=s) for s in range(5)]
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 8e-3}
    check_conservation(S2(ratio=0.5), steps, tolerance.get(dtype, 6e-2))


def test_conservation_with_a_bf16_wire_is_within_its_rounding():
    steps = [random_rows((20, 10, 31), 90, 3, seed=s) for s in range(5)]
    check_conservation(S2(ratio=0.5, wire="bf16"), steps, 5e-2)


def test_conservation_when_the_union_jumps_tenfold_and_back():
    counts = [(30, 30), (300, 280), (30, 20), (0, 0), (30, 30)]
    steps = [random_rows(c, 1000, 4, seed=i) for i, c in enumerate(counts)]
    states = check_conservation(S2(ratio=0.5), steps[:2], 1e-4)
    assert states[0].union == len(union_of(steps[1]))
    check_conservation(S2(ratio=0.5), steps[2:], 1e-4, states=states)


def test_c03_one_rank_all_rows_collide():
    gradient = torch.arange(1.0, 7.0, dtype=torch.float64).view(6, 1)
    total, states = torch.zeros(6, 1, dtype=torch.float64), None
    for _ in range(3):
        before = 0.0 if states is None else states[0].residual.clone()
        (result,), _, states = reduce_local(
            S2(ratio=0.01, wire="fp32"), [DenseGradient(gradient)], states
        )
        out = as_matrix(result)
        assert result.omega == 5.0
        assert torch.allclose(gradient + before, out + states[0].residual, rtol=0, atol=1e-13)
        total += out
    assert torch.allclose(total + states[0].residual, 3 * gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ratio", [0.1, 0.25, 1.0, 4.0])
def test_error_law(ratio):
    """Relative squared error of `mean` without feedback is omega = (U-1)/(r c)."""
    reducer = S2(ratio=ratio, error_feedback=False, wire="fp32")
    errors, omega = [], 0.0
    for step in range(30):
        parts = random_rows((200, 200), 4000, 8, seed=step)
        results, _, _ = reduce_local(reducer, parts, name=f"table{step}")
        want = dense_mean(parts)
        errors.append(float((as_matrix(results[0]) - want).square().sum() / want.square().sum()))
        omega = results[0].omega
    assert sum(errors) / len(errors) == pytest.approx(omega, rel=0.15)


def test_seeds_are_fresh_each_step_and_equal_on_all_ranks(monkeypatch):
    seen = []
    original = sketch_module.ops.sketch_encode

    def spy(indices, values, hashes, buckets, seed, *rest):
        seen.append(seed)
        return original(indices, values, hashes, buckets, seed, *rest)

    monkeypatch.setattr(sketch_module.ops, "sketch_encode", spy)
    parts, states = random_rows((5, 6, 7), 50, 2), None
    for _ in range(4):
        _, _, states = reduce_local(S2(), parts, states)
    reduce_local(S2(), parts, name="other")
    by_step = [seen[i : i + 3] for i in range(0, 15, 3)]
    assert all(len(set(step)) == 1 for step in by_step)
    assert len({step[0] for step in by_step}) == 5
    first = list(seen)
    seen.clear()
    reduce_local(S2(), parts)
    assert seen[0] == first[0]  # the same in every run


@pytest.mark.parametrize("ratio", [1.3, 2.0])
def test_peel_is_exact(ratio):
    parts = random_rows((900, 800), 5000, 4)
    results, _, _ = reduce_local(S2(ratio=ratio, decoder="peel"), parts)
    assert torch.allclose(as_matrix(results[0]).double(), dense_mean(parts), rtol=0, atol=1e-4)
    assert results[0].rows.indices.tolist() == union_of(parts)


@pytest.mark.parametrize("decoder", ["mean", "median", "peel"])
def test_rows_outside_the_union_are_absent(decoder):
    parts = random_rows((9, 0, 12), 400, 2)
    states = None
    for _ in range(3):
        results, _, states = reduce_local(S2(decoder=decoder), parts, states)
        assert results[0].rows.indices.tolist() == union_of(parts)
        for result in results:
            assert torch.equal(bits(as_matrix(result)), bits(as_matrix(results[0])))


def test_rounds_of_the_first_step_and_of_later_ones():
    parts = random_rows((9, 12), 400, 2)
    _, transport, states = reduce_local(S2(), parts)
    assert transport.num_rounds == 4  # the bitmap, then the sketch
    _, transport, _ = reduce_local(S2(), parts, states)
    assert transport.num_rounds == 2  # both travel at once
    assert len(transport.traffic) == 4
    assert all(entry.name.startswith("table@1.") for entry in transport.traffic)
    _, transport, _ = reduce_local(S2(), parts, index=index_of(parts, True))
    assert transport.num_rounds == 2  # placed: push and pull


WIRES = [None, "fp32", "bf16", "int8", "int6", "int4"]


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_conservation_on_every_wire_in_both_forms(n, wire, announced):
    states = None
    for step in range(5):
        counts = [(17 * (r + step)) % 40 for r in range(n)]
        parts = random_rows(counts, 120, 6, seed=step)
        before = 0.0 if states is None else mean_residual(states)
        results, _, states = reduce_local(
            S2(ratio=0.4, wire=wire),
            parts,
            states,
            index=index_of(parts, True) if announced else None,
        )
        for result in results:
            assert torch.equal(bits(as_matrix(result)), bits(as_matrix(results[0])))
        assert results[0].rows.indices.tolist() == union_of(parts)
        got = as_matrix(results[0]).double() + mean_residual(states)
        assert torch.allclose(dense_mean(parts) + before, got, rtol=0, atol=3e-5)
        assert all(agreed(state) == agreed(states[0]) for state in states)
        assert all(state.announce for state in states)


@pytest.mark.parametrize("wire", [None, "fp32"])
def test_placed_guard_an_unannounced_row_makes_all_ranks_hash(wire):
    states = None
    parts = random_rows((12, 9, 0), 60, 4)
    _, _, states = reduce_local(S2(wire=wire), parts, states, index=index_of(parts, True))
    before = mean_residual(states)
    short = [SparseRows(parts[0].indices[1:], parts[0].values[1:], 60), *parts[1:]]
    results, _, states = reduce_local(S2(wire=wire), parts, states, index=index_of(short, True))
    got = as_matrix(results[0]).double() + mean_residual(states)
    assert torch.allclose(dense_mean(parts) + before, got, rtol=0, atol=3e-5)
    assert [state.announce for state in states] == [False] * 3


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_placed_form_with_a_bucket_a_row_is_exact(n):
    parts = random_rows([30] * n, 90, 4)
    results, _, _ = reduce_local(S2(ratio=1.0), parts, index=index_of(parts, True))
    assert torch.allclose(as_matrix(results[0]).double(), dense_mean(parts), rtol=0, atol=1e-5)
    assert results[0].omega == 0


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_estimate_is_what_was_counted(n, wire):
    parts = random_rows([30] * n, 900, 8)
    reducer = S2(ratio=0.5, wire=wire)
    _, _, states = reduce_local(reducer, parts)
    for _ in range(2):
        _, transport, states = reduce_local(reducer, parts, states)
        want = reducer.estimate_bytes(workload_of(parts, reducer))
        assert sum(transport.sent_bytes()) / n == pytest.approx(want, rel=1e-12)


def test_c08_a_gradient_that_is_not_finite_leaves_residuals_alone():
    good = random_rows((20, 20), 60, 2)
    _, _, states = reduce_local(S2(), good)
    kept = [state.residual.clone() for state in states]
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = good[0].values.clone()
        values[3, 1] = bad
        parts = [SparseRows(good[0].indices, values, 60), good[1]]
        results, _, states = reduce_local(S2(), parts, states)
        row = good[0].indices[3]
        assert not any(as_matrix(result)[row, 1].isfinite() for result in results)
        assert all(
            torch.equal(state.residual, before) for state, before in zip(states, kept, strict=True)
        )
    check_conservation(S2(), [good], 1e-5, states=states)


def test_c08_a_half_that_overflows_only_when_rounded_leaves_residuals_alone():
    rows = SparseRows(torch.tensor([0]), torch.tensor([[60000.0]], dtype=torch.float16), 1)
    states = [ReducerState(residual=torch.tensor([[5.0]])) for _ in range(2)]
    results, _, states = reduce_local(S2(ratio=1.0), [rows, rows], states, average=False)
    assert as_matrix(results[0]).isinf().all()  # 120000
    assert all(float(state.residual) == 5.0 for state in states)


def test_empty_table_and_nobody_with_rows():
    nothing = [DenseGradient(torch.zeros(7, 3)) for _ in range(2)]
    states = None
    for _ in range(3):
        results, _, states = reduce_local(S2(), nothing, states)
        assert as_matrix(results[0]).abs().sum() == 0
    for _ in range(2):
        results, _, _ = reduce_local(S2(), [DenseGradient(torch.zeros(0, 4)) for _ in range(2)])
        assert as_matrix(results[0]).shape == (0, 4)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"ratio": 0.0}, ValueError, r"ratio = 0.0 must be a finite number > 0"),
        ({"ratio": -1}, ValueError, r"ratio = -1 must be a finite number > 0"),
        ({"ratio": float("nan")}, ValueError, r"ratio = nan"),
        ({"ratio": float("inf")}, ValueError, r"ratio = inf"),
        ({"ratio": "0.25"}, TypeError, r"ratio = '0.25' must be a number, for instance 0.25"),
        ({"ratio": True}, TypeError, r"ratio = True must be a number"),
        ({"decoder": "mode"}, ValueError, r"decoder = 'mode' must be one of \['mean', 'median'"),
        ({"wire": "int7"}, ValueError, r"wire = 'int7' must be None or one of"),
        ({"num_hashes": 0}, ValueError, r"num_hashes = 0 must lie between 1 and 16"),
        ({"num_hashes": 17}, ValueError, r"num_hashes = 17"),
        ({"decoder": "peel", "error_feedback": True}, ValueError, r"linear decoder 'mean'"),
    ],
)
def test_bad_options(options, kind, text):
    with pytest.raises(kind, match=text):
        S2(**options)
