"""auto: one choice on all ranks, the cheapest by the model, and looked at again."""

import itertools

import pytest
import torch

from commlib.reducers import Auto
from commlib.reducers.auto import CANDIDATES, RELOOK_STEPS
from commlib.reducers.gradient import DenseGradient
from commlib.topology import Link, Step, Workload
from tests.twins import agreed, as_matrix, dense_mean, index_of, random_rows, reduce_local

LINKS = {
    "fast": Link(alpha_s=1e-5, beta_s=1e-10, memory_s=1e-9),
    "slow": Link(alpha_s=1e-4, beta_s=1e-6, memory_s=1e-10),
    "far": Link(alpha_s=5e-2, beta_s=1e-9, memory_s=1e-10),
}


@pytest.mark.parametrize("link", LINKS)
def test_choice_is_the_least_cost(link):
    for n, v, s, gamma, dim in itertools.product(
        (2, 4, 16), (1000, 100_000), (10, 900), (1.0, 1.5), (1, 64)
    ):
        for dense_input, index_bytes in itertools.product((False, True), (0.0, 4000.0)):
            workload = Workload(
                num_ranks=n,
                num_rows=v,
                dim=dim,
                element_bytes=4,
                rows=float(s),
                union=int(min(v, gamma * s)),
                dense_input=dense_input,
                index_bytes=index_bytes,
            )
            cost = {r.name: LINKS[link].seconds(r.steps(workload)) for r in CANDIDATES}
            chosen = Auto.choose(workload, LINKS[link])
            assert cost[chosen.name] == min(cost.values())
            assert Auto().estimate_bytes(workload) == Auto.choose(workload, Link()).estimate_bytes(
                workload
            )


def test_a_slow_link_gets_few_bytes_and_a_full_table_goes_dense():
    parts = random_rows((20,) * 8, 60, 64)
    results, _, _ = reduce_local(Auto(), parts, link=LINKS["slow"])
    assert results[0].reducer == "minimal"
    full = [DenseGradient(torch.randn(50, 8)) for _ in range(8)]
    results, _, _ = reduce_local(Auto(), full, link=LINKS["fast"])
    assert results[0].reducer == "dense"


@pytest.mark.parametrize("link", LINKS)
def test_all_ranks_choose_alike_at_every_step(link):
    states = None
    for step in range(8):
        parts = random_rows((step * 9, 40, 300 if step == 5 else 3), 400, 8, seed=step)
        index = index_of(parts, True) if step % 2 else None
        results, _, states = reduce_local(Auto(), parts, states, link=LINKS[link], index=index)
        assert len({result.reducer for result in results}) == 1
        assert all(agreed(state) == agreed(states[0]) for state in states)
        assert torch.allclose(as_matrix(results[0]).double(), dense_mean(parts), atol=1e-5)


def test_first_step_runs_the_index_round_and_so_does_every_32nd():
    states, rounds = None, []
    for step in range(2 * RELOOK_STEPS + 1):
        parts = [DenseGradient(torch.randn(60, 4)) for _ in range(8)]
        results, transport, states = reduce_local(Auto(), parts, states, link=LINKS["fast"])
        assert results[0].reducer == "dense"
        if any("index" in entry.name for entry in transport.traffic):
            rounds.append(step)
    assert rounds == [0, 31, 63]


def test_a_table_that_becomes_sparse_is_noticed():
    states = None
    for step in range(RELOOK_STEPS + 2):
        rows = 2000 if step < 5 else 3
        parts = [
            DenseGradient(part.to_dense())
            for part in random_rows((rows, rows), 2000, 16, seed=step)
        ]
        results, _, states = reduce_local(Auto(), parts, states, link=LINKS["slow"])
        if step in (4, RELOOK_STEPS - 2):
            assert results[0].reducer == "dense"
    assert results[0].reducer in ("minimal", "allgather")


def test_link_seconds_and_its_checks():
    link = Link(alpha_s=1.0, beta_s=0.5, memory_s=0.25)
    assert link.seconds([Step("exchange", 4), Step("local", 8)]) == 1 + 2 + 2
    with pytest.raises(ValueError, match=r"alpha_s = -1 must be a finite number of seconds >= 0"):
        Link(alpha_s=-1)
    with pytest.raises(ValueError, match=r"beta_s = nan"):
        Link(beta_s=float("nan"))


def test_workload_units():
    workload = Workload(num_ranks=4, num_rows=17, dim=8, element_bytes=2, rows=6.0, union=9)
    assert workload.row_bytes == 16 and workload.bitmap_bytes == 3 and workload.gamma == 1.5
    assert workload.bound_bytes() == 16 * (6 + 9 * 2 / 4)
