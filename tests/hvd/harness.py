"""Runs one function as n ranks of a real `horovodrun`, with a watchdog that shows what each did."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WATCHDOG_S = 90.0
HASH_SEEDS = "COMMLIB_TEST_HASH_SEEDS"


def launcher() -> str:
    """Path of `horovodrun`."""
    path = Path(sys.executable).with_name("horovodrun")
    if not path.exists():
        pytest.fail("horovodrun is missing: run `make horovod`")
    return str(path)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What workers inherit."""
    path = os.pathsep.join(path for path in [str(ROOT), *sys.path] if path)
    return {**os.environ, "PYTHONPATH": path, "HOROVOD_LOG_LEVEL": "fatal", **(extra or {})}


def run_command(command: list[str], env: Mapping[str, str], timeout_s: float) -> str:
    """The output of a launcher, which is ended with all its workers when time is up."""
    process = subprocess.Popen(
        command,
        env=dict(env),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"watchdog after {timeout_s:g} s:\n{output[-8000:]}") from None
    return output


def run_horovod(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = WATCHDOG_S,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """`function(*args)` on every rank, after `hvd.init()`; gives the results in rank order.

    A rank that raises fails the test with its traceback.
    """
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory() as folder:
        what = (function.__module__, function.__qualname__, args, timeout_s - 10)
        (Path(folder) / "what").write_bytes(pickle.dumps(what))
        ranks = ["-np", str(num_ranks), "-H", f"localhost:{num_ranks}", "--gloo"]
        worker = [sys.executable, "-m", "tests.hvd.worker", folder]
        output = run_command([launcher(), *ranks, *worker], environment(env), timeout_s)
        files = [Path(folder) / f"result{rank}" for rank in range(num_ranks)]
        ended = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    if any(one is None or one[0] != "result" for one in ended):
        raise AssertionError("\n".join(str(one) for one in ended) + f"\n{output[-6000:]}")
    return [one[1] for one in ended if one is not None]


def find(module: str, name: str) -> Callable[..., Any]:
    """The function that a worker runs."""
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
