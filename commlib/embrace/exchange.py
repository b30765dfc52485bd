"""What the tables of one model share: the ranks, the lanes, the names of requests, the options."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from commlib.collectives.requests import Broadcast, Protocol, T
from commlib.embrace import optim, replicas
from commlib.embrace.columns import Columns, column_widths
from commlib.embrace.priority import LOOKUP
from commlib.embrace.ranks import TransportName, find_ranks
from commlib.embrace.source import RowSource, SynchronousRows
from commlib.errors import CommError
from commlib.schedule import Lane

if TYPE_CHECKING:
    from commlib.embrace.table import ShardedTable

Op = Literal["mean", "sum"]
WireName = Literal["bf16", "fp16"]

WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MAX_TIMEOUT_S = 1e6
# 4 ms at 1 Gbit/s: what a lookup waits for at most behind gradients that nobody needs yet.
_SLICE_BYTES = 512 << 10
_CREDIT_BYTES = 2 * _SLICE_BYTES


class Exchange:
    """The ranks that share tables, and two lanes that only tables use; opening it is collective.

    Args:
        group: Process group; the default one where None. Use the group of the model's DDP.
        transport: "c10d", or "horovod": what carries the bytes, see `shard`.
        op: What becomes of the ranks' gradients: their mean, as in DDP, or their sum.
        wire: Dtype in which rows and gradients of wider tables travel; None for their own. Less
            bytes, and one rounding each way; sums stay fp32.
        timeout_s: Longest wait for one request.

    Attributes:
        source: Where modules get their rows. Replace it to bring rows by other means.
        ids: Lane for rounds of ids ahead of time.
        rows: Lane for lookups and gradients. Both are None for one rank, which asks nobody.
        tables: The modules that use this exchange.

    A deep copy of a module uses the same exchange. It cannot be pickled.

    Raises:
        ValueError: No process group, or a wrong option.

    Source: ours.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        transport: TransportName = "c10d",
        op: Op = "mean",
        wire: WireName | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        check_options(op, wire, timeout_s)
        self.group, peers = find_ranks(group, transport)
        self.op: Op = op
        self.wire: WireName | None = wire
        self.timeout_s = timeout_s
        self.rank, self.num_ranks = peers.rank, peers.num_ranks
        self.mesh = DeviceMesh.from_group(self.group, "cpu")
        self.tables: weakref.WeakSet[ShardedTable] = weakref.WeakSet()
        self.source: RowSource = SynchronousRows(self)
        self.slots: dict[tuple[str, ...], int] = {}
        self.closed = False
        self._numbers: dict[str, int] = {}
        self.ids: Lane | None = None
        self.rows: Lane | None = None
        if self.num_ranks > 1:
            self.rows = peers.open_lane(
                "embrace.rows",
                timeout_s,
                slice_bytes=_SLICE_BYTES,
                credit_bytes=_CREDIT_BYTES,
            )
            # One board: a rank that failed in one lane will not come to the other.
            board = self.rows.transport.blame.board
            self.ids = peers.open_lane("embrace.ids", timeout_s, board)
        optim.watch_optimizers()
        replicas.watch_modules()

    @property
    def scale(self) -> float:
        """What a sum over ranks is multiplied with."""
        return 1.0 / self.num_ranks if self.op == "mean" else 1.0

    def columns(self, num_rows: int, dim: int) -> Columns:
        """What this rank holds of a `[V, D]` table."""
        return Columns((num_rows, dim), column_widths(dim, self.num_ranks), self.rank, self.mesh)

    def wire_of(self, dtype: torch.dtype) -> torch.dtype | None:
        """Dtype in which rows of `dtype` travel; None for their own, as half types always do."""
        return WIRES[self.wire] if self.wire is not None and dtype.itemsize > 2 else None

    def request_name(self, label: str) -> str:
        """An agreed name that was not used before: the label and how often it was used."""
        number = self._numbers.get(label, 0)
        self._numbers[label] = number + 1
        return f"{label}@{number}"

    def run(self, name: str, make: Callable[[], Protocol[T]], *, priority: int = LOOKUP) -> T:
        """Run a protocol on the lane of rows and wait for its result.

        Raises:
            CommError: A peer failed or did not come in time, or the exchange is closed.
        """
        if self.closed:
            raise CommError(
                "these tables are closed", rank=self.rank, request=name, remedy="shard them anew"
            )
        if self.rows is None:
            return _alone(make())
        return self.wait(self.rows.submit(name, make, priority=priority), name)

    def wait(self, future: Future[T], name: str) -> T:
        """The result of what was submitted to a lane of this exchange."""
        try:
            # The lane itself gives up after `timeout_s` a request; this ends what it does not.
            return future.result(4 * self.timeout_s)
        except TimeoutError:
            raise CommError(
                f"no result within {4 * self.timeout_s:g} s", rank=self.rank, request=name
            ) from None

    def seed(self) -> int:
        """A fresh seed, rank 0's; collective, and advances every rank's generator alike."""
        own = torch.randint(2**31, (1,))
        name = self.request_name("seed")

        def ask() -> Protocol[int]:
            agreed = (yield Broadcast(name=name, tensor=own)) if self.num_ranks > 1 else own
            return int(agreed)

        return self.run(name, ask)

    def close(self) -> None:
        """End the threads and give the groups back; lookups are errors from then on."""
        self.closed = True
        for lane in (self.rows, self.ids):
            if lane is not None:
                lane.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "partitioned tables cannot be pickled, they are tied to their process group: save"
            " state_dict() with torch.distributed.checkpoint, or embrace.unshard(model) first"
        )


def check_options(op: Op, wire: WireName | None, timeout_s: float) -> None:
    """Refuse what no exchange can do.

    Raises:
        ValueError: An unknown op or wire, or a time that is none.
    """
    if op not in ("mean", "sum"):
        raise ValueError(f"op = {op!r} must be 'mean' or 'sum'")
    if wire is not None and wire not in WIRES:
        raise ValueError(f"wire = {wire!r} must be 'bf16', 'fp16' or None")
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not (number and 0 < timeout_s <= MAX_TIMEOUT_S):
        raise ValueError(
            f"timeout_s = {timeout_s!r} must be a number of seconds > 0, at most {MAX_TIMEOUT_S:g}"
        )


def _alone(protocol: Protocol[T]) -> T:
    """The result of a protocol of one rank, which asks for nothing."""
    try:
        asked = next(protocol)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError(f"a protocol of one rank asked for {asked}")
