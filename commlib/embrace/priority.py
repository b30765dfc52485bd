"""How urgent each kind of request is: a lower number goes first.

What a batch's forward pass needs goes before what the next one's needs, and for one forward pass

    lookups        rows that the model asks for now
    delayed rows   gradients of the batch before last; its rows may be looked up now
    prior rows     gradients of the last batch, in rows that this one looks up
    early rows     looked up by this batch, sent while the last one computed
    dense blocks   in the order of the forward pass

So gradients that no row of the next batch needs are the last of their step: they have the whole
next batch to travel.

Source: EmbRace, two-dimensional scheduling; deadlines by batch, early rows and numbers are ours.
"""

LOOKUP = 0
DELAYED_ROWS = 100_000
PRIOR_ROWS = 200_000
EARLY_ROWS = 300_000
DENSE_BLOCKS = 400_000
_BATCH = 1_000_000


def needed_by(batch: int, kind: int, place: int = 0) -> int:
    """Priority of what the forward pass of a batch needs.

    Args:
        batch: Its number, from 0.
        kind: One of the constants above.
        place: Of equal kinds; below 100,000.
    """
    return batch * _BATCH + kind + place
