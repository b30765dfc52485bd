"""Lanes: one order on every rank whatever the ranks' readiness, and what ends them."""

import os
import random
import threading
import time
from concurrent.futures import wait as wait_all

import pytest
import torch

from commlib.collectives.requests import AllReduce, AllToAll, Later, ask
from commlib.errors import CommError
from commlib.schedule import open_lane
from tests.dist.harness import Died, issued, run_ranks, same_everywhere, threads

pytestmark = pytest.mark.dist

NUM_LAYERS = 4


def gradient(rank, step, layer):
    generator = torch.Generator().manual_seed(1000 * step + 10 * layer + rank)
    return torch.randn(50 + 7 * layer, generator=generator)


def layer_sum(rank, step, layer):
    return ask(AllReduce(name=f"layer{layer}@{step}", tensor=gradient(rank, step, layer)))


def random_delays(rank, n, num_steps):
    """Layers are ready at random times, in an order of each rank's own."""
    lane = open_lane("test", list(range(n)), 30.0)
    delays = random.Random(rank)
    results = []
    for step in range(num_steps):
        futures = [None] * NUM_LAYERS

        def submit(layer, delay_s, step=step, futures=futures):
            time.sleep(delay_s)
            futures[layer] = lane.submit(
                f"layer{layer}", lambda: layer_sum(rank, step, layer), priority=layer
            )

        workers = [
            threading.Thread(target=submit, args=(layer, delays.uniform(0, 0.05)))
            for layer in range(NUM_LAYERS)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        results += [future.result(30) for future in futures]
    fifo = open_lane("fifo", list(range(n)), 30.0)
    for step in range(num_steps):
        for layer in range(NUM_LAYERS):
            one = fifo.run(f"layer{layer}", layer_sum(rank, step, layer))
            assert torch.equal(one, results[step * NUM_LAYERS + layer])
    assert all(same_everywhere(result) for result in results[:NUM_LAYERS])
    log = [entry[:4] for entry in lane.log()]
    lane.close()
    fifo.close()
    return log


@pytest.mark.parametrize("n", [1, 2, 3])
def test_same_order_everywhere_whatever_the_delays(n):
    logs = run_ranks(n, random_delays, 30)
    assert all(log == logs[0] for log in logs)
    assert len(logs[0]) == 2 * 30 * NUM_LAYERS  # a short sum is two exchanges


@pytest.mark.slow
def test_same_order_everywhere_for_200_steps():
    logs = run_ranks(4, random_delays, 200, timeout_s=150.0)
    assert all(log == logs[0] for log in logs)
    order = [name for name, *_ in logs[0]]
    assert order != sorted(order)


def stalled(rank, n):
    """Rank 1 lets the first request stall the link; meanwhile everything else is submitted."""
    lane = open_lane("test", list(range(n)), 30.0, slice_bytes=4096, credit_bytes=4096)
    store = torch.distributed.distributed_c10d._get_default_store()
    sizes = (2048,) * n

    def submit(name, priority):
        tensor = torch.full((2048 * n,), float(rank))
        request = AllToAll(name=name, tensor=tensor, send=sizes, recv=sizes)
        return lane.submit(name, lambda: ask(request), priority=priority)

    if rank == 1:
        store.wait(["submitted"])
    futures = [submit("back3", 3)]
    if rank == 0:
        while not lane.log():
            time.sleep(0.001)
    futures += [submit("back2", 2), submit("back1", 1), submit("front", 0)]
    if rank == 0:
        store.set("submitted", "")
    assert not wait_all(futures, timeout=30).not_done
    log = [name for name, *_ in lane.log()]
    lane.close()
    return log


def test_a_front_layer_overtakes_on_a_stalled_link():
    """back3 is cut into slices (2 for 2 ranks); what is more urgent goes between them."""
    logs = run_ranks(2, stalled)
    assert logs[0] == logs[1]
    assert logs[0] == ["back3", "front", "front", "back1", "back1", "back2", "back2", "back3"]


def overlap(rank, n):
    lane = open_lane("test", list(range(n)), 30.0)
    sizes = (8,) * n
    spans = {}

    def decode(name):
        tensor = torch.ones(8 * n)
        yield AllToAll(name=name, tensor=tensor, send=sizes, recv=sizes)
        start = time.perf_counter()
        time.sleep(0.2)
        spans[name] = (start, time.perf_counter())

    def hold():
        both_are_submitted.wait(20)
        yield from ()

    both_are_submitted = threading.Event()
    lane.submit("hold", hold, priority=-1)
    futures = [lane.submit(name, lambda name=name: decode(name)) for name in ("a", "b")]
    both_are_submitted.set()
    wait_all(futures, timeout=30)
    b_issued = next(entry[6] for entry in lane.log() if entry[0] == "b")
    lane.close()
    return b_issued < spans["a"][1]


def test_the_next_exchange_runs_while_rows_are_decoded():
    """On the leader always; a follower may begin to decode before the leader announces the next."""
    assert run_ranks(2, overlap)[0]


def slices(rank, n):
    """What arrives in slices is what arrives whole."""
    lane = open_lane("test", list(range(n)), 30.0, slice_bytes=1000, credit_bytes=2000)
    send = tuple(1 + 300 * ((rank + peer) % n) for peer in range(n))
    sent = torch.arange(sum(send) * 3.0).view(-1, 3) + 1000 * rank
    got = lane.run("x", ask(AllToAll(name="x", tensor=sent, send=send, recv=send)))
    expected = []
    for peer in range(n):
        theirs = tuple(1 + 300 * ((peer + other) % n) for other in range(n))
        whole = torch.arange(sum(theirs) * 3.0).view(-1, 3) + 1000 * peer
        expected.append(whole.split(theirs)[rank])
    assert torch.equal(got, torch.cat(expected))
    large = torch.full((1 << 19,), float(rank))
    ring = lane.run("ring", ask(AllReduce(name="ring", tensor=large, op="mean")))
    assert torch.equal(ring, torch.full((1 << 19,), sum(range(n)) / n))
    num_slices = {name: total for name, _, total, *_ in lane.log()}
    lane.close()
    return num_slices


@pytest.mark.parametrize("n", [2, 3])
def test_slices_arrive_as_a_whole(n):
    for num_slices in run_ranks(n, slices):
        assert num_slices["x"] > 1 and num_slices["ring"] > 1


def never_submits(rank, n, absent):
    """Every rank asks for 'first'; then `absent` leaves 'missing' out, and goes on."""
    lane = open_lane("test", list(range(n)), 3.0)
    ones = torch.ones(4)
    lane.submit("first", lambda: ask(AllReduce(name="first", tensor=ones))).result(20)
    if rank == absent:
        time.sleep(5)
        lane.submit("next", lambda: ask(AllReduce(name="next", tensor=ones))).result(20)
    lane.submit("missing", lambda: ask(AllReduce(name="missing", tensor=ones))).result(20)


@pytest.mark.parametrize("absent", [0, 2])
def test_announced_but_never_submitted_names_rank_and_request(absent):
    for end in run_ranks(3, never_submits, absent, may_fail=True):
        assert isinstance(end, Died) and end.kind == "CommError", end
        assert f"rank {absent}" in end.text and "'missing" in end.text
        assert end.seconds < 12


def raises_in_a_stage(rank, n):
    lane = open_lane("test", list(range(n)), 10.0)

    def work():
        answer = yield AllReduce(name="x", tensor=torch.ones(4))
        if rank == 1:
            raise ZeroDivisionError("decoding went wrong")
        yield AllReduce(name="y", tensor=answer)

    future = lane.submit("table", work)
    bystander = lane.submit("z", lambda: ask(AllReduce(name="z", tensor=torch.ones(4))), priority=1)
    with pytest.raises(ZeroDivisionError if rank == 1 else CommError) as raised:
        future.result(20)
    with pytest.raises(CommError):
        bystander.result(20)
        lane.run("after", ask(AllReduce(name="after", tensor=torch.ones(4))))
    with pytest.raises(CommError):
        lane.submit("later", lambda: ask(AllReduce(name="l", tensor=torch.ones(1)))).result(20)
    return str(raised.value)


def test_an_exception_in_a_stage_ends_every_rank():
    texts = run_ranks(3, raises_in_a_stage)
    for rank in (0, 2):
        assert "rank 1" in texts[rank] and "'table'" in texts[rank]
        assert "decoding went wrong" in texts[rank]


def one_dies(rank, n, dead):
    lane = open_lane("test", list(range(n)), 10.0)
    lane.submit("x", lambda: ask(AllReduce(name="x", tensor=torch.ones(4)))).result(20)
    torch.distributed.barrier()  # all have their answer
    if rank == dead:
        os._exit(1)
    lane.submit("y", lambda: ask(AllReduce(name="y", tensor=torch.ones(4)))).result(20)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_rank_is_named(dead):
    ends = run_ranks(3, one_dies, dead, may_fail=True)
    for rank, end in enumerate(ends):
        if rank != dead:
            assert end.kind == "CommError" and f"rank {dead}" in end.text, end
            assert "'y" in end.text


def open_and_close(rank, n):
    def resources():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once():
        lane = open_lane("test", list(range(n)), 10.0)
        lane.submit("x", lambda: ask(AllReduce(name="x", tensor=torch.ones(4)))).result(20)
        torch.distributed.barrier()
        lane.close()
        lane.close()

    once()  # what torch keeps for good is there now
    deadline = time.monotonic() + 5
    before = resources()
    for _ in range(3):
        once()
    while resources() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    return before, resources(), threads()


@pytest.mark.parametrize("n", [1, 3])
def test_nothing_is_left_behind(n):
    for before, after, names in run_ranks(n, open_and_close):
        assert after[0] <= before[0] and after[1] <= before[1]
        assert names == []


def tickets(rank, n):
    """`Later` of a sum that takes two exchanges, redeemed in the other order, beside others."""
    lane = open_lane("test", list(range(n)), 10.0)

    def work(name):
        first = yield Later(AllReduce(name=f"{name}.first", tensor=torch.ones(3)))
        second = yield Later(AllReduce(name=f"{name}.second", tensor=torch.ones(3) * 2))
        pair = yield (
            AllReduce(name=f"{name}.left", tensor=torch.ones(1)),
            AllReduce(name=f"{name}.right", tensor=torch.ones(2)),
        )
        b = yield second
        a = yield first
        return a, b, pair

    futures = [lane.submit(name, lambda name=name: work(name)) for name in "pqr"]
    for future in futures:
        a, b, (left, right) = future.result(20)
        assert a.tolist() == [n] * 3 and b.tolist() == [2 * n] * 3
        assert left.tolist() == [n] and right.tolist() == [n, n]
    order = issued(lane)
    lane.close()
    return order


def test_tickets_and_tuples():
    orders = run_ranks(2, tickets)
    assert orders[0] == orders[1] and len(orders[0]) == 12
