"""One all-to-all of uneven parts over torch.distributed: the step that requests are made of.

Gloo's ring allreduce and all-gather take 2(n-1) and n-1 dependent hops, a direct exchange takes
one. On small messages the hops are the cost (docs/results/transport.md), so parts go straight
from source to destination: short ones together in one alltoall, long ones point to point, which
spares the copies that a joined buffer needs, in pieces, since a message holds less than 2^31 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SHORT_BYTES = 256 << 10
MAX_PIECE_BYTES = 1 << 30


@dataclass(slots=True)
class Exchange:
    """An exchange under way.

    `gate` is done once every peer has begun the same exchange, and may be waited for again and
    again; a wait for one of `direct` that runs out would close the connection.
    """

    gate: dist.Work | None = None
    direct: list[dist.Work] = field(default_factory=list)
    keep: list[Tensor] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    arrival: torch.futures.Future[Any] | None = None

    def when_landed(self, wake: Callable[[], None]) -> bool:
        """Have a thread of Gloo's call `wake`; False where nobody would, and it must be polled.

        Gloo completes a gate's future before the gate says so, and only the future's callbacks
        wake anybody.
        """
        if self.gate is not None:
            self.arrival = self.gate.get_future()
            self.arrival.add_done_callback(lambda _: wake())
        return True

    def landed(self) -> bool:
        """Whether every rank has come to it; long parts may still be arriving."""
        return self.arrival is None or self.arrival.done()

    def finish(self) -> None:
        """Put what arrived in its place; call once, after all works are done."""
        for target, source in self.copies:
            target.copy_(source)
        self.keep.clear()


def start_exchange(
    group: dist.ProcessGroup,
    parts: Sequence[Tensor],
    out: Sequence[Tensor],
    *,
    short_bytes: int = SHORT_BYTES,
    max_piece_bytes: int = MAX_PIECE_BYTES,
) -> Exchange:
    """Send `parts[p]` to rank p and fill `out[p]` with what p sends here; returns at once.

    Args:
        group: Process group.
        parts: n contiguous 1-D uint8 tensors; the same one may stand for several ranks.
        out: n contiguous 1-D uint8 tensors, as long as what each rank sends here.
        short_bytes: Parts up to this length share one alltoall; both ends of a part decide alike.
        max_piece_bytes: Longest single message of a long part.

    Returns:
        The exchange. Until its works are done and `finish` ran, parts and out are in use.

    Source: ours.
    """
    rank, num_ranks = group.rank(), group.size()
    exchange = Exchange(keep=[*parts, *out])
    out[rank].copy_(parts[rank])
    if num_ranks == 1:
        return exchange

    def short(part: Tensor, peer: int) -> Tensor:
        return part if peer != rank and len(part) <= short_bytes else part[:0]

    _start_short(
        group,
        [short(part, peer) for peer, part in enumerate(parts)],
        [short(part, peer) for peer, part in enumerate(out)],
        exchange,
    )
    for peer in range(num_ranks):
        if peer != rank and len(out[peer]) > short_bytes:
            for tag, piece in enumerate(out[peer].split(max_piece_bytes)):
                exchange.direct.append(group.recv([piece], peer, tag))
    for shift in range(1, num_ranks):
        peer = (rank + shift) % num_ranks
        if len(parts[peer]) > short_bytes:
            for tag, piece in enumerate(parts[peer].split(max_piece_bytes)):
                exchange.direct.append(group.send([piece], peer, tag))
    return exchange


def _start_short(
    group: dist.ProcessGroup, parts: list[Tensor], out: list[Tensor], exchange: Exchange
) -> None:
    whole_out = _adjacent(out)
    if whole_out is None:
        whole_out = torch.empty(sum(map(len, out)), dtype=torch.uint8)
        pieces = whole_out.split([len(part) for part in out])
        exchange.copies += zip(out, pieces, strict=True)
    whole_in = _adjacent(parts)
    if whole_in is None:
        whole_in = torch.cat(parts)
    exchange.keep += [whole_in, whole_out]
    exchange.gate = group.alltoall_base(
        whole_out,
        whole_in,
        [len(part) for part in out],
        [len(part) for part in parts],
        dist.AllToAllOptions(),
    )


def _adjacent(parts: list[Tensor]) -> Tensor | None:
    """One tensor over all parts where they already lie one behind the other, else None."""
    filled = [part for part in parts if len(part)]
    if not filled:
        return torch.empty(0, dtype=torch.uint8)
    end = filled[0].data_ptr()
    for part in filled:
        if part.data_ptr() != end:
            return None
        end += len(part)
    first = filled[0]
    if any(
        part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for part in filled
    ):
        return None
    return first.as_strided((sum(map(len, filled)),), (1,))
