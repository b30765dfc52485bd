"""Mistakes with partitioned tables: named where they are made, known everywhere, never a hang."""

import time

import pytest
import torch
from torch import nn

from commlib import embrace
from commlib.errors import CommError
from tests.dist.harness import Died, run_ranks

pytestmark = pytest.mark.dist

V = 10


def tables(**options):
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(V, 6), "tags": nn.EmbeddingBag(V, 2)})
    return embrace.shard(model, **{"timeout_s": 30, **options})


def looks_up(ask, guilty, rank, kind, message):
    """`ask` fails with its own error on the guilty rank, and with a CommError elsewhere."""
    start = time.monotonic()
    if rank == guilty:
        with pytest.raises(kind, match=message):
            ask()
    else:
        with pytest.raises(CommError, match=rf"rank {guilty} gave ids that are none of table") as e:
            ask()
        assert e.value.rank == rank and "@" in e.value.request
    assert time.monotonic() - start < 20


BAD = {
    "negative": (torch.tensor([[3, -1]]), IndexError, "id -1 is outside table 'words'"),
    "too large": (torch.tensor([V, 2]), IndexError, f"id {V} is outside table 'words', .*0 to 9"),
    "float": (torch.tensor([1.0]), TypeError, r"ids of table 'words' are torch\.float32"),
    "list": ([1, 2], TypeError, "are list, not a tensor"),
}


def bad_ids(rank, n):
    model = tables()
    good = torch.tensor([1, 2])
    expected = model["words"](good)
    for guilty in range(n):
        for ids, kind, message in BAD.values():
            mine = ids if rank == guilty else good
            looks_up(lambda mine=mine: model["words"](mine), guilty, rank, kind, message)
            assert torch.equal(model["words"](good), expected)  # the lanes are as they were

    def together():
        return embrace.lookup(
            {model["words"]: good, model["tags"]: torch.tensor([[-7 if rank == 1 else 7]])}
        )

    if n > 1:
        looks_up(together, 1, rank, IndexError, "id -7 is outside table 'tags'")
    out = model["words"](good)
    out.sum().backward()
    assert model["words"].local_weight.grad is not None


@pytest.mark.parametrize("n", [1, 3])
def test_c35_bad_ids(n):
    run_ranks(n, bad_ids)


def all_wrong(rank, n):
    model = tables()
    with pytest.raises(IndexError, match=f"id {V + rank} is outside"):
        model["words"](torch.tensor([V + rank]))
    model["words"](torch.tensor([rank]))


def test_every_rank_hears_of_its_own_mistake():
    run_ranks(3, all_wrong)


# Out of step


def other_table(rank, n):
    model = tables(timeout_s=4)
    model["words" if rank == 0 else "tags"](torch.tensor([[1]]))


def absent(rank, n):
    model = tables(timeout_s=4)
    if rank != 1:
        model["words"](torch.tensor([1]))
    else:
        time.sleep(12)


def dies(rank, n):
    model = tables()
    model["words"](torch.tensor([1]))
    if rank == 1:
        raise RuntimeError("out of memory, say")
    model["words"](torch.tensor([1])).sum().backward()


@pytest.mark.parametrize("body", [other_table, absent, dies])
def test_ranks_out_of_step_end_with_an_error(body):
    ends = run_ranks(3, body, may_fail=True, timeout_s=50)
    for rank, end in enumerate(ends):
        if rank != 1 or body is other_table:
            assert isinstance(end, Died) and end.kind == "CommError", end
            assert end.seconds < 30
            assert "words@" in end.text or "tags@" in end.text


# At shard


def refusals(rank, n):
    def refuse(kind, message, model=None, **options):
        with pytest.raises(kind, match=message):
            embrace.shard(model or nn.Sequential(nn.Embedding(V, 4)), timeout_s=30, **options)

    refuse(ValueError, "op = 'max' must be", op="max")
    refuse(ValueError, "wire = 'int8' must be", wire="int8")
    with pytest.raises(ValueError, match="timeout_s = -1 must be"):
        embrace.shard(nn.Embedding(3, 3), timeout_s=-1)
    refuse(TypeError, "model = list must be", model=[1])
    refuse(ValueError, "has no nn.Embedding", model=nn.Linear(2, 2))
    refuse(ValueError, "min_bytes = 1000000", min_bytes=10**6)
    refuse(ValueError, "max_norm = 1.0: renormalising", model=nn.Embedding(V, 4, max_norm=1.0))
    refuse(TypeError, "complex64; it must be", model=nn.Embedding(V, 4, dtype=torch.complex64))

    tied = nn.ModuleDict({"words": nn.Embedding(V, 4), "out": nn.Linear(4, V, bias=False)})
    tied["out"].weight = tied["words"].weight
    refuse(ValueError, r"'words' is tied, it is words.weight and out.weight.*filter", model=tied)
    tied["more"] = nn.Embedding(V, 4)
    embrace.shard(tied, filter=lambda name, module: name != "words", timeout_s=30)
    assert type(tied["words"]) is nn.Embedding

    hooked = nn.Embedding(V, 4)
    hooked.register_forward_hook(lambda *args: None)
    refuse(ValueError, r"has hooks \(_forward_hooks\)", model=hooked)
    wrapped = nn.parallel.DistributedDataParallel(nn.Embedding(V, 4))
    refuse(ValueError, "shard it first, then wrap it", model=wrapped)

    with pytest.raises(ValueError, match="mode = 'min'"):
        embrace.ShardedEmbeddingBag(V, 4, mode="min")
    with pytest.raises(ValueError, match="padding_idx = 10 must be a row"):
        embrace.ShardedEmbedding(V, 4, padding_idx=V)
    with pytest.raises(ValueError, match="both must be at least 1"):
        embrace.ShardedEmbedding(0, 4)
    with pytest.raises(ValueError, match="no tables"):
        embrace.lookup({})
    with pytest.raises(TypeError, match="Embedding is no partitioned table"):
        embrace.lookup({nn.Embedding(2, 2): torch.tensor([1])})
    one, two = tables(), tables()
    with pytest.raises(ValueError, match="do not share an exchange"):
        embrace.lookup({one["words"]: torch.tensor([1]), two["tags"]: torch.tensor([[1]])})


def test_refusals():
    run_ranks(2, refusals)


def differ(rank, n):
    def refuse(message, model, **options):
        with pytest.raises(ValueError, match=message):
            embrace.shard(model, timeout_s=30, **options)

    refuse("table '0' must be the same.*differs", nn.Sequential(nn.Embedding(V, 4 + rank)))
    refuse(r"table '0'.*sparse=True", nn.Sequential(nn.Embedding(V, 4, sparse=rank == 1)))
    refuse("table '1' .*absent", nn.Sequential(nn.Embedding(V, 4), *_more(rank)))
    refuse("wire must be the same", nn.Embedding(V, 4), wire="bf16" if rank else None)
    # One rank's own mistake is known everywhere.
    start = time.monotonic()
    refuse(
        "min" if rank else "rank 1 of the group refused",
        nn.Embedding(V, 4),
        min_bytes=10**9 if rank == 1 else 0,
    )

    def broken_filter(name, module):
        if rank == 1:
            raise KeyError("oops")
        return True

    with pytest.raises(KeyError if rank == 1 else ValueError, match="oops"):
        embrace.shard(nn.Embedding(V, 4), filter=broken_filter, timeout_s=30)
    assert time.monotonic() - start < 20
    embrace.shard(nn.Embedding(V, 4), timeout_s=30)


def _more(rank):
    return [nn.Embedding(V, 4)] if rank else []


def test_models_that_differ():
    run_ranks(2, differ)
