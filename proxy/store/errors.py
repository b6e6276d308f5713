"""What can go wrong with a store. None of it reaches a request: ``Unavailable`` ends inside, the rest at start."""

from __future__ import annotations


class StoreError(Exception):
    """Anything this room raises."""


class StoreMisconfigured(StoreError):
    """The store's URL or key cannot be used as it stands; the text names the setting and never the secret."""


class StoreUnsupported(StoreError):
    """The server is too old; the text says which version it is and which is needed."""


class EmbeddedUnavailable(StoreError):
    """The private server cannot run here: no binary for the platform, no place to write, or it does not start."""


class Unavailable(StoreError):
    """One operation got no usable answer; ``kind`` is a short stable name to count it by."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind
