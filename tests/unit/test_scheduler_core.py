"""The scheduler's core through Python: the contract at its surface, against a slow twin."""

import gc
import math
import os
import random
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import commlib.ops  # noqa: F401  loads torch's libraries, which the extension links to
from commlib._C import Scheduler

LONG_S = 20.0  # a wait that no passing test reaches the end of


def alone(credit_bytes=1 << 30, **options):
    return Scheduler(0, 1, [], credit_bytes, LONG_S, **options)


def make_ranks(num_ranks, credit_bytes=1 << 30, timeout_s=LONG_S):
    pairs = [socket.socketpair() for _ in range(num_ranks - 1)]
    leader = Scheduler(0, num_ranks, [a.detach() for a, _ in pairs], credit_bytes, timeout_s)
    return [leader] + [
        Scheduler(rank, num_ranks, [b.detach()], credit_bytes, timeout_s)
        for rank, (_, b) in enumerate(pairs, start=1)
    ]


def drain(scheduler):
    """Issue and complete what can be issued at once."""
    issued = []
    while (unit := scheduler.next(0)) is not None:
        issued.append(unit[:2])
        scheduler.done(*unit[:2])
    return issued


def order(scheduler):
    return [entry[:2] for entry in scheduler.log()]


def twin(requests):
    """The schedule, slow and obvious: sort by (priority, number)."""
    ranked = sorted(enumerate(requests), key=lambda item: (item[1][0], item[0]))
    return [(str(number), i) for number, (_, slices) in ranked for i in range(slices)]


any_requests = st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 4)), max_size=40)


@given(requests=any_requests)
def test_leader_goes_by_the_twin(requests):
    scheduler = alone()
    for number, (priority, num_slices) in enumerate(requests):
        scheduler.submit(str(number), priority, 7, num_slices)
    assert drain(scheduler) == order(scheduler) == twin(requests)


@given(requests=any_requests, later=any_requests)
def test_what_comes_later_passes_between_units(requests, later):
    scheduler = alone()
    queue = []  # (priority, number, slice_idx) of all units that wait
    issued, expected = [], []
    for number, (priority, num_slices) in enumerate(requests + later):
        scheduler.submit(str(number), priority, 1, num_slices)
        queue += [(priority, number, i) for i in range(num_slices)]
        if number >= len(requests):
            issued.append(scheduler.next(0)[:2])
            queue.sort()
            _, first, slice_idx = queue.pop(0)
            expected.append((str(first), slice_idx))
    assert issued == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
def test_orders_are_equal_whatever_the_ranks_do(num_ranks):
    names = [f"table.{i}" for i in range(300)]
    ranks = make_ranks(num_ranks, credit_bytes=50)
    errors, through = [], [False] * num_ranks

    def submit(rank):
        mine = random.Random(rank)
        for name in mine.sample(names, len(names)):
            ranks[rank].submit(name, mine.randrange(5), 20, 1 + len(name) % 2)
            if mine.random() < 0.1:
                time.sleep(mine.random() * 1e-3)

    def issue(rank):
        lane = ranks[rank]
        while lane.total_issued < sum(1 + len(name) % 2 for name in names):
            unit = lane.next(LONG_S)
            if unit is None:
                errors.append((rank, lane.failure))
                break
            lane.done(*unit[:2])
        through[rank] = True
        while not all(through):  # a leader sends on what its sockets did not take at once
            lane.poll()
            time.sleep(1e-3)

    threads = [
        threading.Thread(target=f, args=(r,)) for f in (submit, issue) for r in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len({tuple(order(lane)) for lane in ranks}) == 1
    assert all(lane.num_queued == lane.bytes_in_flight == 0 for lane in ranks)


def test_log_has_sizes_and_times_on_the_clock_of_perf_counter():
    scheduler = alone()
    begin = time.perf_counter()
    scheduler.submit("a", 3, 5, 2)
    scheduler.next(0)
    scheduler.next(0)
    scheduler.done("a", 1)
    end = time.perf_counter()
    first, second = scheduler.log()
    assert first[:5] == ("a", 0, 2, 3, 3) and second[:5] == ("a", 1, 2, 3, 2)
    assert begin <= second[5] <= second[6] <= second[7] <= end
    assert math.isnan(first[7])
    assert (scheduler.total_issued, scheduler.bytes_in_flight, scheduler.num_queued) == (2, 3, 0)


def test_log_keeps_the_newest():
    scheduler = alone(log_size=2)
    for name in "abc":
        scheduler.submit(name, 0, 1)
    drain(scheduler)
    assert order(scheduler) == [("b", 0), ("c", 0)]
    assert scheduler.total_issued == 3


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda s: s.submit("queued", 0, 1), ValueError, "'queued' is queued or in flight"),
        (lambda s: s.submit("", 0, 1), ValueError, "name is empty"),
        (lambda s: s.submit("é" * 32768, 0, 1), ValueError, "65536 bytes"),
        (lambda s: s.submit("a", 0, -1), ValueError, "num_bytes = -1 of 'a'"),
        (lambda s: s.submit("a", 0, 1, 0), ValueError, "num_slices = 0 of 'a'"),
        (lambda s: s.submit("a", 1 << 64, 1), ValueError, "priority = 18446744073709551616"),
        (lambda s: s.submit(b"a", 0, 1), TypeError, "name must be str, got b'a'"),
        (lambda s: s.submit("a", 0.5, 1), TypeError, "priority must be int, got 0.5"),
        (lambda s: s.submit("a", 0), TypeError, "needs the argument 'num_bytes'"),
        (lambda s: s.submit("a", 0, 1, 1, 1), TypeError, "at most 4 arguments, got 5"),
        (lambda s: s.submit("a", 0, 1, size=1), TypeError, "no argument 'size'"),
        (lambda s: s.submit("a", 0, 1, name="a"), TypeError, "'name' twice"),
        (lambda s: s.submit("\ud800", 0, 1), UnicodeEncodeError, "surrogates"),
        (lambda s: s.done("queued"), ValueError, "slice 0 of 'queued' is not in flight"),
        (lambda s: s.next(-1), ValueError, "timeout_s = -1"),
        (lambda s: s.next(math.inf), ValueError, "timeout_s = inf"),
        (lambda s: s.next(None), TypeError, "timeout_s must be float, got None"),
        (lambda s: s.fail(1), TypeError, "text must be str, got 1"),
        (lambda s: Scheduler(1, 1, [], 1, 1.0), ValueError, "rank = 1: from 0 to 0"),
        (lambda s: Scheduler(0, 2, [1, 2], 1, 1.0), ValueError, "takes 1, or none"),
        (lambda s: Scheduler(0, 2, [-1], 1, 1.0), ValueError, "-1 is no descriptor"),
        (lambda s: Scheduler(0, 2, 3, 1, 1.0), TypeError, "fds must be a sequence of int"),
        (lambda s: Scheduler(0, 1, [], -1, 1.0), ValueError, "credit_bytes = -1"),
        (lambda s: Scheduler(0, 1, [], 1, 0.0), ValueError, "timeout_s = 0"),
        (lambda s: Scheduler(0, 1, [], 1, 1.0, log_size=0), ValueError, "log_size = 0"),
        (lambda s: Scheduler(0, 1), TypeError, "Scheduler"),
    ],
)
def test_mistakes(call, error, words):
    scheduler = alone()
    scheduler.submit("queued", 0, 1)
    with pytest.raises(error) as raised:
        call(scheduler)
    assert words in str(raised.value)
    assert drain(scheduler) == [("queued", 0)]


def test_refused_descriptors_stay_the_callers():
    with socket.socket() as unconnected:
        with pytest.raises(ValueError, match="not a connected stream socket"):
            Scheduler(1, 2, [unconnected.fileno()], 1, 1.0)
        os.fstat(unconnected.fileno())


def test_a_waiting_next_lets_other_threads_run():
    scheduler = alone()
    got = []
    waiter = threading.Thread(target=lambda: got.append(scheduler.next(LONG_S)))
    waiter.start()
    time.sleep(0.05)  # with the GIL held, this line would take LONG_S
    with pytest.raises(RuntimeError, match="one at a time"):
        scheduler.next(0)
    begin = time.perf_counter()
    scheduler.submit("a", 0, 1)
    waiter.join()
    assert got == [("a", 0, 1)]
    assert time.perf_counter() - begin < LONG_S / 2


def test_submit_does_not_wait_for_a_busy_thread():
    scheduler = alone()
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            pass

    busy = threading.Thread(target=spin)
    busy.start()
    # Giving the GIL away costs a switch interval of 5 ms each time: 10 s in all.
    begin = time.perf_counter()
    for i in range(2000):
        scheduler.submit(str(i), 0, 1)
    elapsed_s = time.perf_counter() - begin
    stop.set()
    busy.join()
    assert elapsed_s < 5


@pytest.mark.parametrize("end", [Scheduler.wake, Scheduler.close])
def test_wake_and_close_end_a_wait(end):
    scheduler = alone()
    got = []
    waiter = threading.Thread(target=lambda: got.append(scheduler.next(LONG_S)))
    waiter.start()
    time.sleep(0.02)
    end(scheduler)
    waiter.join(LONG_S / 2)
    assert got == [None]


def test_failures_reach_every_rank():
    ranks = make_ranks(3)
    ranks[2].fail("out of mémoire")
    for lane in ranks:
        assert lane.next(LONG_S) is None
        assert lane.failure == (2, "out of mémoire")
        assert lane.next(LONG_S) is None  # at once


@pytest.mark.parametrize(
    ("submitted_on", "failure"),
    [(0, (1, "has not submitted 'x'")), (1, (0, "has not announced 'x'"))],
)
def test_a_request_that_one_rank_lacks(submitted_on, failure):
    ranks = make_ranks(2, timeout_s=0.1)
    ranks[submitted_on].submit("x", 0, 1)
    drain(ranks[0])
    assert ranks[1].next(LONG_S) is None  # wakes by itself
    assert ranks[0].next(LONG_S) is None
    for lane in ranks:
        rank, text = lane.failure
        assert rank == failure[0] and failure[1] in text


def test_a_dead_peer_is_no_goodbye():
    ours, theirs = socket.socketpair()
    leader = Scheduler(0, 2, [ours.detach()], 1, LONG_S)
    theirs.close()
    assert leader.next(LONG_S) is None
    assert leader.failure == (1, "is gone: its control connection ended")
    leader, follower = make_ranks(2)
    follower.close()
    leader.poll()
    assert leader.failure is None


def test_bytes_of_a_stranger_are_a_failure():
    ours, theirs = socket.socketpair()
    follower = Scheduler(1, 2, [ours.detach()], 1, LONG_S)
    with theirs:
        theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert follower.next(LONG_S) is None
    assert follower.failure == (0, "sent a malformed control message: version = 69")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_nothing_is_left_open():
    gc.collect()  # what earlier tests left
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for closes in (True, False):
        for _ in range(10):
            ranks = make_ranks(3)
            if closes:
                for lane in ranks:
                    lane.close()
            del ranks
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads
