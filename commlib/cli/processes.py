"""Runs one command per rank, all or none: when one fails or time is up, every one is ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any

_POLL_S = 0.02
_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_TAIL_CHARS = 4_000


class RankError(RuntimeError):
    """A rank failed, or the ranks did not finish in time."""


def run_ranks(
    commands: Sequence[Sequence[str]],
    envs: Sequence[Mapping[str, str]],
    *,
    timeout_s: float,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Runs one command per rank at the same time and waits for all.

    Afterwards none of them runs any more, also if this process is interrupted or terminated.

    Args:
        commands: The command of each rank.
        envs: The whole environment of each rank.
        timeout_s: Most seconds that all may take.
        on_line: Called with each line of rank 0's standard output; the rest is shown only on
            failure. Default: rank 0's output and errors are this process's.

    Raises:
        RankError: A rank failed, or time is up; says which, with the end of its output.
    """
    deadline = time.monotonic() + timeout_s
    with terminate_raises(), contextlib.ExitStack() as stack:
        logs: list[IO[bytes]] = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        ranks: list[subprocess.Popen[str]] = []
        stack.callback(_end, ranks)
        for rank, command in enumerate(commands):
            streams: dict[str, Any] = {"stdout": logs[rank], "stderr": logs[rank]}
            if rank == 0:
                streams = {} if on_line is None else streams | {"stdout": subprocess.PIPE}
            ranks.append(_start(command, envs[rank], streams))
        if on_line is not None:
            assert ranks[0].stdout is not None
            reader = threading.Thread(target=_read, args=(ranks[0].stdout, on_line, logs[0]))
            reader.start()
            stack.callback(reader.join)
            stack.callback(_end, ranks)
        _wait(ranks, logs, deadline, timeout_s)


@contextlib.contextmanager
def terminate_raises() -> Iterator[None]:
    """Turns SIGTERM into SystemExit, so that contexts clean up; in the main thread only."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    try:
        previous = signal.signal(signal.SIGTERM, leave)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _start(
    command: Sequence[str], env: Mapping[str, str], streams: dict[str, Any]
) -> subprocess.Popen[str]:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent,
        **streams,
    )


def _read(stream: IO[str], on_line: Callable[[str], None], log: IO[bytes]) -> None:
    for line in stream:
        log.write(line.encode())
        on_line(line)


def _wait(
    ranks: list[subprocess.Popen[str]], logs: list[IO[bytes]], deadline: float, timeout_s: float
) -> None:
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                # Its last words may still be on their way to the log.
                time.sleep(_POLL_S)
                raise RankError(f"rank {rank} {_describe(code)}{_tail(logs[rank])}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            late = [rank for rank, code in enumerate(codes) if code is None]
            raise RankError(
                f"ranks {late} did not finish within {timeout_s:.0f} s{_tail(logs[late[0]])}"
            )
        time.sleep(_POLL_S)


def _describe(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"


def _tail(log: IO[bytes]) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - _TAIL_CHARS))
    text = log.read().decode(errors="replace").strip()
    return f"; the end of its output:\n{text}" if text else ""


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    """Ends what still runs: politely, and after a while by force."""
    deadline = time.monotonic() + _GRACE_S
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in ranks:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(
                    max(0.0, deadline - time.monotonic()) if sign != signal.SIGKILL else None
                )
