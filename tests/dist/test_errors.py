"""Callers' mistakes and broken worlds: a message that names what and where, and never a hang."""

import os
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commlib
from commlib import S2
from tests.dist.harness import Died, run_ranks
from tests.dist.models import D, V, Words, batches, train

pytestmark = pytest.mark.dist


def message(call, *args, **options):
    try:
        call(*args, **options)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def mistakes(rank, n):
    ddp = DDP(Words())
    register = commlib.ddp.register
    return [
        message(register, Words()),
        message(register, ddp, "powersgd"),
        message(register, ddp, 0.25),
        message(register, ddp, tables=["word.weight"]),
        message(register, ddp, tables=["linear.bias"]),
        message(register, ddp, dense="int8"),
        message(register, ddp, link=3.0),
        message(register, ddp, timeout_s=0),
        message(register, ddp, timeout_s="soon"),
        message(register, ddp, trace="/nowhere/at/all.json"),
        message(register, ddp, find_sparse="no"),
        message(register, ddp, tables=[ddp.module.words.weight]),
        message(register, ddp, timeout_s=1e15),
        message(register, ddp, timeout_s=True),
        message(register, ddp, trace=os.getcwd()),
        message(register, ddp, trace=5),
        message(register, ddp, colour="red"),
        message(register, ddp, "exact"),
        twice(ddp),
    ]


def twice(ddp):
    state = commlib.ddp.register(ddp, "minimal")
    text = message(commlib.ddp.register, ddp)
    state.close()
    return text


def test_mistakes_name_the_value_and_the_remedy():
    for texts in run_ranks(2, mistakes):
        assert texts[0] == (
            "TypeError: ddp = Words must be a DistributedDataParallel: wrap the model first"
        )
        assert "ValueError: reducer = 'powersgd' must be one of" in texts[1]
        assert "TypeError: reducer = 0.25 must be a name" in texts[2]
        assert "S2(ratio=0.25)" in texts[2]
        assert "'word.weight', which is no parameter" in texts[3]
        assert "words.weight" in texts[3]
        assert "'linear.bias' of shape (3,): a table needs rows" in texts[4]
        assert "dense = 'int8' must be 'fp16', 'bf16' or None" in texts[5]
        assert "link = 3.0 must be a commlib.topology.Link" in texts[6]
        assert "timeout_s = 0 must be a number of seconds > 0" in texts[7]
        assert "timeout_s = 'soon' must be a number of seconds > 0" in texts[8]
        assert "trace = '/nowhere/at/all.json': the folder does not exist" in texts[9]
        assert "find_sparse = 'no' must be True or False" in texts[10]
        assert "TypeError: tables holds Parameter: give parameters by name" in texts[11]
        assert "timeout_s = 1000000000000000.0 must be" in texts[12]
        assert "timeout_s = True must be" in texts[13]
        assert "is a folder" in texts[14]
        assert "trace = 5 must be the path of a file" in texts[15]
        assert "register() has no option ['colour']" in texts[16]
        assert "'auto' is exact" in texts[17]
        assert "has a communication hook already" in texts[18]


def test_no_process_group():
    with pytest.raises(ValueError, match="call torch.distributed.init_process_group before"):
        commlib.ddp.State(nn.Linear(1, 1))


def unlike(rank, n):
    """Each pair differs between the ranks in one thing; both ranks must be told."""
    ddp = DDP(Words())
    other = DDP(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Embedding(3, 2)}))
    other.module.b.weight.requires_grad_(rank == 0)
    register = commlib.ddp.register
    first = rank == 0
    return [
        message(register, ddp, S2(ratio=0.5 if first else 0.25)),
        message(register, ddp, "minimal" if first else "balanced"),
        message(register, ddp, tables=["linear.weight"] if first else []),
        message(register, ddp, dense="fp16" if first else None),
        message(register, ddp, timeout_s=10.0 + rank),
        message(register, other),
        # A mistake on one rank only must reach the other one too, not leave it waiting.
        message(register, ddp, tables=["nothing"] if first else []),
        message(register, ddp, dense="int8" if first else None),
        message(register, ddp, trace="/nowhere/at/all.json" if first else None),
        message(register, ddp, "powersgd" if first else None),
        message(register, ddp, tables=[5] if first else []),
    ]


def test_ranks_that_differ_are_all_told():
    for rank, texts in enumerate(run_ranks(2, unlike, timeout_s=40.0)):
        for text, what in zip(
            texts[:6],
            ("reducer", "reducer", "tables", "dense", "timeout_s", "parameter 'b.weight'"),
            strict=True,
        ):
            assert (
                f"{what} must be the same on every rank" in text or what == "parameter 'b.weight'"
            )
            assert "ranks [0]: " in text and "ranks [1]: " in text
        for text, what in zip(
            texts[6:], ("nothing", "int8", "/nowhere/at/all.json", "powersgd", "int"), strict=True
        ):
            assert what in text, (rank, text)
            if rank == 1:
                assert "rank 0" in text


def wrong_dtype(rank, n):
    ddp = DDP(nn.ParameterDict({"a": nn.Parameter(torch.zeros(4, 2, dtype=torch.complex64))}))
    return message(commlib.ddp.register, ddp, tables=["a"])


def test_a_table_of_a_dtype_without_kernels():
    for text in run_ranks(2, wrong_dtype):
        assert "TypeError: tables names 'a' of torch.complex64" in text


def dies(rank, n, hook):
    ddp = DDP(Words())
    commlib.ddp.register(ddp, hook, timeout_s=20.0)
    for step, ids in enumerate(batches(rank, 5)):
        if step == 2 and rank == n - 1:
            os._exit(1)
        ddp.zero_grad()
        ddp(ids).backward()


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("reducer", ["minimal", "union"])
def test_a_dead_rank_is_named(n, reducer):
    results = run_ranks(n, dies, reducer, may_fail=True)
    assert results[-1].kind == "gone"
    for result in results[:-1]:
        assert isinstance(result, Died) and result.kind == "RuntimeError"
        assert f"rank {n - 1} is gone" in result.text, result.text
        assert "restart the ranks" in result.text
        assert result.seconds < 25


@pytest.mark.parametrize("n", [2, 3])
def test_the_rank_that_hosts_the_store_dies(n):
    results = run_ranks(n, dies_first, may_fail=True, store_in_rank_0=True)
    for result in results[1:]:
        assert isinstance(result, Died) and result.kind == "RuntimeError"
        assert "in request '" in result.text
        assert result.seconds < 30


def dies_first(rank, n):
    ddp = DDP(Words())
    commlib.ddp.register(ddp, "minimal", timeout_s=15.0)
    for step, ids in enumerate(batches(rank, 5)):
        if step == 2 and rank == 0:
            os._exit(1)
        ddp.zero_grad()
        ddp(ids).backward()


def never_comes(rank, n):
    ddp = DDP(Words())
    commlib.ddp.register(ddp, "minimal", timeout_s=3.0)
    train(ddp, rank, steps=2)
    if rank == n - 1:
        time.sleep(9)
        return
    train(ddp, rank, steps=1)


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_that_never_comes(n):
    results = run_ranks(n, never_comes, may_fail=True)
    assert results[-1] is None
    for result in results[:-1]:
        assert isinstance(result, Died)
        assert f"rank {n - 1}" in result.text and "has not submitted" in result.text
        assert "in request '" in result.text
        assert result.seconds < 9 + 5


def closed(rank, n):
    ddp = DDP(Words())
    state = commlib.ddp.register(ddp)
    train(ddp, rank, steps=1)
    state.close()
    state.close()
    try:
        train(ddp, rank, steps=1)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def test_a_closed_state():
    for text in run_ranks(2, closed):
        assert "this commlib state is closed: register a new one on a new DDP" in text


def raises_in_training(rank, n):
    ddp = DDP(Words())
    commlib.ddp.register(ddp, timeout_s=4.0)
    for step, ids in enumerate(batches(rank, 3)):
        if step == 1 and rank == 0:
            raise KeyError("the user's own mistake")
        ddp.zero_grad()
        ddp(ids).backward()


def test_an_exception_of_the_user_on_one_rank():
    results = run_ranks(2, raises_in_training, may_fail=True)
    assert results[0].kind == "KeyError"
    assert results[1].kind == "RuntimeError"
    assert results[1].seconds < 15


def ids_out_of_range(rank, n):
    ddp = DDP(nn.Embedding(V, D))
    commlib.ddp.register(ddp, timeout_s=5.0)
    ddp(torch.tensor([V])).sum().backward()


def test_ids_out_of_range_are_torchs_own_error():
    for result in run_ranks(2, ids_out_of_range, may_fail=True):
        assert result.kind == "IndexError"
