"""The bench of one partitioned table: its inputs, its memory, its peers' absence."""

import json
import sys

import pytest
import torch

from bench import embedding, interface, torchrec_peer
from bench.embedding_methods import NUM_BATCHES, Shape


def test_inputs_are_the_same_for_every_method():
    shape = Shape(rows=100, dim=4, tokens=32)
    assert torch.equal(shape.weight(), shape.weight())
    assert torch.equal(shape.ids(1, 2), shape.ids(1 + NUM_BATCHES, 2))
    assert not torch.equal(shape.ids(1, 2), shape.ids(2, 2))
    assert not torch.equal(shape.ids(1, 2), shape.ids(1, 3))
    assert not torch.equal(shape.target(0), shape.target(1))


def test_memory_counts_whole_tables_once_a_rank():
    shape = Shape(rows=1_000, dim=16, tokens=8)
    table = 1_000 * 16 * 4
    assert embedding.needed_bytes(shape, [], 4) == 2 * 4 * table
    assert (
        embedding.needed_bytes(shape, ["ddp-sparse", "embrace"], 4) == (2 + 1 + 1 / 4) * 4 * table
    )


def test_tables_that_do_not_fit_are_refused(capsys):
    with pytest.raises(SystemExit):
        embedding.parse(["--rows", "1000000000", "--dim", "4096"])
    assert "leave methods out" in capsys.readouterr().err


def test_an_unknown_method_is_named(capsys):
    with pytest.raises(SystemExit):
        embedding.parse(["--methods", "embrace,magic"])
    assert "magic" in capsys.readouterr().err


def test_without_torchrec_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrec", None)
    reason = torchrec_peer.why_not()
    assert reason is not None and torchrec_peer.INSTALL in reason
    with pytest.raises(ImportError, match="--no-deps torchrec"):
        torchrec_peer.TorchrecTable(torch.zeros(4, 4), 0.1, by="rows", unique=False)


def test_interface_counters(tmp_path):
    for name, sent, received in (("lo", 7, 7), ("eth0", 100, 50), ("eth1", 1, 2)):
        folder = tmp_path / name / "statistics"
        folder.mkdir(parents=True)
        (folder / "tx_bytes").write_text(f"{sent}\n")
        (folder / "rx_bytes").write_text(f"{received}\n")
    assert interface.count_bytes(tmp_path) == (101, 52)


@pytest.mark.dist
def test_two_ranks_are_verified(tmp_path):
    methods = "ddp-dense,ddp-sparse,exact,embrace"
    shape = ["--rows", "200", "--dim", "6", "--tokens", "64", "--rounds", "2"]
    embedding.main(
        ["--ranks", "2", "--methods", methods, *shape, "--json", str(tmp_path / "out.json")]
    )
    records = json.loads((tmp_path / "out.json").read_text())
    assert {record["method"] for record in records} == set(methods.split(","))
    for record in records:
        assert record["verified"]
        assert record["bytes_per_rank"] is None
        assert 0 < record["p10_s"] <= record["median_s"] <= record["p90_s"]
