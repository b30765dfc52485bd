"""Emulated hosts on one machine: a network namespace each, on a switch whose every port is shaped.

    rank 0 (own namespace)          switch (namespace)          rank 1 (own namespace)
      eth0  ── shaped: sends ──►  port0          port1  ◄── shaped: sends ──  eth0
            ◄── shaped: receives ──                     ── shaped: receives ──►

`launch` runs a module once per rank, each on a host of its own, and cleans up whatever happens.
Needs Linux, root, and `ip` and `tc` of iproute2; the link "none", which is plain processes on
loopback, needs nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from commlib.cli.processes import RankError, run_ranks, terminate_raises

__all__ = ["Host", "NetlabError", "RankError", "hosts", "launch", "parse_rate", "sweep", "why_not"]

_NAME = "commlib"
_SUBNET = "10.77.0"
_MAX_RANKS = 250
_NETNS_ETC = Path("/etc/netns")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class NetlabError(RuntimeError):
    """Emulated hosts cannot be had on this machine, or a command that makes them failed."""


@dataclasses.dataclass(frozen=True)
class Host:
    """One emulated host.

    Attributes:
        namespace: Its network namespace.
        address: Its IPv4 address.
    """

    namespace: str
    address: str

    @property
    def address_forms(self) -> tuple[str, str]:
        """Its address as IPv4 and as IPv6 write it."""
        return self.address, f"::ffff:{self.address}"

    def command(self, argv: list[str]) -> list[str]:
        """Returns the command that runs `argv` on this host."""
        return ["ip", "netns", "exec", self.namespace, *argv]


def parse_rate(link: str) -> float:
    """Returns the bits per second of a rate such as "1gbit" or "2.5gbit".

    Raises:
        ValueError: Not a rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", link.lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f'link {link!r} is neither "none" nor a rate like "1gbit" or "100mbit"')
    return float(match[1]) * _UNITS[match[2]]


def why_not() -> str | None:
    """Returns why emulated hosts cannot be had here, or None if they can."""
    if sys.platform != "linux":
        return "needs Linux's network namespaces"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} of iproute2 on the path"
    return None


def sweep() -> None:
    """Removes hosts that a run left behind whose process is gone."""
    for name in _list_namespaces():
        if not Path(f"/proc/{name.split('-')[1]}").exists():
            _remove(name)


@contextlib.contextmanager
def hosts(num_hosts: int, link: str) -> Iterator[list[Host]]:
    """Makes emulated hosts, and removes them when the context ends, with an error or without.

    Args:
        num_hosts: Hosts on the switch.
        link: Rate of each port, in each direction, as `tc` writes it: "1gbit", "100mbit".

    Raises:
        NetlabError: Not possible here; says what is missing.
        ValueError: `link` is not a rate, or too many hosts.
    """
    rate = parse_rate(link)
    if not 1 <= num_hosts <= _MAX_RANKS:
        raise ValueError(f"num_hosts = {num_hosts}: 1 to {_MAX_RANKS} are possible")
    reason = why_not()
    if reason is not None:
        raise NetlabError(f"link {link!r} {reason}; link 'none' works without")
    sweep()
    prefix = f"{_NAME}-{os.getpid()}"
    switch = f"{prefix}-switch"
    lab = [Host(f"{prefix}-{idx}", f"{_SUBNET}.{idx + 1}") for idx in range(num_hosts)]
    with terminate_raises():
        try:
            _add_switch(switch)
            for idx, host in enumerate(lab):
                _write_hosts(host, lab)
                _add_host(host, switch, f"port{idx}", rate)
            yield lab
        finally:
            for name in (*(host.namespace for host in lab), switch):
                _remove(name)


def launch(
    module_argv: list[str],
    ranks: int,
    link: str = "none",
    env: dict[str, str] | None = None,
    timeout_s: float = 600.0,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Runs `python -m module_argv...` once per rank and waits for all.

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME in
    its environment. Rank 0's output is passed on; what the others print is shown only where a rank
    fails. When a rank fails, the run times out, or this process is interrupted or terminated, all
    ranks are ended and the hosts removed.

    Args:
        module_argv: A module and its arguments, often the caller's own in a worker mode.
        ranks: Processes.
        link: "none" for processes on loopback, or the rate of each emulated host's port.
        env: Added to this process's environment.
        timeout_s: Most seconds the whole run may take.
        on_line: Called with each line of rank 0's output, instead of passing it on.

    Raises:
        NetlabError: Emulated hosts are not possible here.
        RankError: A rank failed or the run took too long; says which, with its last output.
        ValueError: A bad link or number of ranks.
    """
    if ranks < 1:
        raise ValueError(f"ranks = {ranks}: at least 1 is needed")
    argv = [sys.executable, "-m", *module_argv]
    common = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), "WORLD_SIZE": str(ranks)}
    checkout = str(Path(__file__).resolve().parents[1])
    common["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, common.get("PYTHONPATH")]))
    with contextlib.ExitStack() as stack:
        if link == "none":
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            common |= {"GLOO_SOCKET_IFNAME": _loopback()}
            commands = [argv] * ranks
        else:
            lab = stack.enter_context(hosts(ranks, link))
            common |= {"MASTER_ADDR": lab[0].address, "MASTER_PORT": "29500"}
            common |= {"GLOO_SOCKET_IFNAME": "eth0"}
            commands = [host.command(argv) for host in lab]
        local = [str(rank) if link == "none" else "0" for rank in range(ranks)]
        envs = [common | {"RANK": str(r), "LOCAL_RANK": local[r]} for r in range(ranks)]
        run_ranks(commands, envs, timeout_s=timeout_s, on_line=on_line)


def _add_switch(switch: str) -> None:
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
    _ip("-n", switch, "link", "set", "br0", "up")


def _write_hosts(host: Host, lab: list[Host]) -> None:
    """Writes a host's own /etc/hosts: on it, the machine's name means the host's address."""
    lines = ["127.0.0.1 localhost", f"{host.address} {socket.gethostname()}"]
    for other in lab:
        # The second form is what an IPv6 socket calls an IPv4 peer.
        lines += [f"{address} {other.namespace}" for address in other.address_forms]
    etc = _NETNS_ETC / host.namespace
    etc.mkdir(parents=True)
    (etc / "hosts").write_text("\n".join(lines) + "\n")


def _add_host(host: Host, switch: str, port: str, rate: float) -> None:
    _ip("netns", "add", host.namespace)
    peer = ("peer", "name", "eth0", "netns", host.namespace)
    _ip("-n", switch, "link", "add", port, "type", "veth", *peer)
    _ip("-n", switch, "link", "set", port, "master", "br0", "up")
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", host.namespace, "link", "set", device, "up")
    _shape(host.namespace, "eth0", rate)
    _shape(switch, port, rate)


def _shape(namespace: str, device: str, rate: float) -> None:
    """Limits what a device sends.

    The bucket holds 1 ms, at least two segments of 64 KiB; the queue 10 ms, at least 1 MiB.
    """
    burst = max(int(rate / 8 * 0.001), 128 * 1024)
    limit = max(int(rate / 8 * 0.010), 1024 * 1024)
    shaper = ("tbf", "rate", f"{int(rate)}bit", "burst", str(burst), "limit", str(limit))
    _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shaper)


def _remove(name: str) -> None:
    """Removes a namespace, what is left in it, and its hosts file; none of them need exist."""
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    shutil.rmtree(_NETNS_ETC / name, ignore_errors=True)


def _list_namespaces() -> list[str]:
    """Lists the namespaces, and hosts files, that this module made in any process."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    names = {line.split()[0] for line in listed.stdout.splitlines() if line.strip()}
    if _NETNS_ETC.is_dir():
        names |= {path.name for path in _NETNS_ETC.iterdir()}
    return sorted(name for name in names if re.fullmatch(rf"{_NAME}-\d+-(\d+|switch)", name))


def _ip(*args: str) -> None:
    _call("ip", *args)


def _call(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetlabError(
            f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}"
        )


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
