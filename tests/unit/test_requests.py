"""Requests that cannot be carried are refused before any byte moves; the local transport."""

import pytest
import torch

from commlib.collectives.local import LocalTransport
from commlib.collectives.reduce import combine
from commlib.collectives.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    check_request,
    chunk_sizes,
    request_bytes,
)
from commlib.errors import CommError
from commlib.rows import SparseRows

four = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (AllToAll(name="x", tensor=four, send=(1, 1), recv=(1, 1)), r"send sums to 2 but .* has 4"),
        (AllToAll(name="x", tensor=four, send=(5, -1), recv=(5, 1)), r"send = \(5, -1\) must hold"),
        (AllToAll(name="x", tensor=four, send=(4,), recv=(4, 0)), r"send = \(4,\) must hold one"),
        (AllToAll(name="x", tensor=four, send=(2, 2), recv=(2,)), r"recv = \(2,\)"),
        (AllToAll(name="x", tensor=four, send=(2, 2), recv=(3, 2)), r"must be equal, both are"),
        (AllGather(name="x", tensor=four, sizes=(3, 4)), r"sizes\[0\] = 3 but the tensor has 4"),
        (AllGather(name="x", tensor=four, sizes=(4, -4)), r"sizes = \(4, -4\)"),
        (AllGather(name="x", tensor=four, sizes=(4, 4, 4)), r"each of the 2 ranks"),
        (Broadcast(name="x", tensor=four, root=2), r"root = 2 is not a rank of 2"),
    ],
)
def test_c33_bad_sizes(request_, text):
    with pytest.raises(ValueError, match=r"request 'x'.*" + text):
        check_request(request_, 0, 2)


def test_op_and_dtype_must_fit():
    with pytest.raises(TypeError, match=r"request 'x': op 'bor' does not go with torch.float32"):
        check_request(AllReduce(name="x", tensor=four, op="bor"), 0, 2)
    with pytest.raises(TypeError, match=r"op 'sum' does not go with torch.uint8"):
        check_request(AllReduce(name="x", tensor=four.byte()), 0, 2)


def one(*requests):
    answers = yield requests if len(requests) > 1 else requests[0]
    return answers


def test_every_request_on_three_ranks():
    data = [torch.arange(3.0) + 10 * r for r in range(3)]

    def run(make):
        transport = LocalTransport(3)
        return transport.run([one(make(rank)) for rank in range(3)]), transport

    gathered, transport = run(lambda r: AllGather(name="g", tensor=data[r][:r], sizes=(0, 1, 2)))
    assert [g.tolist() for g in gathered] == [[10, 20, 21]] * 3
    assert transport.sent_bytes() == (0, 8, 16) and transport.received_bytes() == (12, 8, 4)
    swapped, transport = run(
        lambda r: AllToAll(name="a", tensor=data[r], send=(1, 1, 1), recv=(1, 1, 1))
    )
    assert swapped[1].tolist() == [1, 11, 21]
    assert transport.sent_bytes() == (8,) * 3
    summed, transport = run(lambda r: AllReduce(name="s", tensor=data[r].clone(), op="sum"))
    assert summed[2].tolist() == [30, 33, 36]
    assert transport.sent_bytes() == (16,) * 3  # 2(n-1)/n of 12 bytes
    meant, _ = run(lambda r: AllReduce(name="s", tensor=data[r].clone(), op="mean"))
    assert meant[0].tolist() == [10, 11, 12]
    most, _ = run(lambda r: AllReduce(name="s", tensor=data[r].clone(), op="max"))
    assert most[0].tolist() == [20, 21, 22]
    told, transport = run(lambda r: Broadcast(name="b", tensor=data[r], root=1))
    assert told[2].tolist() == [10, 11, 12]
    assert transport.sent_bytes() == (0, 24, 0) and transport.busiest_bytes() == 24
    for kind in (
        AllReduce(name="s", tensor=torch.zeros(7)),
        AllGather(name="g", tensor=torch.zeros(5), sizes=(5, 5, 5)),
        AllToAll(name="a", tensor=torch.zeros(3, 2), send=(1, 2, 0), recv=(1, 2, 0)),
        Broadcast(name="b", tensor=torch.zeros(9)),
    ):
        if isinstance(kind, AllToAll):
            continue  # not symmetric; its bytes are those of the reducers' tests
        transport = LocalTransport(3)
        transport.run([one(kind) for _ in range(3)])
        bytes_ = [request_bytes(kind, rank, 3) for rank in range(3)]
        assert transport.sent_bytes() == tuple(sent for sent, _ in bytes_)
        assert transport.received_bytes() == tuple(received for _, received in bytes_)


def test_several_requests_at_once():
    transport = LocalTransport(2)
    answers = transport.run(
        [
            one(
                AllReduce(name="s", tensor=torch.ones(2)),
                AllGather(name="g", tensor=torch.tensor([float(rank)]), sizes=(1, 1)),
            )
            for rank in range(2)
        ]
    )
    assert transport.num_rounds == 1
    assert [answer.tolist() for answer in answers[1]] == [[2, 2], [0, 1]]


@pytest.mark.parametrize(
    ("protocols", "kind", "text"),
    [
        (
            lambda: [one(Broadcast(name="a", tensor=four)), one(Broadcast(name="b", tensor=four))],
            ValueError,
            r"rank 0 asks for Broadcast 'a' but rank 1 for Broadcast 'b'",
        ),
        (
            lambda: [one(Broadcast(name="a", tensor=four)), one(AllReduce(name="a", tensor=four))],
            ValueError,
            r"rank 0 asks for Broadcast 'a' but rank 1 for AllReduce 'a'",
        ),
        (
            lambda: [
                one(AllToAll(name="a", tensor=four, send=(2, 2), recv=(2, 1))),
                one(AllToAll(name="a", tensor=four, send=(2, 2), recv=(2, 2))),
            ],
            ValueError,
            r"request 'a': rank 0 expects 1 entries from rank 1, which sends 2",
        ),
        (
            lambda: [one(Broadcast(name="a", tensor=four)), iter_none()],
            CommError,
            r"ranks \[1\] have ended while others wait in request 'a'",
        ),
        (lambda: [iter_none()], ValueError, r"1 protocols given for 2 ranks"),
    ],
)
def test_ranks_out_of_step(protocols, kind, text):
    with pytest.raises(kind, match=text):
        LocalTransport(2).run(protocols())


def iter_none():
    yield from ()


def test_chunks():
    assert chunk_sizes(7, 3) == (3, 2, 2)
    assert chunk_sizes(1, 3) == (1, 0, 0)
    assert chunk_sizes(0, 2) == (0, 0)


def test_combine():
    halves = [torch.tensor([60000.0], dtype=torch.float16)] * 2
    assert combine(halves, "mean").item() == 60000
    assert combine([torch.tensor([6], dtype=torch.uint8), torch.tensor([2]).byte()], "bor") == 6
    many = [torch.tensor([1], dtype=torch.uint8)] * 256
    assert combine(many, "bor").item() == 1  # C01: a sum would wrap to 0
    first = torch.ones(2)
    combine([first, first], "sum")
    assert first.tolist() == [1, 1]


def test_rows_are_checked():
    ids = torch.tensor([1])
    with pytest.raises(TypeError, match=r"indices must be int64, got torch.int32"):
        SparseRows(ids.int(), torch.zeros(1, 2), 3)
    with pytest.raises(TypeError, match=r"values must be fp32, .* got torch.int64"):
        SparseRows(ids, torch.zeros(1, 2).long(), 3)
    with pytest.raises(ValueError, match=r"got \(1,\) and \(2, 2\)"):
        SparseRows(ids, torch.zeros(2, 2), 3)


def test_comm_error_says_what_to_do():
    error = CommError("rank 2 is gone", rank=0, request="a@3.push")
    assert str(error).startswith("rank 2 is gone on rank 0 in request 'a@3.push'; ")
    assert "restart the ranks" in str(error)
