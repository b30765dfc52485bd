"""How urgent each kind of request is: a lower number goes first.

What the forward pass waits for now, then what the next forward pass reads first, then dense
blocks in the order in which the next forward pass needs them, then rows that the next batch reads
and that are final already, and last the rows that it does not touch.

Source: EmbRace, two-dimensional scheduling; the numbers are ours.
"""

LOOKUP = 0
PRIOR_ROWS = 1_000
DENSE_BLOCKS = 2_000  # and the block's place in the forward pass
EARLY_ROWS = 500_000
DELAYED_ROWS = 1_000_000
