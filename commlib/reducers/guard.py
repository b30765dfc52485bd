"""The guard row: how ranks learn, at no extra round, that an announcement was wrong.

Ids announced in the forward pass may miss rows that the gradient turns out to have (a weight also
used outside its module). Such a rank must not decide alone. While an exchange rests on announced
ids, each part carries one row more, zeros where all is well and ones from a rank that has rows it
did not announce; after the exchange every rank knows, and all run it again with the real ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from commlib import ops


@dataclass(slots=True)
class Guard:
    """The state of one guarded exchange.

    Args:
        active: Announced ids are in use; without, nothing is added to what travels.
        raised: This rank has rows that it did not announce.
        tripped: Some rank has, known after `unpack`.
    """

    active: bool
    raised: bool = False
    tripped: bool = False

    def sizes(self, counts: Tensor, rank: int) -> tuple[int, ...]:
        """Rows that travel to (or from) each rank: its count, plus the guard row where active."""
        extra = int(self.active)
        return tuple(
            count + (extra if peer != rank else 0) for peer, count in enumerate(counts.tolist())
        )

    def pack(self, values: Tensor, positions: Tensor, counts: Tensor, rank: int) -> Tensor:
        """Gather `values[positions]`, grouped by receiver, with a guard row behind each group."""
        if not self.active:
            return ops.gather_rows(values, positions)
        sizes = self.sizes(counts, rank)
        out = values.new_empty(sum(sizes), values.shape[1])
        groups = zip(out.split(sizes), positions.split(counts.tolist()), strict=True)
        for peer, (part, group) in enumerate(groups):
            if peer != rank:
                ops.gather_rows(values, group, out=part[:-1])
                part[-1] = float(self.raised)
        return out

    def unpack(self, arrived: Tensor, counts: Tensor, rank: int) -> list[Tensor]:
        """The groups that arrived, one a sender, without their guard rows; notes a raised one."""
        groups = list(arrived.split(self.sizes(counts, rank)))
        if not self.active:
            return groups
        self.tripped |= self.raised
        for peer, group in enumerate(groups):
            if peer != rank:
                self.tripped |= bool(group[-1].any())
                groups[peer] = group[:-1]
        return groups
