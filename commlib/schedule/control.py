"""The control connections of a lane: one stream socket from each follower to the leader, rank 0.

Through them the leader announces the order (`csrc/scheduler/`). They are sockets of our own, not a
process group: one small message then wakes one thread on each rank, and the end of a connection
says at once that a rank is gone.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import time

from torch._C._distributed_c10d import Store

from commlib.errors import CommError

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}sI")
_SIOCGIFADDR = 0x8915


def connect(store: Store, name: str, rank: int, num_ranks: int, timeout_s: float) -> list[int]:
    """Make the control connections of one lane; collective over its ranks.

    Args:
        store: The group's store, where the leader leaves its address under `name`.
        name: Agreed, used once.
        rank: This rank.
        num_ranks: n.
        timeout_s: Longest wait for the others.

    Returns:
        File descriptors of connected sockets, owned by the caller: on the leader those of ranks 1
        to n-1, on a follower the one to the leader, none for a single rank.

    Raises:
        CommError: Some rank did not connect in time.

    Source: ours.
    """
    if num_ranks == 1:
        return []
    key = f"commlib/{name}/control"
    try:
        if rank == 0:
            return _accept_all(store, key, num_ranks, timeout_s)
        return [_connect_to_leader(store, key, rank, timeout_s)]
    except (OSError, RuntimeError) as error:
        raise CommError(
            f"the control connections were not made within {timeout_s:g} s: {error}",
            rank=rank,
            request=name,
            remedy="let GLOO_SOCKET_IFNAME name an interface that all ranks can reach",
        ) from error


def _accept_all(store: Store, key: str, num_ranks: int, timeout_s: float) -> list[int]:
    deadline = time.monotonic() + timeout_s
    token = secrets.token_bytes(_TOKEN_BYTES)
    host = own_address()
    peers: dict[int, socket.socket] = {}
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
            listener.listen(num_ranks)
            store.set(key, f"{host} {listener.getsockname()[1]} {token.hex()}")
            while len(peers) < num_ranks - 1:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                peer, _ = listener.accept()
                rank = _greet(peer, token, deadline)
                if 0 < rank < num_ranks and rank not in peers:
                    peers[rank] = peer
                else:  # a stranger
                    peer.close()
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    return [peers[rank].detach() for rank in range(1, num_ranks)]


def _greet(peer: socket.socket, token: bytes, deadline: float) -> int:
    """The rank that a new connection says it is; -1 if it does not know the token."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.settimeout(max(0.01, min(5.0, deadline - time.monotonic())))
    hello = b""
    try:
        while len(hello) < _HELLO.size and (more := peer.recv(_HELLO.size - len(hello))):
            hello += more
    except OSError:
        return -1
    if len(hello) < _HELLO.size:
        return -1
    theirs, rank = _HELLO.unpack(hello)
    return int(rank) if secrets.compare_digest(theirs, token) else -1


def _connect_to_leader(store: Store, key: str, rank: int, timeout_s: float) -> int:
    host, port, token = store.get(key).decode().split()
    peer = socket.create_connection((host, int(port)), timeout=timeout_s)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(_HELLO.pack(bytes.fromhex(token), rank))
    return peer.detach()


def own_address() -> str:
    """The address that Gloo takes too: of the interface named, else of the host name.

    The interfaces in `GLOO_SOCKET_IFNAME` are asked for an IPv4 address (Linux); a host name that
    is not this machine's leads to loopback.
    """
    for interface in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                asked = struct.pack("256s", interface.strip().encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
            except OSError:
                continue
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        for family, _, _, _, address in found:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address[0], 0))
                return str(address[0])
    except OSError:
        pass
    return "127.0.0.1"
