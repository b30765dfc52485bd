"""Horovod in the benches: who sits where, what is sent, and what happens where it is missing."""

import importlib.util
import json
from types import SimpleNamespace

import pytest

from bench import breakdown, horovod_peer, horovod_ranks, sparse_allreduce, train
from bench.methods import METHODS

INSTALLED = horovod_ranks.why_not() is None


@pytest.mark.parametrize(
    ("local_ranks", "hosts"),
    [
        ([0, 1, 2, 3], "host0:4"),
        ([0, 0, 0, 0], "host0:1,host1:1,host2:1,host3:1"),
        ([0, 1, 0, 0, 1, 2], "host0:2,host1:1,host2:3"),
    ],
)
@pytest.mark.skipif(not INSTALLED, reason="Horovod's own plan is needed")
def test_places_are_those_of_horovod(local_ranks, hosts):
    theirs = pytest.importorskip("horovod.runner.common.util.hosts")
    plan = theirs.get_host_assignments(theirs.parse_hosts(hosts), len(local_ranks))
    assert [vars(slot) for slot in horovod_ranks.place(local_ranks)] == [vars(s) for s in plan]


def test_on_hosts_of_their_own_ranks_are_alone():
    for rank, slot in enumerate(horovod_ranks.place([0, 0, 0])):
        assert (slot.rank, slot.local_rank, slot.cross_rank) == (rank, 0, rank)
        assert (slot.size, slot.local_size, slot.cross_size) == (3, 1, 3)
    assert horovod_ranks.place([0, 0, 0])[2].environment() == {
        "HOROVOD_HOSTNAME": "host2",
        "HOROVOD_RANK": "2",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_CROSS_RANK": "2",
        "HOROVOD_SIZE": "3",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_SIZE": "3",
    }


@pytest.mark.parametrize("local_ranks", [[1], [0, 2], [0, 1, 1], [0, -1]])
def test_local_ranks_that_do_not_count_up_are_refused(local_ranks):
    with pytest.raises(ValueError, match="do not count up"):
        horovod_ranks.place(local_ranks)


def test_sparse_bytes_count_every_lookup():
    assert horovod_peer.gathered_bytes(4, 100, 256 * 4) == 3 * 100 * (1024 + 8)
    assert horovod_peer.gathered_bytes(1, 100, 256 * 4) == 0


def test_without_horovod_the_command_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    horovod_ranks.require(["exact", "ddp"])
    with pytest.raises(SystemExit, match=r"horovod-exact: .*commlib install-horovod"):
        train.parse(["--methods", "exact,horovod-exact"])


def test_other_methods_leave_horovod_alone(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with horovod_ranks.joined(["exact", "ddp"]):
        pass
    assert not horovod_ranks.wanted(sparse_allreduce.ALL)
    assert len(horovod_ranks.wanted(METHODS)) == 5


def test_what_the_profiler_does_not_see_is_no_number():
    parts = breakdown.split(0.1, 0.04, None, None)
    assert (parts.exposed_s, parts.hidden_s, parts.busy_s) == (pytest.approx(0.06), None, None)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="Horovod is not installed")
def test_losses_are_those_of_ddp(tmp_path):
    methods = ["ddp-sparse", "horovod-sparse", "horovod-exact", "horovod-embrace"]
    small = {"max_vocab": 500, "max_tokens": 50_000, "dim": 8, "hidden": 8, "negatives": 32}
    settings = [part for pair in small.items() for part in ("--set", "{}={}".format(*pair))]
    options = ["--ranks", "2", "--steps", "4", "--warmup", "2", "--block", "2"]
    path = tmp_path / "out.json"
    train.main([*options, "--methods", ",".join(methods), *settings, "--json", str(path)])
    records = {line["method"]: SimpleNamespace(**line) for line in json.loads(path.read_text())}
    assert list(records) == methods
    for record in records.values():
        assert record.loss == pytest.approx(records["ddp-sparse"].loss, abs=1e-3)
        assert record.valid_loss == pytest.approx(records["ddp-sparse"].valid_loss, abs=1e-3)
    num_lookups = 16 * 32 + (16 * 32 + 32)
    sent = records["horovod-sparse"].sparse_bytes_per_step
    assert sent == horovod_peer.gathered_bytes(2, num_lookups, 8 * 4)
    assert records["horovod-exact"].sparse_bytes_per_step < 0.6 * sent
