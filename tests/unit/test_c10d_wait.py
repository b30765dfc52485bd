"""The wait for one exchange: a poll that runs out is not a failure, whatever happens meanwhile."""

import pytest

from commlib.collectives.c10d import _done


class Work:
    """Times out once; complete by the time anyone asks, as on a busy machine."""

    def __init__(self, *outcomes: str | None) -> None:
        self._outcomes = list(outcomes)

    def wait(self, timeout: object) -> bool:
        outcome = self._outcomes.pop(0)
        if outcome is not None:
            raise RuntimeError(outcome)
        return True

    def is_completed(self) -> bool:
        return True


def test_a_poll_that_runs_out_as_the_work_completes_is_asked_again() -> None:
    work = Work("Operation timed out!", None)
    assert not _done(work)
    assert _done(work)


@pytest.mark.parametrize("text", ["Timed out waiting 5000ms for recv operation", "closed by peer"])
def test_what_gloo_reports_is_raised(text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        _done(Work(text))
