"""What ranks agree on about a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Whether its gradient is sparse, and whether its ids are announced."""

    sparse: bool
    announced: bool
