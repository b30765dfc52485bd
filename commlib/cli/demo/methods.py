"""The ways to average gradients that the demo compares."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

from torch.nn.parallel import DistributedDataParallel

from commlib.cli.demo.driver import Driver
from commlib.cli.demo.scheduled import ScheduledDriver
from commlib.cli.demo.settings import Settings
from commlib.cli.demo.touched import Touched

ID_BYTES = 8
"""Bytes of a row id in torch's sparse allreduce."""


class State(Protocol):
    """What `commlib.ddp.register` returns, as far as the demo uses it."""

    def stats(self) -> Iterable[Mapping[str, Any]]:
        """Returns one record per parameter and step."""

    def clear_stats(self) -> None:
        """Forgets the records so far."""

    def close(self) -> None:
        """Gives threads and groups back."""


def dense_bytes(touched: Touched) -> float:
    """Bytes that a rank sends in a ring allreduce of the whole table."""
    return 2 * (touched.num_ranks - 1) / touched.num_ranks * touched.num_rows * touched.row_bytes


def torch_sparse_bytes(touched: Touched) -> float:
    """Bytes that a rank sends in torch's sparse allreduce, which pads to the largest rank."""
    return (touched.num_ranks - 1) * touched.max_rows * (touched.row_bytes + ID_BYTES)


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to average gradients.

    Attributes:
        name: As on the command line.
        title: As in the report.
        sparse: Whether the tables' gradients are sparse tensors.
        attach: Registers the method on a DDP model; returns commlib's state where it is commlib's.
        estimate_bytes: Bytes that a rank sends for a table in a step; where there is no state.
        bucket_cap_mb: Size of DDP's buckets; None leaves DDP's default.
        driver: Wraps the model and takes the steps.
    """

    name: str
    title: str
    sparse: bool
    attach: Callable[[DistributedDataParallel, Settings], State | None]
    estimate_bytes: Callable[[Touched], float] | None = None
    bucket_cap_mb: float | None = None
    driver: type[Driver] = Driver


def _import(name: str) -> Any:
    return importlib.import_module(name)


def _attach_nothing(ddp: DistributedDataParallel, settings: Settings) -> None:
    """Leaves DDP as it is."""


def _attach_exact(ddp: DistributedDataParallel, settings: Settings) -> State:
    return cast(State, _import("commlib.ddp").register(ddp))


def _attach_sketch(ddp: DistributedDataParallel, settings: Settings) -> State:
    reducer = _import("commlib").S2(ratio=settings.sketch_ratio)
    return cast(State, _import("commlib.ddp").register(ddp, reducer))


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("ddp", "DDP, dense gradients", False, _attach_nothing, dense_bytes),
        Method("ddp-sparse", "DDP, sparse gradients", True, _attach_nothing, torch_sparse_bytes),
        Method("exact", "commlib exact", True, _attach_exact),
        Method("sketch", "commlib sketch (S2)", True, _attach_sketch),
        Method("embrace-2d", "commlib EmbRace", True, _attach_nothing, driver=ScheduledDriver),
    )
}
"""The demo's methods by name, in the order of the report."""

OURS = ("exact", "sketch", "embrace-2d")
"""Those of them that are commlib's."""
