"""Every number of the demo in one place."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained, how long, and how often it is looked at.

    The defaults finish five methods on four ranks of a two-core machine in less than five minutes.
    """

    seed: int = 0
    steps: int = 120
    """Training steps of each method."""
    warmup_steps: int = 5
    """First steps that are left out of the timings."""

    max_vocab: int = 40_000
    """Rows V of both tables; rarer words become `<unk>`. More makes dense gradients larger."""
    max_tokens: int = 8_000_000
    """Words read from the text. More takes longer to start."""
    batch: int = 16
    """Sequences per rank and step."""
    length: int = 32
    """Words per sequence."""

    dim: int = 256
    """Columns D of both tables."""
    hidden: int = 192
    """Units of the LSTM."""
    negatives: int = 512
    """Sampled words shared by a batch. More costs time and bytes, and makes the loss less noisy."""

    lr: float = 0.05
    """Adagrad's step size."""
    lr_ramp_steps: int = 20
    """Steps in which the step size grows to `lr`. More starts more gently."""
    initial_accumulator: float = 1e-6
    """Adagrad's first sum of squares. More damps the first steps."""

    eval_every: int = 10
    """Steps between two validations."""
    eval_tokens: int = 2_048
    """Words validated, shared among the ranks, against the whole vocabulary."""

    sketch_ratio: float = 0.19
    """Size of the S2 sketch relative to the gradient rows it holds. Less sends fewer bytes."""

    def to_json(self) -> str:
        """Returns the settings as one line of JSON, for a worker's command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Reads what `to_json` wrote."""
        return cls(**json.loads(text))
