"""The 2D schedule as a drawing, and the lane's log as the same drawing.

Between two batches the lane is held until everything is submitted, in the order in which backward
has it: back blocks first, the table's gradients last. What follows is the order of the schedule.
"""

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from commlib import embrace
from commlib.collectives.requests import AllReduce
from tests.dist.harness import issued, run_ranks

pytestmark = pytest.mark.dist

DRAWING = """
    batch      1                      2                      3
    submitted  L1 E2 B2 B1 B0 P1 D1   L2 E3 B2 B1 B0 P2 D2   L3
    the lane   L1 P1 E2 B0 B1 B2 D1   L2 P2 E3 B0 B1 B2 D2   L3
"""
NUM_BATCHES = 5
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "embrace.md"


def row(label):
    line = next(line for line in DRAWING.splitlines() if line.strip().startswith(label))
    return line.split(label)[1].split()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 4, sparse=True)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, words):
        return self.layers(self.words(words)).pow(2).mean()


class Hold:
    """Keeps the lane's thread busy from when the next batch is asked for until `release`."""

    def __init__(self, lane):
        self.lane = lane
        self.held = threading.Event()
        self.gone = threading.Event()

    def batches(self, rank, num_batches):
        generator = torch.Generator().manual_seed(rank)
        for i in range(num_batches):
            if i > 1:
                self.wait_for({f"schedule@0@{i - 1}.rows0"})
                self.held.clear()
                self.gone.clear()
                self.lane.submit(f"hold{i}", lambda i=i: self.protocol(i), priority=-1)
                assert self.held.wait(20)
            yield torch.randint(100, (12,), generator=generator)

    def protocol(self, i):
        yield AllReduce(name=f"hold{i}", tensor=torch.ones(1))
        self.held.set()
        assert self.gone.wait(20)

    def release(self, step):
        """Let everything go that was submitted, and wait for its end."""
        self.gone.set()
        last = {f"block.layers.{i}@{step}/spread" for i in range(3)}
        if step < NUM_BATCHES - 1:
            last.add(f"schedule@0@{step}.1.grads0.delayed")
        self.wait_for(last)

    def wait_for(self, names):
        deadline = time.monotonic() + 20
        while not names <= {name for name, *_, done in self.lane.log() if done == done}:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def short(name):
    """`schedule@0@3.early` is E3, `block.layers.1@2` is B1."""
    if name.startswith("block."):
        return "B" + name.split("@")[0][-1]
    letter = {"rows0": "L", "early": "E", "prior": "P", "delayed": "D"}[name.split(".")[-1]]
    return letter + name.split("@")[2].split(".")[0]


def log_of_a_run(rank, n):
    torch.manual_seed(0)
    model = embrace.shard(Model(), timeout_s=20.0)
    ddp = DDP(model)
    optimizer = torch.optim.Adagrad(ddp.parameters(), lr=0.1)
    lane = model.words.exchange.rows
    hold = Hold(lane)
    loop = embrace.schedule(
        hold.batches(rank, NUM_BATCHES),
        ddp,
        optimizer,
        ids=lambda batch: {"words": batch},
        block_bytes=1,
    )
    for step, words in enumerate(loop):
        ddp(words).backward()
        time.sleep(0.2)  # early rows are submitted by the lane of ids
        hold.release(step)
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name in issued(lane) if name.startswith(("schedule@", "block."))]
    embrace.close(model)
    return [short(name) for name in names]


def test_the_lane_is_the_drawing():
    logs = run_ranks(2, log_of_a_run)
    assert logs[0] == logs[1]
    expected = row("the lane")
    assert sorted(row("submitted")) == sorted(expected)
    start = logs[0].index("L1")
    assert logs[0][start : start + len(expected)] == expected


def test_the_guide_has_the_drawing():
    assert DRAWING.strip("\n").rstrip() in GUIDE.read_text()
