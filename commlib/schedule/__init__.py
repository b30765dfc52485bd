"""The priority scheduler: lanes that carry protocols in an order that all ranks share."""

from commlib.schedule.lane import Lane
from commlib.schedule.open import open_lane
from commlib.schedule.timeline import Timeline

__all__ = ["Lane", "Timeline", "open_lane"]
