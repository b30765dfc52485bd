"""What a state leaves behind and tells: statistics, traces, copies, threads, groups."""

import copy
import json
import os
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commlib
from tests.dist.harness import issued, run_ranks, same_everywhere, threads
from tests.dist.models import D, Hidden, V, Words, batches, counts, train

pytestmark = pytest.mark.dist


def num_fds():
    return len(os.listdir("/proc/self/fd"))


def num_threads():
    return len(os.listdir("/proc/self/task"))


def open_and_close(rank, n):
    ddp = DDP(Words())
    train(ddp, rank, steps=1)
    before = None
    for _ in range(4):
        state = commlib.ddp.State(ddp, "minimal")
        state.announcer.close()
        state.close()
        del state
        torch.distributed.barrier()
        if before is None:  # what the first one loads stays
            before = num_fds(), num_threads()
    assert num_fds() <= before[0]
    assert num_threads() <= before[1]
    for _ in range(3):  # states in use, one after another, each on a DDP of its own
        ddp = DDP(Words())
        state = commlib.ddp.register(ddp, "minimal")
        train(ddp, rank, steps=2)
        state.close()
        assert all(same_everywhere(p) for p in ddp.parameters())
    assert threads() == []
    assert not any(module._forward_hooks for module in ddp.modules())


@pytest.mark.parametrize("n", [1, 2, 3])
def test_close_leaves_nothing(n):
    run_ranks(n, open_and_close)


def two_at_once(rank, n):
    a, b = DDP(Words()), DDP(Words())
    states = [commlib.ddp.register(ddp, "minimal") for ddp in (a, b)]
    for ids in batches(rank, 3):
        a.zero_grad()
        b.zero_grad()
        (a(ids) + b(ids)).backward()
        for p in (*a.parameters(), *b.parameters()):
            assert p.grad is not None and same_everywhere(p.grad)
    for state in states:
        assert counts(state, "words.weight") == ["minimal"] * 3
        state.close()


def test_two_ddp_instances_at_once():
    run_ranks(2, two_at_once)


def plain_form(rank, n):
    ddp = DDP(Words())
    state = commlib.ddp.State(ddp)
    ddp.register_comm_hook(state, commlib.ddp.hook)
    train(ddp, rank, steps=2)
    assert all(same_everywhere(p) for p in ddp.parameters())
    assert len(counts(state, "words.weight")) == 2


def test_plain_form():
    run_ranks(2, plain_form)


def noop(rank, n):
    ddp = DDP(Words())
    state = commlib.ddp.register(ddp, "noop")
    ids = next(batches(rank, 1))
    lone = copy.deepcopy(ddp.module)
    lone(ids).backward()
    ddp(ids).backward()
    assert torch.equal(ddp.module.words.weight.grad, lone.words.weight.grad)
    assert counts(state, "words.weight") == ["noop"]
    assert state.stats()[0]["bytes_sent"] == 0


def test_noop():
    run_ranks(2, noop)


def statistics(rank, n, folder):
    ddp = DDP(Words())
    state = commlib.ddp.register(ddp, "minimal", trace=f"{folder}/trace.json")
    for ids in batches(rank, 3):
        ddp(ids).backward()
        ddp.zero_grad()
    records = [r for r in state.stats() if r["parameter"] == "words.weight"]
    assert [r["step"] for r in records] == [0, 1, 2]
    every = [torch.zeros(50) for _ in range(n)]
    for step, ids in enumerate(batches(rank, 3)):
        mine = torch.zeros(50).index_fill_(0, ids.flatten(), 1.0)
        torch.distributed.all_gather(every, mine)
        s = sum(float(e.sum()) for e in every) / n
        u = int((sum(every) > 0).sum())
        record = records[step]
        assert record["density"] == pytest.approx(float(mine.sum()) / 50)
        assert record["union_density"] == pytest.approx(u / 50)
        assert record["gamma"] == pytest.approx(u / s)
        assert record["bound_bytes"] == pytest.approx(D * 4 * (s + u * (n - 2) / n))
        assert record["bytes_over_bound"] == pytest.approx(
            max(record["bytes_sent"], record["bytes_received"]) / record["bound_bytes"]
        )
        assert record["omega"] == 0 and record["index_s"] > 0 and record["exchange_s"] > 0
        assert all(record[k] >= 0 for k in ("scan_s", "decode_s", "wait_s"))
    json.dumps(state.stats())
    # H5: a table's step is one announcement, one push, one pull; a dense bucket is one allreduce.
    assert issued(state.lanes.index).count("words.weight@1.announce") == 1
    step_1 = [name for name in issued(state.lanes.data) if name.startswith("words.weight@1")]
    assert step_1 == [f"words.weight@1.{what}" for what in ("push", "spread", "pull")]
    dense = [r for r in state.stats() if r["parameter"].startswith("bucket")]
    log = issued(state.lanes.dense)
    assert len(log) == len(dense) and all(name.startswith("bucket") for name in log)
    state.clear_stats()
    assert state.stats() == []
    ddp(next(batches(rank, 1))).backward()
    state.close()
    name = "trace.json" if rank == 0 else f"trace-rank{rank}.json"
    with open(f"{folder}/{name}") as file:
        trace = json.load(file)
    assert trace["traceEvents"]
    for event in trace["traceEvents"]:
        assert event["ph"] == "X" and event["dur"] > 0 and event["pid"] == rank
        assert {"name", "ts", "tid", "args"} <= set(event)


@pytest.mark.parametrize("n", [2, 3])
def test_stats_and_trace(n, tmp_path):
    run_ranks(n, statistics, str(tmp_path))


def pickles(rank, n):
    ddp = DDP(Words())
    state = commlib.ddp.register(ddp, commlib.S2(ratio=0.5))
    train(ddp, rank, steps=2)
    twin = pickle.loads(pickle.dumps(state))
    again = pickle.loads(pickle.dumps(twin))
    fresh = commlib.ddp.register(DDP(Words()), commlib.S2(ratio=0.5))
    fresh.load_state_dict(again.state_dict())
    mine = state.reducer_states["words.weight"]
    assert torch.equal(fresh.reducer_states["words.weight"].residual, mine.residual)
    assert fresh.reducer_states["words.weight"].step == 2
    for copied in (twin, copy.deepcopy(state)):
        with pytest.raises(ValueError, match="closed"):
            copied.reduce(None)
        copied.close()
    # Whole models are copied (moving averages) and pickled while a hook watches them.
    for model in (copy.deepcopy(ddp.module), pickle.loads(pickle.dumps(ddp.module))):
        before = len(state.announcer._lookups["words.weight"].ids)
        model(next(batches(rank, 1)))
        assert len(state.announcer._lookups["words.weight"].ids) == before
    train(ddp, rank, steps=1)
    assert all(same_everywhere(p) for p in ddp.parameters())


def test_pickled_and_copied():
    run_ranks(2, pickles)


def watched(rank, n):
    """A watch that was saved loads with and without a watch on the other side."""
    texts = []
    for steps in (1, 5):
        ddp = DDP(Hidden())
        state = commlib.ddp.register(ddp, "minimal")
        train(ddp, rank, steps=steps)
        saved = state.state_dict()
        same = DDP(Hidden())
        again = commlib.ddp.register(same, "minimal")
        again.load_state_dict(saved)
        train(same, rank, steps=4)
        want = 4 if steps == 5 else 2  # steps 2 and 3 measure, then rows go
        assert len(counts(again, "table")) == want
        other = DDP(Hidden())
        without = commlib.ddp.register(other, "minimal", find_sparse=False)
        try:
            without.load_state_dict(saved)
        except ValueError as error:
            texts.append(str(error))
        train(other, rank, steps=2)
    return texts


def test_density_watch_in_checkpoints():
    (text,) = run_ranks(2, watched)[0]
    assert "table" in text


class Shared(nn.Module):
    """A sparse gradient of a parameter that is not an embedding's alone."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(V, D, sparse=True)
        self.other = nn.Module()
        self.other.table = self.words.weight

    def forward(self, ids):
        more = nn.functional.embedding((ids + 1) % V, self.other.table, sparse=True)
        return (self.words(ids) + more).square().mean()


def shared(rank, n):
    ddp = DDP(Shared())
    state = commlib.ddp.register(ddp, commlib.S2(ratio=0.5))
    train(ddp, rank, steps=2)
    assert counts(state, "words.weight") == ["sketch"] * 2
    fresh = commlib.ddp.register(DDP(Shared()), commlib.S2(ratio=0.5))
    fresh.load_state_dict(state.state_dict())
    assert torch.equal(
        fresh.reducer_states["words.weight"].residual,
        state.reducer_states["words.weight"].residual,
    )


def test_a_sparse_table_with_another_owner():
    run_ranks(2, shared)


def frozen_and_mixed(rank, n):
    model = Words()
    model.kinds.weight.requires_grad_(False)
    model.linear.double()
    ddp = DDP(nn.Sequential(model.words, nn.Flatten(1), nn.Linear(5 * D, 2, bias=False)))
    state = commlib.ddp.register(ddp)
    train_ids = next(batches(rank, 1))
    ddp(train_ids).sum().backward()
    assert all(same_everywhere(p.grad) for p in ddp.parameters())
    assert "0.weight" in state.tables


def test_frozen_parameters():
    run_ranks(2, frozen_and_mixed)


def lanes_off_the_training_thread(rank, n):
    ddp = DDP(Words())
    commlib.ddp.register(ddp, "minimal")
    train(ddp, rank, steps=1)
    assert sorted(threads()) == ["commlib.data", "commlib.dense", "commlib.index"]
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("commlib"))


def test_one_thread_a_lane():
    run_ranks(2, lanes_off_the_training_thread)
