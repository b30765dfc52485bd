"""Two-dimensional scheduling of a model with partitioned tables."""

from commlib.embrace.twod.schedule import Schedule, schedule

__all__ = ["Schedule", "schedule"]
