"""The index round: every rank learns which rows every rank holds.

    round 1   all-gather of a slot a rank: header, then as much of the ids as the agreed slot holds
    round 2   only if some rank's ids were longer: the rest, its size known from the headers

Ids travel as delta-coded varints, or as the packed bitmap where that is shorter. The slot is what
the longest ids of the last round needed and a quarter more, so it is agreed without a message.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from commlib import ops
from commlib.collectives.requests import AllGather, Later, Protocol
from commlib.errors import CommError
from commlib.route import unite_rows
from commlib.rows import SparseRows

HEADER_BYTES = 24
FIRST_SLOT_BYTES = 2048
_SLOT_STEP_BYTES = 64
_DELTA, _BITMAP = 0, 1
_REFUSED = -1


@dataclass(frozen=True, slots=True)
class Index:
    """Which rows each rank holds; equal on all ranks.

    Args:
        indices: int64 `[sum of R_r]`, sorted and unique within each rank.
        counts: R_r of each rank.
        num_rows: V.
        sent_bytes: What this rank sent to each peer to make it known.
        next_slot_bytes: Slot for the next index round of the same table.
        announced: Made of ids seen in the forward pass, which the gradient may prove wrong.
        refused: Ranks that had no valid ids to tell; where there are any, nobody's are known.
    """

    indices: Tensor
    counts: tuple[int, ...]
    num_rows: int
    sent_bytes: int
    next_slot_bytes: int
    announced: bool = False
    refused: tuple[int, ...] = ()

    @property
    def mean_rows(self) -> float:
        """S."""
        return sum(self.counts) / len(self.counts)

    @property
    def counts_tensor(self) -> Tensor:
        """The counts as int64 `[n]`."""
        return torch.tensor(self.counts, dtype=torch.int64)

    def union(self) -> Tensor:
        """The rows that any rank holds, sorted."""
        return unite_rows(self.indices, self.counts_tensor, self.num_rows)[0]

    def of_rank(self, rank: int) -> Tensor:
        """The rows of one rank, sorted."""
        parts: tuple[Tensor, ...] = self.indices.split(list(self.counts))
        return parts[rank]

    def cover(self, rows: SparseRows, rank: int) -> SparseRows | None:
        """`rows` laid out over the ids that this rank announced, zeros where it has none.

        None if it has a row that it did not announce.
        """
        announced = self.of_rank(rank)
        if torch.equal(announced, rows.indices):
            return rows
        place = torch.searchsorted(announced, rows.indices)
        if len(rows.indices) and (
            int(place[-1]) >= len(announced)
            or not torch.equal(announced.index_select(0, place), rows.indices)
        ):
            return None
        values = rows.values.new_zeros(len(announced), rows.dim)
        ops.scatter_rows_(values, place, rows.values)
        return SparseRows(announced, values, rows.num_rows)

    def zeros(self, rows: SparseRows, rank: int) -> SparseRows:
        """Zeros over the ids that `rank` announced: what it sends when its guard is raised."""
        announced = self.of_rank(rank)
        return SparseRows(announced, rows.values.new_zeros(len(announced), rows.dim), rows.num_rows)


def index_round(
    name: str,
    indices: Tensor,
    num_rows: int,
    slot_bytes: int,
    rank: int,
    num_ranks: int,
    meanwhile: Callable[[], object] = lambda: None,
    refuse: bool = False,
) -> Protocol[Index]:
    """Tell every rank the own `indices` (sorted, unique) and learn theirs.

    `meanwhile` is called once they travel: work that does not need the answer. With `refuse` a rank
    says that its ids are no ids: `refused` names it on all ranks, and nothing follows.

    Steps 1 (2 where a slot was too short), bytes (n-1)(24 + slot) and the excess.

    Raises:
        CommError: A peer's part belongs to another request: the ranks are out of step.
    """
    kind, payload = _encode(indices, num_rows)
    tag = zlib.crc32(name.encode())
    slot = torch.zeros(HEADER_BYTES + slot_bytes, dtype=torch.uint8)
    coded = _REFUSED if refuse else 2 * len(indices) + kind
    header = torch.tensor([tag, coded, len(payload)], dtype=torch.int64)
    slot[:HEADER_BYTES] = header.view(torch.uint8)
    first = payload[:slot_bytes]
    slot[HEADER_BYTES : HEADER_BYTES + len(first)] = first
    gathering = AllGather(name=name, tensor=slot, sizes=(len(slot),) * num_ranks)
    travelling = yield Later(gathering)
    meanwhile()
    slots = yield travelling
    slots = slots.view(num_ranks, len(slot))

    headers = slots[:, :HEADER_BYTES].reshape(-1).view(torch.int64).view(num_ranks, 3).tolist()
    for peer, (peer_tag, _, _) in enumerate(headers):
        if peer_tag != tag:
            raise CommError(
                f"rank {peer} is at another request: the ranks are out of step",
                rank=rank,
                request=name,
                remedy="run the same forward passes on every rank, and restart them",
            )
    refused = tuple(peer for peer, (_, coded, _) in enumerate(headers) if coded == _REFUSED)
    if refused:
        none = torch.empty(0, dtype=torch.int64)
        return Index(none, (0,) * num_ranks, num_rows, len(slot), slot_bytes, refused=refused)
    lengths = [length for _, _, length in headers]
    excess = tuple(max(0, length - slot_bytes) for length in lengths)
    rest: Tensor | None = None
    if any(excess):
        rest = yield AllGather(name=f"{name}.rest", tensor=payload[slot_bytes:], sizes=excess)
    rests = [None] * num_ranks if rest is None else rest.split(excess)
    parts = []
    for peer, (_, coded, length) in enumerate(headers):
        data = slots[peer, HEADER_BYTES : HEADER_BYTES + min(length, slot_bytes)]
        tail = rests[peer]
        if tail is not None and len(tail):
            data = torch.cat([data, tail])
        parts.append(_decode(coded % 2, data, coded // 2, num_rows))
    return Index(
        torch.cat(parts),
        tuple(coded // 2 for _, coded, _ in headers),
        num_rows,
        len(slot) + excess[rank],
        _next_slot(max(lengths), num_rows),
    )


def first_slot(num_rows: int) -> int:
    """Slot of a table's first index round."""
    return min(FIRST_SLOT_BYTES, (num_rows + 7) // 8)


def _next_slot(longest: int, num_rows: int) -> int:
    roomy = -(-(longest + longest // 4) // _SLOT_STEP_BYTES) * _SLOT_STEP_BYTES
    return min(roomy, (num_rows + 7) // 8)


def _encode(indices: Tensor, num_rows: int) -> tuple[int, Tensor]:
    coded = ops.encode_ids(indices)
    if len(coded) > (num_rows + 7) // 8:
        return _BITMAP, ops.indices_to_bitmap(indices, num_rows)
    return _DELTA, coded


def _decode(kind: int, data: Tensor, count: int, num_rows: int) -> Tensor:
    if kind == _BITMAP:
        return ops.bitmap_to_indices(data.contiguous(), num_rows)
    return ops.decode_ids(data.contiguous(), count)
