"""Where a failing rank says why, so that the others need not wait for their timeout to learn it."""

from __future__ import annotations

import time
import typing
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store


class KeyValue(typing.Protocol):
    """What a board needs of a store; raises RuntimeError once the store is gone."""

    def set(self, key: str, value: str) -> None:
        """Put a text."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def get(self, key: str) -> bytes:
        """The text of a key that is there."""


@dataclass(slots=True)
class Board:
    """One short text a rank in the group's rendezvous store.

    Args:
        store: The group's store; None makes every call a no-op.
        ranks: Global ranks of the group, in group order.
        rank: This rank's position in it.

    Source: ours.
    """

    store: KeyValue | None
    ranks: tuple[int, ...]
    rank: int
    posted: bool = False

    @classmethod
    def open(cls, store: Store | None, name: str, ranks: tuple[int, ...], rank: int) -> Board:
        """A board of its own under `name`."""
        return cls(None if store is None else PrefixStore(f"commlib/{name}/", store), ranks, rank)

    def post(self, text: str) -> None:
        """Say why this rank stopped; the first reason stands.

        Never raises: the store may be gone with its rank.
        """
        if self.store is None or self.posted:
            return
        self.posted = True
        try:
            self.store.set(str(self.rank), text)
        except RuntimeError:
            self.store = None

    def read(self) -> dict[int, str]:
        """What the other ranks have posted, by group rank; empty where nobody failed."""
        if self.store is None:
            return {}
        posts = {}
        try:
            for peer in range(len(self.ranks)):
                if peer != self.rank and self.store.check([str(peer)]):
                    posts[peer] = self.store.get(str(peer)).decode()
        except RuntimeError:
            self.store = None
        return posts

    def missing(self, wait_s: float) -> list[int]:
        """Ranks that posted nothing within `wait_s` of a lost connection: likely dead."""
        deadline = time.monotonic() + wait_s
        while True:
            posts = self.read()
            silent = [r for r in range(len(self.ranks)) if r != self.rank and r not in posts]
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(0.05)
