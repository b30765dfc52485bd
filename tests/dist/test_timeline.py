"""The timeline: what ranks computed and carried, as a Chrome trace and as a picture."""

import json

import pytest
import torch

from commlib.collectives.requests import AllToAll, ask
from commlib.schedule import Timeline, open_lane
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.dist


def record(rank, n, folder):
    lane = open_lane("test", list(range(n)), 20.0, slice_bytes=400)
    timeline = Timeline(rank)
    sizes = (100,) * n
    tensor = torch.ones(100 * n)
    lane.run("before", ask(AllToAll(name="before", tensor=tensor, send=sizes, recv=sizes)))
    with timeline.span("forward"):
        name = "schedule@0@1.rows0"
        lane.run(name, ask(AllToAll(name=name, tensor=tensor, send=sizes, recv=sizes)))
        since = min(entry[6] for entry in lane.log() if entry[0] == name)
    timeline.take(lane, since)
    timeline.gather()
    lane.close()
    if rank == 0:
        timeline.save(folder / "trace.json")
        timeline.plot(folder / "trace.png", title="two ranks")
    return len(timeline.spans)


def test_trace_and_picture(tmp_path):
    counts = run_ranks(2, record, tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == counts[0] == 2 * counts[1]
    assert {(e["pid"], e["tid"]) for e in events} == {
        (rank, lane) for rank in (0, 1) for lane in ("compute", "test")
    }
    assert all(e["dur"] >= 0 and e["args"]["waited_s"] >= 0 for e in events)
    slices = [e for e in events if e["cat"] == "rows" and e["pid"] == 0]
    assert len(slices) == 1
    assert sum(e["args"]["bytes_sent"] for e in slices) == 400
    forward = next(e for e in events if e["name"] == "forward" and e["pid"] == 0)
    assert forward["ts"] <= slices[0]["ts"] <= forward["ts"] + forward["dur"]
    assert (tmp_path / "trace.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="timeline is empty"):
        Timeline(0).plot(tmp_path / "x.png")
