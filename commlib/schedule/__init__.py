"""The priority scheduler: lanes that carry protocols in an order that all ranks share."""

from commlib.schedule.lane import Lane
from commlib.schedule.open import open_lane

__all__ = ["Lane", "open_lane"]
