"""A worker of an elastic job: loses a peer, gains one, and writes a line a step of what it saw."""

import json
import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import commlib
from commlib.schedule.lane import close_open_lanes
from tests.hvd.models import batches, build, ours, same_everywhere, weights

STEPS = 22


def residuals(optimizer):
    """Sum of the residuals' absolute values, by table."""
    states = optimizer.commlib.reducer_states
    return {n: float(s.residual.abs().sum()) for n, s in states.items() if s.residual is not None}


def act(folder, what, step):
    """What happens to the job while it has two workers: one dies, or one leaves and one joins."""
    if what == f"rank {hvd.rank()} dies" and step == 6 and hvd.size() == 2:
        os._exit(1)
    if what == "leave" and step == 4 and hvd.size() == 2 and hvd.rank() == 0:
        (folder / "hosts").write_text("localhost:1\n")
    if what == "leave" and step == 12 and hvd.size() == 1:
        (folder / "hosts").write_text("localhost:1\n127.0.0.1:1\n")


def main():
    folder, what, reducer = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    hvd.init()
    chosen = commlib.S2(ratio=0.3) if reducer == "S2" else None
    model, optimizer = build(ours, lambda p: torch.optim.SGD(p, lr=0.1), reducer=chosen)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    name = f"{os.environ['HOROVOD_HOSTNAME']}-{os.getpid()}"

    @hvd.elastic.run
    def train(state):
        while state.step < STEPS:
            act(folder, what, state.step)
            ids = batches(STEPS)[state.step]
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()
            same = same_everywhere(weights(model))
            line = {
                "worker": name,
                "step": state.step,
                "rank": hvd.rank(),
                "size": hvd.size(),
                "same": same,
                "records": len(optimizer.commlib.stats()),
                "residuals": residuals(optimizer),
                "tables": sorted(optimizer.commlib.layouts),
                "finite": bool(weights(model).isfinite().all()),
            }
            with (folder / f"log-{name}").open("a") as log:
                log.write(json.dumps(line) + "\n")
            state.step += 1
            time.sleep(0.3)  # the launcher looks for hosts once a second
            state.commit()

    train(state)
    close_open_lanes()


if __name__ == "__main__":
    main()
