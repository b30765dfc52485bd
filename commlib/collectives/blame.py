"""Whose fault a lost or late request is: what transports find out before they give up."""

from __future__ import annotations

from dataclasses import dataclass

from commlib.collectives.board import Board
from commlib.errors import CommError

_ROLL_CALL_S = 2.0
_LATE = "no answer"
_LOST = "lost its peers:"


@dataclass(slots=True)
class Blame:
    """Tells other ranks that this one stopped, and finds out which of them did.

    Args:
        board: Where failures are told.
        rank: This rank.
        kind: What to raise.

    Source: ours.
    """

    board: Board
    rank: int
    kind: type[CommError] = CommError

    def fail(self, text: str) -> None:
        """Tell the other ranks that this one stopped, and why."""
        self.board.post(text)

    def answer_roll_call(self, text: str) -> None:
        """Tell the other ranks that this one stopped, but that another is at fault."""
        self.fail(f"{_LOST} {text}")

    def reasons(self) -> dict[int, str]:
        """What other ranks say of themselves, not of their peers."""
        return {r: text for r, text in self.board.read().items() if not text.startswith(_LOST)}

    def late(self, request: str, seconds: float | None) -> CommError:
        """A request that is overdue, here after `seconds`, or where None on other ranks."""
        after = ", as other ranks report" if seconds is None else f" within {seconds:g} s"
        return self.lost(request, _LATE + after)

    def lost(self, request: str, why: str) -> CommError:
        """A rank that says so is at fault, else those that say nothing any more."""
        reasons = self.reasons()
        if not reasons:
            self.answer_roll_call(f"'{request}': {why}")
            silent = self.board.missing(_ROLL_CALL_S)
            reasons = self.reasons()
            if silent and not reasons:
                who = f"rank {silent[0]} is" if len(silent) == 1 else f"ranks {silent} are"
                return self._error(f"{who} gone or stuck ({why})", request)
        for peer, text in reasons.items():
            return self._error(f"rank {peer} failed: {text}", request)
        if why.startswith(_LATE):
            return self._error(
                f"{why}, though all ranks are alive: some rank has not asked for this; did every"
                " rank run the same training forward and backward passes?",
                request,
            )
        return self._error(f"the connection broke ({why})", request)

    def _error(self, reason: str, request: str) -> CommError:
        return self.kind(reason, rank=self.rank, request=request)
