"""Emulated hosts come and go; ranks run all or none."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bench import netlab

REASON = netlab.why_not()
emulated = [
    pytest.mark.netns,
    pytest.mark.skipif(REASON is not None, reason=f"emulated hosts: {REASON}"),
]
LINKS = ["none", pytest.param("1gbit", marks=emulated)]


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    etc = Path("/etc/netns")
    files = [path.name for path in etc.iterdir()] if etc.is_dir() else []
    names = [line.split()[0] for line in listed.stdout.splitlines()] + files
    return [name for name in names if name.startswith(f"commlib-{pid}-")]


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for its new parent to notice."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Writes a module that ranks run; returns its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(body: str) -> str:
        (tmp_path / "netlab_worker.py").write_text("import os, sys, time\n" + textwrap.dedent(body))
        return "netlab_worker"

    return write


@pytest.mark.parametrize(
    ("link", "rate"), [("1gbit", 1e9), ("100mbit", 1e8), ("2.5gbit", 2.5e9), ("64kbit", 64e3)]
)
def test_parse_rate(link, rate):
    assert netlab.parse_rate(link) == rate


@pytest.mark.parametrize("link", ["fast", "1gb", "0mbit", "-1gbit", ""])
def test_a_bad_rate_is_named(link):
    with pytest.raises(ValueError, match="neither"):
        netlab.parse_rate(link)


def test_no_ranks_is_an_error():
    with pytest.raises(ValueError, match="ranks = 0"):
        netlab.launch(["netlab_worker"], 0)


def test_without_root_the_error_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 1000)
    with pytest.raises(netlab.NetlabError, match=r"1gbit.*root.*'none' works"):
        netlab.launch(["netlab_worker"], 2, "1gbit")


@pytest.mark.parametrize("link", LINKS)
def test_launch_gives_ranks_their_environment_and_passes_lines(worker, link):
    module = worker(
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME", "EXTRA")
        print(*(os.environ[name] for name in names), *sys.argv[1:])
        """
    )
    lines = []
    netlab.launch(
        [module, "hello"], 3, link, env={"EXTRA": "x"}, timeout_s=60, on_line=lines.append
    )
    device = netlab._loopback() if link == "none" else "eth0"
    assert lines == [f"0 3 0 {device} x hello\n"]


@pytest.mark.parametrize("link", LINKS)
def test_ranks_reduce_over_gloo(worker, link):
    module = worker(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        ones = torch.ones(1000)
        dist.all_reduce(ones)
        print(int(ones.sum()))
        dist.destroy_process_group()
        """
    )
    lines = []
    netlab.launch([module], 2, link, timeout_s=120, on_line=lines.append)
    assert lines == ["2000\n"]


@pytest.mark.parametrize("link", LINKS)
def test_a_failed_rank_ends_all_and_is_named(worker, link):
    module = worker(
        """
        if os.environ["RANK"] == "1":
            sys.exit("no such table")
        time.sleep(60)
        """
    )
    start = time.monotonic()
    with pytest.raises(netlab.RankError, match=r"(?s)rank 1 exited with code 1.*no such table"):
        netlab.launch([module], 3, link, timeout_s=60, on_line=print)
    assert time.monotonic() - start < 30
    if link != "none":
        assert namespaces(os.getpid()) == []


def test_a_killed_rank_is_named(worker):
    module = worker(
        """
        import signal
        if os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """
    )
    with pytest.raises(netlab.RankError, match="rank 2 was ended by signal 9"):
        netlab.launch([module], 3, timeout_s=60, on_line=print)


def test_late_ranks_are_ended_and_named(worker):
    module = worker("time.sleep(60 * int(os.environ['RANK']))")
    with pytest.raises(netlab.RankError, match=r"ranks \[1\] did not finish within 2 s"):
        netlab.launch([module], 2, timeout_s=2, on_line=print)


@pytest.mark.netns
@pytest.mark.skipif(REASON is not None, reason=f"emulated hosts: {REASON}")
class TestEmulated:
    def test_hosts_know_their_own_name_and_reach_each_other(self):
        with netlab.hosts(2, "1gbit") as lab:
            for host in lab:
                command = host.command(["getent", "hosts", socket.gethostname()])
                found = subprocess.run(command, capture_output=True, text=True, check=True)
                assert found.stdout.split()[0] == host.address
            shown = subprocess.run(
                ["tc", "-n", lab[0].namespace, "qdisc", "show", "dev", "eth0"],
                capture_output=True,
                text=True,
                check=True,
            )
            assert "tbf" in shown.stdout
            assert "rate 1Gbit" in shown.stdout
        assert namespaces(os.getpid()) == []

    def test_an_exception_removes_hosts(self):
        with pytest.raises(KeyboardInterrupt), netlab.hosts(2, "1gbit"):
            assert len(set(namespaces(os.getpid()))) == 3
            raise KeyboardInterrupt
        assert namespaces(os.getpid()) == []

    @pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_signals_remove_ranks_and_hosts(self, worker, sign):
        module = worker("print('up', os.getpid(), flush=True); time.sleep(60)")
        code = f"from bench import netlab; netlab.launch([{module!r}], 2, '1gbit')"
        launcher = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        rank_pid = int(launcher.stdout.readline().split()[1])
        launcher.send_signal(sign)
        launcher.wait(30)
        launcher.stdout.close()
        if sign == signal.SIGKILL:
            assert namespaces(launcher.pid)
            netlab.sweep()
        assert namespaces(launcher.pid) == []
        deadline = time.monotonic() + 10
        while runs(rank_pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not runs(rank_pid)
