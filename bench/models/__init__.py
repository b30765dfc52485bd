"""The models of `bench.train`: what their tables are of all parameters differs.

lm           LSTM language model      tables 98% of the parameters, two of 40,000 x 256
transformer  transformer on the text  tables 25%, two of 6,400 x 128
dlrm         click prediction         tables 99%, 26 from 10 to 120,000 rows, bags of ids
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.models.dlrm import DlrmWorkload
from bench.models.transformer import TransformerWorkload
from commlib.cli.demo.corpus import Corpus
from commlib.cli.demo.settings import Settings
from commlib.cli.demo.workload import LanguageWorkload, Workload


@dataclass(frozen=True)
class Model:
    """How one of the models is had.

    Attributes:
        settings: What differs from the demo's settings.
        text: Whether it is trained on the text.
        workload: Makes a rank's workload.
    """

    settings: dict[str, Any]
    text: bool
    workload: Callable[..., Workload]

    def load(self, corpus: Path, settings: Settings, *, rank: int, num_ranks: int) -> Workload:
        """Returns a rank's workload; `corpus` is the saved text, read where it is needed."""
        if self.text:
            return self.workload(Corpus.load(corpus), settings, rank=rank, num_ranks=num_ranks)
        return self.workload(settings, rank=rank, num_ranks=num_ranks)


_TRANSFORMER = {
    "max_vocab": 6_400,
    "dim": 128,
    "batch": 8,
    "negatives": 256,
    "lr": 0.005,
    "initial_accumulator": 1e-4,
}
_DLRM = {"dim": 32, "batch": 256, "length": 1, "lr": 0.02, "eval_tokens": 8_192}

MODELS = {
    "lm": Model({}, True, LanguageWorkload),
    "transformer": Model(_TRANSFORMER, True, TransformerWorkload),
    "dlrm": Model(_DLRM, False, DlrmWorkload),
}
"""The models by name."""
