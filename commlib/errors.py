"""The error of a broken world; a caller's mistake is a ValueError, TypeError or IndexError."""

from __future__ import annotations


class CommError(RuntimeError):
    """A collective could not finish: says which rank, which request, and what to rebuild.

    Args:
        reason: What happened, in one sentence.
        rank: Rank on which the error was raised, or None where no group exists.
        request: Name of the request that failed, or None.
        remedy: What the caller has to do before going on.

    Source: ours.
    """

    def __init__(
        self,
        reason: str,
        *,
        rank: int | None = None,
        request: str | None = None,
        remedy: str = "the process group is no longer usable: restart the ranks from a checkpoint",
    ) -> None:
        where = "" if rank is None else f" on rank {rank}"
        what = "" if request is None else f" in request '{request}'"
        super().__init__(f"{reason}{where}{what}; {remedy}")
        self.reason = reason
        self.rank = rank
        self.request = request
        self.remedy = remedy

    def naming(self, request: str) -> CommError:
        """The same, of this request, where it names none."""
        if self.request is not None:
            return self
        return type(self)(self.reason, rank=self.rank, request=request, remedy=self.remedy)
