"""`hvd.elastic.run`: a worker dies, leaves or joins, and training goes on."""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.hvd.harness import environment, launcher, run_command

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]


def run_elastic(what, reducer):
    """Logs of the workers, by worker, in the order in which they came."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hosts").write_text("localhost:1\n127.0.0.1:1\n")
        discover = folder / "discover"
        discover.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        discover.chmod(0o755)
        scale = ["-np", "2", "--min-np", "1", "--max-np", "2"]
        hosts = ["--host-discovery-script", str(discover), "--gloo"]
        worker = [sys.executable, "-m", "tests.hvd.elastic_worker", name, what, reducer]
        output = run_command([launcher(), *scale, *hosts, *worker], environment(), 120.0)
        logs = sorted(folder.glob("log-*"), key=lambda path: path.stat().st_ctime)
        lines = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    assert lines, output
    for log in lines:
        for line in log:
            assert line["same"] and line["finite"], line
            assert line["tables"] == ["kinds.weight", "words.weight"], line
    by_worker = {log[0]["worker"].rpartition("-")[0]: [] for log in lines}
    for log in lines:
        by_worker[log[0]["worker"].rpartition("-")[0]].append(log)
    assert len(by_worker["localhost"]) == 1, output  # it was there all the time
    return by_worker["localhost"][0], sorted(by_worker["127.0.0.1"], key=lambda log: log[0]["step"])


def test_a_worker_leaves_and_another_joins():
    """Agreed state is rank 0's; the residual of a worker that stayed is not lost."""
    stayed, (left, joined) = run_elastic("leave", "S2")
    assert [line["step"] for line in stayed] == list(range(22))
    sizes = [line["size"] for line in stayed]
    assert sizes[0] == 2 and sizes[-1] == 2 and 1 in sizes
    alone = sizes.index(1)
    for name, residual in stayed[alone]["residuals"].items():
        assert residual > 0.5 * stayed[alone - 1]["residuals"][name] > 0
    assert left[0]["step"] == 0 and left[-1]["step"] == alone - 1
    assert joined[0]["step"] > alone and joined[-1]["step"] == 21
    before = stayed[joined[0]["step"] - 1]["residuals"]
    for name, residual in joined[0]["residuals"].items():
        assert 0 < residual < before[name]  # it began without one


def test_a_worker_dies():
    """The step that was lost is taken again from the last commit, by who is left."""
    stayed, (died,) = run_elastic("die", "exact")
    assert died[-1]["step"] == 5
    assert [line["step"] for line in stayed] == list(range(22))
    assert [line["size"] for line in stayed] == [2] * 6 + [1] * 16
