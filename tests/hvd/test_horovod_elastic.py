"""`hvd.elastic.run`: a worker dies, leaves or joins, and training goes on."""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.hvd.harness import environment, launcher, run_command

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]


# The launcher keeps hosts in a set: its hash seed says which of the two gets rank 0.
SEEDS = {"localhost": "0", "127.0.0.1": "4"}


def run_elastic(what, reducer, first):
    """Logs of the workers, by host, in the order of their first step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hosts").write_text("localhost:1\n127.0.0.1:1\n")
        discover = folder / "discover"
        discover.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        discover.chmod(0o755)
        scale = ["-np", "2", "--min-np", "1", "--max-np", "2"]
        hosts = ["--host-discovery-script", str(discover), "--gloo"]
        worker = [sys.executable, "-m", "tests.hvd.elastic_worker", name, what, reducer]
        env = environment({"PYTHONHASHSEED": SEEDS[first]})
        output = run_command([launcher(), *scale, *hosts, *worker], env, 120.0)
        logs = [
            [json.loads(line) for line in log.read_text().splitlines()]
            for log in folder.glob("log-*")
        ]
    assert logs, output
    by_host = {}
    for log in sorted(logs, key=lambda log: log[0]["step"]):
        for line in log:
            assert line["same"] and line["finite"], line
            assert line["tables"] == ["kinds.weight", "words.weight"], line
        by_host.setdefault(log[0]["worker"].rpartition("-")[0], []).append(log)
    assert sorted(by_host) == ["127.0.0.1", "localhost"], output
    assert by_host[first][0][0]["rank"] == 0, "no longer the seed for this order"
    return by_host


@pytest.mark.parametrize("first", SEEDS)
def test_a_worker_leaves_and_another_joins(first):
    """Agreed state is rank 0's; the residual of a worker that stayed is not lost."""
    by_host = run_elastic("leave", "S2", first)
    (stayed,) = by_host["localhost"]
    left, joined = by_host["127.0.0.1"]
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


@pytest.mark.parametrize("what", ["rank 0 dies", "rank 1 dies"])
def test_a_worker_dies(what):
    """The step that was lost is taken again from the last commit, by who is left."""
    by_host = run_elastic(what, "exact", "localhost")
    (died,), (stayed,) = sorted(by_host.values(), key=lambda logs: len(logs[0]))
    assert died[0]["rank"] == int(what.split()[1])
    assert [line["step"] for line in died] == list(range(6))
    assert [line["step"] for line in stayed] == list(range(22))
    assert [line["size"] for line in stayed] == [2] * 6 + [1] * 16
