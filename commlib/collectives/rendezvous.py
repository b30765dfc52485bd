"""The key-value store that `horovodrun` keeps for its workers, as a place to tell failures."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from dataclasses import dataclass

_TIMEOUT_S = 2.0
_MISSING = 404


@dataclass(frozen=True, slots=True)
class RendezvousStore:
    """Text by key, on the launcher's HTTP server.

    Args:
        address: Of the server.
        scope: Keeps keys apart from others'; the same on every rank, used once.

    Raises (from every call):
        RuntimeError: The server does not answer: the launcher is gone.

    Source: ours; the server is Horovod's.
    """

    address: str
    scope: str

    @classmethod
    def open(cls, scope: str) -> RendezvousStore | None:
        """The store of this job; None where another launcher (MPI) keeps none."""
        host = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
        return cls(f"{host}:{port}", scope) if host and port else None

    def set(self, key: str, value: str) -> None:
        """Put a text."""
        self._ask(key, value.encode())

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return all(self._ask(key) is not None for key in keys)

    def get(self, key: str) -> bytes:
        """The text of a key that is there."""
        value = self._ask(key)
        if value is None:
            raise RuntimeError(f"the rendezvous server has no {key!r}")
        return value

    def _ask(self, key: str, data: bytes | None = None) -> bytes | None:
        url = f"http://{self.address}/{self.scope}/{key}"
        request = urllib.request.Request(url, data, method="GET" if data is None else "PUT")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                text: bytes = answer.read()
                return text
        except urllib.error.HTTPError as error:
            if error.code == _MISSING:
                return None
            raise RuntimeError(f"the rendezvous server refused {key!r}: {error}") from error
        except OSError as error:
            raise RuntimeError(f"the rendezvous server does not answer: {error}") from error
