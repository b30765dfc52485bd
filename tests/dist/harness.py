"""Runs one function as n ranks: fresh processes, a Gloo group, a watchdog that tells what each did.

Processes are forked from a server that has torch loaded, so a test of four ranks starts in well
under a second, and one that kills a rank hurts nobody else.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # the server loads what ranks would else load each for itself
import torch.distributed as dist
import torch.nn.parallel

import commlib
import commlib.ddp
from commlib.schedule import Lane
from commlib.schedule.lane import close_open_lanes

WATCHDOG_S = 60.0

_context = multiprocessing.get_context("forkserver")
_started = False


def _start_server() -> None:
    """Start the server with everything loaded; it takes no notice of the parent's sys.path."""
    global _started
    if _started:
        return
    _started = True
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    _context.set_forkserver_preload(["tests.dist.harness", "pytest"])
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@dataclass(frozen=True)
class Died:
    """What `run_ranks(..., may_fail=True)` gives for a rank that raised, or ended early."""

    kind: str
    text: str
    seconds: float


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = WATCHDOG_S,
    may_fail: bool = False,
    store_in_rank_0: bool = False,
) -> list[Any]:
    """`function(rank, num_ranks, *args)` on every rank; gives the results in rank order.

    A rank that raises fails the test with its traceback, unless `may_fail`, which gives a `Died`
    in its place. After `timeout_s` every rank dumps its requests and stacks, and the test fails.
    """
    __tracebackhide__ = True
    _start_server()
    store = None
    if not store_in_rank_0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port if store else _free_port()
    ranks, pipes = [], {}
    start = time.monotonic()
    for rank in range(num_ranks):
        ours, theirs = _context.Pipe(duplex=False)
        setting = (rank, num_ranks, port, store is None, timeout_s)
        process = _context.Process(target=_main, args=(theirs, setting, function, args))
        process.start()
        theirs.close()
        ranks.append(process)
        pipes[ours] = rank
    results: dict[int, Any] = {}
    try:
        deadline = start + timeout_s + 10
        while pipes and time.monotonic() < deadline:
            for pipe in wait(list(pipes), timeout=1.0):
                rank = pipes.pop(pipe)
                results[rank] = _receive(pipe, time.monotonic() - start)
    finally:
        for process in ranks:
            process.join(2.0 if not pipes else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
    for rank in range(num_ranks):
        results.setdefault(rank, Died("hang", "no sign of life", time.monotonic() - start))
    failed = {rank: result for rank, result in results.items() if isinstance(result, Died)}
    hung = any(result.kind == "hang" for result in failed.values())
    if failed and (hung or not may_fail):
        shown = [f"--- rank {rank}: {end.kind}\n{end.text}" for rank, end in failed.items()]
        raise AssertionError("\n".join(shown))
    return [results[rank] for rank in range(num_ranks)]


def _receive(pipe: Connection, seconds: float) -> Any:
    try:
        kind, payload = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return Died("gone", "the process ended without a word", seconds)
    finally:
        pipe.close()
    return payload if kind == "result" else Died(kind, payload, seconds)


def _free_port() -> int:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port


def _main(
    pipe: Connection,
    setting: tuple[int, int, int, bool, float],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    rank, num_ranks, port, hosts_store, timeout_s = setting
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lock = threading.Lock()

    def tell(kind: str, payload: Any) -> None:
        with lock:
            pipe.send_bytes(pickle.dumps((kind, payload)))

    def give_up() -> None:
        tell("hang", f"watchdog after {timeout_s:g} s\n{requests_so_far()}\n{_stacks()}")
        os._exit(3)

    dog = threading.Timer(timeout_s, give_up)
    dog.daemon = True
    dog.start()
    try:
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            num_ranks if hosts_store else None,
            is_master=hosts_store and rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        result = function(rank, num_ranks, *args)
    except BaseException as error:
        kind = type(error).__name__
        tell(kind, f"{error}\n{traceback.format_exc()}\n{requests_so_far()}")
    else:
        tell("result", result)
        close_open_lanes()  # as where a program ends
    dog.cancel()
    os._exit(0)


def requests_so_far() -> str:
    """The newest requests of every lane in this process."""
    lanes = [item for item in gc.get_objects() if type(item) is Lane]
    return "\n".join(f"requests of {lane.name}: {issued(lane)[-64:]}" for lane in lanes)


def issued(lane: Lane) -> list[str]:
    """Names of a lane's requests, in order, each once; the two exchanges of a short sum are one."""
    names = [name for name, slice_idx, *_ in lane.log() if slice_idx == 0]
    return [name.removesuffix("/sum") for name in names if not name.endswith("/spread")]


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def threads() -> list[str]:
    """Names of commlib's threads that are alive."""
    return [t.name for t in threading.enumerate() if t.name.startswith("commlib")]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers, so that -0.0 differs from 0.0 and a NaN equals itself."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(width[tensor.element_size()])


def same_everywhere(tensor: torch.Tensor) -> bool:
    """H2: whether all ranks of the default group hold the same bits."""
    mine = bits(tensor).view(-1).view(torch.uint8)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return all(torch.equal(mine, other) for other in theirs)


__all__ = [
    "Died",
    "bits",
    "commlib",
    "issued",
    "requests_so_far",
    "run_ranks",
    "same_everywhere",
    "threads",
]
