"""What links cost, and which algorithm is cheapest on them."""

from commlib.topology.link import Link, Step, Workload
from commlib.topology.probe import probe_link

__all__ = ["Link", "Step", "Workload", "probe_link"]
